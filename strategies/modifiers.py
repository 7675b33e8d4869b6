"""Strategies of modifiers: softcap, window, score_mod and mask_mod, named and random ones; they shrink to none.

Random score_mods are smooth in the score, since no budget covers a jump, but for those that hide keys by adding a large negative
number; they cap the argument of exp, and index within bounds by construction, with b, h, q_idx, kv_idx and their offset only.
Random masks hide rows, tiles, prefixes, or everything. For a kernel that lists its mask's blocks, edges lie at and next to the
ends of blocks, and heads have different lists.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import strategies as st

from attnfuzz.kernels.contract import Capabilities, WindowForm
from attnfuzz.kernels.expressions.named import (
    MASKS,
    SCORES,
    alibi,
    bias,
    causal,
    causal_top_left,
    dilated,
    documents,
    prefix,
    relative_bias,
    sliding_window,
    softcap,
)
from attnfuzz.kernels.expressions.tree import (
    KV,
    SEQLEN_K,
    B,
    Captured,
    Expression,
    H,
    Q,
    S,
    both,
    captured,
    const,
    either,
    exp,
    load,
    negated,
    sigmoid,
    tanh,
    to_data,
    to_float,
    truth,
    where,
    whole,
)
from attnfuzz.strategies.weighted import weighted

__all__ = [
    "HIDING",
    "HIDING_TILES",
    "Blocks",
    "Chosen",
    "chosen",
    "masks",
    "modifiers",
    "scores",
    "windows",
]

Chosen = tuple[tuple[str, Any], ...]
"""Fields of a Problem: ("score_mod", data), ("softcap", 20.0) and so on; empty for none."""
_FIELDS = ("score_mod", "mask_mod", "softcap", "window")
_STEPS = (32, 64, 128)
_EDGES = (1, 2, 3, 7, 8, 16, 31, 32, 33, 64, 65, 128)
_FACTORS = (0.5, 2.0, -1.0, 0.25, 1.5, -0.5, 0.125)
_CAPS = (20.0, 50.0, 5.0, 1.0)
HIDING = (-65504.0, -1e9, -1e38)
"""What models add to the scores of keys that they hide: the least float16, a round number, and one of the size of the least
float32, which itself would be -inf in base 2: a row of such keys alone has another LSE in a kernel that computes in base 2.
Least first, as they are tried when a failure is shrunk: only the first leaves sums of scores exact enough to be judged."""
_FIRST_KEYS = (32, 64, 33, 65, 128)
"""So many first keys are hidden by an added number: whole tiles of a row, before those that count (`hiding_tile`)."""
HIDING_TILES = (-1e38, -65504.0, -1e38, -1e9)
"""What is added to their scores: half of the time so large a number that where two products of it are rounded apart, exp of the
difference overflows; what it leaves of smaller ones is lost in the first visible tile."""
_SLOPES: st.SearchStrategy[Expression] = st.sampled_from((H, B, H + B, H + B)).map(lambda of: S + to_float(KV * of) * 0.03125)
"""Added slopes that differ by head, by sequence, or by both."""
_REMEMBERED = 4096
"""Strategies kept for the blocks of one process."""


class _Takes(NamedTuple):
    """The modifiers that a kernel takes."""

    score_mod: bool
    mask_mod: bool
    softcap: bool
    window: bool
    captured: bool
    captured_gradients: bool
    window_forms: tuple[WindowForm, ...]
    window_multiple: int

    @property
    def any_window(self) -> bool:
        """Whether each side of a window has any limit or none."""
        return {"left", "right", "both"} <= {*self.window_forms} and self.window_multiple == 1

    def windows(
        self, left: tuple[int, ...], right: tuple[int, ...]
    ) -> tuple[st.SearchStrategy[tuple[int | None, int | None]], ...]:
        """Return strategies of windows of each form, with limits as given or up to a multiple more."""
        step, every = self.window_multiple, st.none()
        of_left, of_right = (st.sampled_from(tuple(-(-n // step) * step for n in each)) for each in (left, right))
        forms: dict[WindowForm, st.SearchStrategy[tuple[int | None, int | None]]] = {
            "left": st.tuples(of_left, every),
            "right": st.tuples(every, of_right),
            "both": st.tuples(of_left, of_right),
            "equal": of_left.map(lambda side: (side, side)),
        }
        return tuple(forms[each] for each in self.window_forms)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a mask: queries (and keys) of one, the lengths, and the diagonal (kv_idx - q_idx) of a window."""

    size: int
    seqlen_q: int
    seqlen_k: int
    diagonal: int

    def edges(self, shift: int, longest: int) -> tuple[int, ...]:
        """Return distances of 0 to `longest`, `shift` more than around a multiple of the size; the most useful ones twice."""
        # One more than a multiple shows one pair of a block on the edge, one less shows all, two less all but one.
        distances = [n * self.size + d + shift for n in range(-3, 7) for d in (-2, -2, -1, 0, 1, 1)]
        return tuple(sorted(each for each in distances if 0 <= each <= longest)) or (0,)

    @property
    def left(self) -> tuple[int, ...]:
        """Widths of windows to the left that hide something."""
        return self.edges(self.diagonal, self.seqlen_q - 1 + self.diagonal)

    @property
    def right(self) -> tuple[int, ...]:
        """Widths of windows to the right that hide something."""
        return self.edges(-self.diagonal, self.seqlen_k - 1 - self.diagonal)


