"""The CUDA source of a function that was traced, and the arguments of its launch.

A kernel takes one struct by value: pointers, strides in elements of up to three dimensions (0 where an input is broadcast), the
last two sizes, the number of elements, and scalars. Outputs are contiguous.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Shape", "Source", "shape_of"]

_DIMS = 3
_LIMIT = 1 << 31


class Shape(NamedTuple):
    """How the inputs of one launch lie: their common shape, its sizes as three dimensions, and their number of elements.

    `strides`: three of each input, one input after the other. `flat`: all inputs have the common shape without gaps.
    """

    common: Sequence[int]
    sizes: tuple[int, int, int]
    elements: int
    strides: Sequence[int]
    flat: bool


def shape_of(tensors: Sequence[torch.Tensor]) -> Shape | None:
    """Return how tensors lie that are broadcast against each other; None where a kernel cannot index them."""
    shapes = [x.shape for x in tensors]
    first = shapes[0]
    if shapes.count(first) == len(shapes) and all(map(torch.Tensor.is_contiguous, tensors)):
        count = tensors[0].numel()
        return Shape(first, (1, 1, count), count, (0, 0, 1) * len(shapes), flat=True) if count < _LIMIT else None
    dims = max([len(shape) for shape in shapes])
    if dims > _DIMS or (common := _broadcast(shapes, dims)) is None:
        return None
    count = math.prod(common)
    if count >= _LIMIT:
        return None
    strides: list[int] = []
    for x, shape in zip(tensors, shapes, strict=True):
        own: Sequence[int] = x.stride()
        if shape != common or 1 in shape:
            own = [0 if size == 1 else stride for size, stride in zip(shape, own, strict=True)]
        if not x.is_contiguous() and sum([(size - 1) * stride for size, stride in zip(shape, own, strict=True)]) >= _LIMIT:
            return None
        strides += (0,) * (_DIMS - len(own))
        strides += own
    z, y, last = (1,) * (_DIMS - dims) + common
    return Shape(common, (z, y, last), count, strides, flat=False)


def _broadcast(shapes: Sequence[Sequence[int]], dims: int) -> tuple[int, ...] | None:
    """Return the common shape, or None where there is none."""
    sizes = [1] * dims
    for shape in dict.fromkeys(shapes):
        for at, size in enumerate(shape, dims - len(shape)):
            if size != 1:
                if sizes[at] not in (1, size):
                    return None
                sizes[at] = size
    return tuple(sizes)


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
        _, size_y, size_x = shape.sizes
        return self._layout.pack(*pointers, *scalars, *shape.strides, size_y, size_x, shape.elements)


def _read(at: int, is_bool: bool, *, flat: bool) -> str:
    where = "i" if flat else f"z * a.stride[{at}][0] + y * a.stride[{at}][1] + x * a.stride[{at}][2]"
    kind = "unsigned char" if is_bool else "double"
    return f"const double in{at} = (double)((const {kind}*)a.pointer[{at}])[{where}]"


def _write(at: int, pointer: int, is_bool: bool) -> str:
    kind, value = ("unsigned char", f"out{at} != 0") if is_bool else ("double", f"out{at}")
    return f"(({kind}*)a.pointer[{pointer}])[i] = {value}"


def _joined(statements: Sequence[str]) -> str:
    return "".join(f"  {each};\n" for each in statements)
