"""Scores and probabilities of a frame in float64, and the budget of LSE.

Notation as in oracles/budgets/bounds.py. Tensors are `(Z, rows, keys)` and `(Z, rows, dim)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from attnfuzz.kernels.contract import Deviations
from attnfuzz.oracles.budgets import forward_formulas as formulas
from attnfuzz.oracles.budgets.doubts import Doubt
from attnfuzz.oracles.budgets.forward_formulas import LAMBDA, TIES
from attnfuzz.oracles.budgets.roundings import Rounding, neighbours
from attnfuzz.oracles.formats import EPS, TF32, Format
from attnfuzz.oracles.frames import Loaded, Placement, Steps
from attnfuzz.oracles.modifiers import Changed

__all__ = ["Scores", "scores"]

_Rounded: TypeAlias = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Errors of scores by roundings of a factor of theirs: random ones of each score, and flushed ones."""


@dataclass(slots=True, eq=False)
class Scores:
    """float64 quantities of the forward on a frame. q, d_o: `(Z, rows, dim)`; k, v: `(Z, keys, dim)`."""

    rounding: Rounding
    form: Format
    scale: Steps
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_o: torch.Tensor
    d_lse: torch.Tensor | None
    q_size: torch.Tensor
    k_size: torch.Tensor
    v_size: torch.Tensor
    d_size: torch.Tensor
    """|q|, |scale| |k|, |v|, |dO|."""
    k2: torch.Tensor
    v2: torch.Tensor
    d2: torch.Tensor
    """Squares of scale k, v, dO."""
    values: torch.Tensor
    """v, |v|, v^2 and k side by side, for one product with P."""
    visible: torch.Tensor
    dead: torch.Tensor
    """(Z, rows, 1): 1 if the row sees no key, else 0; float64, since a kernel that converts is slower."""
    s: torch.Tensor
    """Scores, -inf where they are not visible; where mask_mod is in doubt, all of them."""
    exact: bool
    """Whether a row's maximum gives P = 1 before it is normalised (`top`)."""
    m: torch.Tensor
    e: torch.Tensor
    """exp(s - m): P before it is normalised."""
    l: torch.Tensor  # noqa: E741
    p: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    """Bound on the error of a score's exponent argument."""
    lost: torch.Tensor
    """(Z, rows, 1): 1 if scores are too inexact (an error beyond 1 in the exponent) for any budget, else 0."""
    m_lse: torch.Tensor
    shift: torch.Tensor
    l_error: torch.Tensor | None
    """Relative error of O that a row shares: of its row sum, or of the weights of splits, where they are declared."""
    n_k: Steps
    """Keys of the sequence, or of each sequence `(Z, 1, 1)`."""
    terms_q: Steps
    terms_k: Steps
    """Rows and keys in this frame, without padding."""
    rows: int
    """Rows of each query head."""
    part: float
    """Share of the rows of the longest sequence in this frame."""
    k_sum: torch.Tensor
    """(Z, 1, dim_qk): sum_j |k|."""
    touched: torch.Tensor
    """(Z, keys, 1): 1 for keys that some row sees, else 0."""
    changed: Changed | None
    """Scores after softcap and score_mod."""
    doubt: Doubt | None
    """Scores that mask_mod may or may not hide."""
    sunk: bool = False
    """Whether the last key is a sink."""
    normalised_p: bool = False
    """Whether P is rounded after it has been divided by a row sum."""
    half_partial_o: bool = False
    """Whether O of each split of the keys is rounded to the dtype."""
    again: tuple[torch.Tensor, torch.Tensor] | None = None
    """`delta` and `lost` of the scores that the backward recomputes, where it rounds K times the scale, which is declared."""
    of_splits: torch.Tensor | None = None
    """`delta` with the rounding of LSE of each split of the keys, where that is declared."""
    shared: torch.Tensor | None = None
    """Relative error of P in the backward that rows share: that of LSE of splits, and twice the mean of the roundings of K."""

    @property
    def only_scale(self) -> float:
        """The scale of a frame with one for all sequences."""
        assert isinstance(self.scale, float)
        return self.scale

    @property
    def delta_again(self) -> torch.Tensor:
        """`delta` in the backward."""
        return self.delta if self.again is None else self.again[0]

    @property
    def lost_again(self) -> torch.Tensor:
        """`lost` in the backward, where it is at least that of the forward."""
        return self.lost if self.again is None else torch.maximum(self.lost, self.again[1])

    @property
    def lost_rows(self) -> torch.Tensor:
        """`lost_again` as bool."""
        return self.lost_again != 0

    @property
    def unsure(self) -> torch.Tensor | None:
        """(1 or Z, rows, 1): rows in which a score in doubt may be the maximum; None: no row."""
        return None if self.doubt is None else self.doubt.rows

    @property
    def top(self) -> torch.Tensor:
        """Scores that are their row's maximum, where P is exactly 1."""
        if not self.exact:
            return torch.zeros_like(self.e, dtype=torch.bool)
        return formulas.leading(self.e, self.delta, self.form.u, self.unsure)

    @property
    def rounded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is rounded, and what its rounding is divided by: exp(s - m) and l, or P and 1.

        P is rounded when it has been divided by the sum of the keys so far, and is then scaled down to their share of l: its
        error is at most that of P itself, as a part of P or as a subnormal number's.
        """
        return (self.p, torch.ones_like(self.l)) if self.normalised_p else (self.e, self.l)

    @property
    def whole(self) -> bool:
        """Whether all rows of the sequences are in this frame."""
        return self.part == 1.0

    @property
    def lost_keys(self) -> torch.Tensor:
        """(Z, keys, 1): whether some row that sees or may see the key has unbounded errors."""
        if self.doubt is None:
            return (self.lost_rows & self.visible).any(1)[..., None]
        return ((self.lost_rows | self.doubt.endless) & self.doubt.reach).any(1)[..., None]


def scores(placed: Placement, x: Loaded, deviations: Deviations, device: str, *, ties: bool = False) -> Scores:
    """Compute scores, probabilities and the budget of LSE.

    delta = eps (4 (c |s| + sqrt(c) A) + 4 |m|) + 4 tiny, A = |scale| |q| |k|^T, c = max(1, D / 16); masked: 0.
    By tf32x3, which is declared, c is (21/16 D + 24) / 4 more (`Rounding.steps`), in both terms, and so is c' of dP.
    With a score_mod f, delta = error of f(s) (tree_errors.py) where s is off by that without m, + eps (4 |f(s)| + 4 |m|) + 4 tiny
    Lambda = log(1 + sum P (e^delta - 1));  M_LSE = Lambda + eps (4 (|LSE| + |m|) + 8 (1 + log2 max(M, 2)))
    Equal P that one thread adds one after the other are rounded alike each time: with ties + eps / 8 sum_j P (n - 1).
    In a row with scores that mask_mod may or may not hide, all scores that may be seen have one delta (doubts.py).
    Where LSE of splits is rounded, which is declared, Lambda has that in its delta (`of_split_lse`). Where splits are weighted by
    their LSE, O's relative error is 3 eps (|LSE| + 16) more: LSE of a split is rounded twice, LSE once. A split's LSE may be
    further from 0 by x, and has the weight e^-x then.
    """
    q, d_o, dim_qk = x.q, x.d_o, x.q.shape[-1]
    values = torch.cat([x.v, *formulas.of_values(x.v), x.k], -1)
    v, v_size, v2, k = values.split([*[x.v.shape[-1]] * 3, dim_qk], -1)
    form = Format.of(placed.dtype)
    q_size, (d_size, d2), (plain_k, k_size, k2) = q.abs(), formulas.of_values(d_o), formulas.of_keys(k, placed.scale)
    rounding = Rounding.of(placed.dtype, deviations, device)
    k_sum = plain_k.sum(1, keepdim=True)
    sum_k = plain_k.sum(-1)[:, None, :] if deviations.prescaled_q else None
    del plain_k
    prescaled: _Rounded = ()
    if sum_k is not None or deviations.half_scaled_k:
        random = 2.12 * form.u * torch.sqrt((q * q) @ k2.mT)
        prescaled = () if sum_k is None else ((random, 0.7 * form.eta * sum_k),)
    # Scaled afterwards: sums of products of half-precision numbers are mostly exact, in any order.
    product, sizes = q @ k.mT, q_size @ k_size.mT
    seen = _seen(placed, product, sizes, rounding, prescaled, dim_qk)
    largest = seen.hidden.amax(-1, keepdim=True)
    e, delta = formulas.exponentials(seen.hidden, largest, seen.delta, seen.doubtful is None)
    l, lse, m, dead = formulas.row_sums(e.sum(-1, keepdim=True), largest)  # noqa: E741
    doubt = None
    if seen.doubtful is not None:
        doubt = Doubt.of(seen.s, m, seen.visible, seen.doubtful)
        delta = doubt.widest(delta, seen.s.abs()).masked_fill_(~doubt.reach, 0.0)
    p, raised = formulas.probabilities(e, l, delta)
    keys = placed.n_k.clamp(min=2).log2() if isinstance(placed.n_k, torch.Tensor) else math.log2(max(placed.n_k, 2))
    widest = delta.amax(-1, keepdim=True)
    shift, m_lse, lost = formulas.lse_budget(lse, m, dead, raised.sum(-1, keepdim=True), widest, keys)
    of_splits = of_lse = None
    if deviations.half_split_lse and rounding.half:
        of_splits = _of_splits(seen, delta, lse, doubt, keys, form)
        _, raised = formulas.probabilities(e, l, of_splits)
        widest, plain = of_splits.amax(-1, keepdim=True), shift
        shift, m_lse, lost = formulas.lse_budget(lse, m, dead, raised.sum(-1, keepdim=True), widest, keys)
        of_lse = (shift - plain).clamp_(min=0.0, max=1.0)
    exact = not (deviations.lazy_rescale or deviations.normalised_p or rounding.tf32)
    result = Scores(
        rounding=rounding, form=form, scale=placed.scale, q=q, k=k, v=v, d_o=d_o, d_lse=x.d_lse, q_size=q_size, k_size=k_size,
        v_size=v_size, d_size=d_size, k2=k2, v2=v2, d2=d2, values=values, visible=seen.visible, dead=dead,
        s=seen.hidden if doubt is None else seen.s, exact=exact, m=m, e=e, l=l, p=p, lse=lse,
        delta=delta, lost=lost, m_lse=m_lse, shift=shift, l_error=None, n_k=placed.n_k,
        terms_q=placed.terms_q, terms_k=placed.terms_k, rows=placed.rows_of_head, part=placed.part, k_sum=k_sum,
        touched=seen.visible.any(1)[..., None].to(torch.float64), changed=seen.changed, doubt=doubt,
        sunk=placed.sinks is not None, normalised_p=deviations.normalised_p,
        half_partial_o=deviations.half_partial_o and rounding.half, of_splits=of_splits, shared=of_lse,
    )  # fmt: skip
    if deviations.half_scaled_k and rounding.half:
        of_k = (random, 0.7 * form.eta * q_size.sum(-1, keepdim=True))
        recomputed = _seen(placed, product, sizes, rounding, (*prescaled, of_k), dim_qk)
        _, again = formulas.exponentials(recomputed.hidden, largest, recomputed.delta, recomputed.doubtful is None)
        if doubt is not None:
            again = doubt.widest(again, recomputed.s.abs()).masked_fill_(~doubt.reach, 0.0)
        result.again = (again, (again.amax(-1, keepdim=True) > 1.0).to(torch.float64))
        of_keys = (again - delta).mul_(0.4).clamp_(max=1.0)
        result.shared = of_keys if of_lse is None else of_keys + of_lse
        result.changed = recomputed.changed
    if ties:
        # A unit of a sum of n terms is n of theirs: so far apart they may be and still be rounded alike.
        m_lse += (p * (neighbours(e, EPS / 2 * placed.n_k) - 1)).sum(-1, keepdim=True).mul_(EPS / 8)
    if deviations.l_from_rounded_p:
        result.l_error = _rounded_sum(result)
        m_lse += result.l_error
    if deviations.split_lse_weights:
        of_weights = lse.abs().add_(16.0).mul_(3 * EPS)
        result.l_error = of_weights if result.l_error is None else result.l_error + of_weights
    if ties or deviations.l_from_rounded_p:
        m_lse.masked_fill_(dead != 0, 0.0)
    return result


@dataclass(slots=True, eq=False)
class _Seen:
    """Scores after modifiers, which of them are visible or in doubt, and the error of their exponent argument without m's."""

    s: torch.Tensor
    hidden: torch.Tensor
    """s, -inf where it is not visible."""
    delta: torch.Tensor
    visible: torch.Tensor
    doubtful: torch.Tensor | None = None
    changed: Changed | None = None


