"""Tests of half a minute whose siblings stay in the default run, which is to take less than ten minutes on 2 cores.

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
    "test_faults.py::test_the_fault_of_a_ragged_kernel_is_found_and_shrunk[whole tiles stored into the next sequence]",
    "test_script.py::test_the_interpreters_own_checks_are_on_in_a_script",
    "test_tilelang_modified.py::test_the_fault_is_found[slope of score_mod left out]",
    "test_benchmarks.py::test_the_memory_checkers_cost_is_a_ratio",
    "test_benchmarks.py::test_flex_builds_every_contestant_of_every_case",
    "test_faults.py::test_the_fault_is_found_and_shrunk[tilelang-missing offset when seqlen_q != seqlen_k]",
    "test_faults.py::test_the_fault_is_found_and_shrunk[triton-group index wrong]",
    "test_isolation.py::test_kill_9_during_a_compile_leaves_its_case_too",
    "test_isolation.py::test_an_ended_compile_leaves_nothing",
    "test_memory.py::test_the_fault_is_found_as_what_it_is[tilelang: last row of O and LSE unwritten]",
    "test_memory.py::test_what_one_case_leaves_to_the_next_becomes_a_case_of_its_own",
    "test_plugin.py::test_the_shards_share_the_work_among_xdist_workers",
    "test_tilelang_cpu.py::test_scores_below_any_finite_sentinel",
    "test_tilelang_dense.py::test_masks_scales_empty_sides_and_layouts[{'seqlens_k': (0, 0), 'slack_k': 1}-tilelang.gqa.split]",
    "test_tilelang_dense.py::test_masks_scales_empty_sides_and_layouts"
    "[{'causal': 'top_left', 'slack_q': 3, 'slack_k': 2}-tilelang.gqa.split]",
    "test_tilelang_dense.py::test_the_pipelined_backward_is_right[{'causal': 'bottom_right', 'seqlens_k': (31, 31)}]",
    "test_tilelang_modified.py::test_it_is_right[hidden tiles and rows]",
    "test_verdict_rates.py::test_a_sharp_judge_is_right_and_the_figures_do_not_depend_on_the_processes",
})  # fmt: skip


def named(nodeid: str) -> str:
    """The id from the file's name on: from where pytest was called does not matter."""
    path, _, rest = nodeid.partition("::")
    return f"{path.rsplit('/', 1)[-1]}::{rest}"
