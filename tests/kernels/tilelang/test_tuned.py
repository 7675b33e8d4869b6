"""The table of measured Configs: what is in it, that it is used, and on a GPU that each of its Configs is right."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tilelang")

from msgspec.structs import replace
from support.runs import try_variants

from attnfuzz.harness.core import environment
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.tilelang.hopper import CONFIGS, fits
from attnfuzz.kernels.tilelang.tuned import ARCH, config_of, read, rows, tuned
from attnfuzz.strategies.variants import Variant, all_variants

KERNELS = {
    name: registry.get(name)
    for name in registry.names()
    if name.startswith(("tilelang.mha", "tilelang.gqa"))
}  # fmt: skip
PROBLEM = Problem(seqlens_q=(8,), seqlens_k=(8,), packing="dense", dim_qk=128, dim_v=128)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize("causal", [None, "bottom_right", "top_left"])
def test_every_function_has_been_measured(name: str, dims: tuple[int, int], causal) -> None:
    kernel = KERNELS[name]
    for dtype in kernel.capabilities.dtypes:
        of = replace(PROBLEM, dim_qk=dims[0], dim_v=dims[1], dtype=dtype, causal=causal)
        key = (ARCH, *dims, dtype, causal is not None)
        assert (kernel.table.split()[0], *key) in rows()
        assert (kernel.table, *key) in rows()
        chosen = tuned(kernel.table, of, CONFIGS[-1])
        assert kernel.configs(of)[0] == chosen
        assert fits(of, chosen, beside=kernel.table == "ragged atomic")


def test_what_was_fastest_is_chosen() -> None:
    assert len(rows()) == 8 * 4 * 3 * 2 - 4 * 2, "no single precision in what is asynchronous only"
    for row in rows().values():
        of_best = max(row.tflops.values())
        assert of_best > 0
        tile_m, tile_n, threads, stages = row.best
        assert row.tflops[f"{tile_m} x {tile_n} {threads} {stages}"] == of_best


def test_what_was_not_measured_has_the_default() -> None:
    odd = replace(PROBLEM, dim_qk=48, dim_v=80)
    assert tuned("dense none", odd, CONFIGS[0]) == CONFIGS[0]
    assert config_of((128, 128, 256, 2), (64, 128, 256, 2)) == CONFIGS[0]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_each_measured_config_passes_the_fuzzer(name: str, tmp_path: Path) -> None:
    kernel = KERNELS[name]
    environment.prepare("cuda")
    measured = [each for each in all_variants(kernel, "cuda") if is_measured(kernel, each)]
    assert measured
    most = 30 * len(measured)
    run = try_variants(kernel, measured, tmp_path, seed=7, most=most, device="cuda", max_failures=2, limits="cuda")
    assert not run.findings.closed, [
        failure.message for each in run.findings.closed.values() for failure in each.verdict.failures
    ]
    assert run.tally.cases >= 25 * len(measured)


def is_measured(kernel, variant: Variant) -> bool:
    """Whether the table says this Config of these dims, dtype and mask."""
    of = variant.problem(kernel.capabilities)
    known = (kernel.table, ARCH, *variant.dims, variant.dtype, variant.causal is not None) in rows()
    return known and variant.config == tuned(kernel.table, of, CONFIGS[-1])


@pytest.mark.parametrize("content", [b"", b"{", b'{"rows": []}', b'{"device": 1}'])
def test_a_broken_table_is_told(content: bytes) -> None:
    with pytest.raises(BadArgument, match=r"table='tuned.json': it is broken .*benchmarks/tune.py"):
        read(content, "tuned.json")
