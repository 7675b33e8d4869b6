"""The decorator `fused`: on a CUDA device one kernel for all operations of a function, on a CPU the function itself.

A GPU spends some microseconds on each operation on tensors of this project's size, and reads and writes all of them: budgets of
errors are some hundred operations on the same few tensors. The kernels are compiled by NVRTC, which comes with PyTorch: none of
the compilers under test has a part in it. Without NVRTC, or for shapes that a kernel cannot index, the function itself is called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch

from attnfuzz.oracles.fused.nvrtc import Loaded, compiled, current_device, library
from attnfuzz.oracles.fused.source import Source, shape_of
from attnfuzz.oracles.fused.trace import traced

__all__ = ["FUNCTIONS", "Backend", "Code", "Fused", "Handwritten", "Kernel", "fused", "stacked", "sums_of", "whole_of"]

P = ParamSpec("P")
R = TypeVar("R")
Kernel = Callable[[bytes, int, int], None]
"""Launches compiled code: its argument, the number of elements, and the device's index."""


class Code(Protocol):
    """CUDA source with one kernel, that takes one struct by value."""

    @property
    def text(self) -> str:
        """The source."""

    @property
    def entry(self) -> str:
        """The kernel's name."""


class Backend(Protocol):
    """Compiles and launches sources."""

    def takes(self, device: torch.device) -> bool:
        """Whether functions of tensors on that device are to be compiled: code belongs to the device that is current."""

    def kernel(self, source: Code) -> Kernel:
        """Compile a source, for the device that is current."""


class _Nvrtc:
    """NVRTC and the driver."""

    def takes(self, device: torch.device) -> bool:
        return device.type == "cuda" and self._available and (self._only_one or device.index in (None, current_device()))

    def kernel(self, source: Code) -> Kernel:
        nvrtc = library()
        assert nvrtc is not None
        return Loaded(compiled(nvrtc, source.text, self._architecture()), source.entry)

    @functools.cached_property
    def _available(self) -> bool:
        nvrtc = library()
        return nvrtc is not None and nvrtc.knows(self._architecture())

    @functools.cached_property
    def _only_one(self) -> bool:
        return int(torch.cuda.device_count()) == 1

    @staticmethod
    def _architecture() -> str:
        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}"


BACKEND: Backend = _Nvrtc()


