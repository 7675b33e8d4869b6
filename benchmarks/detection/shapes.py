"""The Cases that published suites of attention kernels try, as far as a kernel takes them.

Kernels on the CPU are interpreted, some thousand times slower than on a GPU. The tiles of ours are about a quarter of those that
the suites were written for, so lengths are a quarter of the published ones (a sixteenth for flex attention's 2048), with the same
remainders by one; there are fewer sequences and heads. Every Config of a kernel is tried, which is more than those suites do.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.expressions.named import alibi
from attnfuzz.kernels.expressions.tree import KV, Expression, Q, S, to_data, to_float
from attnfuzz.kernels.problem import Layout, Problem
from attnfuzz.strategies.case import Case, Recipe

__all__ = ["Consume", "case_of", "flash_attention", "flex_attention", "tilelang_examples"]

Consume = Callable[[Case], bool]
"""Called with each Case; True ends the drawing."""

_DIMS: Final = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
_PAIRS: Final = (
    (1, 37), (29, 51), (32, 55), (29, 53), (27, 64), (64, 128), (128, 64), (256, 256), (255, 256), (256, 255),
)  # fmt: skip
"""A quarter of (1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024); two beside."""
_HEADS: Final = ((2, 2), (2, 1), (6, 2))
"""MHA, MQA and GQA with three heads a group, as the published 9 over 3."""
_BATCH: Final = 2
_PADDING: Final = 5
"""Tokens by which lengths of a ragged batch are shorter, at most."""
_EXAMPLES: Final = (
    # heads, kv_heads, length, dim_qk, dim_v, causal, varlen
    (4, 4, 32, 64, 64, True, False),
    (2, 2, 64, 64, 64, True, False),
    (4, 4, 64, 64, 64, False, False),
    (4, 4, 64, 128, 128, False, False),
    (4, 4, 64, 128, 128, True, False),
    (4, 1, 64, 192, 128, False, False),
    (2, 2, 128, 64, 64, False, False),
    (2, 2, 128, 64, 64, False, True),
    (2, 1, 128, 128, 128, True, False),
    (2, 1, 256, 128, 128, False, False),
)
_FLEX_LENGTHS: Final = ((128, 128), (64, 128))
_FLEX_HEADS: Final = ((2, 2), (4, 2), (4, 1))
_DISTANCE: Final = to_float(Q - KV)
_SCORES: Final[tuple[tuple[Expression | None, bool], ...]] = (
    (None, False), (S * 2.0, False), (S * S, False), (None, True), (S + _DISTANCE, False), (S + _DISTANCE, True),
    (alibi(), False),
)  # fmt: skip
"""score_mod and whether it is causal: identity, times two, squared, causal, distance added, that and causal, ALiBi."""
_ORDERS: Final = (Layout(order="bhsd"), Layout(), Layout(order="bhsd", offset=293, pitch=1))


def case_of(kernel: Kernel, turn: int, seed: int, **parts: Any) -> Case | None:
    """Return the Case of a Problem's parts with normal values and the Config number `turn` of those that fit, or None."""
    try:
        problem = Problem(**parts)
        configs = kernel.configs(problem)
        fit = [each for each in configs if kernel.supports(problem, each, "cpu") is None]
    except BadArgument:
        return None
    if not fit:
        return None
    return Case(kernel=kernel.name, problem=problem, recipe=Recipe(seed=seed), config=fit[turn % len(fit)])


def flash_attention(kernel: Kernel, seed: int, consume: Consume) -> None:
    """Try flash-attention's grid in random order: lengths, dims, dtypes, heads, causal, local windows, softcap.

    Source: tests/test_flash_attn.py of Dao-AILab/flash-attention, `test_flash_attn_output` and `test_flash_attn_varlen_output`.
    """
    numbers = random.Random(seed)
    grid = list(
        itertools.product(_PAIRS, _DIMS, ("float16", "bfloat16"), _HEADS, (None, "bottom_right"), (False, True), (0.0, 50.0))
    )
    numbers.shuffle(grid)
    cases = (_of_grid(kernel, turn, numbers, *point) for turn, point in enumerate(grid))
    _each(cases, consume)


