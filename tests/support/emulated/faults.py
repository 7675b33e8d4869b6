"""The numeric faults of half-precision attention kernels: 35 that are wrong and one that is gray, by the design's names.

Each is a `Change`: what one step of the emulated kernel does otherwise. All of them leave the result plausible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from support.emulated.choices import Choices

from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import Problem

LOG2_E: Final = math.log2(math.e)

Rounding = Literal["dtype", "bfloat16", "truncated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What each step does; the defaults are the correct kernel."""

    p_forward: Rounding = "dtype"
    p_backward: Rounding = "dtype"
    ds: Rounding = "dtype"
    o: Literal["dtype", "via_bfloat16", "truncated"] = "dtype"
    o_last_row_missing: bool = False
    lse_rounded: bool = False
    delta: Literal["", "bfloat16_o", "product_rounded", "stored_rounded"] = ""
    """How D = rowsum(dO * O) is made; empty: as the Config says."""
    delta_last_row_zero: bool = False
    scale_forward: float = 1.0
    scale_backward: float = 1.0
    scale_gradient: float = 1.0
    """Factors on softmax_scale: in the forward's scores, in the backward's, in dQ and dK."""
    log2_e_forward: float = LOG2_E
    log2_e_backward: float = LOG2_E
    key_dropped: frozenset[Literal["forward", "backward", "dq"]] = frozenset()
    """Where the middle key of every sequence is left out."""
    causal_shift: int = 0
    """The causal diagonal is this many keys too far right."""
    padding_visible: bool = False
    """The zero keys that fill up the last tile take part in the forward."""
    o_not_rescaled: bool = False
    l_not_rescaled: bool = False
    """The accumulator, or the row sum, is not rescaled at one tile when the running maximum grows."""
    no_maximum: bool = False
    """The forward's exponentials do not subtract the row's maximum."""
    l_from_rounded_p: bool = False
    scores_rounded: bool = False
    """q . k is rounded to the input dtype."""
    scores_in_half: bool = False
    o_in_half: bool = False
    dv_in_half: bool = False
    """Products accumulated in the input dtype."""
    backward_last_row_missing: bool = False
    dq_tile_lost: bool = False
    """One key tile is not added to the last query tile's dQ."""
    dq_in_half: bool = False
    """The key tiles' shares of dQ are added in the input dtype."""
    partials: Literal["fp32", "rounded", "sum_rounded"] = "fp32"
    """Of the group's query heads, in dK and dV: each rounded to the input dtype, or their running sum."""


@dataclass(frozen=True, slots=True)
class NumericFault:
    """A Change with its name, what it is in words, and where it can show at all."""

    slug: str
    title: str
    change: Change
    when: Callable[[Problem, Choices], bool] = lambda problem, _: problem.dtype != "float32"
    gray: bool = False
    """Numerically defensible: a kernel that does it declares it."""

    def applies(self, problem: Problem, config: Config) -> bool:
        """Whether it can change a bit: false where the step that it changes does not occur."""
        return self.when(problem, Choices.of(config))


def _fp16(problem: Problem, _: Choices) -> bool:
    return problem.dtype == "float16"


def _tiles(problem: Problem, choices: Choices) -> bool:
    return max(problem.seqlens_k) > choices.tile_n


def _partial_tile(problem: Problem, choices: Choices) -> bool:
    return any(n and m % choices.tile_n for n, m in zip(problem.seqlens_q, problem.seqlens_k, strict=True))


def _grouped(problem: Problem, _: Choices) -> bool:
    return problem.groups > 1


def _base2(_: Problem, choices: Choices) -> bool:
    return choices.exp != "natural"


def _causal(problem: Problem, _: Choices) -> bool:
    return problem.causal is not None


_FOUR_DIGITS = 1.4424

