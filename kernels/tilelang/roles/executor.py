"""Run a PrimFunc with warp roles on the CPU, block by block, as its roles under a schedule.

A schedule is a short sequence of numbers, the choice at each point at which several things may happen; 0, and whatever is behind
its end, lets roles go on as far as they can and asynchronous operations finish as late as barriers allow. -N at its start holds
back the Nth role: it goes on only where nothing else can. Each block of the grid runs under the same schedule.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from attnfuzz.kernels.support.protocol import ProtocolFault
from attnfuzz.kernels.tilelang.roles.lowering import lowered
from attnfuzz.kernels.tilelang.roles.machine import Machine
from attnfuzz.kernels.tilelang.roles.memory import Memory, rounded
from attnfuzz.kernels.tilelang.roles.recorder import record_block
from attnfuzz.kernels.tilelang.roles.steps import BlockProgram
from attnfuzz.kernels.tilelang.roles.translate import Translation, translated

__all__ = ["Executable", "Launched", "collected", "executable", "run"]

Launched = tuple["Executable", tuple[Any, ...]]
"""A launch: the function, and its parameters in order."""
_collected: list[list[Launched]] = []


@contextlib.contextmanager
def collected() -> Iterator[list[Launched]]:
    """Collect the launches of this process until the end of the context, instead of running them."""
    launches: list[Launched] = []
    _collected.append(launches)
    try:
        yield launches
    finally:
        _collected.remove(launches)


def run(func: Any, arguments: Sequence[Any], schedule: Sequence[int] = (), passes: dict[str, Any] | None = None) -> None:
    """Run `func` once.

    Args:
        func: the PrimFunc of a device code's factory.
        arguments: its parameters in order, tensors on the CPU and numbers; output tensors are written.
        schedule: the choices.
        passes: TileLang's compiler options.

    Raises:
        BuildError: TileLang's passes refuse it, or it uses what the executor does not know.
        ProtocolFault: the roles do not wait for each other as they must.
    """
    executable(func, passes or {})(*arguments, schedule=schedule)


def executable(func: Any, passes: dict[str, Any]) -> Executable:
    """Lower and translate `func`.

    Raises:
        BuildError: as `run`.
    """
    return Executable(translated(lowered(func, passes)))


class Executable:
    """A translated PrimFunc, called with its parameters in order."""

    def __init__(self, translation: Translation) -> None:
        self.translation = translation

    def __call__(self, *arguments: Any, schedule: Sequence[int] = ()) -> None:
        """Run all blocks.

        Raises:
            ProtocolFault: the roles of a block do not wait for each other as they must.
        """
        if _collected:
            _collected[-1].append((self, arguments))
            return
        tensors = [_array(each) for each in arguments]
        with np.errstate(all="ignore"):
            for program in self.programs(arguments, tensors):
                try:
                    Machine(program, Memory(program.buffers, program.tensors)).run(schedule)
                except ProtocolFault as fault:
                    fault.add_note(f"in block {program.block} of {program.name}")
                    raise
        for position in self.translation.written:
            _copy_back(tensors[position], arguments[position])

    def programs(self, arguments: Sequence[Any], tensors: list[Any] | None = None) -> Iterator[BlockProgram]:
        """Record the blocks of a call one by one.

        Raises:
            UnsupportedByRolesError: a construct that the executor does not know.
        """
        arrays = [_array(each) for each in arguments] if tensors is None else tensors
        numbers = self._numbers(arguments)
        grid = eval(self.translation.grid, {"P": numbers, "max": max, "min": min, **numbers})
        for z, y, x in itertools.product(*(range(int(each)) for each in reversed(grid))):
            yield record_block(self.translation, (x, y, z), numbers, arrays)

    def _numbers(self, arguments: Sequence[Any]) -> dict[str, Any]:
        numbers: dict[str, Any] = {
            name: int(arguments[position].shape[axis]) for name, position, axis in self.translation.extents
        }
        for position, (name, dtype) in self.translation.numbers.items():
            value = arguments[position]
            numbers[name] = np.float32(rounded(np.float32(value), dtype)) if "float" in dtype else int(value)
        return numbers


def _array(argument: Any) -> Any:
    """A tensor as an array: that of float32 shares its memory where it can, 16-bit floats are widened."""
    if not hasattr(argument, "detach"):
        return None
    tensor = argument.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def _copy_back(array: Any, tensor: Any) -> None:
    import torch

    source = torch.from_numpy(array)
    if source.data_ptr() != tensor.data_ptr() or source.dtype != tensor.dtype:
        tensor.copy_(source)
