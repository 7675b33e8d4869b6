"""Memory while a kernel runs: what nobody has written yet, and the fault that ends a launch which misuses it. No backend needed.

Who starts a kernel says what is known of its memory (`watching`); an interpreter that sees each access asks, and raises
`MemoryFault`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

__all__ = [
    "Fresh",
    "MemoryFault",
    "MemoryKind",
    "Operation",
    "Site",
    "Watch",
    "check",
    "checking",
    "current",
    "leave_unchecked",
    "told_stores",
    "watching",
    "why_unchecked",
]

MemoryKind = Literal["out-of-bounds", "outside-view", "duplicate-store", "race", "uninitialised", "masked-load"]
Operation = Literal["load", "store", "atomic"]


@dataclass(frozen=True, slots=True)
class Site:
    """A statement of device code: the file's name, its line and that line's text, and the function that it is in."""

    file: str
    line: int
    text: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class MemoryFault(Exception):
    """An access that a kernel may not make.

    Args:
        kind: what is wrong with it.
        operation: what was done.
        site: where in the device code.
        message: which element of which tensor, in which program.
        callers: the statements that led there, from the launched function on.
    """

    def __init__(self, kind: MemoryKind, operation: Operation, site: Site, message: str, callers: tuple[Site, ...] = ()) -> None:
        super().__init__(f"{site}: {message}")
        self.kind, self.operation, self.site, self.callers = kind, operation, site, callers

    @property
    def check(self) -> str:
        """The rule that was broken, the same for all Cases: neither lines nor numbers of elements."""
        return f"{self.operation} in {self.site.function}"

    @property
    def trail(self) -> str:
        """The device functions that led there, a line each."""
        return "\n".join(f"{each.function}: {each}" for each in (*self.callers, self.site))


@dataclass(slots=True)
class Fresh:
    """Memory from torch.empty: its first byte, and the bytes that each of its elements holds until something is written there."""

    begin: int
    filling: bytes
    written: list[tuple[int, tuple[int, ...], tuple[int, ...], int]] = field(default_factory=list)
    """What torch has written: address, shape, strides, bytes per element."""


class Watch:
    """What is known of memory from the beginning of a kernel's calls to their end."""

    def __init__(self) -> None:
        self.fresh: dict[int, Fresh] = {}
        """By the address of the storage."""
        self.shadows: dict[int, Any] = {}
        """An interpreter's own notes on a storage."""
        self.launches: list[str] = []
        """Interpreted ones, by the names of their device functions."""
        self.stores: dict[int, dict[Site, None]] = {}
        """Statements that have stored to a storage."""
        self.fault: MemoryFault | None = None
        """The first one, which a kernel's own code may have caught."""

    def allocated(self, tensor: torch.Tensor) -> None:
        """`tensor` is new, and holds one value that shows where nothing is written."""
        storage = tensor.untyped_storage().data_ptr()
        self.shadows.pop(storage, None)
        self.fresh[storage] = Fresh(tensor.data_ptr(), ctypes.string_at(tensor.data_ptr(), tensor.element_size()))

    def written(self, tensor: torch.Tensor) -> None:
        """An operation of torch has written `tensor`."""
        known = self.fresh.get(tensor.untyped_storage().data_ptr())
        if known is not None and tensor.numel():
            known.written.append((tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size()))


_checking = True
_unchecked: str | None = None
_watch: Watch | None = None
_last: Watch | None = None


def check(on: bool) -> None:
    """Check the accesses of interpreted launches in this process from now on, or not."""
    global _checking
    _checking = on


def checking() -> bool:
    """Whether they are checked, where they can be."""
    return _checking


def leave_unchecked(reason: str) -> None:
    """An interpreter says why it cannot check here."""
    global _unchecked
    _unchecked = reason


def why_unchecked() -> str | None:
    """Why no interpreted launch of this process is checked, or None."""
    return _unchecked


def current() -> Watch | None:
    """The watch that is on."""
    return _watch


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """`watch` is on until the end of the context."""
    global _watch, _last
    before, _watch = _watch, watch
    _last = watch
    try:
        yield
    finally:
        _watch = before


def told_stores(tensor: torch.Tensor) -> str:
    """Which statements stored to the memory of `tensor` in the last watch; "" where nothing was interpreted."""
    if _last is None or not _last.launches:
        return ""
    sites = list(_last.stores.get(tensor.untyped_storage().data_ptr(), ()))
    if not sites:
        return f"no store to it was reached in {', '.join(dict.fromkeys(_last.launches))}"
    return f"stored to by {' and by '.join(str(site) for site in sites)}"
