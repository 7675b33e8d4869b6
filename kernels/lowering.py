"""Machine code without a GPU: the optional part of the contract, by which `attnfuzz compile` gets a kernel's code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.problem import Problem

__all__ = ["ARCHITECTURES", "Lowers", "MachineCode", "Operand", "Required", "Requires", "Unit", "capability", "shared_limit"]

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
"""Architectures of a kernel that declares none."""
_KIB = 1024
_SHARED_LIMITS = {
    80: 163 * _KIB, 86: 99 * _KIB, 87: 163 * _KIB, 89: 99 * _KIB, 90: 227 * _KIB, 100: 227 * _KIB, 103: 227 * _KIB,
    120: 99 * _KIB, 121: 99 * _KIB,
}  # fmt: skip
"""Shared memory that a block may request, by compute capability: CUDA C++ Programming Guide, "Technical Specifications"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """One function of a kernel, compiled."""

    cubin: bytes
    """The ELF file for one architecture; it may hold several entry functions."""
    log: Callable[[], str]
    """Returns the output of `ptxas -v`; called only where its figures are not known already."""
    dynamic_shared: Mapping[str, int] = field(default_factory=dict)
    """Bytes of shared memory that a launch requests, by entry function."""
    races: tuple[str, ...] | None = None
    """Races that the compiler reports, or that its output shows; None: not checked."""
    suspects: Callable[[str], tuple[str, ...]] | None = None
    """Looks for wrong code in the disassembly (`nvdisasm -c -g`); findings are reported with the races; None: not checked."""
    refused: str | None = None
    """The backend's own reason for refusing to launch it; None: none is known."""


class Unit(Protocol):
    """One function of a kernel that can be compiled for one architecture."""

    @property
    def function(self) -> str:
        """The function's name: "forward"."""

    def identity(self) -> str | None:
        """Everything that the machine code depends on, as text: equal texts are compiled once. None: the backend has a cache.

        Raises:
            BuildError: the compiler's front end refused the function.
        """

    def compile(self) -> MachineCode:
        """Compile the function.

        Raises:
            BuildError: the compiler refused; the text is the compiler's.
        """


Operand = Literal["shared", "tensor"]
"""The memory that a tcgen05 product takes its left operand from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Required:
    """What the machine code of a function with tcgen05 products must be made of, where a compiler may choose otherwise.

    All products are tcgen05's, tensor memory is allocated, read by tcgen05.ld, and freed on every path to the function's end.
    """

    products: int
    """Number of places, at least, at which products complete on an mbarrier."""
    left: frozenset[Operand]
    """The memories that products take their left operands from: each of them is used, and no other."""


@runtime_checkable
class Requires(Protocol):
    """A Unit whose machine code is checked for more than that it can be launched."""

    @property
    def required(self) -> Required | None:
        """What must be in the machine code; None: nothing in particular."""


@runtime_checkable
class Lowers(Protocol):
    """A Kernel whose machine code can be compiled without a GPU, for the architectures in `capabilities.architectures`."""

    def cannot_lower(self) -> str | None:
        """The compiler that is missing on this machine, with the remedy, or None. A GPU is not needed."""

    def lower(self, problem: Problem, config: Config, arch: str) -> tuple[Unit, ...]:
        """List everything that `build` compiles for CUDA, for an architecture such as "sm_90a". Compiles nothing yet."""


def capability(arch: str) -> int:
    """The compute capability of an architecture: 90 for "sm_90a".

    Raises:
        BadArgument: the architecture is unknown.
    """
    match = re.fullmatch(r"sm_(\d+)[a-z]?", arch)
    number = int(match[1]) if match else -1
    if number not in _SHARED_LIMITS:
        known = ", ".join(f"sm_{each}" for each in _SHARED_LIMITS)
        raise reject(
            "arch", arch, "it is not known how much shared memory it has", f"give one of {known}, or one of them with an a"
        )
    return number


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that a block may have on `arch`."""
    return _SHARED_LIMITS[capability(arch)]
