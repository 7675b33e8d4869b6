"""Faults of block-sparse kernels with modifiers, planted in copies of triton.flex: in its device code or its block lists."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from support.flex import dense

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.expressions.named import alibi, causal, relative_bias, softcap
from attnfuzz.kernels.expressions.tree import KV, B, Captured, H, Q, S, load, to_float
from attnfuzz.kernels.faults.planted import Edit, planted_copy
from attnfuzz.kernels.problem import Problem

DEVICE, MASKS = "attnfuzz.kernels.triton.flex_device", "attnfuzz.kernels.triton.blockmask"


@dataclass(frozen=True)
class FlexFault:
    """One fault, a Problem that shows it, the outputs that must be wrong there, and all that may be (None: any)."""

    name: str
    problem: Problem
    shows: frozenset[str]
    device: tuple[Edit, ...] = ()
    masks: tuple[Edit, ...] = ()
    only: bool = True
    """No other output is wrong."""
    recipe: dict[str, Any] = field(default_factory=dict)
    split: int = 1
    rare: bool = False
    """A few Cases of hundreds show it, so that no test's campaign can count on one: compared directly alone."""


def _fault(name: str, problem: Problem, shows: str, *device: Edit, **others: Any) -> FlexFault:
    return FlexFault(name, problem, frozenset(each.replace(".", " ") for each in shows.split()), device, **others)


_OF_KEYS = "queries_masked, queries_count, queries, tensors,\n            b, kv_head"
_SCORES = "x, s = _scores(products, b, h, q_idx, kv_idx, scale, sizes, tensors, SCORE, PRESCALED, WITHIN_Q, WITHIN_K)"
_PART = "begin, end = tiles * part // SPLIT, tiles * (part + 1) // SPLIT"
_SLOPE = "SLOPE(ds, x, b, h, near_q, near_k, sizes, tensors)"
_SLOPE_OF_KEYS = f"ds = {_SLOPE}\n            if MIXED or not FULL:\n                ds = tl.where"
_OF_QUERIES = "b, h, rows, index, block, begin, end, masked, k_blocks, scale, low, high, sizes, tensors,\n"

