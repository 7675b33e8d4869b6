"""Memory while a kernel runs: which of it is not written yet, and the fault that ends a launch on misuse. No backend needed.

The caller of a kernel reports what is known of its memory (`watching`); an interpreter checks each access against that and raises
`MemoryFault`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

__all__ = [
    "Empty",
    "Fresh",
    "Masked",
    "MemoryFault",
    "MemoryKind",
    "Operation",
    "Site",
    "Watch",
    "allocating",
    "check",
    "checking",
    "current",
    "describe_stores",
    "leave_unchecked",
    "masked",
    "masked_loads",
    "watching",
    "why_unchecked",
]

MemoryKind = Literal["out-of-bounds", "outside-view", "duplicate-store", "race", "uninitialised", "masked-load"]
Operation = Literal["load", "store", "atomic"]
Empty = Callable[..., "torch.Tensor"]
"""torch.empty; fastest with a size as one tuple, and dtype and device as keywords."""
Masked = Literal["refused", "anything", "zero"]
"""Masked elements of a load without `other`, which Triton leaves undefined. refused: the load is a fault; anything: NaN or the
largest integer; zero: 0, as what Triton compiles for NVIDIA's GPUs leaves there."""


@dataclass(frozen=True, slots=True)
class Site:
    """A statement of device code: file name, line number, text of the line, and function."""

    file: str
    line: int
    text: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class MemoryFault(Exception):
    """Error for an access that a kernel may not make.

    Args:
        kind: the rule that was broken.
        operation: load, store or atomic.
        site: the statement of the device code.
        message: which element of which tensor, in which program.
        callers: the calling statements, from the launched function on.
    """

    def __init__(self, kind: MemoryKind, operation: Operation, site: Site, message: str, callers: tuple[Site, ...] = ()) -> None:
        super().__init__(f"{site}: {message}")
        self.kind, self.operation, self.site, self.callers = kind, operation, site, callers

    @property
    def check(self) -> str:
        """Operation and function, the same for all Cases: without lines and numbers of elements."""
        return f"{self.operation} in {self.site.function}"

    @property
    def trail(self) -> str:
        """The device functions on the stack, one per line."""
        return "\n".join(f"{each.function}: {each}" for each in (*self.callers, self.site))


@dataclass(slots=True)
class Fresh:
    """Memory from torch.empty: its address, and the bytes that each element holds until something is written there."""

    begin: int
    filling: bytes
    written: list[tuple[int, tuple[int, ...], tuple[int, ...], int]] = field(default_factory=list)
    """Tensors that torch has written: address, shape, strides, bytes per element."""


class Watch:
    """Notes on memory during a kernel's calls."""

    def __init__(self) -> None:
        self.fresh: dict[int, Fresh] = {}
        """Fresh memory by the address of its storage."""
        self.shadows: dict[int, Any] = {}
        """An interpreter's own notes on a storage."""
        self.launches: list[str] = []
        """Device functions of the interpreted launches."""
        self.stores: dict[int, dict[Site, None]] = {}
        """Statements that have stored to a storage, by its address."""
        self.fault: MemoryFault | None = None
        """The first fault, even if the kernel's own code caught it."""
        self.allocating = False
        """Whether nothing uses new tensors until `filled` is called."""
        self.filled: Callable[[], None] = lambda: None
        """Fills the new tensors that are not filled yet."""
        self.empty: Empty | None = None
        """Makes new tensors as torch.empty does, in less time."""

    def allocated(self, tensor: torch.Tensor) -> None:
        """Note that `tensor` is new and filled with one value, which shows where nothing is written."""
        storage = tensor.untyped_storage().data_ptr()
        self.shadows.pop(storage, None)
        self.fresh[storage] = Fresh(tensor.data_ptr(), ctypes.string_at(tensor.data_ptr(), tensor.element_size()))

    def written(self, tensor: torch.Tensor) -> None:
        """Note that an operation of torch has written `tensor`."""
        known = self.fresh.get(tensor.untyped_storage().data_ptr())
        if known is not None and tensor.numel():
            known.written.append((tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size()))


_checking = True
_masked: Masked = "refused"
_unchecked: str | None = None
_watch: Watch | None = None
_last: Watch | None = None


def check(on: bool) -> None:
    """Switch the checks of interpreted launches in this process on or off."""
    global _checking
    _checking = on


def checking() -> bool:
    """Whether the checks are switched on."""
    return _checking


@contextmanager
def masked_loads(hold: Masked) -> Iterator[None]:
    """Decide during the context what a load without `other` has in its masked elements."""
    global _masked
    before, _masked = _masked, hold
    try:
        yield
    finally:
        _masked = before


def masked() -> Masked:
    """What the masked elements of a load without `other` hold at present."""
    return _masked


def leave_unchecked(reason: str) -> None:
    """Note why the interpreter cannot check in this process."""
    global _unchecked
    _unchecked = reason


def why_unchecked() -> str | None:
    """Why no interpreted launch of this process is checked, or None."""
    return _unchecked


def current() -> Watch | None:
    """The active watch."""
    return _watch


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Activate `watch` until the end of the context."""
    global _watch, _last
    before, _watch = _watch, watch
    _last = watch
    try:
        yield
    finally:
        _watch = before


@contextmanager
def allocating() -> Iterator[Empty]:
    """Promise that nothing reads or writes the tensors that are made in the context before it ends.

    A caller that fills new memory, to see what a kernel leaves unwritten, then fills all of it by one launch. The context yields
    torch.empty, or what such a caller has in its place: it need not be used.
    """
    import torch

    watch = _watch
    if watch is None or watch.allocating:
        yield torch.empty
        return
    watch.allocating = True
    try:
        yield watch.empty or torch.empty
    finally:
        watch.allocating = False
        watch.filled()


def describe_stores(tensor: torch.Tensor) -> str:
    """Format the statements that stored to the memory of `tensor` in the last watch; "" where nothing was interpreted."""
    if _last is None or not _last.launches:
        return ""
    sites = list(_last.stores.get(tensor.untyped_storage().data_ptr(), ()))
    if not sites:
        return f"no store to it was reached in {', '.join(dict.fromkeys(_last.launches))}"
    return f"stored to by {' and by '.join(str(site) for site in sites)}"
