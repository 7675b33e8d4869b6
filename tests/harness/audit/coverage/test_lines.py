"""Lines of device code, recorded in a child process."""

from __future__ import annotations

import pytest

from attnfuzz.harness.audit.coverage.lines import check_lines, lines_of
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Layout, Problem
from attnfuzz.strategies.case import Case

CONFIG = Config(tile_m=16, tile_n=16, num_warps=4, num_stages=1)


def case(kernel: str, length: int, **more: object) -> Case:
    fields = {"seqlens_q": (length,), "seqlens_k": (length,), "dim_qk": 16, "dim_v": 16, **more}
    return Case(kernel=kernel, problem=Problem(**fields), config=CONFIG)  # type: ignore[arg-type]


def test_what_a_kernel_runs_for_one_case_and_for_two() -> None:
    kernel = registry.get("triton.varlen")
    if reason := kernel.unavailable("cpu"):
        pytest.skip(reason)
    done: list[int] = []
    plain = case("triton.varlen", 16)
    (rows,) = lines_of(kernel, [plain], "cpu", done.append).files.values()
    assert done == [1]
    offsets = next(row for row in rows if row.name == "_input_offsets")
    assert len(offsets.never) == 2
    assert [value for _, value in offsets.one_way] == [False]
    strided = case("triton.varlen", 5, layout_q=Layout(pitch=3), layout_k=Layout(pitch=1))
    (both,) = lines_of(kernel, [plain, strided], "cpu", done.append).files.values()
    offsets = next(row for row in both if row.name == "_input_offsets")
    assert (offsets.never, offsets.one_way) == ((), ())
    # 16 rows fill the tile: no mask hides an element.
    assert sum(len(row.one_valued) for row in rows) > sum(len(row.one_valued) for row in both)


def test_a_kernel_without_triton_functions_has_no_lines() -> None:
    kernel = registry.get("torch.reference_cpu")
    lines = lines_of(kernel, [case("torch.reference_cpu", 4)], "cpu", lambda _: None)
    assert (lines.cases, lines.files) == (0, {})
    assert "no source file of it has Triton functions" in lines.reason


def test_lines_are_of_the_cpu_alone() -> None:
    with pytest.raises(BadArgument, match="device='cuda': Triton is interpreted on the CPU alone"):
        check_lines(registry.get("triton.varlen"), "cuda")
