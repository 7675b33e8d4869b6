"""The specification: plain float64 attention, gradients by torch.autograd. Slow and obvious, the reference for all kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.modified import tensors_of
from attnfuzz.kernels.problem import SINKS, Problem
from attnfuzz.oracles.modifiers import Leaves, Modifiers, leaves_of

__all__ = [
    "Reference",
    "SequenceData",
    "attention",
    "differentiable",
    "leaves_within",
    "reference",
    "reference_of_heads",
    "sees",
    "sequences",
    "visible_keys",
]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceData:
    """The tensors of one sequence, heads first, in the kernel's dtype, without slack rows.

    `q (heads, seqlen_q, dim_qk)`, `k (kv_heads, seqlen_k, dim_qk)`, `v (kv_heads, seqlen_k, dim_v)`,
    `d_o (heads, seqlen_q, dim_v)`, `d_lse (heads, seqlen_q)` or None. `captured`: the batch's, as in Inputs.
    """

    index: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_o: torch.Tensor
    d_lse: torch.Tensor | None
    captured: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """float64 results of one sequence, heads first: o, dq like q; dk, dv like k, v; lse `(heads, seqlen_q)`, natural log.

    `captured`: by name, the sequence's contribution to the gradients of captured tensors.
    """

    o: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    captured: dict[str, torch.Tensor] = field(default_factory=dict)


def sequences(inputs: Inputs) -> Iterator[SequenceData]:
    """Yield each sequence of a ragged or dense batch."""
    problem = inputs.problem
    at_q = at_k = 0
    for index, (n_q, n_k) in enumerate(zip(problem.seqlens_q, problem.seqlens_k, strict=True)):
        if problem.packing == "dense":
            q, d_o = inputs.q[index, :n_q], inputs.d_o[index, :n_q]
            k, v = inputs.k[index, :n_k], inputs.v[index, :n_k]
            d_lse = None if inputs.d_lse is None else inputs.d_lse[index, :, :n_q]
        else:
            q, d_o = inputs.q[at_q : at_q + n_q], inputs.d_o[at_q : at_q + n_q]
            k, v = inputs.k[at_k : at_k + n_k], inputs.v[at_k : at_k + n_k]
            d_lse = None if inputs.d_lse is None else inputs.d_lse[:, at_q : at_q + n_q]
        q, k, v, d_o = (x.transpose(0, 1) for x in (q, k, v, d_o))
        yield SequenceData(index=index, q=q, k=k, v=v, d_o=d_o, d_lse=d_lse, captured=inputs.captured)
        at_q, at_k = at_q + n_q, at_k + n_k


def visible_keys(problem: Problem, index: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return which keys each query of sequence `index` sees by lengths, causal mask and window: bool `(seqlen_q, seqlen_k)`."""
    n_q, n_k = problem.seqlens_q[index], problem.seqlens_k[index]
    rows, keys = torch.arange(n_q, device=device)[:, None], torch.arange(n_k, device=device)[None, :]
    return sees(problem, rows, keys, n_q, n_k)


