"""The contract's conditions on a kernel's outputs that do not concern their values: type, shape, dtype, device, storage."""

from __future__ import annotations

import torch

from attnfuzz.harness.judge.failure import BY_QUERY, OUTPUT_TITLES, Failure
from attnfuzz.kernels.contract import Inputs, Outputs
from attnfuzz.kernels.problem import OutputName, Problem

__all__ = ["broken_contract", "heads_first", "slack_rows", "valid_rows", "why_unfit"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_LARGE = 1 << 24
"""Elements of an output above which no float64 copy is made here: 128 MiB."""


def why_unfit(kernel: str, inputs: Inputs, outputs: Outputs) -> tuple[Failure, ...]:
    """Return a Failure for each output that breaks the contract; values are not compared."""
    problem = inputs.problem
    device, failures = inputs.q.device, []
    for name in problem.needs.outputs:
        if (failure := broken_contract(kernel, problem, name, getattr(outputs, name), device)) is not None:
            failures.append(failure)
    return tuple(failures)


def _shape(problem: Problem, name: OutputName) -> tuple[int, ...]:
    """Return the shape that the contract requires of an output, slack rows included."""
    heads = problem.heads if name in BY_QUERY else problem.kv_heads
    dim = problem.dim_v if name in ("o", "dv") else problem.dim_qk
    lengths, slack = (problem.seqlens_q, problem.slack_q) if name in BY_QUERY else (problem.seqlens_k, problem.slack_k)
    if problem.packing == "dense":
        rows = lengths[0] + slack
        return (problem.batch, heads, rows) if name == "lse" else (problem.batch, rows, heads, dim)
    rows = sum(lengths) + slack
    return (heads, rows) if name == "lse" else (rows, heads, dim)


def broken_contract(
    kernel: str, problem: Problem, name: OutputName, got: torch.Tensor | None, device: torch.device
) -> Failure | None:
    """Return how an output breaks the contract (type, layout, shape, dtype, device or storage), or None."""
    title, dtype = OUTPUT_TITLES[name], torch.float32 if name == "lse" else _DTYPES[problem.dtype]

    def broken(check: str, expected: object, actual: object) -> Failure:
        message = f"{title} has {check} {actual} where {expected} is expected"
        return Failure(kernel=kernel, kind="contract", output=name, check=check, message=message)

    if not isinstance(got, torch.Tensor):
        return broken("type", "a tensor", "None" if got is None else type(got).__name__)
    if type(got) not in (torch.Tensor, torch.nn.Parameter):
        return broken("type", "a plain tensor", type(got).__name__)
    if got.layout is not torch.strided:
        return broken("layout", torch.strided, got.layout)
    if got.shape != (shape := _shape(problem, name)):
        return broken("shape", shape, tuple(got.shape))
    if got.dtype != dtype:
        return broken("dtype", dtype, got.dtype)
    if got.device != device:
        return broken("device", device, got.device)
    if (held := got.untyped_storage().nbytes()) < (needed := _bytes_needed(got)):
        return broken("storage", f"{needed} bytes", f"{held} bytes")
    if _overlaps(got):
        return broken("strides", "memory of its own for each element", got.stride())
    return None


def slack_rows(problem: Problem, name: OutputName, got: torch.Tensor) -> torch.Tensor:
    """Return the slack rows of an output that has the contract's shape, a view."""
    axis, rows, slack = _rows(problem, name)
    return got.narrow(axis, rows, slack)


def valid_rows(problem: Problem, name: OutputName, got: torch.Tensor) -> torch.Tensor:
    """Return the other rows of such an output, a view."""
    axis, rows, _ = _rows(problem, name)
    return got.detach().narrow(axis, 0, rows)


def _rows(problem: Problem, name: OutputName) -> tuple[int, int, int]:
    """Return the dimension of an output that counts rows, how many are those of tokens, and how many are slack."""
    dense = problem.packing == "dense"
    lengths, slack = (problem.seqlens_q, problem.slack_q) if name in BY_QUERY else (problem.seqlens_k, problem.slack_k)
    return dense + (name == "lse"), lengths[0] if dense else sum(lengths), slack


def _bytes_needed(x: torch.Tensor) -> int:
    """Return the bytes of storage that the tensor's shape and strides reach."""
    if not x.numel():
        return 0
    if x.is_contiguous():
        return int((x.storage_offset() + x.numel()) * x.element_size())
    last = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return int((last + 1) * x.element_size())


def _overlaps(x: torch.Tensor) -> bool:
    """Whether two elements share memory, as in an expanded tensor."""
    if x.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    # Dims may interleave without sharing memory: count.
    taken = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        taken = (taken[:, None] + stride * torch.arange(size)).flatten()
    return bool(taken.unique().numel() < x.numel())


def heads_first(problem: Problem, name: OutputName, got: torch.Tensor) -> torch.Tensor:
    """Return a kernel's output as (heads, tokens[, dim]) without slack rows, in float64 unless it is large."""
    lengths = problem.seqlens_q if name in BY_QUERY else problem.seqlens_k
    got = got.detach()
    if problem.packing == "dense":
        got = got if name == "lse" else got.transpose(1, 2)
        got = got[:, :, : lengths[0]].transpose(0, 1).flatten(1, 2)
    else:
        got = got if name == "lse" else got.transpose(0, 1)
        got = got[:, : sum(lengths)]
    return got if got.numel() > _LARGE else got.double()
