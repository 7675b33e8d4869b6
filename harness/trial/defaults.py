"""Torch's default device and dtype: a kernel keeps those that its code has set, and the rest of a trial has torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["of_kernel", "of_torch"]

_Defaults = tuple[torch.device, torch.dtype]
_OWN: _Defaults = (torch.device("cpu"), torch.float32)
_kernels: list[_Defaults] = []
"""Those of the kernel, while the rest has torch's own; empty outside of trials."""


@contextmanager
def of_torch() -> Iterator[None]:
    """Have torch's own defaults, and put back what was there before: inputs, oracle and judge must not obey a kernel's module."""
    if _kernels:
        yield
        return
    _kernels.append(_taken())
    try:
        yield
    finally:
        _set(_kernels.pop())


@contextmanager
def of_kernel() -> Iterator[None]:
    """Within `of_torch`, have the defaults that the kernel's code has set, and note those that it leaves."""
    if not _kernels:
        yield
        return
    _set(_kernels[-1])
    try:
        yield
    finally:
        _kernels[-1] = _taken()


def _taken() -> _Defaults:
    """Return the defaults, and replace them by torch's own."""
    current = _default_device(), torch.get_default_dtype()
    if current != _OWN:
        torch.set_default_device(None)
        torch.set_default_dtype(_OWN[1])
    return current


def _default_device() -> torch.device:
    """Return torch's default device; a default of its own is a mode of torch functions, without which torch need not look."""
    try:
        return torch.get_default_device() if torch._C._len_torch_function_stack() else _OWN[0]
    except AttributeError:
        return torch.get_default_device()


def _set(defaults: _Defaults) -> None:
    if defaults != _OWN:
        torch.set_default_device(defaults[0])
        torch.set_default_dtype(defaults[1])
