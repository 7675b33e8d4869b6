"""Cases that two kinds of fuzzing draw: sizes at tile boundaries by a seeded generator, and plain integers by Hypothesis."""

from __future__ import annotations

import random
from typing import Any, Final

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.expressions.named import MASKS, SCORES
from attnfuzz.kernels.expressions.tree import to_data
from attnfuzz.strategies.draw import no_local_constants
from detection.shapes import Consume, case_of

__all__ = ["boundary_shapes", "plain_integers"]

_EDGES: Final = (16, 32, 64, 128)
_LENGTHS: Final = tuple(sorted({1, 2, 3, *(edge + more for edge in _EDGES for more in (-1, 0, 1))}))
_LONGEST, _MOST_SEQUENCES, _MOST_HEADS = 150, 3, 2
"""About half of what a campaign on the CPU draws at most, whose sizes are such that a Case has few tiles."""
_MOST_GROUP: Final = 3
_ENDLESS: Final = 10**9
_IN_VAIN: Final = 10_000
"""So many Problems one after the other that a kernel does not take are all that there are."""


class _Stop(BaseException):
    """Ends a test of Hypothesis, which would run it again after an Exception."""


def boundary_shapes(kernel: Kernel, seed: int, consume: Consume) -> None:
    """Try sizes from lists of candidates at powers of two, one less and one more; dtype, mask and Config at random, by seed.

    Source: arXiv 2606.20128 (each symbolic dim of an operation has its candidates, each Case its seed) and 2606.27396 (boundary
    candidates find most without false alarms).
    """
    numbers, can, in_vain = random.Random(seed), kernel.capabilities, 0
    for turn in range(_ENDLESS):
        batch = numbers.randint(1, 3)
        pairs = [(numbers.choice(_LENGTHS), numbers.choice(_LENGTHS)) for _ in range(batch)]
        if "ragged" not in can.packings:
            pairs = pairs[:1] * batch
        kv_heads = numbers.choice((1, 2))
        dim_qk, dim_v = numbers.choice(can.dims)
        case = case_of(
            kernel, numbers.randrange(_ENDLESS), turn, packing="ragged" if "ragged" in can.packings else "dense",
            seqlens_q=tuple(q for q, _ in pairs), seqlens_k=tuple(k for _, k in pairs),
            heads=kv_heads * numbers.choice((1, 2, 3)), kv_heads=kv_heads, dim_qk=dim_qk, dim_v=dim_v,
            dtype=numbers.choice(can.dtypes_for("cpu")), causal=numbers.choice(can.causal),
        )  # fmt: skip
        in_vain = in_vain + 1 if case is None else 0
        if in_vain == _IN_VAIN or (case is not None and consume(case)):
            return


def plain_integers(kernel: Kernel, seed: int, consume: Consume) -> None:
    """Try what an ordinary Hypothesis test draws: each size an integer in its range, and whichever masks the kernel declares."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=_ENDLESS, database=None, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(parts=_parts(kernel), turn=st.integers(0, 100), values=st.integers(0, 2**31))
    def test(parts: dict[str, Any], turn: int, values: int) -> None:
        case = case_of(kernel, turn, values, **parts)
        hypothesis.assume(case is not None)
        if case is not None and consume(case):
            raise _Stop

    try:
        # Hypothesis would parse torch for constants, half a minute.
        with no_local_constants():
            test()
    except (_Stop, hypothesis.errors.Unsatisfiable):
        # The latter: the kernel takes none of them.
        return


@st.composite
def _parts(draw: st.DrawFn, kernel: Kernel) -> dict[str, Any]:
    """Draw the parts of a Problem that the kernel declares."""
    can = kernel.capabilities
    length = st.integers(1, _LONGEST)
    sequences = draw(st.integers(1, _MOST_SEQUENCES))
    ragged = "ragged" in can.packings
    pairs = [draw(st.tuples(length, length)) for _ in range(sequences if ragged else 1)] * (1 if ragged else sequences)
    kv_heads = draw(st.integers(1, _MOST_HEADS))
    dims = st.sampled_from(can.dims)
    if (step := can.dim_multiple) is not None:
        dims |= st.integers(1, can.dim_max // step).map(lambda n: (n * step, n * step))
    dim_qk, dim_v = draw(dims)
    side = st.none() | st.integers(0, _LONGEST)
    return {
        "packing": "ragged" if ragged else "dense",
        "seqlens_q": tuple(q for q, _ in pairs),
        "seqlens_k": tuple(k for _, k in pairs),
        "heads": kv_heads * draw(st.integers(1, _MOST_GROUP)),
        "kv_heads": kv_heads,
        "dim_qk": dim_qk,
        "dim_v": dim_v,
        "dtype": draw(st.sampled_from(can.dtypes_for("cpu"))),
        "causal": draw(st.sampled_from(can.causal)),
        "window": draw(st.none() | st.tuples(side, side)) if can.window else None,
        "softcap": draw(st.sampled_from((0.0, 20.0))) if can.softcap else 0.0,
        "score_mod": draw(_modifiers(SCORES)) if can.score_mod and can.captured else None,
        "mask_mod": draw(_modifiers(MASKS)) if can.mask_mod and can.captured else None,
    }


def _modifiers(named: dict[str, Any]) -> st.SearchStrategy[Any]:
    return st.none() | st.sampled_from([to_data(each) for each in named.values()])
