"""Tensors copied to the host together: each copy of its own would wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnfuzz.oracles.relations.transfer import flat_bytes

__all__ = ["on_host"]


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors on the host: those that are not there by one copy from the device, contiguous, the others as they are.

    Args:
        tensors: of any shapes and dtypes; those on a device are all on the same one.
    """
    result = list(tensors)
    # Larger elements first, so that each tensor begins at a multiple of its element size.
    far = sorted((at for at, each in enumerate(tensors) if each.device.type != "cpu"), key=lambda at: -tensors[at].element_size())
    if not far:
        return result
    parts = [flat_bytes(tensors[at]) for at in far]
    for at, part in zip(far, torch.cat(parts).cpu().split([len(each) for each in parts]), strict=True):
        result[at] = part.view(tensors[at].dtype).view(tensors[at].shape)
    return result