FAULTS = (
    _fault(
        "transposed lists of a sliced mask",
        dense(100, 100, mask=causal() & (KV + H * 40 + B * 20 > 100)),
        "dk dv",
        Edit("row = _list_row(b, h, start_n // BLOCK_K", "row = _list_row(b * 0, h * 0, start_n // BLOCK_K"),
    ),
    _fault(
        "full blocks past the real length",
        dense(64, 50, slack_k=32),
        "o lse dq dk dv",
        masks=(Edit("whole = (last_q < n_q) & (last_k < n_k)", "whole = (last_q < n_q) & (last_k >= 0)"),),
        only=False,
    ),
    _fault(
        "score_mod called with index 0 in the backward",
        dense(40, 40, score=alibi()),
        "dq dk dv",
        Edit(_SCORES, _SCORES.replace("q_idx, kv_idx", "q_idx * 0, kv_idx"), times=2),
    ),
    _fault(
        "head 0's score_mod in dK and dV",
        dense(40, 40, score=relative_bias(gradient=False)),
        "dk dv",
        Edit("b, h, cols, index, begin, masked", "b, h * 0, cols, index, begin, masked"),
        Edit("b, h, cols, index, begin, end, masked, q_blocks", "b, h * 0, cols, index, begin, end, masked, q_blocks"),
    ),
    _fault(
        "forward lists used in the backward",
        dense(100, 100, causal="bottom_right"),
        "dk dv",
        Edit(_OF_KEYS, _OF_KEYS.replace("queries", "keys")),
    ),
    _fault(
        "LSE in base 2",
        dense(40, 40),
        "lse dq dk dv",
        Edit("(row_max + tl.math.log2(row_sum)) * LN_2", "(row_max + tl.math.log2(row_sum))", times=2),
    ),
    _fault(
        "natural LSE taken for base 2 in the backward",
        dense(40, 40),
        "dq dk dv",
        Edit("natural * LOG2_E", "natural"),
    ),
    _fault(
        "the -inf guard gone",
        dense(60, 40, mask=KV > Q, slack_k=2),
        "o lse",
        Edit('shift = tl.where(new_max == float("-inf"), 0.0, new_max)', "shift = new_max"),
        only=False,
    ),
    _fault("dLSE ignored", dense(40, 40), "dq dk", Edit("row_delta -= tl.load(d_lse", "row_delta -= 0.0 * tl.load(d_lse")),
    _fault("dLSE with the wrong sign", dense(40, 40), "dq dk", Edit("row_delta -= tl.load(d_lse", "row_delta += tl.load(d_lse")),
    _fault(
        "prescale undeclared",
        dense(40, 50, dtype="float16", softmax_scale=0.9),
        "lse",
        Edit("    if PRESCALED:\n        q_tile =", "    if not PRESCALED:\n        q_tile ="),
        Edit("        if not PRESCALED:\n            s =", "        if PRESCALED:\n            s ="),
        recipe={"q_scale": 4.0},
        only=False,
    ),
    _fault(
        "slope of score_mod left out in dK",
        dense(40, 40, score=softcap(1.0)),
        "dk",
        Edit(_SLOPE_OF_KEYS, _SLOPE_OF_KEYS.replace(_SLOPE, "ds * 1.0")),
    ),
    _fault(
        "diagonal masked",
        dense(70, 70, causal="bottom_right"),
        "o lse dq dk dv",
        Edit("tl.sub(high, low,", "tl.sub(high - 1, low,"),
        only=False,
    ),
    _fault(
        "windows of the top-left diagonal under a bottom-right one",
        dense(50, 90, window=(20, 3)),
        "o lse dq dk dv",
        masks=(Edit('0 if problem.causal == "top_left" else n_k - n_q', '0 if problem.causal != "bottom_right" else n_k - n_q'),),
    ),
    _fault(
        "gradients of captured tensors from the slope of the score",
        dense(40, 40, score=S * load(Captured("gain", ("heads",), gradient=True), H) * 0.5),
        "d.gain",
        Edit("CAPTURED(ds, x,", f"CAPTURED({_SLOPE}, x,"),
    ),
    _fault(
        "parts merged as if they had one maximum",
        dense(40, 150),
        "o lse",
        Edit('other=float("-inf")) - shift)', 'other=float("-inf")) * 0.0)'),
        split=3,
        only=False,
    ),
    _fault(
        "tiles lost where parts are not alike",
        dense(40, 100),
        "o lse",
        Edit(_PART, "begin, end = tiles // SPLIT * part, tiles // SPLIT * (part + 1)"),
        split=3,
        only=False,
    ),
    _fault(
        "masked tiles of an earlier part done again",
        dense(100, 100),
        "o lse",
        Edit("middle = tl.minimum(tl.maximum(masked, begin), end)", "middle = tl.minimum(masked, end)"),
        split=3,
        only=False,
        rare=True,
    ),
    _fault(
        "key head's score_mod in full blocks",
        dense(64, 64, score=S + to_float(KV * H) * 0.03125),
        "o lse",
        Edit(_OF_QUERIES, _OF_QUERIES.replace("b, h,", "b, kv_head,")),
        only=False,
    ),
    _fault(
        "sequence 0's score_mod in full blocks of dK and dV",
        dense(64, 64, score=S + to_float(KV * B) * 0.03125),
        "dk dv",
        Edit("b, h, cols, index, begin, end, masked, q_blocks", "b * 0, h, cols, index, begin, end, masked, q_blocks"),
    ),
    _fault(
        "lists of the group's first head in dK and dV",
        dense(64, 64, mask=KV + H * 32 >= 32),
        "dk dv",
        Edit("row = _list_row(b, h, start_n", "row = _list_row(b, kv_head * groups, start_n"),
    ),
    _fault(
        "a block left out of which a window leaves one pair",
        dense(64, 64, window=(1, 0)),
        "o lse dq dk dv",
        masks=(Edit("some = (most >= band.low)", "some = (most > band.low)"),),
        rare=True,
    ),
    _fault(
        "a block full of which a window hides one pair",
        dense(64, 64, window=(None, 30)),
        "o lse dq dk dv",
        masks=(Edit("(most <= band.high)\n    return", "(most <= band.high + 1)\n    return"),),
    ),
)


def faulty(fault: FlexFault) -> Kernel:
    """A copy of triton.flex with `fault`, under a name of its own."""
    from attnfuzz.kernels.triton.flex import TritonFlex

    return TritonFlex(
        name=f"test.triton.{''.join(c if c.isalnum() else '_' for c in fault.name)}",
        device_code=functools.partial(planted_copy, DEVICE, fault.device),
        masks=functools.partial(planted_copy, MASKS, fault.masks),
    )
