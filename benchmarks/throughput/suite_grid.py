"""A parametrised suite of attention tests: a fixed grid of dtypes, masks, heads, dims and lengths. Run by rivals.py."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from throughput.suite_formula import DEVICE, KERNELS, Shape, compare, kernel_of, problem_of

_LENGTHS = {
    "cpu": [(1, 128), (64, 64), (97, 97), (113, 203), (128, 128), (200, 144), (255, 256), (300, 300)],
    "cuda": [
        (1, 128), (64, 64), (97, 97), (113, 203), (256, 256), (384, 256), (511, 513), (1024, 1024), (1000, 2048), (2048, 2048),
        (4096, 4096),
    ],
}  # fmt: skip
_BATCH = {"cpu": 2, "cuda": 4}
_HEADS = {"MHA": (6, 6), "GQA": (6, 2)}


def _grid() -> list[Any]:
    """Every combination that a kernel supports, shorter lengths first within each."""
    grid = []
    for name in KERNELS:
        kernel = kernel_of(name)
        dtypes = kernel.capabilities.dtypes_for(DEVICE)
        for dtype, dim, heads, causal, pair in itertools.product(dtypes, (32, 64, 128), _HEADS, (False, True), _LENGTHS[DEVICE]):
            lengths = tuple((-(-pair[0] // n), -(-pair[1] // n)) for n in range(1, _BATCH[DEVICE] + 1))
            problem = problem_of(kernel, Shape(dtype, causal, *_HEADS[heads], dim, dim, lengths))
            if problem is not None:
                mask = "causal" if causal else "full"
                grid.append(pytest.param(kernel, problem, id=f"{name}-{dtype}-{dim}-{heads}-{mask}-{pair[0]}x{pair[1]}"))
    return grid


@pytest.mark.parametrize(("kernel", "problem"), _grid())
def test_as_near_as_plain_attention(kernel, problem):  # type: ignore[no-untyped-def] # noqa: D103
    compare(kernel, problem)
