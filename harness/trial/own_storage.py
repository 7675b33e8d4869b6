"""Part of a tensor's memory as a tensor whose storage begins with it.

Autograd and kernels take a new tensor to begin where its storage does: gradients of slices that were written in place are read
by `as_strided` at offsets from there.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import torch

__all__ = ["with_own_storage"]


def with_own_storage(part: torch.Tensor) -> torch.Tensor | None:
    """Return the same memory as a tensor with a storage of its own, which keeps the other alive.

    Args:
        part: uint8, contiguous, of one dimension, with elements.

    Returns:
        The tensor, or None where torch cannot make one: on a GPU without NumPy.
    """
    if part.device.type == "cpu":
        buffer: Any = (ctypes.c_ubyte * part.numel()).from_address(part.data_ptr())
        buffer.owner = part
        return torch.frombuffer(buffer, dtype=torch.uint8)
    if importlib.util.find_spec("numpy") is None:
        return None
    return torch.as_tensor(_Memory(part), device=part.device)


class _Memory:
    """Memory of a GPU as an array that torch takes, and the tensor whose memory it is."""

    def __init__(self, part: torch.Tensor) -> None:
        self.owner = part
        self.__cuda_array_interface__: dict[str, Any] = {
            "typestr": "|u1",
            "shape": (part.numel(),),
            "data": (part.data_ptr(), False),
            "strides": None,
            "stream": None,
            "version": 3,
        }
