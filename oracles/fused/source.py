"""The CUDA source of a function that was traced, and the arguments of its launch.

A kernel takes one struct by value: pointers, strides in elements of up to three dimensions (0 where an input is broadcast), the
last two sizes, the number of elements, and scalars. Outputs are contiguous.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Shape", "Source", "shape_of"]

_DIMS = 3
_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class Shape:
    """How the inputs of one launch lie: their common shape, its sizes as three dimensions, and each input's strides.

    `flat`: all inputs have that shape without gaps.
    """

    common: tuple[int, ...]
    sizes: tuple[int, int, int]
    strides: tuple[tuple[int, int, int], ...]
    flat: bool

    @property
    def count(self) -> int:
        """The number of elements."""
        return self.sizes[0] * self.sizes[1] * self.sizes[2]


def shape_of(tensors: Sequence[torch.Tensor]) -> Shape | None:
    """Return how tensors lie that are broadcast against each other; None where a kernel cannot index them."""
    first = tensors[0].shape
    if all(x.shape == first and x.is_contiguous() for x in tensors):
        count = tensors[0].numel()
        return Shape(tuple(first), (1, 1, count), ((0, 0, 1),) * len(tensors), flat=True) if count < _LIMIT else None
    dims = max(x.dim() for x in tensors)
    common = [1] * dims
    for x in tensors:
        for at, size in enumerate(x.shape, dims - x.dim()):
            if common[at] not in (1, size) and size != 1:
                return None
            common[at] = common[at] if size == 1 else size
    strides = []
    for x in tensors:
        own = (*([0] * (dims - x.dim())), *(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)))
        strides.append(own)
    if dims > _DIMS:
        return None
    lacking = _DIMS - dims
    z, y, x_ = (*([1] * lacking), *common)
    shape = Shape(tuple(common), (z, y, x_), tuple(_three(lacking, each) for each in strides), flat=False)
    reach = max(sum((n - 1) * abs(s) for n, s in zip(shape.sizes, each, strict=True)) for each in shape.strides)
    return shape if shape.count < _LIMIT and reach < _LIMIT else None


def _three(lacking: int, strides: tuple[int, ...]) -> tuple[int, int, int]:
    a, b, c = (*([0] * lacking), *strides)
    return a, b, c


class Source:
    """The source of one kernel, for inputs that are flat or not.

    Args:
        code: the function of an element (trace.py), with inputs, scalars and outputs as its arguments.
        name: its name.
        inputs: for each input whether it is of bool, else float64.
        outputs: the same for outputs.
        scalars: their number.
        flat: whether all inputs have one shape without gaps.
    """

    def __init__(
        self, code: str, name: str, inputs: Sequence[bool], outputs: Sequence[bool], scalars: int, *, flat: bool
    ) -> None:
        self.entry = f"run_{name}"
        tensors = len(inputs) + len(outputs)
        # 32-bit numbers last, so that only the end is padded.
        numbers = _DIMS * len(inputs) + 3
        self._layout = struct.Struct(f"={tensors}Q{scalars}d{numbers}I{4 * (numbers % 2)}x")
        fields = [
            f"unsigned long long pointer[{tensors}]",
            f"index_t stride[{len(inputs)}][{_DIMS}]",
            "index_t size_y, size_x, count",
        ]
        fields[1:1] = [f"double scalar[{scalars}]"] if scalars else []
        called = [f"in{at}" for at in range(len(inputs))] + [f"a.scalar[{at}]" for at in range(scalars)]
        called += [f"out{at}" for at in range(len(outputs))]
        lines = (
            []
            if flat
            else ["const index_t row = i / a.size_x, x = i - row * a.size_x, z = row / a.size_y, y = row - z * a.size_y"]
        )
        lines += [_read(at, is_bool, flat=flat) for at, is_bool in enumerate(inputs)]
        lines += ["double " + ", ".join(called[len(inputs) + scalars :]), f"{name}<double>({', '.join(called)})"]
        lines += [_write(at, len(inputs) + at, is_bool) for at, is_bool in enumerate(outputs)]
        loop = "for (index_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += gridDim.x * blockDim.x)"
        function = code.replace("template <typename T> void", "template <typename T> __device__ void")
        self.text = (
            f"typedef unsigned int index_t;\n{function}\nstruct arguments {{\n{_joined(fields)}}};\n"
            f'extern "C" __global__ void {self.entry}(const arguments a) {{\n{loop} {{\n{_joined(lines)}}}\n}}\n'
        )

    def packed(self, shape: Shape, pointers: Sequence[int], scalars: Sequence[float]) -> bytes:
        """Return the kernel's argument: pointers of inputs and outputs, scalars, and the shape."""
        strides = [each for own in shape.strides for each in own]
        return self._layout.pack(*pointers, *scalars, *strides, shape.sizes[1], shape.sizes[2], shape.count)


def _read(at: int, is_bool: bool, *, flat: bool) -> str:
    where = "i" if flat else f"z * a.stride[{at}][0] + y * a.stride[{at}][1] + x * a.stride[{at}][2]"
    kind = "unsigned char" if is_bool else "double"
    return f"const double in{at} = (double)((const {kind}*)a.pointer[{at}])[{where}]"


def _write(at: int, pointer: int, is_bool: bool) -> str:
    kind, value = ("unsigned char", f"out{at} != 0") if is_bool else ("double", f"out{at}")
    return f"(({kind}*)a.pointer[{pointer}])[i] = {value}"


def _joined(statements: Sequence[str]) -> str:
    return "".join(f"  {each};\n" for each in statements)