def sees(problem: Problem, i: torch.Tensor, j: torch.Tensor, n_q: int | torch.Tensor, n_k: int | torch.Tensor) -> torch.Tensor:
    """Return whether query i sees key j in a sequence of n_q queries and n_k keys, broadcast.

    Bottom-right causal is `j <= i + seqlen_k - seqlen_q`, top-left `j <= i`. The window counts keys left and right of that
    diagonal (the bottom-right one where there is no causal mask).
    """
    diagonal = i + (0 if problem.causal == "top_left" else n_k - n_q)
    visible = (i < n_q) & (j < n_k)
    if problem.causal is not None:
        visible = visible & (j <= diagonal)
    if problem.window is not None:
        left, right = problem.window
        if left is not None:
            visible = visible & (j >= diagonal - left)
        if right is not None:
            visible = visible & (j <= diagonal + right)
    return visible


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float | torch.Tensor,
    modify: Callable[[torch.Tensor], torch.Tensor] = lambda s: s,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (o, lse) of one sequence by the definition, differentiable.

    Args:
        q: `(heads, seqlen_q, dim_qk)`; k `(kv_heads, seqlen_k, dim_qk)`; v `(kv_heads, seqlen_k, dim_v)`, float64.
        visible: which keys each query sees, bool `(seqlen_q, seqlen_k)`, or `(heads, seqlen_q, seqlen_k)`.
        scale: factor on q . k, or one of each head, `(heads, 1, 1)`.
        modify: softcap and score_mod, applied to the scaled scores.
        sinks: `(heads,)`, or of each row `(heads, seqlen_q, 1)`: scores of a further column with value 0.

    Returns:
        o `(heads, seqlen_q, dim_v)` and lse `(heads, seqlen_q)`; rows that see no key are 0 and -inf, or the sink.
    """
    groups = q.shape[0] // k.shape[0]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    s = modify(scale * (q @ k.transpose(-1, -2)))
    if sinks is not None:
        sinks = sinks[:, None, None] if sinks.ndim == 1 else sinks
        finite = sinks.masked_fill(sinks == -torch.inf, 0.0)
        s = torch.cat([s, finite.expand(*s.shape[:2], 1)], -1)
        v = torch.cat([v, v.new_zeros(v.shape[0], 1, v.shape[2])], 1)
        seen = (sinks > -torch.inf).expand(*s.shape[:2], 1)
        visible = torch.cat([visible.expand(*s.shape[:2], visible.shape[-1]), seen], -1)
    blind = ~visible.any(-1)
    # Autograd has no gradient for a row of -inf alone: it is computed as if it saw all keys, then set exactly.
    s = s.masked_fill(~(visible | blind[..., None]), -torch.inf)
    if s.shape[-1] == 0:
        o, lse = s @ v, s.sum(-1)
    else:
        o, lse = torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)
    return o.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)


def reference(problem: Problem, data: SequenceData) -> Reference:
    """Return float64 O, LSE, dQ, dK, dV of one sequence: gradients of `sum(dO * O) + sum(dLSE * LSE)` by torch.autograd."""
    device = data.q.device
    n_q, n_k = data.q.shape[1], data.k.shape[1]
    modifiers, tensors = differentiable(problem, data)
    visible = visible_keys(problem, data.index, device)
    heads = torch.arange(problem.heads, device=device)[:, None, None]
    leaves = {} if modifiers.none else leaves_within(data, heads, range(n_q), range(n_k))
    # Without queries or keys no index of a modifier is within bounds.
    if n_q and n_k and (unmasked := modifiers.unmasked(leaves)) is not None:
        visible = visible & unmasked
    q, k, v = (x.detach().double().requires_grad_() for x in (data.q, data.k, data.v))
    if not (n_q and n_k):
        modifiers = Modifiers(None, None, {})
    o, lse = attention(
        q, k, v, visible, problem.scale, lambda s: modifiers.changed(s, leaves), tensors[SINKS] if problem.sinks else None
    )
    loss = (o * data.d_o.double()).sum()
    if data.d_lse is not None:
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * data.d_lse.double()).sum()
    dq, dk, dv, *rest = torch.autograd.grad(loss, (q, k, v, *tensors.values()), materialize_grads=True, allow_unused=True)
    captured = dict(zip(tensors, rest, strict=True))
    return Reference(o=o.detach(), lse=lse.detach(), dq=dq, dk=dk, dv=dv, captured=captured)


def reference_of_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_o: torch.Tensor, d_lse: torch.Tensor | None, visible: torch.Tensor,
    scale: torch.Tensor, sinks: torch.Tensor | None = None,
) -> Reference:  # fmt: skip
    """Return `reference` of heads that each have their own keys, mask and scale; `d_lse`, `sinks` `(heads, seqlen_q, 1)`."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    of = {} if sinks is None else {SINKS: sinks.detach().requires_grad_()}
    o, lse = attention(q, k, v, visible, scale, sinks=of.get(SINKS))
    results, gradients = [o], [d_o]
    if d_lse is not None:
        results.append(lse)
        gradients.append(d_lse[..., 0])
    # The gradients of the loss of `reference` with respect to O and LSE; rows that see no key have none (`attention`).
    dq, dk, dv, *rest = torch.autograd.grad(results, (q, k, v, *of.values()), gradients)
    return Reference(o=o.detach(), lse=lse.detach(), dq=dq, dk=dk, dv=dv, captured=dict(zip(of, rest, strict=True)))


def differentiable(problem: Problem, data: SequenceData) -> tuple[Modifiers, dict[str, torch.Tensor]]:
    """Return the modifiers over float64 copies of the tensors that take a gradient, and those copies by name."""
    taking = [each.gradient for each in tensors_of(problem)]
    copies = tuple(x.detach().double().requires_grad_() if of else x for x, of in zip(data.captured, taking, strict=True))
    modifiers = Modifiers.of(problem, copies)
    return modifiers, {name: x for name, x in modifiers.tensors.items() if x.requires_grad}


def leaves_within(data: SequenceData, heads: torch.Tensor, rows: range, keys: range) -> Leaves:
    """Return the coordinates of `(heads, rows, keys)` in a sequence."""
    device = data.q.device
    i = torch.arange(rows.start, rows.stop, device=device)[None, :, None]
    j = torch.arange(keys.start, keys.stop, device=device)[None, None, :]
    return leaves_of(torch.tensor(data.index).to(device, non_blocking=True), heads, i, j, data.q.shape[1], data.k.shape[1])
