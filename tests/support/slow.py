"""Tests that take long, or of which there are many alike; their siblings stay in the default run (10 minutes on 2 cores).

By node id, as pytest prints them; they run with `-m slow`. A name that no test has any more is an error (test_suite.py).
"""

SLOW = frozenset({
    "test_autograd.py::test_rows_of_no_sequence_have_no_gradient[tilelang.gqa_varlen.split]",
    "test_autograd.py::test_gradients_are_those_of_the_definition[tilelang.mha_pipelined-dtype0]",
    "test_autograd.py::test_gradients_are_those_of_the_definition[tilelang.gqa_varlen.atomic-dtype1]",
    "test_attacks.py::test_the_campaign_goes_on_and_the_next_kernel_is_right[exits_later]",
    "test_attacks.py::test_the_campaign_goes_on_and_the_next_kernel_is_right[eats_in_another_session]",
    "test_autograd.py::test_a_transformer_block_trains[tilelang.gqa.split]",
    "test_default_config.py::test_repro_runs_a_file_without_a_config[empty-triton.varlen]",
    "test_script.py::test_the_interpreters_own_checks_are_on_in_a_script",
    "test_benchmarks.py::test_the_memory_checkers_cost_is_a_ratio",
    "test_benchmarks.py::test_flex_builds_every_contestant_of_every_case",
    "test_isolation.py::test_kill_9_during_a_compile_leaves_its_case_too",
    "test_isolation.py::test_an_ended_compile_leaves_nothing",
    "test_memory.py::test_what_one_case_leaves_to_the_next_becomes_a_case_of_its_own",
    "test_plugin.py::test_the_shards_share_the_work_among_xdist_workers",
    "test_tilelang_cpu.py::test_scores_below_any_finite_sentinel",
    "test_tilelang_dense.py::test_masks_scales_empty_sides_and_layouts[{'seqlens_k': (0, 0), 'slack_k': 1}-tilelang.gqa.split]",
    "test_tilelang_dense.py::test_masks_scales_empty_sides_and_layouts"
    "[{'causal': 'top_left', 'slack_q': 3, 'slack_k': 2}-tilelang.gqa.split]",
    "test_tilelang_dense.py::test_the_pipelined_backward_is_right[{'causal': 'bottom_right', 'seqlens_k': (31, 31)}]",
    "test_tilelang_modified.py::test_it_is_right[hidden tiles and rows]",
    "test_verdict_rates.py::test_a_sharp_judge_is_right_and_the_figures_do_not_depend_on_the_processes",
    "test_autograd.py::test_the_gradient_of_o_may_have_any_strides[transposed-tilelang.gqa.split]",
    "test_tilelang_dense.py::test_masks_scales_empty_sides_and_layouts[{'seqlens_q': (0, 0), 'slack_q': 1}-tilelang.gqa.split]",
    "test_triton_races.py::test_our_kernels_have_none_and_the_one_that_was_wrong_is_found",
    "test_stride_types.py::test_small_and_huge_strides_have_one_code[forward]",
    "test_aggregate.py::test_the_last_rounding_is_no_bias[means of V]",
    "test_fused_budgets.py::test_budgets_are_equal[normal-float16-plain-False]",
    "test_batch.py::test_equal_values_are_counted_for_the_cases_that_need_it[deviations0-float16]",
    "test_benchmarks.py::test_wrong_use_is_refused[memory_check-arguments0-kernel='nothing']",
    "test_benchmarks.py::test_wrong_use_of_the_batch_benchmark[arguments0-use --device cuda]",
    "test_check.py::test_each_call_sees_the_file_as_it_is",
    "test_attacks.py::test_the_campaign_goes_on_and_the_next_kernel_is_right[raises_interrupt]",
    "test_out_folders.py::test_a_folder_of_any_name_holds_cases_that_can_be_copied[100 levels]",
    "test_out_folders.py::test_a_folder_of_any_name_holds_cases_that_can_be_copied[250 letters]",
    "test_out_folders.py::test_a_folder_of_any_name_holds_cases_that_can_be_copied[a blank]",
    "test_out_folders.py::test_a_folder_of_any_name_holds_cases_that_can_be_copied[a command]",
    "test_out_folders.py::test_a_folder_of_any_name_holds_cases_that_can_be_copied[a glob]",
    "test_out_folders.py::test_a_folder_of_any_name_holds_cases_that_can_be_copied[a way round]",
    "test_out_folders.py::test_a_folder_of_any_name_holds_cases_that_can_be_copied[an option]",
    "test_out_folders.py::test_a_folder_of_any_name_holds_cases_that_can_be_copied[blanks at its ends]",
    "test_out_folders.py::test_a_folder_of_any_name_holds_cases_that_can_be_copied[quotes]",
    "test_ctrl_c.py::test_whenever_ctrl_c_comes_after_a_failure_the_run_says_so[2]",
    "test_ctrl_c.py::test_whenever_ctrl_c_comes_after_a_failure_the_run_says_so[5]",
    "test_ctrl_c.py::test_whenever_ctrl_c_comes_after_a_failure_the_run_says_so[12]",
    "test_ctrl_c.py::test_whenever_ctrl_c_comes_after_a_failure_the_run_says_so[26]",
    "test_ctrl_c.py::test_whenever_ctrl_c_comes_after_a_failure_the_run_says_so[60]",
    "test_ctrl_c.py::test_whenever_ctrl_c_comes_after_a_failure_the_run_says_so[130]",
    "test_ctrl_c.py::test_whenever_ctrl_c_comes_after_a_failure_the_run_says_so[240]",
    "test_ctrl_c.py::test_whenever_ctrl_c_comes_after_a_failure_the_run_says_so[420]",
    "test_ctrl_c.py::test_whenever_ctrl_c_comes_after_a_failure_the_run_says_so[750]",
})  # fmt: skip


def named(nodeid: str) -> str:
    """The id from the file's name on: from where pytest was called does not matter."""
    path, _, rest = nodeid.partition("::")
    return f"{path.rsplit('/', 1)[-1]}::{rest}"
