"""Numbers of the host that are sent to a device: those of many tensors by one copy, which nothing waits for."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import torch

__all__ = ["integers", "reals_sent", "sent"]


def integers(values: Sequence[int]) -> torch.Tensor:
    """Return int64 numbers as a tensor of the host; torch.tensor takes seven times as long for a list of thousands."""
    return torch.frombuffer(array("q", values), dtype=torch.int64) if values else torch.zeros(0, dtype=torch.int64)


def sent(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return int64 tensors of the host on the device, by one copy.

    It is not waited for, nor what the device does before it: the driver takes its own copy of memory that is not pinned.
    """
    return list(torch.cat(list(parts)).to(device, non_blocking=True).split([len(each) for each in parts]))


def reals_sent(parts: Sequence[Sequence[float]], device: torch.device) -> list[torch.Tensor]:
    """Return numbers on the device as float64, a tensor for each part, by one copy that nothing waits for, as in `sent`."""
    whole = array("d", itertools.chain(*parts))
    flat = torch.frombuffer(whole, dtype=torch.float64) if whole else torch.zeros(0, dtype=torch.float64)
    return list(flat.to(device, non_blocking=True).split([len(each) for each in parts]))
