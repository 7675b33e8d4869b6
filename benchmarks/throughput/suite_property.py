"""A Hypothesis test of attention kernels, which builds the kernel for each drawn shape. Run by rivals.py."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from attnfuzz.strategies.draw import no_local_constants

sys.path.append(str(Path(__file__).parents[1]))

from throughput.suite_formula import DEVICE, KERNELS, PARTS, Shape, compare, kernel_of, problem_of

# Hypothesis would parse torch for constants, half a minute where torch is outside of site-packages: begun here, since its pytest
# plugin does so at the end of the collection, and ended with the process.
_WITHOUT_CONSTANTS = no_local_constants()
_WITHOUT_CONSTANTS.__enter__()
atexit.register(_WITHOUT_CONSTANTS.__exit__, None, None, None)
_LONGEST = {"cpu": 300, "cuda": 4096}
_MOST = {"cpu": 4, "cuda": 8}
"""Sequences in a batch."""
_ENDLESS = 10**9
"""Examples: time ends the test."""

_length = st.integers(1, _LONGEST[DEVICE])
_pairs = st.lists(st.tuples(_length, _length), min_size=1, max_size=_MOST[DEVICE])


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=_ENDLESS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(), kv_heads=st.integers(1, 4), groups=st.sampled_from((1, 2, 3)), pairs=_pairs, seed=st.integers(0, 2**31),
)  # fmt: skip
def test_as_near_as_plain_attention(name, part, data, kv_heads, groups, pairs, seed):  # type: ignore[no-untyped-def] # noqa: ARG001, D103
    kernel = kernel_of(name)
    can = kernel.capabilities
    dtype = data.draw(st.sampled_from(can.dtypes_for(DEVICE)))
    causal = data.draw(st.sampled_from([each is not None for each in can.causal]))
    dims = st.sampled_from(can.dims)
    if (step := can.dim_multiple) is not None:
        dims |= st.integers(1, 128 // step).map(lambda n: (n * step, n * step))
    dim_qk, dim_v = data.draw(dims)
    problem = problem_of(kernel, Shape(dtype, causal, kv_heads * groups, kv_heads, dim_qk, dim_v, tuple(pairs)))
    assume(problem is not None)
    assert problem is not None
    compare(kernel, problem, seed)
