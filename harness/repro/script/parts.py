"""What a standalone script (script.py) is made of, besides the functions that make inputs: its text is this module's.

A script must not need attnfuzz beyond its kernel, so what a function uses is here, in the modules that make inputs (which the
script gets as well), in torch, the standard library or the kernels' contract.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import math
import zlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.harness.trial.noise import noise
from attnfuzz.harness.trial.values import Maker
from attnfuzz.kernels.contract import Config, Inputs, Kernel
from attnfuzz.kernels.problem import Problem

__all__ = [
    "Bands",
    "Poison",
    "Recipe",
    "again",
    "broken_form",
    "called",
    "checksum",
    "compared",
    "cumulated",
    "heads_first",
    "judged",
    "judged_captured",
    "kept",
    "materialise",
    "outside",
    "unpacked",
]


@dataclass(frozen=True)
class Recipe:
    """How the values are made: hashed noise of the seed by a pattern, times a scale for each tensor."""

    pattern: str = "normal"
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    do_scale: float = 1.0
    seed: int = 0


def materialise(problem: Problem, recipe: Recipe, device: str) -> Inputs:
    """The kernel's inputs, contiguous; rows beyond the last sequence (slack) are NaN. Change the tensors here to try others."""
    maker = Maker(problem, recipe, device)  # type: ignore[arg-type]
    return Inputs(
        problem=problem,
        q=batched(problem, maker.q() * recipe.q_scale, problem.slack_q),
        k=batched(problem, maker.k() * recipe.k_scale, problem.slack_k),
        v=batched(problem, maker.v() * recipe.v_scale, problem.slack_k),
        d_o=batched(problem, maker.d_o() * recipe.do_scale, problem.slack_q),
        cu_seqlens_q=torch.tensor(cumulated(problem.seqlens_q), dtype=torch.int32, device=device),
        cu_seqlens_k=torch.tensor(cumulated(problem.seqlens_k), dtype=torch.int32, device=device),
        max_seqlen_q=max(problem.seqlens_q),
        max_seqlen_k=max(problem.seqlens_k),
        d_lse=gradient_of_lse(problem, recipe, device) if problem.needs.dlse else None,
    )


