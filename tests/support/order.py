"""Tests that take 15 s and more on a GPU node: processes of pytest-xdist begin with them, so that none of them ends last.

By node id, as in `slow.py`; a name that no test has any more is an error (test_suite.py).
"""

from __future__ import annotations

from typing import Any

from .slow import named

__all__ = ["LONG", "spread"]

LONG = (
    "test_kernels.py::test_triton_flex[0]",
    "test_files.py::test_a_fault_is_found_shrunk_and_run_again_by_the_printed_line",
    "test_faults.py::test_the_fault_is_found_and_shrunk[LSE-14-tilelang]",
    "test_relations.py::test_long_sequences_pass_on_the_gpu[constant_v-tilelang.varlen]",
    "test_gate.py::test_twenty_per_cent_slower_fails_on_a_gpu_and_the_same_speed_does_not[0.2-fail]",
    "test_kernels.py::test_triton_varlen[0]",
    "test_sparse.py::test_on_the_gpu_a_batch_passes_and_gives_its_memory_back[tilelang.gqa.atomic]",
    "test_sm100_backward.py::test_stores_reach_the_products_and_copies_that_another_thread_starts[ss]",
    "test_hidden_by_a_number.py::test_triton_on_a_cpu[-65504.0]",
    "test_workers.py::test_kill_9_of_a_worker_costs_nothing",
    "test_batch.py::test_an_interpreted_kernel_has_the_same_verdicts[triton.varlen]",
    "test_tree_errors.py::test_rows_with_hidden_keys_are_judged[-65504.0-float32]",
    "test_explained_faults.py::test_the_cause_of_a_fault_on_the_host_is_named[causal]",
    "test_independence.py::test_a_false_alarm_of_before_passes[triton.flex-dq-aggregate-a91c642647]",
    "test_workers.py::test_the_cases_do_not_depend_on_the_number_of_workers[40]",
    "test_autograd.py::test_ragged_tensors_may_have_any_strides[transposed-q]",
    "test_narrow_v.py::test_every_config_of_warp_groups_is_right[(115, 15)-triton.varlen]",
    "test_rows_apart.py::test_every_config_is_right[168-16-bfloat16]",
    "test_default_config.py::test_repro_runs_a_file_without_a_config[empty-triton.flex]",
    "test_state.py::test_a_failure_that_needs_earlier_cases_is_kept_with_them[dims]",
    "test_plugin.py::test_five_lines_gate_a_correct_kernel",
    "test_tilelang_ragged.py::test_lengths_masks_and_scales[{}-tilelang.gqa_varlen.atomic]",
    "test_sm100.py::test_outputs_are_those_of_the_definition[1-{'causal': 'bottom_right', 'heads': 6}-ss]",
    "test_calls.py::test_a_file_whose_kernel_is_right_passes",
    "test_lines.py::test_what_a_kernel_runs_for_one_case_and_for_two",
    "test_memory_checker.py::test_one_element_past_the_end_and_before_the_start",
    "test_stand_in.py::test_questions_about_the_gpu_have_answers_inside_and_none_after",
    "test_sparse.py::test_on_the_gpu_an_offset_of_32_bits_is_found",
    "test_workers.py::test_ctrl_c_while_a_finding_is_written_does_not_lose_it[1]",
    "test_files.py::test_check_adapter_takes_a_file",
    "test_tilelang_modified.py::test_hidden_keys_before_the_one_that_is_seen[-65504.0]",
    "test_protocol.py::test_a_fault_of_some_schedules_is_a_failure_and_shrinks",
)
"""The longest first, as measured on one node.

None that has a costly fixture in common with others of its module: away from them, it would be made a second time.
"""


def spread(items: list[Any], processes: int) -> None:
    """Move the long tests among `items` to where the processes begin: pytest-xdist gives each an equal part, in their order.

    The others stay as they are. Every process must call it alike, since they all have the same items in the same order.
    """
    places = {name: place for place, name in enumerate(LONG)}
    long = sorted((each for each in items if named(each.nodeid) in places), key=lambda each: places[named(each.nodeid)])
    rest = [each for each in items if named(each.nodeid) not in places]
    total, begin, taken, ordered = len(items), 0, 0, []
    for index in range(processes):
        # The part of this process, counted as pytest-xdist counts it: what is left, shared by the processes left.
        size = (total - begin) // (processes - index)
        first = long[index::processes]
        others = max(0, size - len(first))
        ordered += [*first, *rest[taken : taken + others]]
        taken, begin = taken + others, begin + size
    items[:] = [*ordered, *rest[taken:]]
