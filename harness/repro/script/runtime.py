"""Functions of a standalone script: it is this module's text, then the kernel's import, the Case and the packed tensors.

It may import only torch, the standard library and the kernels' contract.
"""

from __future__ import annotations

import base64
import math
import sys
import traceback
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.kernels.contract import Config, Device, Inputs, Kernel
from attnfuzz.kernels.problem import Layout, Needs, Problem

__all__ = ["Config", "Layout", "Needs", "PackedCase", "Problem", "Stored", "check", "run", "unpacked"]

BAND, NAN_WORD = 1 << 15, -127  # 16-bit words before and after a tensor; the word is NaN in every dtype
INTEGERS = (torch.int32, torch.int64)
FLOATING = ("q", "k", "v", "d_o", "d_lse", "k_pages", "v_pages")
CYCLES = 200_000_000  # of a wait on a stream: about 0.1 s


class Stored(NamedTuple):
    """A tensor's place: the number of its allocation, dtype, shape, strides and offset in elements."""

    allocation: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def within(self, memory: Mapping[int, torch.Tensor] | Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor in the bytes of its allocation, without a copy."""
        elements = memory[self.allocation].view(getattr(torch, self.dtype))
        return elements[self.offset :].as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class PackedCase:
    """A Case as data: the calls in order, the judged one last, each a Problem and its inputs by name.

    `outputs`: float64 reference, error budget, lowest and highest right value; NaN where nothing is judged. `reorder`: the
    error of another order of additions, by which equal calls may differ. `deterministic`: outputs that the kernel declares equal
    to the bit. `runs`: the most runs, until one fails. `check`: where the last call is made, if that is not the default stream:
    other_stream, two_streams (`beside`: the inputs of the call beside it) or graph. `memory`: all allocations.
    """

    kernel: Kernel
    device: Device
    config: Config
    calls: tuple[tuple[Problem, dict[str, Stored]], ...]
    outputs: dict[str, tuple[Stored, ...]]
    reorder: dict[str, Stored]
    deterministic: tuple[str, ...]
    runs: int
    check: str
    beside: dict[str, Stored]
    memory: list[torch.Tensor] = field(default_factory=list)


def unpacked(data: tuple[str, ...]) -> list[torch.Tensor]:
    """Return the bytes of each allocation, aligned as torch aligns its own."""
    contents = [zlib.decompress(base64.b64decode(text)) for text in data]
    return [torch.frombuffer(bytearray(each or b"."), dtype=torch.uint8)[: len(each)].clone() for each in contents]


class Bands:
    """Memory between bands of NaN: reading beyond a tensor's end shows in the results, writing there in the bands."""

    def __init__(self) -> None:
        self.buffers: list[tuple[str, torch.Tensor, int, int]] = []

    def between(self, count: int, device: torch.device | str, what: str, *, integers: bool = False) -> torch.Tensor:
        """`count` bytes, unfilled. What follows integers is positive: a length that is read there is not that of nothing."""
        end, after = BAND + (count + 1) // 2, NAN_WORD & 0x7FFF if integers else NAN_WORD
        words = torch.full((end + BAND,), NAN_WORD, dtype=torch.int16, device=device)
        words[end:] = after
        self.buffers.append((what, words, end, after))
        return words.view(torch.uint8)[2 * BAND : 2 * BAND + count]

    def broken(self) -> list[str]:
        """Lines about tensors that were written to beyond their ends."""
        broken = [what for what, x, end, after in self.buffers if (x[:BAND] != NAN_WORD).any() or (x[end:] != after).any()]
        return [f"{what}: memory beyond its ends was written to" for what in broken]


class Poison(TorchDispatchMode):  # type: ignore[misc]
    """While it is on, memory from torch.empty is NaN (integers: the largest value), and all new tensors lie between bands."""

    def __init__(self, bands: Bands) -> None:
        super().__init__()
        self.bands = bands

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; move a new tensor between bands."""
        x = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removeprefix("new_")
        if not name.startswith(("empty", "zeros", "ones", "full")) or not x.numel() or x.layout is not torch.strided or x.is_meta:
            return x
        count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        what, integers = f"a tensor that the kernel made {tuple(x.shape)}", x.dtype in INTEGERS
        held = self.bands.between(count * x.element_size(), x.device, what, integers=integers)
        held = held.view(x.dtype).as_strided(x.shape, x.stride())
        if not name.startswith("empty") or x.dtype is torch.bool or x.is_complex():
            return held.copy_(x)
        return held.fill_(math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)


class Elsewhere:
    """A kernel whose calls are made as the check says: late on another stream, beside other calls, or in CUDA graphs."""

    def __init__(self, case: PackedCase, problem: Problem, bands: Bands) -> None:
        self.case, self.streams = case, (torch.cuda.Stream(), torch.cuda.Stream())
        self.built, self.other = (case.kernel.build(problem, case.config, case.device) for _ in range(2))
        self.others: Any = placed(case, problem, case.beside, bands)[0] if case.beside else None
        self.second: Any = ()
        self.graphs: list[Any] = []
        self.early: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, inputs: Inputs) -> Any:
        """(o, lse)."""
        results, self.second = self.called(
            "forward", inputs, lambda: self.built.forward(inputs), lambda: self.other.forward(self.others)
        )
        return results

    def backward(self, inputs: Inputs, o: Any, lse: Any) -> Any:
        """Gradients."""
        second = lambda: self.other.backward(self.others, *self.second)  # noqa: E731
        return self.called("backward", inputs, lambda: self.built.backward(inputs, o, lse), second)[0]

    def called(self, step: Any, inputs: Inputs, call: Any, second: Any) -> tuple[Any, Any]:
        """What `call` returns, and what `second` does, where there are two calls."""
        values = Values(inputs)
        torch.cuda.synchronize()
        results, others = None, None
        with torch.cuda.stream(self.streams[0]):
            if self.case.check == "other_stream":
                values.hide()
                torch.cuda.synchronize()
                torch.cuda._sleep(CYCLES)
                values.show()
                results = call()
                self.early += [(x, x.clone()) for x in results if isinstance(x, torch.Tensor)]
            elif self.case.check == "two_streams":
                for stream in self.streams:
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(CYCLES)
                results = call()
                with torch.cuda.stream(self.streams[1]):
                    others = second()
            elif step in self.case.kernel.capabilities.cuda_graphs:
                values.change()
                call()
                torch.cuda.synchronize()
                self.graphs.append(torch.cuda.CUDAGraph())
                self.graphs[-1].capture_begin(capture_error_mode="thread_local")
                try:
                    results = call()
                finally:
                    self.graphs[-1].capture_end()
                self.graphs[-1].replay()
                values.show()
                self.graphs[-1].replay()
            else:
                results = call()
        torch.cuda.synchronize()
        return results, others

    def lines(self) -> list[str]:
        """Lines about outputs that were not there yet for an operation behind the call, and about the call beside it."""
        late = [now for now, then in self.early if not torch.equal(now.nan_to_num(), then.nan_to_num())]
        lines = [f"an output {tuple(x.shape)} was read too early by an operation that follows on the same stream" for x in late]
        if self.others is not None and "o" in self.case.deterministic:
            plain, beside = self.other.forward(self.others)[0].cpu(), self.second[0].cpu()
            # All but slack rows.
            judged = ~self.case.outputs["o"][0].within(self.case.memory).isnan()
            if not torch.equal(plain[judged].nan_to_num(), beside[judged].nan_to_num()):
                lines.append("o of the call beside it, with other values, is not that of a plain call")
        return lines


class Values:
    """The floating point numbers of inputs, which can be taken away and given back."""

    def __init__(self, inputs: Inputs) -> None:
        names = [name for name in FLOATING if inputs.page_table is None or name not in ("k", "v")]
        tensors = [*(getattr(inputs, name) for name in names), *inputs.captured]
        self.parts: list[tuple[torch.Tensor, torch.dtype]] = []
        for x in tensors:
            if x is not None and x.is_floating_point() and x.numel():
                size, count = x.element_size(), 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
                flat = torch.empty(0, dtype=torch.uint8, device=x.device)
                flat.set_(x.untyped_storage(), x.storage_offset() * size, (count * size,), (1,))
                self.parts.append((flat, x.dtype))
        self.kept = [part.clone() for part, _ in self.parts]

    def hide(self) -> None:
        """Make all of them NaN."""
        for part, _ in self.parts:
            part.fill_(0xFF)

    def change(self) -> None:
        """Make them others."""
        for part, dtype in self.parts:
            part.view(dtype).mul_(-0.5)

    def show(self) -> None:
        """Give all bytes back."""
        for (part, _), kept in zip(self.parts, self.kept, strict=True):
            part.copy_(kept)


def placed(
    case: PackedCase, problem: Problem, table: dict[str, Stored], bands: Bands
) -> tuple[Inputs, dict[int, torch.Tensor], dict[int, list[str]], list[str]]:
    """Copy the inputs between bands: the inputs, each allocation, the names of the tensors in it, those of captured tensors."""
    owners: dict[int, list[str]] = {}
    for name, stored in table.items():
        owners.setdefault(stored.allocation, []).append(name)
    held: dict[int, torch.Tensor] = {}
    for each, names in owners.items():
        what, integers = f"its input {', '.join(names)}", any(getattr(torch, table[name].dtype) in INTEGERS for name in names)
        between = bands.between(case.memory[each].numel(), case.device, what, integers=integers)
        held[each] = between.copy_(case.memory[each])
    tensors: dict[str, Any] = {name: stored.within(held) for name, stored in table.items()}
    captured = [name for name in table if name.startswith("captured ")]
    longest = {"max_seqlen_q": max(problem.seqlens_q), "max_seqlen_k": max(problem.seqlens_k)}
    inputs = Inputs(problem=problem, captured=tuple(tensors.pop(name) for name in captured), **longest, **tensors).for_kernel()
    return inputs, held, owners, captured


def called(
    case: PackedCase, problem: Problem, table: dict[str, Stored], bands: Bands, *, plain: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Call the kernel once, forward and backward: outputs by name, and lines about inputs that it changed."""
    inputs, held, owners, captured = placed(case, problem, table, bands)
    elsewhere = None if plain else Elsewhere(case, problem, bands)
    built = elsewhere or case.kernel.build(problem, case.config, case.device)
    with torch.no_grad(), Poison(bands):
        o, lse = built.forward(inputs)
        outputs: dict[str, Any] = {"o": o, "lse": lse}
        if {"dq", "dk", "dv"} & set(problem.needs.outputs):
            dq, dk, dv, *more = built.backward(inputs, o, lse)
            gradients = zip(captured, more[0] if more else (), strict=False)
            outputs |= {"dq": dq, "dk": dk, "dv": dv, **{f"d {name.removeprefix('captured ')}": x for name, x in gradients}}
        if case.device == "cuda":
            torch.cuda.synchronize()
    changed = [names for each, names in owners.items() if not torch.equal(held[each].cpu(), case.memory[each])]
    lines = [f"the kernel wrote to its input {', '.join(names)}" for names in changed]
    return outputs, lines + (elsewhere.lines() if elsewhere else [])


def broken_form(case: PackedCase, name: str, got: Any) -> str | None:
    """What is wrong with an output's type, shape, dtype or device, or None."""
    expected, _, lowest, _ = case.outputs[name]
    if not isinstance(got, torch.Tensor):
        return f"{name} is {type(got).__name__}, a tensor is expected"
    form, right = (
        f"{tuple(got.shape)} {got.dtype} on {got.device.type}",
        f"{expected.shape} torch.{lowest.dtype} on {case.device}",
    )
    return None if form == right else f"{name} is {form}, {right} is expected"


def compared(case: PackedCase, name: str, got: torch.Tensor) -> list[str]:
    """Lines about an output's wrong elements, the worst five with their places; empty if all are right."""
    expected, allowed, low, high = (each.within(case.memory).double() for each in case.outputs[name])
    got = got.detach().cpu().double()
    wrong = ~((low <= got) & (got <= high) | low.isnan())
    if not wrong.any():
        return []
    count = int(wrong.sum())
    lines = [f"{name}: {count} of {int((~low.isnan()).sum())} elements {'is' if count == 1 else 'are'} wrong"]
    ratio = ((got - expected).abs() / allowed).nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(~wrong, -1.0)
    for flat in ratio.flatten().topk(min(5, count)).indices.tolist():
        place = place_of(case.calls[-1][0], name, [int(at) for at in torch.unravel_index(torch.tensor(flat), wrong.shape)])
        value, right, least, most = (float(x.flatten()[flat]) for x in (got, expected, low, high))
        accepted = f"{least:.9g} alone" if least == most else f"{least:.9g} to {most:.9g}"
        lines.append(f"  {place}: got {value:.9g}, expected {right:.9g}, accepted {accepted}")
    return lines


def place_of(problem: Problem, name: str, index: list[int]) -> str:
    """Sequence, row, head and dim of an element of an output; the index in the gradient of a captured tensor."""
    if name.startswith("d "):
        return f"at {index}"
    if name == "lse":
        index[-2:] = index[:-3:-1]
    if problem.packing == "ragged":
        ends = list(accumulate(problem.seqlens_k if name in ("dk", "dv") else problem.seqlens_q))
        sequence = next(i for i, end in enumerate(ends) if index[0] < end)
        index = [sequence, index[0] - (ends[sequence - 1] if sequence else 0), *index[1:]]
    return ", ".join(f"{what} {at}" for what, at in zip(("sequence", "row", "head", "dim"), index, strict=False))


def again(case: PackedCase, first: dict[str, tuple[Any, Any]], outputs: dict[str, Any]) -> list[str]:
    """Lines about outputs that differ between two equal calls; `first` holds each of the first call's, and a copy of it."""
    lines = []
    for name, (before, copy) in first.items():
        now = outputs[name]
        if broken_form(case, name, now) or broken_form(case, name, copy):
            continue
        if now.numel() and before.untyped_storage().data_ptr() == now.untyped_storage().data_ptr():
            lines.append(f"{name} of the last call lies in the memory of the first call's")
        one, other = (x.detach().cpu().double() for x in (copy, now))
        judged = ~case.outputs[name][0].within(case.memory).isnan()  # all but slack rows
        same = (one == other) & (one.signbit() == other.signbit()) | (one.isnan() & other.isnan()) | ~judged
        if name not in case.deterministic:
            info, largest = torch.finfo(now.dtype), torch.maximum(one.abs(), other.abs())
            largest = largest.nan_to_num(nan=0.0, posinf=info.max).clamp(min=info.tiny)
            half_ulp = largest / torch.frexp(largest).mantissa * (info.eps / 4)
            same |= (one == other) | ((one - other).abs() <= 2 * (case.reorder[name].within(case.memory) + half_ulp))
        if not same.all():
            lines.append(f"{name}: {int((~same).sum())} of {int(judged.sum())} elements differ between two equal calls")
    return lines


def check(case: PackedCase) -> list[str]:
    """Run the calls of `case` once; return what is wrong, in words."""
    bands, earlier, first = Bands(), list[str](), dict[str, tuple[Any, Any]]()
    problem = case.calls[-1][0]
    try:
        for call in case.calls[:-1]:
            outputs, changed = called(case, *call, bands)
            earlier += [f"{line} (in a call before)" for line in changed]
            if call[0] == problem and not first:
                tensors = {name: outputs[name] for name in problem.needs.outputs}
                first = {name: (x, x.detach().clone()) for name, x in tensors.items() if isinstance(x, torch.Tensor)}
        outputs, lines = called(case, *case.calls[-1], bands, plain=not case.check)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a kernel may raise anything
        traceback.print_exc()
        return ["the kernel raised; its traceback is above"]
    lines += bands.broken()
    for name in case.outputs:
        got = outputs.get(name)
        form = broken_form(case, name, got)
        lines += [form] if form else compared(case, name, got)
    return lines + earlier + again(case, first, outputs)


def run(case: PackedCase, data: tuple[str, ...]) -> int:
    """Print the result; return the exit code: 0 OK, 1 FAILED, 2 an error of the script itself."""
    try:
        case.memory[:] = unpacked(data)
        for number in range(case.runs):
            if lines := check(case):
                sys.stdout.write("\n".join([f"FAILED {case.kernel.name} on {case.device}, run {number + 1}", *lines, ""]))
                return 1
    except Exception:
        traceback.print_exc()
        return 2
    sys.stdout.write(f"OK {case.kernel.name} on {case.device}\n")
    return 0