def modifiers(can: Capabilities, blocks: Blocks | None = None) -> st.SearchStrategy[Chosen]:
    """Return a strategy of the fields to set in a Problem, within `can`; none first.

    With `blocks` a mask_mod, a window, or neither, since each hides the edges of the other; most score_mods differ by head.
    """
    return _anywhere(_takes(can)) if blocks is None else _of_blocks(_takes(can), blocks)


def windows(
    can: Capabilities, forms: tuple[WindowForm, ...], blocks: Blocks | None = None
) -> st.SearchStrategy[tuple[int | None, int | None]]:
    """Return a strategy of limited windows of these forms, each as often; around the edges of `blocks`, if given."""
    return _windows(_takes(can)._replace(window_forms=forms), blocks)


@functools.lru_cache(_REMEMBERED)
def _windows(takes: _Takes, blocks: Blocks | None) -> st.SearchStrategy[tuple[int | None, int | None]]:
    anywhere = (0, *_EDGES)
    return st.one_of(takes.windows(blocks.left, blocks.right) if blocks else takes.windows(anywhere, anywhere))


def _takes(can: Capabilities) -> _Takes:
    forms = (can.window_forms, can.window_multiple)
    return _Takes(can.score_mod, can.mask_mod, can.softcap, can.window, can.captured, can.captured_gradients, *forms)


@functools.cache
def _anywhere(takes: _Takes) -> st.SearchStrategy[Chosen]:
    parts: dict[str, st.SearchStrategy[Any]] = {}
    if takes.score_mod:
        parts["score_mod"] = weighted((1, st.none()), (2, scores(takes.captured, takes.captured_gradients).map(to_data)))
    if takes.mask_mod:
        parts["mask_mod"] = weighted((1, st.none()), (2, masks(takes.captured).map(to_data)))
    if takes.softcap:
        parts["softcap"] = st.sampled_from((None, None, None, None, *_CAPS))
    if takes.window:
        side, sides = st.none() | st.sampled_from((0, *_EDGES)), (0, *_EDGES)
        windows = st.tuples(side, side) if takes.any_window else st.just((None, None)) | st.one_of(*takes.windows(sides, sides))
        parts["window"] = st.sampled_from((None, None, None)) | windows
    return st.fixed_dictionaries(parts).map(chosen)


@functools.lru_cache(_REMEMBERED)
def _of_blocks(takes: _Takes, blocks: Blocks) -> st.SearchStrategy[Chosen]:
    hiding: list[tuple[int, st.SearchStrategy[dict[str, Any]]]] = [(2, st.just({}))]
    if takes.window:
        limited = takes.windows(blocks.left, blocks.right)
        windows = weighted(*((2, each) for each in limited), (1, st.just((None, None))))
        hiding.append((3, windows.map(lambda sides: {"window": sides})))
    if takes.mask_mod:
        edges = tuple(each for each in blocks.edges(0, 3 * blocks.size) if each)
        hiding.append((2, _masks_of_blocks(takes.captured, blocks.size, edges)))
    return st.tuples(_scores_of_blocks(takes), weighted(*hiding)).map(lambda pair: chosen({**pair[0], **pair[1]}))


