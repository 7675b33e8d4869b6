"""The Cases for the verdict's rates: number i of a table is the same for a seed, in every process.

Shapes follow those on which the floors were measured: small ones mostly, one in twenty of a thousand rows or a few very long
ones, rarely a large one.
"""

from __future__ import annotations

import math
import random
from typing import Final, Literal, NamedTuple

from support.emulated.choices import drawn_config

from attnfuzz.kernels.problem import Causal, Dtype, Problem
from attnfuzz.strategies.case import PATTERNS, Case, Pattern, Recipe

Table = Literal["correct", "plain", "mixed"]
"""correct: all patterns and dtypes, for false alarms. plain: normal values, table A of the floors. mixed: 27 families, B."""
_OTHERS = ("needle", "falling", "rising", "negative", "below_sentinels", "large_products", "outlier", "do_parallel")
FAMILIES: tuple[Pattern, ...] = tuple(each for each in PATTERNS if each not in _OTHERS)
"""The patterns on which the verdict is calibrated. Padded keys are calibrated too, but are lengths and slack rows, not values."""
PADDED: Final = "padmask"
"""Sequences of very different key lengths in one batch, with rows beyond the last: the one family without a pattern of values."""

ZERO_Q: Final = "zero_q"
"""q is all but 0 (in float16: 0), and k is not, as it is in the pattern "zeros": every P is 1/n, and dQ is not 0."""

_KERNEL, _PRESCALED = "emulated", "emulated.prescaled"
_SMALL_N = (1, 1, 2, 3, 5, 8, 16, 17, 31, 33, 48, 63, 64, 65, 80, 100, 127, 128, 129, 160, 200, 256)
_SMALL_M = (1, 2, 7, 16, 33, 64, 65, 100, 128, 129, 192, 256, 300, 511)
_MID: tuple[tuple[int, int], ...] = (
    (256, 256), (512, 512), (1, 1024), (1, 2048), (4, 2048), (2048, 4),
    (2048, 64), (64, 2048), (300, 700), (511, 513), (129, 1025),
)  # fmt: skip
_BIG = ((1024, 1024), (2048, 1024), (1000, 2000))
_DIMS = (16, 32, 64, 64, 64, 96, 128, 128, 192, 256)
_HEADS = ((1, 1), (2, 1), (1, 2), (1, 4), (2, 4), (1, 8), (2, 2))
"""(kv_heads, groups)."""
_MOST_SCORES = {"small": 130_000, "mid": 600_000, "big": 4_300_000}
_WINDOWS = (1, 7, 64, 100)
_SPREAD = 1.5
"""Hashed noise has a deviation of 0.816, so that q . k has two thirds of that of the normal numbers behind the floors."""
_HALF: tuple[Dtype, ...] = ("float16", "bfloat16")
_ALL: tuple[Dtype, ...] = ("float16", "bfloat16", "float32")


class FamilyCase(NamedTuple):
    """A Case and the name of its values' family."""

    family: str
    case: Case


def families(table: Table) -> tuple[str, ...]:
    """The families of values in a table, each as often as the others."""
    if table == "plain":
        return ("normal",)
    if table == "correct":
        return (*PATTERNS, ZERO_Q, PADDED)
    return (*(each for each in FAMILIES if each != "zeros"), ZERO_Q, PADDED)


def drawn_case(table: Table, seed: int, index: int) -> FamilyCase:
    """Case number `index` of a table."""
    rng = random.Random(f"{table}:{seed}:{index}")
    if table == "plain":
        return FamilyCase("normal", _plain(rng, index))
    names = families(table)
    family = names[index % len(names)]
    dtype = rng.choice(_HALF if table == "mixed" else _ALL)
    problem = _problem(rng, dtype, table, padded=family == PADDED)
    kernel = _PRESCALED if table == "correct" and dtype != "float32" and rng.random() < 0.1 else _KERNEL
    config = drawn_config(rng, problem, plain_mma=table == "mixed")
    return FamilyCase(family, Case(kernel=kernel, problem=problem, recipe=_recipe(rng, family), config=config))


