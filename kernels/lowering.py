"""Machine code without a GPU: what a kernel may offer besides the contract, so that `attnfuzz compile` can look at its code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import Problem, reject

__all__ = ["ARCHITECTURES", "Lowers", "MachineCode", "Unit", "capability", "shared_limit"]

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
"""For a kernel that declares none."""
_KIB = 1024
_SHARED_LIMITS = {
    80: 163 * _KIB, 86: 99 * _KIB, 87: 163 * _KIB, 89: 99 * _KIB, 90: 227 * _KIB, 100: 227 * _KIB, 103: 227 * _KIB,
    120: 99 * _KIB, 121: 99 * _KIB,
}  # fmt: skip
"""Shared memory that a block may ask for, by compute capability: the CUDA C++ Programming Guide's table of technical
specifications."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """One function of a kernel, compiled."""

    cubin: bytes
    """The ELF file for one architecture; it may hold several entry functions."""
    log: Callable[[], str]
    """What `ptxas -v` says of it: asked only where its figures are not known already."""
    dynamic_shared: Mapping[str, int] = field(default_factory=dict)
    """Bytes of shared memory that a launch asks for, by entry function."""
    races: tuple[str, ...] | None = None
    """Races that the compiler reports, or that its output shows; None: not looked for."""
    suspects: Callable[[str], tuple[str, ...]] | None = None
    """Looks for wrong code in the disassembly (`nvdisasm -c -g`): what it finds, told with the races; None: nothing looks."""
    refused: str | None = None
    """Why the backend will not launch it, in its own words; None: it will, as far as is known."""


class Unit(Protocol):
    """One function of a kernel that can be compiled for one architecture."""

    @property
    def function(self) -> str:
        """Its name: "forward"."""

    def identity(self) -> str | None:
        """All that its machine code depends on, as text: equal texts are compiled once. None: the backend has a cache.

        Raises:
            BuildError: it cannot be told, because the compiler's front end refuses it.
        """

    def compile(self) -> MachineCode:
        """Compile it.

        Raises:
            BuildError: the compiler refused; the text is the compiler's.
        """


@runtime_checkable
class Lowers(Protocol):
    """What a Kernel adds so that its machine code can be looked at. `capabilities.architectures` says for what."""

    def cannot_lower(self) -> str | None:
        """Which compiler is missing on this machine, and the remedy; or None. A GPU is not needed."""

    def lower(self, problem: Problem, config: Config, arch: str) -> tuple[Unit, ...]:
        """Everything that `build` compiles for CUDA, for an architecture such as "sm_90a". Compiles nothing yet."""


def capability(arch: str) -> int:
    """90 of "sm_90a".

    Raises:
        BadArgument: it is no architecture that is known here.
    """
    found = re.fullmatch(r"sm_(\d+)[a-z]?", arch)
    number = int(found[1]) if found else -1
    if number not in _SHARED_LIMITS:
        known = ", ".join(f"sm_{each}" for each in _SHARED_LIMITS)
        raise reject(
            "arch", arch, "it is not known how much shared memory it has", f"give one of {known}, or one of them with an a"
        )
    return number


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that a block may have on `arch`."""
    return _SHARED_LIMITS[capability(arch)]