@functools.cache
def _scores_of_blocks(takes: _Takes) -> st.SearchStrategy[dict[str, Any]]:
    parts: dict[str, st.SearchStrategy[Any]] = {}
    if takes.score_mod:
        score_mods = scores(takes.captured, takes.captured_gradients)
        parts["score_mod"] = weighted((1, st.none()), (2, _of_places(takes).map(to_data)), (1, score_mods.map(to_data)))
    if takes.softcap:
        parts["softcap"] = st.sampled_from((None, None, None, None, *_CAPS))
    return st.fixed_dictionaries(parts)


@functools.cache
def _masks_of_blocks(reads: bool, size: int, edges: tuple[int, ...]) -> st.SearchStrategy[dict[str, Any]]:
    trees = weighted((2, sliced(edges, (size,))), (1, masks(reads, edges=edges)))
    return trees.map(lambda mask: {"mask_mod": to_data(mask)})


def _of_places(takes: _Takes) -> st.SearchStrategy[Expression]:
    """Return a strategy of score_mods that differ by head, sequence or position."""
    if not takes.captured:
        return _SLOPES
    return weighted((2, _SLOPES), (1, _captured(takes.captured_gradients).map(lambda x: S + x)))


def chosen(values: dict[str, Any]) -> Chosen:
    """Return the fields that are set, in one order: also a window without limits, since a kernel must take it for none."""
    # Hypothesis draws the fields of a dictionary in any order.
    return tuple((name, values[name]) for name in _FIELDS if values.get(name) not in (None, ("score",)))


def _captured(gradients: bool) -> st.SearchStrategy[Expression]:
    """Return a strategy of float32 loads, indexed by head, key, query, offset, or all."""
    grad = st.booleans() if gradients else st.just(False)
    forms: tuple[tuple[str, tuple[str, ...], tuple[Expression, ...]], ...] = (
        ("of_head", ("heads",), (H,)),
        ("of_key", ("seqlen_k",), (KV,)),
        ("of_query", ("batch", "seqlen_q"), (B, Q)),
        ("of_offset", ("offsets",), (Q - KV + SEQLEN_K - 1,)),
        ("of_all", ("batch", "heads", "seqlen_q", "seqlen_k"), (B, H, Q, KV)),
    )

    def load_of(form: tuple[str, tuple[str, ...], tuple[Expression, ...]], gradient: bool) -> Expression:
        name, sizes, index = form
        # One name, one tensor: with and without a gradient are two tensors.
        return load(Captured(name if gradient else f"{name}_fixed", sizes, "normal", gradient), *index)

    return st.builds(load_of, st.sampled_from(forms), grad)


@functools.cache
def scores(reads: bool, gradients: bool) -> st.SearchStrategy[Expression]:
    """Return a strategy of score_mods, simplest first. `reads`: may read captured tensors; `gradients`: those may take one."""
    named = st.sampled_from([each for name, each in SCORES.items() if gradients or name in ("softcap", "scaled by distance")])
    parametric = (
        st.sampled_from(_CAPS).map(softcap),
        *((st.just(alibi(gradient=False)),) if reads else ()),
        *((st.booleans().map(lambda of: relative_bias(gradient=of)), st.just(bias(gradient=True))) if gradients else ()),
    )
    rest = st.sampled_from(_FIRST_KEYS).map(lambda first: whole(first) <= KV)
    hiding = weighted((1, _hiding(masks(reads, depth=1), HIDING)), (1, _hiding(rest, HIDING_TILES)))
    factor = st.sampled_from(_FACTORS).map(lambda factor: S * factor)
    return st.one_of(factor, named, *parametric, hiding, _SLOPES, _random(reads, gradients))