def batched(problem: Problem, values: torch.Tensor, slack: int) -> torch.Tensor:
    """float32 (tokens, heads, dim) as the kernel gets it: in its dtype, dense ones with a batch, NaN in slack rows."""
    dtype: torch.dtype = getattr(torch, problem.dtype)
    finite = torch.finfo(dtype).max
    values = values.clamp(-finite, finite).to(dtype)
    if problem.packing == "dense":
        values = values.reshape(problem.batch, values.shape[0] // problem.batch, *values.shape[1:])
    *batch, tokens, heads, dim = values.shape
    out = torch.full((*batch, tokens + slack, heads, dim), torch.nan, dtype=dtype, device=values.device)
    out[..., :tokens, :, :] = values
    return out


def gradient_of_lse(problem: Problem, recipe: Recipe, device: str) -> torch.Tensor:
    """dLSE: float32, shaped like LSE."""
    values = noise(recipe.seed, "dlse", (problem.total_q, problem.heads), device) * recipe.do_scale
    if problem.packing == "dense":
        values = values.reshape(problem.batch, problem.seqlens_q[0], problem.heads)
    rows = values.shape[-2]
    out = torch.full((*values.shape[:-2], problem.heads, rows + problem.slack_q), torch.nan, device=device)
    out[..., :rows] = values.transpose(-1, -2)
    return out


def cumulated(lengths: tuple[int, ...]) -> list[int]:
    """Where each sequence begins, and where the last one ends."""
    return [0, *accumulate(lengths)]


def heads_first(problem: Problem, name: str, x: torch.Tensor) -> torch.Tensor:
    """An output as float64 (heads, tokens of all sequences[, dim]) on the CPU, rows beyond the last sequence left out."""
    lengths = problem.seqlens_k if name in ("dk", "dv") else problem.seqlens_q
    x = x.detach().cpu().double()
    if problem.packing == "dense":
        x = x if name == "lse" else x.transpose(1, 2)
        return x[:, :, : lengths[0]].transpose(0, 1).flatten(1, 2)
    return (x if name == "lse" else x.transpose(0, 1))[:, : sum(lengths)]


def unpacked(text: str, shape: tuple[int, ...]) -> torch.Tensor:
    """float32 numbers from their packed text, as float64 of `shape`."""
    words = bytearray(zlib.decompress(base64.b85decode(text)))
    return torch.frombuffer(words, dtype=torch.float32).reshape(shape).double() if words else torch.zeros(shape).double()


def checksum(inputs: Inputs) -> int:
    """A number that tells whether the inputs are those that the budgets were measured for, to the bit."""
    found = zlib.crc32(repr(inputs.problem).encode())
    for x in (inputs.q, inputs.k, inputs.v, inputs.d_o, inputs.d_lse, *inputs.captured):
        if x is not None and x.numel():
            plain = x.detach().cpu().contiguous()
            found = zlib.crc32(ctypes.string_at(plain.data_ptr(), plain.nbytes), found)
    return found


def outside(got: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Which elements are wrong: not between round(expected - allowed) and round(expected + allowed). dtype None: no rounding.

    What is expected to be infinite (the LSE of a row without keys) has to be that; where `allowed` is infinite, all is right.
    """
    centre = expected.masked_fill(expected.isinf(), 0.0)
    low, high = centre - allowed, centre + allowed
    if dtype is not None:
        low, high = low.to(dtype).double(), high.to(dtype).double()
    inside = torch.where(expected.isinf(), got == expected, (low <= got) & (got <= high))
    return ~(inside | allowed.isinf())


def compared(
    problem: Problem,
    name: str,
    got: torch.Tensor,
    expected: torch.Tensor,
    allowed: torch.Tensor,
    dtype: torch.dtype | None,
    worst: int = 5,
) -> list[str]:
    """Lines about an output's wrong elements, the worst ones with their places; empty if all are right. Heads first."""
    wrong = outside(got, expected, allowed.expand_as(expected), dtype)
    if not wrong.any():
        return []
    lines = [f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong"]
    ratio = ((got - expected).abs() / allowed).nan_to_num(nan=math.inf).masked_fill(~wrong, -1.0)
    starts = cumulated(problem.seqlens_k if name in ("dk", "dv") else problem.seqlens_q)
    for flat in ratio.flatten().topk(min(worst, int(wrong.sum()))).indices.tolist():
        head, token, *dim = (int(at) for at in torch.unravel_index(torch.tensor(flat), wrong.shape))
        sequence = max(i for i in range(problem.batch) if starts[i] <= token < starts[i + 1])
        place = f"sequence {sequence}, row {token - starts[sequence]}, head {head}" + "".join(f", dim {d}" for d in dim)
        values = [float(x.flatten()[flat]) for x in (got, expected, allowed.expand_as(expected), ratio)]
        lines.append("  {}: got {:.9g}, expected {:.9g}, allowed error {:.3g}, error/allowed {:.3g}".format(place, *values))
    return lines


def broken_form(problem: Problem, name: str, got: Any, inputs: Inputs) -> str | None:
    """What an output's type, shape or dtype is that it should not be, or None."""
    like = inputs.k if name in ("dk", "dv") else inputs.q
    shape: tuple[int, ...] = (*like.shape[:-1], problem.dim_v if name in ("o", "dv") else problem.dim_qk)
    if name == "lse":
        shape = (*like.shape[:-3], problem.heads, like.shape[-3])
    dtype = torch.float32 if name == "lse" else like.dtype
    if not isinstance(got, torch.Tensor):
        return f"{name} is {type(got).__name__}, a tensor is expected"
    if tuple(got.shape) != shape or got.dtype != dtype or got.device != like.device:
        found = f"{tuple(got.shape)} {got.dtype} on {got.device}"
        return f"{name} is {found}, {shape} {dtype} on {like.device} is expected"
    return None


class Bands:
    """Memory between bands of NaN: what is read beyond the end of a tensor shows in the results, what is written in the bands."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, torch.Tensor, int, int]] = []

    def like(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Memory for a tensor of x's shape, strides and alignment."""
        elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        before = 1 << 15  # words of two bytes
        begin = before + x.storage_offset() * x.element_size() % 256 // 2
        end = begin + (elements * x.element_size() + 1) // 2
        words = torch.full((end + before,), -127, dtype=torch.int16, device=x.device)  # -127 is NaN in every dtype
        self.kept.append((what, words, begin, end))
        held = words.view(torch.uint8)[2 * begin : 2 * begin + elements * x.element_size()]
        return held.view(x.dtype).as_strided(x.shape, x.stride())

    def copy(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """A copy of x between bands, with what lies between its elements."""
        if not x.numel():
            return x.clone()
        elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        made = self.like(x, what)
        made.as_strided((elements,), (1,)).copy_(x.as_strided((elements,), (1,)))
        return made

    def broken(self) -> list[str]:
        """Of which tensors a band was written to."""
        return [
            f"{what} {tuple(words.shape)}: memory beyond its ends was written to"
            for what, words, begin, end in self.kept
            if (words[:begin] != -127).any() or (words[end:] != -127).any()
        ]


class Poison(TorchDispatchMode):  # type: ignore[misc]
    """While it is on, memory from torch.empty is NaN (integers: the largest value), and all new tensors lie between bands."""

    def __init__(self, bands: Bands) -> None:
        super().__init__()
        self.bands = bands

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; move what it made between bands."""
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removeprefix("new_")
        if not name.startswith(("empty", "zeros", "ones", "full")) or not made.numel():
            return made
        between = self.bands.like(made, "a tensor that the kernel made")
        if not name.startswith("empty"):
            return between.copy_(made)
        if made.dtype is torch.bool or made.is_complex():
            return made
        return between.fill_(math.nan if made.is_floating_point() else torch.iinfo(made.dtype).max)


def called(kernel: Kernel, problem: Problem, config: Config, inputs: Inputs, bands: Bands) -> tuple[dict[str, Any], list[str]]:
    """One call of the kernel, forward and backward, on copies of `inputs`: outputs by name, and inputs that it changed."""
    names = [
        name for name in ("q", "k", "v", "d_o", "d_lse", "cu_seqlens_q", "cu_seqlens_k") if getattr(inputs, name) is not None
    ]
    copies: dict[str, Any] = {name: bands.copy(getattr(inputs, name), f"its input {name}") for name in names}
    copies["captured"] = tuple(bands.copy(x, "a captured input") for x in inputs.captured)
    given = dataclasses.replace(inputs, **copies)
    built = kernel.build(problem, config, "cuda" if inputs.q.is_cuda else "cpu")
    with torch.no_grad(), Poison(bands):
        o, lse = built.forward(given)
        made: dict[str, Any] = {"o": o, "lse": lse}
        if {"dq", "dk", "dv"} & set(problem.needs.outputs):
            dq, dk, dv, *more = built.backward(given, o, lse)
            made |= {"dq": dq, "dk": dk, "dv": dv, "captured": more[0] if more else ()}
        if inputs.q.is_cuda:
            torch.cuda.synchronize()
    pairs = [(name, getattr(inputs, name), copies[name]) for name in names]
    pairs += [("captured", x, y) for x, y in zip(inputs.captured, copies["captured"], strict=True)]
    changed = [name for name, x, y in pairs if not torch.equal(bits(x), bits(y))]
    return made, [f"the kernel wrote to its input {name}" for name in changed]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements: NaN equals nothing."""
    return x.contiguous().view(torch.uint8)


def judged(
    inputs: Inputs,
    made: dict[str, Any],
    expected: dict[str, torch.Tensor],
    budgets: dict[str, tuple[str, tuple[int, ...]]] | None,
    limits: dict[str, float],
) -> list[str]:
    """Lines about every output that is wrong. Without `budgets`: by `limits`."""
    problem, wrong = inputs.problem, []
    for name in problem.needs.outputs:
        got, true = made[name], expected[name]
        if form := broken_form(problem, name, got, inputs):
            wrong.append(form)
            continue
        dtype = None if name == "lse" else inputs.q.dtype
        allowed = unpacked(*budgets[name]) if budgets else rough(limits[name], true, dtype)
        wrong += compared(problem, name, heads_first(problem, name, got), true, allowed, dtype)
    return wrong


def rough(limit: float, true: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The allowed error of inputs that were edited: a share of the largest value, or 8 roundings of it. dtype None: of LSE."""
    largest = true.masked_fill(true.isinf(), 0.0).abs().max() if true.numel() else torch.zeros(())
    return max(limit, 1e-5 if dtype is None else 8 * torch.finfo(dtype).eps) * largest.double().clamp(min=1e-6)


def judged_captured(
    made: dict[str, Any],
    expected: dict[str, torch.Tensor],
    names: list[str],
    budgets: dict[str, tuple[str, tuple[int, ...]]] | None,
    limits: dict[str, float],
) -> list[str]:
    """Lines about gradients of captured tensors that are wrong: float32, of whole tensors."""
    gradients, wrong = dict(zip(names, made.get("captured", ()), strict=False)), []
    for name in (each for each in expected if each.startswith("d ")):
        got, true = gradients.get(name[2:]), expected[name]
        if not isinstance(got, torch.Tensor) or got.shape != true.shape or got.dtype != torch.float32:
            wrong.append(
                f"{name} is {got if got is None else (tuple(got.shape), got.dtype)}, {tuple(true.shape)} float32 is expected"
            )
            continue
        x = got.cpu().double()
        allowed = (unpacked(*budgets[name]) if budgets else rough(limits[name], true, torch.float32)).expand_as(true)
        if (off := outside(x, true, allowed, torch.float32)).any():
            at = int(((x - true).abs() / allowed).nan_to_num(nan=math.inf).masked_fill(~off, -1.0).argmax())
            one, other, most = (float(each.flatten()[at]) for each in (x, true, allowed))
            wrong.append(f"{name}: {int(off.sum())} elements are wrong; got {one:.9g}, expected {other:.9g}, allowed {most:.3g}")
    return wrong


def kept(problem: Problem, made: dict[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each output itself and a copy: a kernel may use its memory again."""
    tensors = {name: made[name] for name in problem.needs.outputs}
    return {name: (x, x.detach().clone()) for name, x in tensors.items() if isinstance(x, torch.Tensor)}


def again(
    inputs: Inputs,
    first: dict[str, tuple[torch.Tensor, torch.Tensor]],
    made: dict[str, Any],
    reorder: dict[str, tuple[str, tuple[int, ...]]],
    deterministic: tuple[str, ...],
) -> list[str]:
    """Lines about outputs that differ between two equal calls: to the bit where the kernel declares it, else beyond `reorder`.

    `reorder` is what another order of additions may change in a result, of each of the two.
    """
    problem, wrong = inputs.problem, []
    for name, (was, copy) in first.items():
        now = made[name]
        if broken_form(problem, name, now, inputs) or broken_form(problem, name, copy, inputs):
            continue
        if now.numel() and was.untyped_storage().data_ptr() == now.untyped_storage().data_ptr():
            wrong.append(f"{name} of the last call lies in the memory of the first call's")
        one, other = heads_first(problem, name, copy), heads_first(problem, name, now)
        same = (one == other) & (one.signbit() == other.signbit()) | (one.isnan() & other.isnan())
        if name not in deterministic:
            step = 0.0 if name == "lse" else torch.finfo(inputs.q.dtype).eps * torch.maximum(one.abs(), other.abs())
            limit = 2 * unpacked(*reorder[name]) + step if name in reorder else torch.tensor(math.inf)
            same |= (one == other) | ((one - other).abs() <= limit)
        if not same.all():
            wrong.append(f"{name}: {int((~same).sum())} of {same.numel()} elements differ between two equal calls")
    return wrong