def _seen(
    placed: Placement,
    product: torch.Tensor,
    size: torch.Tensor,
    rounding: Rounding,
    prescaled: _Rounded,
    dim_qk: int,
) -> _Seen:
    """Scale and mask the scores; `prescaled`: the errors of q or k times the scale, of each."""
    steps, visible, modifiers = rounding.steps(dim_qk), placed.visible(), placed.modifiers
    of_s, of_size = 4 * EPS * steps, 4 * EPS * math.sqrt(steps) + (TF32 if rounding.tf32 else 0.0)
    if modifiers.none:
        s, delta = formulas.visible_scores(product, size, visible, placed.scale, of_s, of_size)
    else:
        s, delta = formulas.scaled_scores(product, size, placed.scale, of_s, of_size)
    for random, flushed in prescaled:
        u = rounding.form.u
        delta += torch.minimum(u * size, random + u * s.abs()) + flushed
    if modifiers.none:
        if placed.sinks is not None:
            is_sink = torch.arange(s.shape[-1], device=s.device) == s.shape[-1] - 1
            s, delta = formulas.with_sinks(s, delta, visible, placed.sinks, is_sink)
        return _Seen(s, s, delta, visible)
    shown = visible
    leaves, doubtful, changed = placed.leaves(), None, None
    if (unmasked := modifiers.unmasked(leaves)) is not None:
        if (doubtful := modifiers.doubtful(leaves)) is not None:
            doubtful = visible & doubtful
        visible = visible & unmasked
    if modifiers.score is not None:
        changed = modifiers.with_error(s, delta, leaves)
        s = changed.after
        delta = changed.after_error + 4 * EPS * s.abs()
    return _sunk(placed, _Seen(s, s.masked_fill(~visible, -torch.inf), delta, visible, doubtful, changed), shown)


