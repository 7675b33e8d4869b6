"""Text of a short script: tensors in plain torch, the call, a float64 reference, and the comparison.

Data is written by repr only, and names only where they are identifiers.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

from attnfuzz.harness.repro.script.lines import GRADIENTS, WIDTH, literal, where
from attnfuzz.harness.repro.script.short_call import call_lines, is_swapped
from attnfuzz.harness.repro.script.short_reference import comparison_lines, is_explicit, reference_lines
from attnfuzz.kernels.contract import Config, Device, Inputs, Kernel
from attnfuzz.kernels.problem import OutputName, Problem

__all__ = ["LINES", "Values", "body", "once_of", "turned"]

LINES = 40


@dataclass(frozen=True, slots=True)
class Values:
    """The tensors of a script: its lines that make them, by name, and the same tensors as the kernel gets them.

    `random`: from `torch.randn`, with this seed; `filled`: memory from `torch.empty` is NaN while the script runs.
    """

    inputs: Inputs
    random: bool
    filled: bool
    scales: Mapping[str, float]
    """Factors on random tensors, by name."""
    seed: int = 0


def turned(kernel: Kernel, x: torch.Tensor) -> torch.Tensor:
    """`x` in the layout of the function that the script calls: an adapter may swap heads and tokens."""
    if not is_swapped(kernel):
        return x
    swapped = x.transpose(1, 2)
    return swapped if kernel.capabilities.layouts else swapped.contiguous()


def body(
    kernel: Kernel, config: Config, values: Values, limits: Mapping[OutputName, float], device: Device, *, alone: bool = False
) -> str:
    """Return the script without its head.

    Args:
        kernel: what is called.
        config: its choices.
        values: the tensors.
        limits: the outputs that are compared, with the largest error that a right kernel has.
        device: where it runs.
        alone: import nothing of attnfuzz for Triton's interpreter.

    Raises:
        BadArgument: the kernel cannot be imported by a script.
    """
    problem = values.inputs.problem
    explicit = is_explicit(problem, limits)
    tensors, packed = _tensors(kernel, values, limits, device)
    call = call_lines(kernel, config, values.inputs, limits, device, alone=alone)
    standard = ["import sys"]
    if packed:
        standard = ["import base64", "import sys", "import zlib"]
    if problem.packing == "ragged":
        standard.append("from itertools import pairwise")
    third = ["import torch"]
    if not explicit:
        third.append("from torch.nn.functional import scaled_dot_product_attention")
    imports = [standard, third, call.imports]
    work = [
        (*([_FILLED] if values.filled else ()), *tensors),
        call.lines,
        reference_lines(kernel, problem, limits, device),
        comparison_lines(problem, limits),
    ]
    text = _paragraphs([*imports, *work])
    # Blank lines go first where the script is too long.
    return text if len(text.splitlines()) <= LINES else _paragraphs([*imports, [line for part in work for line in part]])


def _paragraphs(parts: Iterable[Iterable[str]]) -> str:
    return "\n\n".join(text for part in parts if (text := "\n".join(part)))


_FILLED = "torch.use_deterministic_algorithms(True, warn_only=True)  # memory from torch.empty is NaN"


def _tensors(kernel: Kernel, values: Values, limits: Mapping[OutputName, float], device: Device) -> tuple[list[str], bool]:
    """Return the lines that make the tensors, and whether they hold packed values."""
    inputs, problem = values.inputs, values.inputs.problem
    wanted = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **({"do": inputs.d_o} if set(GRADIENTS) & {*limits} else {})}
    lines: list[str] = [f"torch.manual_seed({values.seed})"] if values.random else []
    pack = _Pack()
    tensors = []
    for name, x in wanted.items():
        rows = problem.total_q if name in ("q", "do") else problem.total_k
        x = turned(kernel, x)
        once = once_of(x)
        factor = values.scales.get(name, 1.0)
        if values.random and not (name == "do" and problem.layout_do.expanded):
            times = "" if factor == 1 else f"{factor!r} * "
            text = f"{times}torch.randn({_sizes(once.shape)}, dtype={x.dtype})"
        else:
            text = pack.text(once[:rows] if problem.packing == "ragged" else once, once.shape)
        tensors += _placed(name, x, once, text, device)
    lines += pack.lines(inputs.q.dtype) + tensors
    if problem.packing == "ragged":
        slack = [f"({name}, {rows})" for name, rows, more in _rows(problem) if more and name in wanted]
        if slack:
            pairs = f"{', '.join(slack)}{',' if len(slack) == 1 else ''}"
            lines += [f"for x, rows in ({pairs}):", "    x[rows:] = torch.nan  # rows of no sequence"]
        ends = ", ".join(repr([0, *accumulate(lengths)]) for lengths in (problem.seqlens_q, problem.seqlens_k))
        begin = f"cu_seqlens_q, cu_seqlens_k = (torch.tensor(x, dtype=torch.int32{where(device)}) for x in "
        lines += [f"{begin}({ends}))"]
    return lines, bool(pack.content)


def _rows(problem: Problem) -> tuple[tuple[str, int, int], ...]:
    """Return (name, rows of sequences, rows of none) of each tensor of a ragged batch."""
    queries, keys = (problem.total_q, problem.slack_q), (problem.total_k, problem.slack_k)
    return (("q", *queries), ("k", *keys), ("v", *keys), ("do", *queries))


def _sizes(shape: Iterable[int]) -> str:
    return ", ".join(map(str, shape))


def once_of(x: torch.Tensor) -> torch.Tensor:
    """`x` without the copies that stride 0 shows."""
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(axis, 0, 1)
    return x


def _placed(name: str, x: torch.Tensor, once: torch.Tensor, text: str, device: Device) -> list[str]:
    """Return the lines that put values into memory with the strides of `x`."""
    if x.is_contiguous() and (x.storage_offset() == 0 or not x.numel()):
        return [f"{name} = {text}{'.cuda()' if device == 'cuda' else ''}"]
    count = x.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    place = f"as_strided({tuple(once.shape)}, {once.stride()}, {x.storage_offset()})"
    more = "" if once.shape == x.shape else f".expand({_sizes(x.shape)})"
    memory = f"{name} = torch.full(({count},), torch.nan, dtype={x.dtype}{where(device)}).{place}"
    if len(line := f"{memory}.copy_({text}){more}") <= WIDTH:
        return [line]
    return [memory, f"{name} = {name}.copy_({text}){more}"]


class _Pack:
    """Exact values: few as numbers, equal ones as one, all others in one packed text."""

    def __init__(self) -> None:
        self.content = b""
        self._width = 0

    def text(self, x: torch.Tensor, shape: torch.Size) -> str:
        """Return an expression of shape `shape`; `x` may lack its last rows."""
        full = torch.zeros(shape, dtype=x.dtype)
        full[: x.shape[0]] = x.detach().cpu()
        flat = full.flatten()
        if not flat.numel():
            return f"torch.zeros({_sizes(shape)}, dtype={x.dtype})"
        if bool((flat == flat[0]).all()) and not bool((flat == 0).all() and flat.signbit().any()):
            return f"torch.full(({_sizes(shape)}{',' if len(shape) == 1 else ''}), {flat[0].item()!r}, dtype={x.dtype})"
        numbers = f"torch.tensor({flat.tolist()!r}, dtype={x.dtype}).reshape({_sizes(shape)})"
        if len(numbers) < WIDTH - len("do = "):
            return numbers
        self._width = flat.element_size()
        begin = len(self.content) // self._width
        self.content += bytes(flat.contiguous().view(torch.uint8).tolist())
        return f"values[{begin}:{begin + flat.numel()}].reshape({_sizes(shape)})"

    def lines(self, dtype: torch.dtype) -> list[str]:
        """Return the lines that unpack."""
        if not self.content:
            return []
        text = base64.b64encode(zlib.compress(self.content, 9)).decode()
        return [
            f"data = {literal(text)}",
            f"values = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(data))), dtype={dtype})",
        ]
