"""A tile of shared memory is given back when it has been read, not when its last load has only been issued.

In single precision products are `mma.sync`, whose operands are loaded by ldmatrix and plain loads. One of 155,176 Cases on an
H200 showed what an arrival that does not wait for them does: `corpus/races`.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("tilelang")

from support.paths import CORPUS
from tvm import tirx
from tvm.tirx.stmt_functor import post_order_visit

from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.compile.figures import disassembler
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.tilelang import loading, lower
from attnfuzz.kernels.tilelang.build import cuda_passes
from attnfuzz.kernels.tilelang.loading import FENCE
from attnfuzz.kernels.tilelang.roles.expressions import UnsupportedByRolesError
from attnfuzz.kernels.tilelang.roles.lowering import lowered
from attnfuzz.kernels.tilelang.roles.operations import Operations
from attnfuzz.kernels.tilelang.subject import TileLangKernel

(FILE,) = (CORPUS / "races").glob("*.json")
NO_NVCC = lower.cannot_lower()
KERNELS = ("tilelang.mha", "tilelang.mha_pipelined", "tilelang.gqa.split", "tilelang.gqa_varlen.atomic", "tilelang.modified")
TIMES = 20


def functions(name: str, problem: Problem, config: Any = None) -> Iterator[tuple[Any, dict[str, Any], str]]:
    """The forward's and the backward's module, options and name."""
    kernel = registry.get(name)
    assert isinstance(kernel, TileLangKernel)
    made = kernel.functions(problem, kernel.configs(problem)[0] if config is None else config, "cuda")
    for factory in ("forward", "backward"):
        yield kernel.device_code(), made[factory].options, factory


def statements(func: Any) -> list[str]:
    """The operations of a PrimFunc that are statements, in order; that of an external function is its name."""
    found: list[str] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.Evaluate) and isinstance(node.value, tirx.Call):
            name = node.value.op.name
            found.append(str(node.value.args[0].value) if name == "tirx.call_extern" else name)

    post_order_visit(func.body, visit)
    return found


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_fence_is_before_every_arrival(name: str, dtype: Any) -> None:
    problem = Problem(seqlens_q=(64,), seqlens_k=(64,), heads=2, kv_heads=2, dim_qk=64, dim_v=64, dtype=dtype)
    for module, options, factory in functions(name, problem):
        done = statements(lowered(getattr(module, factory)(**options), cuda_passes(module, options)))
        arrivals = [at for at, each in enumerate(done) if each == loading._ARRIVE]
        assert len(arrivals) >= 2
        assert all(done[at - 1] == FENCE for at in arrivals)


def test_the_executor_of_roles_knows_no_other_external_function() -> None:
    Operations().evaluate(tirx.Evaluate(tirx.call_extern("handle", FENCE)))
    with pytest.raises(UnsupportedByRolesError, match="other"):
        Operations().evaluate(tirx.Evaluate(tirx.call_extern("handle", "other")))


_WORDS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x([0-9a-f]{16}) \*/")
_NONE = 7


def in_flight(cubin: bytes, folder: Path) -> list[int]:
    """How many scoreboards of loads from shared memory are waited for by nothing yet, at each arrival of warps that compute.

    The upper word of an instruction of sm_70 and later has, from bit 41 on, 4 bits of stall, 1 to yield, 3 for the scoreboard of
    its result, 3 for that of its operands and a mask of 6 scoreboards to wait for (Jia et al. 2018, "Dissecting the NVIDIA Volta
    GPU Architecture via Microbenchmarking"). The code is read from its begin to its end, without its jumps.
    """
    file = folder / "code.cubin"
    file.write_bytes(cubin)
    text = subprocess.run([disassembler(), "-c", "-hex", str(file)], capture_output=True, text=True, check=True).stdout
    loading_now: set[int] = set()
    counts: list[int] = []
    for instruction, upper in _WORDS.findall(text):
        control = int(upper, 16) >> 41
        loading_now -= {each for each in range(6) if control >> 11 >> each & 1}
        if "SYNCS.ARRIVE" in instruction and ".A1T0" in instruction:
            counts.append(len(loading_now))
        scoreboard = control >> 5 & 7
        if scoreboard != _NONE and re.search(r"\bLDSM?\b", instruction):
            loading_now.add(scoreboard)
    return counts


@pytest.mark.slow
@pytest.mark.skipif(NO_NVCC is not None, reason=str(NO_NVCC))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_load_is_in_flight_at_an_arrival(dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = read_case(FILE).case
    before, after = [], []
    problem = replace(case.problem, dtype=dtype, dim_qk=64, dim_v=64) if dtype == "float16" else case.problem
    for module, options, factory in functions(case.kernel, problem, case.config if dtype == "float32" else None):
        after += in_flight(lower._Unit(factory, module, factory, options, "sm_90a").compile().cubin, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(loading, "_fenced", lambda body: body)
            before += in_flight(lower._Unit(factory, module, factory, options, "sm_90a").compile().cubin, tmp_path)
    assert len(before) == len(after) == 6
    assert any(before)
    assert not any(after)


def test_what_an_h200_got_is_a_tile_that_came_too_early() -> None:
    """One ldmatrix, the last before the arrival, had the next tile: keys 32 to 47 of 64, dims 24 to 31 of 32."""
    file = read_case(FILE)
    place = None if file.finding is None else file.finding.place
    assert place is not None
    assert place.position is not None
    problem, row = file.case.problem, place.position
    inputs = materialise(problem, file.case.recipe, "cpu")
    first_q, first_k = (sum(each[: place.sequence]) for each in (problem.seqlens_q, problem.seqlens_k))
    q, k = inputs.q[first_q + row, 0].double(), inputs.k[first_k : first_k + problem.seqlens_k[2], 0].double()

    def lse(k: torch.Tensor) -> float:
        return float((k[: row + 1] @ q * problem.scale).logsumexp(0))

    tile, keys, dims = 24 * 64, slice(32, 48), slice(24, 32)
    early = k.clone()
    early[tile:][keys, dims] = k[tile + 64 :][keys, dims]
    assert lse(k) == pytest.approx(place.expected, abs=1e-12)
    assert isinstance(place.got, float)
    assert lse(early) == pytest.approx(place.got, abs=2 * math.ulp(8.0) * 2.0**29)
    assert abs(lse(k) - place.got) > 9e-4


@pytest.mark.gpu
@pytest.mark.slow
def test_the_case_passes() -> None:
    executor = Isolated("cuda", deadline=60.0)
    try:
        verdicts = [executor.trial(read_case(FILE).case) for _ in range(TIMES)]
    finally:
        executor.close()
    assert [each.status for each in verdicts] == ["pass"] * TIMES