def _hiding(shown: st.SearchStrategy[Expression], numbers: tuple[float, ...]) -> st.SearchStrategy[Expression]:
    """Return a strategy of score_mods that add one of `numbers` where a mask does not hold."""
    return st.builds(lambda mask, by: where(mask, S, S + by), shown, st.sampled_from(numbers))


@functools.cache
def _random(reads: bool, gradients: bool) -> st.SearchStrategy[Expression]:
    number = st.sampled_from(_FACTORS).map(const)
    loads = (_captured(gradients),) if reads else ()
    distance = st.sampled_from((0.03125, -0.03125, 0.5)).map(lambda by: to_float(Q - KV) * by)
    flat = st.one_of(number, *loads, distance, st.just(to_float(H)))
    leaf = st.just(S) | flat.map(lambda x: S + x)

    def grown(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
        tame = st.one_of(
            st.builds(lambda x, c: tanh(x * (1.0 / c)) * c, inner, st.sampled_from(_CAPS)),
            inner.map(sigmoid),
            st.builds(lambda x, c: exp(tanh(x) * c), inner, st.sampled_from((0.5, 1.0, 2.0))),
        )
        return st.one_of(
            st.builds(lambda x, y: x * y, inner, number),
            st.builds(lambda x, y: x + y, inner, flat),
            tame,
            st.builds(lambda x, y: x + y, inner, inner),
            st.builds(lambda x, y: x - y, inner, tame),
            *(st.builds(lambda x, y: x * y, tame, each) for each in loads),
            st.builds(where, masks(reads, depth=1), inner, inner),
            inner.map(lambda x: -x),
        )

    return st.recursive(leaf, grown, max_leaves=5)


@functools.cache
def sliced(edges: tuple[int, ...], steps: tuple[int, ...]) -> st.SearchStrategy[Expression]:
    """Return a strategy of mask_mods that shift by a step for each head or sequence, so that lists of blocks differ."""
    return st.builds(
        lambda of, step, op, right: getattr(KV + of * step, op)(right),
        st.sampled_from((H, H + B, B)),
        st.sampled_from(steps),
        st.sampled_from(("__le__", "__lt__", "__ge__", "__gt__")),
        st.one_of(st.sampled_from(edges).map(whole), st.just(Q), st.sampled_from(edges).map(lambda by: Q + by)),
    )


@functools.cache
def masks(reads: bool, depth: int = 3, edges: tuple[int, ...] = _EDGES) -> st.SearchStrategy[Expression]:
    """Return a strategy of mask_mods, simplest first. `reads`: may read captured tensors; `edges`: distances to compare with."""
    edge = st.sampled_from(edges)
    comparison = st.builds(
        lambda left, op, right: getattr(left, op)(right),
        st.sampled_from((KV, Q, Q - KV, KV + H, Q + B)),
        st.sampled_from(("__le__", "__lt__", "__ge__", "__gt__")),
        st.one_of(edge.map(whole), st.sampled_from((KV, Q, H, SEQLEN_K - 1))),
    )
    of_numbers = load(Captured("levels", ("heads", "seqlen_k"), "numbers"), H, KV)
    leaf = st.one_of(
        st.sampled_from((causal(), causal_top_left())),
        comparison,
        edge.map(sliding_window),
        sliced(edges, _STEPS),
        st.sampled_from((1, 2, 3, 5)).map(dilated),
        *((st.sampled_from((prefix(), documents(), of_numbers >= 2)),) if reads else ()),
        st.builds(lambda n, at: ((KV + H) % n).differs(at % n), st.sampled_from((2, 3, 16)), st.integers(0, 3)),
        st.sampled_from((truth(True), truth(False))),
    )
    if depth <= 1:
        return leaf
    pair = st.builds(lambda op, x, y: op(x, y), st.sampled_from((both, either)), *[masks(reads, depth - 1, edges)] * 2)
    named = [each for each in MASKS.values() if reads or not captured(each)]
    # `map` of st.one_of maps each of its branches: without weights most masks would be negated, some twice.
    return weighted((4, leaf), (1, st.sampled_from(named)), (2, pair), (1, masks(reads, depth - 1, edges).map(negated)))
