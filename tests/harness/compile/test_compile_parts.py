"""The parts of `attnfuzz compile`: what is planned, what figures are read, what is cut, what is worse."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attnfuzz.harness.compile.baseline import FORMAT, Baseline, compare
from attnfuzz.harness.compile.child import cut
from attnfuzz.harness.compile.compile import Row, jobs_of, planned
from attnfuzz.harness.compile.figures import figures_of, rank
from attnfuzz.harness.compile.report import markdown, placed
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.lowering import Lowers, MachineCode, capability, shared_limit
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.variants import all_variants

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 4 barriers, 1024 bytes smem
ptxas-blackwell info    : Compiling entry function 'second' for 'sm_90a'
ptxas-blackwell info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas-blackwell info    : Used 32 registers, used 1 barriers
"""


def row(**changes: Any) -> Row:
    plain = Row(
        kernel="k", key="key", config={}, arch="sm_90a", function="forward", ok=True, seconds=1.0, shared_limit=1, spills=0,
        registers=10, tensor_core="wgmma", races=[],
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def compared(before: list[Row], now: list[Row]) -> Any:
    baseline = Baseline(format=FORMAT, versions={"triton": "1"}, rows=before)
    return compare(now, baseline, "b.json", {"triton": "2"}, {("k", "sm_90a")})


@pytest.mark.parametrize("name", ["tilelang.gqa_varlen.split", "tilelang.varlen", "triton.varlen", "triton.flex"])
def test_every_variant_and_config_is_compiled(name: str) -> None:
    kernel = registry.get(name)
    assert isinstance(kernel, Lowers)
    found = jobs_of(kernel)
    every = {kernel.compile_key(each.problem(kernel.capabilities), each.config) for each in all_variants(kernel, "cuda")}
    assert every <= found.keys()
    assert all(kernel.compile_key(case.problem, case.config) == key for key, case in found.items())
    assert len(jobs_of(kernel, 3)) == 3


@pytest.mark.parametrize("name", ["tilelang.gqa_varlen.split", "triton.flex"])
def test_a_cover_shows_every_dtype_with_each_mask_dims_and_config(name: str) -> None:
    kernel = registry.get(name)
    found = list(jobs_of(kernel, cover=True).values())

    def shown(problem: Problem, config: Config) -> set[object]:
        dims = (problem.dim_qk, problem.dim_v)
        return {(problem.dtype, each) for each in (("mask", problem.causal), ("dims", dims), ("config", config))}

    every = [shown(each.problem(kernel.capabilities), each.config) for each in all_variants(kernel, "cuda")]
    assert set().union(*every) <= set().union(*(shown(each.problem, each.config) for each in found))
    assert len(found) < 45
    assert any(case.problem.score_mod is not None or case.problem.mask_mod is not None for case in found) == (
        name == "triton.flex"
    )
    assert len(planned([kernel], ["sm_90a"], cover=True)[0]) == len(found)
    with pytest.raises(BadArgument, match="cannot be combined with --max 3; leave one of them out"):
        planned([kernel], None, most=3, cover=True)


def test_score_functions_whole_blocks_and_strides_are_compiled_too() -> None:
    found = jobs_of(registry.get("triton.flex"))
    assert sum(case.problem.score_mod is not None for case in found.values()) >= 10
    assert sum(case.problem.mask_mod is not None for case in found.values()) >= 10
    assert sum(" strided " in key for key in found) >= 30
    assert sum(" whole " in key for key in found) >= 30


def test_kernels_with_machine_code_of_their_own_offer_it() -> None:
    lowered = {name for name in registry.names() if isinstance(registry.get(name), Lowers)}
    assert lowered == {name for name in registry.names() if name.startswith(("tilelang.", "triton."))}


def test_figures_are_the_worst_of_all_entry_functions() -> None:
    def figures(sass: str, log: str = LOG, **shared: int) -> Any:
        return figures_of(MachineCode(cubin=b"", log=lambda: log, dynamic_shared=shared), sass)

    found = figures("HGMMA.64x128x16.F32 R24; HMMA.16816.F32 R4; FFMA R1;", first=1000, second=5000)
    assert (found.registers, found.spills, found.shared, found.tensor_core) == (168, 16, 5000, "wgmma+mma")
    found = figures("UTCHMMA gdesc[UR4]", first=5000)
    assert (found.shared, found.tensor_core) == (6024, "tcgen05")
    assert figures("FFMA R1; FADD;").tensor_core is None
    with pytest.raises(BadArgument, match="its output has no registers"):
        figures("", "silence")


def test_paths_have_an_order() -> None:
    assert rank(None) < rank("mma") < rank("wgmma+mma") == rank("wgmma") < rank("tcgen05")


def test_limits_by_architecture() -> None:
    assert [shared_limit(arch) // 1024 for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a")] == [163, 99, 99, 227, 227]
    assert capability("sm_100a") == 100
    with pytest.raises(BadArgument, match="arch='sm_11'"):
        capability("sm_11")


def test_no_worse() -> None:
    found = compared([row(), row(function="gone"), row(arch="sm_80")], [row(seconds=9.0, registers=200), row(function="new")])
    assert not found.worse
    assert (found.added, found.missing, found.versions) == (1, 1, {"triton": ("1", "2")})


@pytest.mark.parametrize(
    ("before", "now", "which"),
    [
        ([row()], [row(ok=False, error="no")], "new_failures"),
        ([], [row(ok=False, error="no")], "new_failures"),
        ([row()], [row(spills=4)], "new_spills"),
        ([row(spills=4)], [row(spills=8)], "new_spills"),
        ([], [row(spills=4)], "new_spills"),
        ([row()], [row(tensor_core="mma")], "lost_tensor_core"),
        ([row(tensor_core="mma")], [row(tensor_core=None)], "lost_tensor_core"),
    ],
)
def test_worse(before: list[Row], now: list[Row], which: str) -> None:
    found = compared(before, now)
    assert found.worse
    assert [name for name in ("new_failures", "new_spills", "lost_tensor_core") if getattr(found, name)] == [which]


def test_better_is_not_worse() -> None:
    found = compared(
        [row(ok=False, error="no", spills=None), row(function="b", spills=8, tensor_core="mma")], [row(), row(function="b")]
    )
    assert not found.worse
    assert [each.function for each in found.fixed] == ["forward"]
    new = compared([row()], [row(races=["B is written twice"])])
    assert not new.worse
    assert [each.now for each in new.new_races] == ["B is written twice"]


def test_a_table_goes_between_the_marks_of_a_page() -> None:
    page = "# Title\n<!-- attnfuzz compile -->\nold\n<!-- end of attnfuzz compile -->\nmore\n"
    command = "attnfuzz compile --cover"
    once = placed(page, "| new |\n", command)
    assert once == "# Title\n<!-- attnfuzz compile -->\n\n| new |\n\n<!-- end of attnfuzz compile -->\nmore\n"
    assert placed(once, "| new |\n", command) == once
    assert placed("something else", "| new |\n", command) == "| new |\n"


def test_a_table_goes_between_the_marks_of_its_own_command_first() -> None:
    of_all, of_a = ("<!-- attnfuzz compile -->", "<!-- end of attnfuzz compile -->"), ("<!-- attnfuzz compile a -->",)
    page = "\n".join((*of_all, *of_a, "<!-- end of attnfuzz compile a -->"))
    ours = placed(page, "| a |", "attnfuzz compile a").splitlines()
    assert ours == [*of_all, *of_a, "", "| a |", "<!-- end of attnfuzz compile a -->"]
    others = placed(page, "| b |", "attnfuzz compile b").splitlines()
    assert others == [of_all[0], "", "| b |", of_all[1], *of_a, "<!-- end of attnfuzz compile a -->"]


def test_a_line_for_each_function_and_config() -> None:
    rows = [
        row(config={"tile": 64}, dims=(64, 64), registers=90, tensor_columns=352, instructions=2000),
        row(config={"tile": 64}, dims=(32, 32), registers=80, tensor_columns=128, instructions=2400),
        row(config={"tile": 32}, dims=(32, 32)),
        row(config={"tile": 32}, dims=(32, 32), function="backward"),
    ]
    lines = markdown(rows, [], {"nvcc": "13"}, "attnfuzz compile k --by-config", by_config=True).splitlines()
    assert lines[0] == "`attnfuzz compile k --by-config`, with nvcc 13:"
    assert [line.split(" | ")[2:5] for line in lines[4:7]] == [
        ["backward", "tile=32", "32, 32"], ["forward", "tile=32", "32, 32"], ["forward", "tile=64", "64, 64; 32, 32"],
    ]  # fmt: skip
    assert "| 2 | 0 | 90 | 0 |" in lines[6]
    assert "| 352 of 512 | 2400 |" in lines[6]
    assert len(markdown(rows, [], {"nvcc": "13"}, "attnfuzz compile k").splitlines()) == len(lines) - 2


def test_errors_are_cut_to_what_matters() -> None:
    nvcc = (
        "nvcc ended with exit code 2\n"
        + "\n".join(f"/tmp/somewhere/include/reduce.h({i}): note: declared here" for i in range(40))
        + '\n/tmp/tmpx1/kernel.cu(20): error: identifier "f" is undefined\n'
        + "          detected during instantiation of something\n1 error detected in the compilation of kernel.cu."
    )
    assert cut(nvcc) == 'nvcc ended with exit code 2\nkernel.cu(20): error: identifier "f" is undefined'
    ptxas = "nvcc ended with exit code 255\nptxas error   : Entry function 'main' uses too much shared data"
    assert cut(ptxas) == ptxas
    triton = (
        "RuntimeError: PassManager::run failed\nkernel.py:3:1: error: operation scheduled before its operands\nmodule {\n"
        + "x\n" * 500
    )
    assert cut(triton).splitlines() == [
        "RuntimeError: PassManager::run failed",
        "kernel.py:3:1: error: operation scheduled before its operands",
    ]
    assert len(cut("\n".join(map(str, range(1000)))).splitlines()) == 12
    assert cut("") == "it gives no reason"


def test_code_of_several_query_heads_to_a_key_head_is_compiled_where_it_differs() -> None:
    kernel = registry.get("tilelang.sm100.ts")
    assert isinstance(kernel, Lowers)
    groups = [case.problem.groups for case in jobs_of(kernel).values()]
    assert groups.count(1) == groups.count(2) == len(groups) // 2
    assert {case.problem.groups for case in jobs_of(kernel, cover=True).values()} == {1, 2}
    atomic = registry.get("tilelang.gqa.atomic")
    assert {case.problem.groups for case in jobs_of(atomic).values()} == {1}
