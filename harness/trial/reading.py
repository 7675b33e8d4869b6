"""Numbers that a device computes for checks, read with one copy for many checks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

__all__ = ["Reading", "read_together"]


class Reading:
    """Numbers that the device computes, compared with what they must be when that is asked, or read earlier with others.

    Args:
        numbers: int64 tensors of one dimension.
        expected: the values that they must have, of all tensors one after the other.
    """

    def __init__(self, numbers: Sequence[torch.Tensor], expected: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self._expected: list[int] = list(expected)
        self._values: list[int] = []

    def as_expected(self) -> bool:
        """Whether all numbers are what they must be; waits for the device unless they were read before."""
        read_together([self])
        return self._values == self._expected

    def take(self, values: list[int]) -> None:
        """Keep the values of all numbers."""
        self.numbers, self._values = [], values


def read_together(readings: Sequence[Reading]) -> None:
    """Read the numbers of all `readings` with one copy from each device, so that it is waited for once."""
    waiting = [each for each in readings if each.numbers]
    if not waiting:
        return
    parts = [part for each in waiting for part in each.numbers]
    flat = iter(value for part in _read(parts) for value in part)
    for each in waiting:
        each.take(list(itertools.islice(flat, sum(part.shape[0] for part in each.numbers))))


def _read(parts: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the values of each tensor."""
    values: dict[int, list[int]] = {}
    for device in {part.device for part in parts}:
        here = [number for number, part in enumerate(parts) if part.device == device]
        flat = iter(torch.cat([parts[number] for number in here]).tolist())
        values |= {number: list(itertools.islice(flat, parts[number].shape[0])) for number in here}
    return [values[number] for number in range(len(parts))]