def _sunk(placed: Placement, seen: _Seen, shown: torch.Tensor) -> _Seen:
    """Make the last key the sink beside modifiers, where there are any: none changes it, and its error is 4 eps |sink|.

    `shown`: which keys a row sees before mask_mod hides some.
    """
    if placed.sinks is None:
        return seen

    def last(x: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
        x = x.expand(*placed_shape).clone()
        x[..., -1:] = value
        return x

    placed_shape = seen.s.shape
    visible, s = last(seen.visible, shown[..., -1:]), last(seen.s, placed.sinks)
    changed = seen.changed
    if changed is not None:
        changed = replace(changed, slope=last(changed.slope, 1.0), slope_error=last(changed.slope_error, 0.0))
    return _Seen(
        s=s, hidden=s.masked_fill(~visible, -torch.inf), delta=last(seen.delta, placed.sinks.abs() * (4 * EPS)), visible=visible,
        doubtful=None if seen.doubtful is None else last(seen.doubtful, False), changed=changed,
    )  # fmt: skip


def _of_splits(
    seen: _Seen, delta: torch.Tensor, lse: torch.Tensor, doubt: Doubt | None, log_keys: Steps, form: Format
) -> torch.Tensor:
    """Return delta with the rounding of LSE of splits; where mask_mod is in doubt, LSE may be that of any keys."""
    if doubt is None:
        return formulas.of_split_lse(delta, seen.hidden, lse.abs(), form)
    reached = seen.s.masked_fill(~doubt.reach, -torch.inf)
    most = reached.abs().masked_fill_(~doubt.reach, 0.0).amax(-1, keepdim=True) + log_keys
    return formulas.of_split_lse(delta, reached, torch.maximum(most, lse.abs()), form)


def _rounded_sum(t: Scores) -> torch.Tensor:
    """Return the relative error of a row sum of rounded P: at most u, and mostly that of a random walk.

    Ties always count here: a sum of equal P is off by all of one rounding.
    """
    random = t.rounding.variance(t.e, t.form.eta, t.top)
    counts = neighbours(t.e, t.form.u / 16)
    repeated = (counts - 1).mul_(t.rounding.repeated(t.e, random, counts))
    random = LAMBDA * random.sum(-1, keepdim=True).sqrt() + TIES * repeated.sum(-1, keepdim=True).sqrt()
    return (
        torch.minimum(random / t.l, torch.full_like(t.l, t.form.u * 1.01))
        + t.rounding.flushed(t.e, None, t.form.eta).sum(-1, keepdim=True) / t.l
    )
