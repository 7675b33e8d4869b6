"""What the suites beside the engine have in common: plain torch attention by autograd, and its usual tolerance.

They judge a kernel as tests of attention kernels usually do: a reference in higher precision, the same formula in the kernel's
own dtype, and the kernel may be off by twice what that one is off. They run in pytest processes of their own; REQUEST, in the
environment, is JSON: kernels, device, log, parts.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch

from attnfuzz.harness.core.environment import prepare
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Inputs, Kernel
from attnfuzz.kernels.problem import Dtype, Problem

__all__ = ["DEVICE", "KERNELS", "PARTS", "VARIABLE", "Shape", "attention", "compare", "problem_of", "random_inputs"]

VARIABLE: Final = "ATTNFUZZ_THROUGHPUT_SUITE"
_REQUEST: Final[dict[str, Any]] = json.loads(os.environ.get(VARIABLE, '{"kernels": [], "device": "cpu", "log": "", "parts": 1}'))
DEVICE: Final = _REQUEST["device"]
KERNELS: Final[list[str]] = _REQUEST["kernels"]
PARTS: Final[int] = _REQUEST["parts"]
_TYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_TIMES: Final = 2.0
"""The kernel's error may be so many times that of the formula in its own dtype."""
_FLOOR: Final = {"float16": 1e-4, "bfloat16": 1e-3, "float32": 1e-5}


@dataclass(frozen=True, slots=True)
class Shape:
    """One test: what a suite chooses of a problem."""

    dtype: Dtype
    causal: bool
    heads: int
    kv_heads: int
    dim_qk: int
    dim_v: int
    lengths: tuple[tuple[int, int], ...]
    """(queries, keys) of each sequence."""


def kernel_of(name: str) -> Kernel:
    """The kernel of that name, in a process that is ready for its device."""
    prepare(DEVICE)
    return registry.get(name)


def problem_of(kernel: Kernel, shape: Shape) -> Problem | None:
    """The problem of a shape for `kernel`; None if it cannot take that. A dense batch has the first sequence's lengths."""
    can = kernel.capabilities
    masks = [each for each in can.causal if (each is not None) == shape.causal]
    ragged = "ragged" in can.packings
    pairs = shape.lengths if ragged else shape.lengths[:1] * len(shape.lengths)
    if not masks:
        return None
    problem = Problem(
        seqlens_q=tuple(q for q, _ in pairs), seqlens_k=tuple(k for _, k in pairs), packing="ragged" if ragged else "dense",
        heads=shape.heads, kv_heads=shape.kv_heads, dim_qk=shape.dim_qk, dim_v=shape.dim_v, dtype=shape.dtype, causal=masks[0],
    )  # fmt: skip
    configs = kernel.configs(problem)
    return None if not configs or kernel.supports(problem, configs[0], DEVICE) else problem


def random_inputs(problem: Problem, seed: int = 0) -> Inputs:
    """Normal values in the shapes that the contract asks for."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(lengths: tuple[int, ...], heads: int, dim: int) -> torch.Tensor:
        rows = (sum(lengths),) if problem.packing == "ragged" else (len(lengths), lengths[0])
        values = torch.randn((*rows, heads, dim), generator=generator, device=DEVICE)
        return values.to(_TYPES[problem.dtype])

    def cumulated(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)

    queries, keys = problem.seqlens_q, problem.seqlens_k
    return Inputs(
        problem=problem,
        q=normal(queries, problem.heads, problem.dim_qk),
        k=normal(keys, problem.kv_heads, problem.dim_qk),
        v=normal(keys, problem.kv_heads, problem.dim_v),
        d_o=normal(queries, problem.heads, problem.dim_v),
        cu_seqlens_q=cumulated(queries),
        cu_seqlens_k=cumulated(keys),
        max_seqlen_q=max(queries),
        max_seqlen_k=max(keys),
    )


def attention(inputs: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """O, dQ, dK and dV of the padded batch by one formula in `dtype`, in the shapes of the inputs."""
    problem = inputs.problem
    q, k, v = (_padded(x, lengths).to(dtype).requires_grad_() for x, lengths in _qkv(inputs))
    d_o = _padded(inputs.d_o, problem.seqlens_q).to(dtype)
    mask = _mask(problem)[:, None]
    keys, values = (x.repeat_interleave(problem.groups, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * problem.scale
    weights = scores.masked_fill(~mask, torch.finfo(dtype).min).softmax(-1) * mask
    o = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    gradients = torch.autograd.grad(o, (q, k, v), d_o)
    lengths = (problem.seqlens_q, problem.seqlens_q, problem.seqlens_k, problem.seqlens_k)
    return tuple(_unpadded(x.detach(), problem, each) for x, each in zip((o, *gradients), lengths, strict=True))


def _qkv(inputs: Inputs) -> tuple[tuple[torch.Tensor, tuple[int, ...]], ...]:
    queries, keys = inputs.problem.seqlens_q, inputs.problem.seqlens_k
    return (inputs.q, queries), (inputs.k, keys), (inputs.v, keys)


def _mask(problem: Problem) -> torch.Tensor:
    """Which keys each query sees: (batch, queries, keys)."""
    n_q, n_k = (torch.tensor(each, device=DEVICE)[:, None, None] for each in (problem.seqlens_q, problem.seqlens_k))
    i = torch.arange(max(problem.seqlens_q), device=DEVICE)[None, :, None]
    j = torch.arange(max(problem.seqlens_k), device=DEVICE)[None, None, :]
    seen = (i < n_q) & (j < n_k)
    if problem.causal is None:
        return seen
    return seen & (j <= i + (n_k - n_q if problem.causal == "bottom_right" else 0))


def _padded(x: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    if x.ndim == 4:
        return x
    return torch.nn.utils.rnn.pad_sequence(list(x.split(list(lengths))), batch_first=True)


def _unpadded(x: torch.Tensor, problem: Problem, lengths: tuple[int, ...]) -> torch.Tensor:
    return x if problem.packing == "dense" else torch.cat([each[:length] for each, length in zip(x, lengths, strict=True)])


def compare(kernel: Kernel, problem: Problem, seed: int = 0) -> None:
    """Build the kernel, run it forward and backward, and assert that it is as near the reference as the formula in its dtype.

    Raises:
        AssertionError: an output is off by more.
    """
    inputs = random_inputs(problem, seed)
    built = kernel.build(problem, kernel.configs(problem)[0], DEVICE)
    with torch.no_grad():
        o, lse = built.forward(inputs)
        outputs = (o, *built.backward(inputs, o, lse)[:3])
    low_type = _TYPES[problem.dtype]
    high_type = torch.float64 if low_type == torch.float32 else torch.float32
    passed = False
    try:
        for name, out, low, high in zip(["O", "dQ", "dK", "dV"], outputs, attention(inputs, low_type),
                                        attention(inputs, high_type), strict=True):  # fmt: skip
            off = (out.to(high_type) - high).abs().max().item()
            # Of the largest value: an absolute one has false alarms where many queries add up, and each ends the test.
            floor = _FLOOR[problem.dtype] * max(1.0, high.abs().max().item())
            allowed = _TIMES * (low.to(high_type) - high).abs().max().item() + floor
            assert off <= allowed, f"{name} is off by {off:.3g}; {allowed:.3g} is allowed"
        passed = True
    finally:
        _note(problem.total_q + problem.total_k, passed)


def _note(tokens: int, passed: bool) -> None:
    """Append a line for one judged test; processes of pytest-xdist share the file."""
    file = os.open(_REQUEST["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"{time.monotonic()} {tokens} {int(passed)}\n".encode())
    os.close(file)