FAULTS: Final = (
    NumericFault("P_bf16_fwd", "P in bf16, forward", Change(p_forward="bfloat16"), _fp16),
    NumericFault("P_bf16_bwd", "P in bf16, backward", Change(p_backward="bfloat16"), _fp16),
    NumericFault("dS_bf16", "dS in bf16", Change(ds="bfloat16"), _fp16),
    NumericFault("out_via_bf16", "O rounded to bf16 on its way", Change(o="via_bfloat16"), _fp16),
    NumericFault("delta_bf16O", "D from a bf16 O", Change(delta="bfloat16_o"), _fp16),
    NumericFault("scale_1pct_all", "scale 1 % off in all scores", Change(scale_forward=1.01, scale_backward=1.01)),
    NumericFault("scale_1pct_bwdS", "scale 1 % off in the backward's scores", Change(scale_backward=1.01)),
    NumericFault("dQdK_scale_1pct", "dQ, dK 1 % too large", Change(scale_gradient=1.01)),
    NumericFault("dQdK_scale_0.1pct", "dQ, dK 0.1 % too large", Change(scale_gradient=1.001)),
    NumericFault("drop_key_fwdbwd", "one key left out", Change(key_dropped=frozenset({"forward", "backward"}))),
    NumericFault("drop_key_bwd", "one key left out of the backward", Change(key_dropped=frozenset({"backward"}))),
    NumericFault("drop_key_dQ", "one key left out of dQ", Change(key_dropped=frozenset({"dq"}))),
    NumericFault("norescale_O", "O not rescaled at one tile", Change(o_not_rescaled=True), _tiles),
    NumericFault("norescale_l", "row sum not rescaled at one tile", Change(l_not_rescaled=True), _tiles),
    NumericFault("delta_prod_half", "D from products rounded to half", Change(delta="product_rounded")),
    NumericFault("delta_stored_half", "D stored in half", Change(delta="stored_rounded")),
    NumericFault("delta_lastrow_0", "D of the last row missing", Change(delta_last_row_zero=True)),
    NumericFault("lse_nomax", "no maximum subtracted", Change(no_maximum=True)),
    NumericFault("O_lastrow_missing", "last row of O not written", Change(o_last_row_missing=True)),
    NumericFault("bwd_lastrow_missing", "last row left out of the backward", Change(backward_last_row_missing=True)),
    NumericFault("QK_half_acc", "scores accumulated in half", Change(scores_in_half=True)),
    NumericFault("PV_half_acc", "O accumulated in half", Change(o_in_half=True)),
    NumericFault("dV_half_acc", "dV accumulated in half", Change(dv_in_half=True)),
    NumericFault("LSE_stored_half", "LSE stored in half", Change(lse_rounded=True)),
    NumericFault("S_rounded_half", "scores rounded to half", Change(scores_rounded=True)),
    NumericFault("O_truncated", "O cut, not rounded", Change(o="truncated")),
    NumericFault("P_truncated", "P cut, not rounded", Change(p_forward="truncated", p_backward="truncated")),
    NumericFault("pad_keys_unmasked", "padding of the last tile not masked", Change(padding_visible=True), _partial_tile),
    NumericFault("dQ_tile_add_lost", "one tile not added to dQ", Change(dq_tile_lost=True), _tiles),
    NumericFault("dQ_half_atomics", "dQ added up in half", Change(dq_in_half=True), _tiles),
    NumericFault("dKdV_split_half", "dK, dV of each query head rounded to half", Change(partials="rounded"), _grouped),
    NumericFault("dKdV_seq_half", "dK, dV added over the group in half", Change(partials="sum_rounded"), _grouped),
    NumericFault("l_from_rounded_P", "row sum of the rounded P", Change(l_from_rounded_p=True), gray=True),
    NumericFault(
        "log2e_1.4424_all",
        "log2(e) with a wrong 4th digit",
        Change(log2_e_forward=_FOUR_DIGITS, log2_e_backward=_FOUR_DIGITS),
        _base2,
    ),
    NumericFault("log2e_1.4424_bwd", "the same in the backward only", Change(log2_e_backward=_FOUR_DIGITS), _base2),
    NumericFault("causal_edge_off1", "causal edge one key too far", Change(causal_shift=1), _causal),
)