def _of_grid(
    kernel: Kernel, turn: int, numbers: random.Random, pair: tuple[int, int], dim: int, dtype: str, heads: tuple[int, int],
    causal: str | None, local: bool, softcap: float,
) -> Case | None:  # fmt: skip
    window = (numbers.randrange(pair[1]), numbers.randrange(pair[1])) if local else None
    return case_of(
        kernel, turn, turn, **_lengths(kernel, numbers, [pair] * _BATCH, ragged=True), heads=heads[0], kv_heads=heads[1],
        dim_qk=dim, dim_v=dim, dtype=dtype, causal=causal, window=window, softcap=softcap,
    )  # fmt: skip


def _lengths(kernel: Kernel, numbers: random.Random, pairs: Sequence[tuple[int, int]], *, ragged: bool) -> dict[str, Any]:
    """Return packing and lengths of a Problem, where `ragged` each a little shorter at random in a kernel of ragged batches."""
    if "ragged" not in kernel.capabilities.packings:
        return {"packing": "dense", "seqlens_q": tuple(q for q, _ in pairs), "seqlens_k": tuple(k for _, k in pairs)}

    def shorter(length: int) -> int:
        return numbers.randint(max(1, length - _PADDING), length) if ragged else length

    return {"seqlens_q": tuple(shorter(q) for q, _ in pairs), "seqlens_k": tuple(shorter(k) for _, k in pairs)}


def tilelang_examples(kernel: Kernel, seed: int, consume: Consume) -> None:
    """Try the shapes of TileLang's example tests with each Config, small ones first; an eighth of their heads, two at least.

    Source: examples/flash_attention/test_example_flash_attention.py of tile-ai/tilelang, and the defaults of the examples.
    """
    numbers = random.Random(seed)
    rounds = range(max(len(kernel.configs(_problem_of_example(kernel, numbers, _EXAMPLES[0]))), 1))
    cases = (
        case_of(kernel, turn, seed, **_parts_of_example(kernel, numbers, example)) for turn in rounds for example in _EXAMPLES
    )
    _each(cases, consume)


def _problem_of_example(kernel: Kernel, numbers: random.Random, example: tuple[Any, ...]) -> Problem:
    return Problem(**_parts_of_example(kernel, numbers, example))


def _parts_of_example(kernel: Kernel, numbers: random.Random, example: tuple[Any, ...]) -> dict[str, Any]:
    heads, kv_heads, length, dim_qk, dim_v, causal, varlen = example
    pairs = [(length, length)] * (_BATCH if varlen else 1)
    return {
        **_lengths(kernel, numbers, pairs, ragged=varlen), "heads": heads, "kv_heads": kv_heads, "dim_qk": dim_qk,
        "dim_v": dim_v, "dtype": "float16", "causal": "bottom_right" if causal else None,
    }  # fmt: skip


def flex_attention(kernel: Kernel, seed: int, consume: Consume) -> None:
    """Try the suite of flex attention in random order: score_mods, causal, dtypes, heads, unequal lengths, strides.

    Source: test/inductor/test_flex_attention.py of pytorch/pytorch; half of its batch, a quarter of its 8 heads.
    """
    numbers = random.Random(seed)
    dtypes = ("float16", "bfloat16", "float32")
    grid = list(itertools.product(_SCORES, _FLEX_LENGTHS, dtypes, _FLEX_HEADS, _ORDERS))
    numbers.shuffle(grid)
    cases = (_of_flex(kernel, turn, numbers, *point) for turn, point in enumerate(grid))
    _each(cases, consume)


def _of_flex(
    kernel: Kernel, turn: int, numbers: random.Random, score: tuple[Expression | None, bool], pair: tuple[int, int], dtype: str,
    heads: tuple[int, int], layout: Layout,
) -> Case | None:  # fmt: skip
    lengths = _lengths(kernel, numbers, [pair] * _BATCH, ragged=False)
    if "packing" not in lengths and layout.order is not None:
        layout = Layout(order="htd", offset=layout.offset, pitch=layout.pitch)
    causal = next((each for each in ("top_left", "bottom_right") if each in kernel.capabilities.causal), None)
    return case_of(
        kernel, turn, turn, **lengths, heads=heads[0], kv_heads=heads[1], dim_qk=64, dim_v=64, dtype=dtype,
        causal=causal if score[1] else None, score_mod=None if score[0] is None else to_data(score[0]),
        layout_q=layout, layout_k=layout, layout_v=layout,
    )  # fmt: skip


def _each(cases: Iterator[Case | None], consume: Consume) -> None:
    for case in cases:
        if case is not None and consume(case):
            return
