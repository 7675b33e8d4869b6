"""Reference of sequences whose score matrix does not fit into memory: one key/value head at a time, query rows in blocks.

The attention is that of oracles/attention.py, with gradients by torch.autograd: each block of rows is its own graph, freed
before the next one. The gradients of k and v are sums over the blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.modified import of_heads
from attnfuzz.kernels.problem import SINKS, Problem
from attnfuzz.oracles.attention import Reference, SequenceData, attention, differentiable, leaves_within, sees
from attnfuzz.oracles.frames import CHUNK, key_range

__all__ = ["by_head", "is_large", "reference"]

_LARGE = 1 << 28
"""Elements of q, k, v and dO times the parts of a budget: above this, heads are judged one by one. 2 GiB in float64."""
_PARTS = 8


def is_large(problem: Problem) -> bool:
    """Whether reference and budgets of all heads at once would take gigabytes."""
    rows = problem.total_q * problem.heads + problem.total_k * problem.kv_heads
    return rows * (problem.dim_qk + problem.dim_v) * _PARTS > _LARGE


def by_head(inputs: Inputs) -> Iterator[tuple[int, Inputs]]:
    """Yield (number, inputs) of each key/value head with its query heads, and their sinks."""
    problem = inputs.problem
    for head in range(problem.kv_heads):
        one = of_heads(problem, head * problem.groups, problem.groups)
        rows = slice(head * problem.groups, (head + 1) * problem.groups)
        keys = slice(head, head + 1)
        d_lse = inputs.d_lse
        if d_lse is not None:
            d_lse = d_lse[:, rows] if problem.packing == "dense" else d_lse[rows]
        yield (
            head,
            dataclasses.replace(
                inputs,
                problem=one,
                q=inputs.q[..., rows, :],
                k=inputs.k[..., keys, :],
                v=inputs.v[..., keys, :],
                d_o=inputs.d_o[..., rows, :],
                d_lse=d_lse,
                captured=inputs.captured if inputs.sinks is None else (*inputs.captured[:-1], inputs.sinks[rows]),
            ),
        )


def reference(problem: Problem, data: SequenceData, chunk: int | None = None) -> Reference:
    """Return float64 O, LSE, dQ, dK, dV of one sequence, in blocks of about `chunk` scores at most."""
    chunk = CHUNK["cuda" if data.q.is_cuda else "cpu"] if chunk is None else chunk
    result = _empty(problem, data)
    block = max(1, chunk // max(1, data.k.shape[1]))
    for head in range(data.q.shape[0]):
        kv = head // problem.groups
        k, v = data.k[kv].double(), data.v[kv].double()
        for start in range(0, data.q.shape[1], block):
            rows = range(start, min(start + block, data.q.shape[1]))
            keys = key_range(problem, data.index, rows)
            if keys or problem.sinks:
                _block(problem, data, result, (head, kv), rows, keys, k, v)
    return result


def _empty(problem: Problem, data: SequenceData) -> Reference:
    """Return the result of rows that see no key."""
    heads, rows, _ = data.q.shape

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=data.q.device)

    return Reference(
        o=zeros(heads, rows, data.v.shape[-1]),
        lse=zeros(heads, rows).fill_(-torch.inf),
        dq=zeros(*data.q.shape),
        dk=zeros(*data.k.shape),
        dv=zeros(*data.v.shape),
        captured={name: torch.zeros_like(x) for name, x in differentiable(problem, data)[1].items()},
    )


def _block(
    problem: Problem,
    data: SequenceData,
    result: Reference,
    heads: tuple[int, int],
    rows: range,
    keys: range,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Store O, LSE and dQ of one head's block of rows, and add its share to dK and dV."""
    head, kv = heads
    at, columns = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
    device = data.q.device
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)[None, :]
    visible = sees(problem, i, j, data.q.shape[1], data.k.shape[1])
    modifiers, tensors = differentiable(problem, data)
    sinks = tensors[SINKS][head : head + 1] if problem.sinks else None
    leaves = {} if modifiers.none else leaves_within(data, torch.full((), head, device=device), rows, keys)
    if keys and (unmasked := modifiers.unmasked(leaves)) is not None:
        visible = visible & unmasked[0] if unmasked.ndim == 3 else visible & unmasked
    q_1, k_1, v_1 = (x.detach()[None].requires_grad_() for x in (data.q[head, at].double(), k[columns], v[columns]))
    o, lse = attention(q_1, k_1, v_1, visible, problem.scale, lambda s: modifiers.changed(s, leaves), sinks)
    loss = (o * data.d_o[head : head + 1, at].double()).sum()
    if data.d_lse is not None:
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * data.d_lse[head : head + 1, at].double()).sum()
    dq, dk, dv, *rest = torch.autograd.grad(loss, (q_1, k_1, v_1, *tensors.values()), materialize_grads=True, allow_unused=True)
    for name, each in zip(tensors, rest, strict=True):
        result.captured[name] += each
    result.o[head, at], result.lse[head, at], result.dq[head, at] = o[0].detach(), lse[0].detach(), dq[0]
    result.dk[kv, columns] += dk[0]
    result.dv[kv, columns] += dv[0]