@dataclass(slots=True, eq=False)
class _Launch:
    """A function that was traced with arguments of some kinds."""

    name: str
    code: str
    tensors: tuple[int, ...]
    are_bool: tuple[bool, ...]
    scalars: tuple[int, ...]
    results: tuple[torch.dtype, ...]
    several: bool
    stacked: bool
    kernels: dict[bool, tuple[Source, Kernel]] = field(default_factory=dict)
    """By whether all inputs have one shape without gaps."""

    def __call__(self, plain: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        inputs = [arguments[at] for at in self.tensors]
        shape = shape_of(inputs)
        if shape is None:
            return plain(*arguments)
        if shape.flat not in self.kernels:
            self.kernels[shape.flat] = self._compiled(flat=shape.flat)
        source, kernel = self.kernels[shape.flat]
        where = inputs[0].device
        outputs = self._outputs(shape.common, where)
        if shape.elements:
            pointers = [x.data_ptr() for x in inputs] + [x.data_ptr() for x in outputs]
            kernel(source.packed(shape, pointers, [arguments[at] for at in self.scalars]), shape.elements, where.index or 0)
        return tuple(outputs) if self.several else outputs[0]

    def _outputs(self, shape: Sequence[int], where: torch.device) -> list[torch.Tensor]:
        if not self.stacked:
            # Others like the first: torch.empty of sizes takes twice as long.
            first = torch.empty(shape, dtype=self.results[0], device=where)
            return [first, *[torch.empty_like(first, dtype=each) for each in self.results[1:]]]
        parts = {
            dtype: iter(torch.empty((self.results.count(dtype), *shape), dtype=dtype, device=where).unbind())
            for dtype in set(self.results)
        }
        return [next(parts[each]) for each in self.results]

    def _compiled(self, *, flat: bool) -> tuple[Source, Kernel]:
        bools = [each == torch.bool for each in self.results]
        source = Source(self.code, self.name, self.are_bool, bools, len(self.scalars), flat=flat)
        return source, BACKEND.kernel(source)


@dataclass(eq=False)
class Fused(Generic[P, R]):
    """A function of tensors, element by element: called with values of a trace, or tensors of a CPU, it is the plain function."""

    function: Callable[P, R]
    stacked: bool = False
    """Whether the results of one dtype are parts of one tensor."""
    _launches: dict[tuple[Any, ...], _Launch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.function)
        parameters = inspect.signature(self.function).parameters
        self._names = tuple(parameters)
        self._defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what the function returns, in one launch where a tensor is on a GPU."""
        for first in (*args, *kwargs.values()):
            if isinstance(first, torch.Tensor):
                break
        else:
            return self.function(*args, **kwargs)
        if not BACKEND.takes(first.device):
            return self.function(*args, **kwargs)
        arguments = args if len(args) == len(self._names) else self._ordered(args, kwargs)
        result: R = self._launch(arguments)(self.function, arguments)
        return result

    def forget(self) -> None:
        """Forget compiled code: the next call compiles it again."""
        self._launches.clear()

    def _ordered(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        given = {**self._defaults, **dict(zip(self._names, args, strict=False)), **kwargs}
        return tuple(given[name] for name in self._names)

    def _launch(self, arguments: Sequence[Any]) -> _Launch:
        key = tuple([x.dtype if isinstance(x, torch.Tensor) else float if _is_number(x) else x for x in arguments])
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._compiled(arguments)
        return launch

    def _compiled(self, arguments: Sequence[Any]) -> _Launch:
        tensors = tuple(at for at, x in enumerate(arguments) if isinstance(x, torch.Tensor))
        for dtype in {arguments[at].dtype for at in tensors} - {torch.float64, torch.bool}:
            raise TypeError(f"a fused function takes float64 and bool, not {dtype}")
        scalars = tuple(at for at, x in enumerate(arguments) if _is_number(x))
        name = f"fused_{self.function.__name__.strip('_')}"
        code, kinds, several = traced(self.function, name, arguments, tensors, scalars)
        are_bool = tuple(arguments[at].dtype == torch.bool for at in tensors)
        results = tuple(torch.bool if kind == "bool" else torch.float64 for kind in kinds)
        return _Launch(name, code, tensors, are_bool, scalars, results, several, self.stacked)


class Compilable(Protocol):
    """What keeps compiled code."""

    def forget(self) -> None:
        """Forget compiled code: the next call compiles it again."""


FUNCTIONS: list[Compilable] = []
"""All of them."""


class Handwritten:
    """A kernel whose source is written by hand, for what no function of elements can be: its threads read tables.

    Args:
        entry: the kernel's name.
        text: CUDA source; `index_t` is an unsigned 32-bit number. It uses the places of thread and block alone, in x.
    """

    def __init__(self, entry: str, text: str) -> None:
        self.entry, self.text = entry, f"typedef unsigned int index_t;\n{text}"
        self._kernels: dict[int, Kernel] = {}
        FUNCTIONS.append(self)

    def takes(self, device: torch.device) -> bool:
        """Whether it can be launched for tensors on that device."""
        return BACKEND.takes(device)

    def __call__(self, argument: bytes, count: int, device: torch.device) -> None:
        """Launch it with its struct, for `count` elements."""
        index = device.index or 0
        if index not in self._kernels:
            self._kernels[index] = BACKEND.kernel(self)
        self._kernels[index](argument, count, index)

    def forget(self) -> None:
        """Forget compiled code: the next call compiles it again."""
        self._kernels.clear()


def fused(function: Callable[P, R]) -> Fused[P, R]:
    """Make one kernel of a function of tensors, whose elements it treats alike; they are broadcast against each other.

    Arguments are tensors of float64 or bool, numbers, and constants that a kernel is compiled for: None, bool, str, or frozen
    dataclasses. Results are tensors of the common shape. An argument must not be changed in place. Operations are those of
    trace.py; torch.where in place of `if`.
    """
    FUNCTIONS.append(one := Fused(function))
    return one


def stacked(function: Callable[P, R]) -> Fused[P, R]:
    """Make one kernel as `fused` does, whose results of one dtype lie one after the other, for `sums_of` and `whole_of`.

    None of them is freed before all are.
    """
    FUNCTIONS.append(one := Fused(function, stacked=True))
    return one


def sums_of(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the sum of each over its last dimension, which is kept: by one operation of results that lie together."""
    whole = whole_of(parts)
    if whole is None:
        return [x.sum(-1, keepdim=True) for x in parts]
    sums: tuple[torch.Tensor, ...] = whole.sum(-1, keepdim=True).unbind()
    return sums


def whole_of(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return parts of equal shape and dtype that lie one after the other as one tensor `(parts, ...)`, without copying."""
    first = parts[0]
    size, address = first.numel() * first.element_size(), first.untyped_storage().data_ptr()
    for at, x in enumerate(parts):
        alike = x.shape == first.shape and x.dtype == first.dtype and x.is_contiguous()
        if not alike or x.untyped_storage().data_ptr() != address or x.data_ptr() != first.data_ptr() + at * size:
            return None
    return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))


def _is_number(x: Any) -> bool:
    return isinstance(x, float | int) and not isinstance(x, bool)