def _recipe(rng: random.Random, family: str) -> Recipe:
    """Values of a family, at the magnitudes that it had where the floors were measured."""
    seed = rng.randrange(1 << 16)
    if family == ZERO_Q:
        return Recipe(q_scale=2.0**-40, seed=seed)
    if family == "tiny":
        # Of a deviation of 1e-4 to 1e-1 in q and k, 1e-5 to 1e-2 in v, 1e-6 to 1e-2 in dO.
        q, k, v, d_o = (2.0 ** rng.randint(*each) for each in ((-5, 4), (-5, 4), (-7, 3), (-10, 3)))
        return Recipe(pattern="tiny", q_scale=q, k_scale=k, v_scale=v, do_scale=d_o, seed=seed)
    pattern: Pattern = "normal" if family == PADDED else family  # type: ignore[assignment]
    return Recipe(pattern=pattern, seed=seed)


def _plain(rng: random.Random, index: int) -> Case:
    """Normal values, seqlen_q = seqlen_k. Of the floors' 50 cases 30 were fp16, 20 causal, 37 grouped: the same shares."""
    length = rng.choice((128, 200, 257, 512))
    dim = rng.choice((64, 128))
    dtype: Dtype = "float16" if index % 5 < 3 else "bfloat16"
    causal: Causal | None = "bottom_right" if index // 5 % 5 < 2 else None
    groups = 1 + index % 4
    problem = Problem(
        seqlens_q=(length,),
        seqlens_k=(length,),
        dim_qk=dim,
        dim_v=dim,
        heads=groups,
        kv_heads=1,
        dtype=dtype,
        causal=causal,
        softmax_scale=_SPREAD * dim**-0.5,
    )
    config = drawn_config(rng, problem, plain_mma=True)
    return Case(kernel=_KERNEL, problem=problem, recipe=_recipe(rng, "normal"), config=config)


def _problem(rng: random.Random, dtype: Dtype, table: Table, *, padded: bool) -> Problem:
    size = rng.choices(("small", "mid", "big"), (0.945, 0.053, 0.002))[0]
    n, m = _lengths(rng, size)
    dim = rng.choice((64, 128)) if size == "big" else rng.choice(_DIMS)
    dim_v = dim if rng.random() < 0.9 else rng.choice((32, 64, 128))
    kv_heads, groups = rng.choice(_HEADS)
    while kv_heads * groups * n * m > _MOST_SCORES[size] and kv_heads * groups > 1:
        kv_heads, groups = (1, groups) if kv_heads > 1 else (1, groups // 2)
    scale = dim**-0.5 if rng.random() < 0.8 else rng.choice((1.0, 0.1, 0.03125, 0.2))
    scale = _SPREAD * scale if table == "mixed" or rng.random() < 0.5 else scale
    mask = rng.choice((None, None, "bottom_right", "top_left", "window"))
    window = (rng.choice(_WINDOWS) - 1, None) if mask == "window" else None
    causal: Causal | None = "bottom_right" if mask == "window" else mask  # type: ignore[assignment]
    lengths = [(n, m)]
    slack, dense = 0, False
    if padded or rng.random() < 0.08:
        # A batch of two, each with some of the keys; slack rows hold NaN.
        lengths = [(n, rng.randint(0, m)) for _ in range(2 if n * m * kv_heads * groups <= _MOST_SCORES[size] // 2 else 1)]
        slack = rng.choice((0, 5))
    elif table == "correct" and size == "small" and rng.random() < 0.25:
        lengths, dense = _batch(rng, n, m)
    return Problem(
        seqlens_q=tuple(pair[0] for pair in lengths),
        seqlens_k=tuple(pair[1] for pair in lengths),
        packing="dense" if dense else "ragged",
        slack_q=slack,
        slack_k=slack,
        dim_qk=dim,
        dim_v=dim_v,
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        dtype=dtype,
        causal=causal,
        window=window,
        softmax_scale=scale,
    )


def _lengths(rng: random.Random, size: str) -> tuple[int, int]:
    if size == "small":
        n = rng.choice(_SMALL_N)
        return n, n if rng.random() < 0.6 else rng.choice(_SMALL_M)
    return rng.choice(_MID if size == "mid" else _BIG)


def _batch(rng: random.Random, n: int, m: int) -> tuple[list[tuple[int, int]], bool]:
    """A batch of about the same work: dense, or ragged with empty sequences at any place."""
    n, m = max(1, math.isqrt(n * n // 3)), max(1, math.isqrt(m * m // 3))
    if rng.random() < 0.4:
        return [(n, m)] * rng.randint(2, 3), True
    lengths = [(rng.choice((0, 1, n, n)), rng.choice((0, 1, m, m))) for _ in range(rng.randint(1, 3))]
    lengths.insert(rng.randrange(len(lengths) + 1), (n, m))
    return lengths, False
