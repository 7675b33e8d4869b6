"""The parts of a tensor's memory that lie together, and bits compared or copied by them: one launch for many tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from attnfuzz.harness.trial import guard_kernel
from attnfuzz.harness.trial.guard_kernel import Pieces

__all__ = ["clones", "differing", "runs"]

_MOST_RUNS = 128
"""Parts that are compared by a launch of our own: two launches."""


def runs(x: torch.Tensor, inner: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of each part of a tensor with elements that lies together in memory, in the order of elements.

    `inner`: of the last so many dimensions, at most those that lie together (`together`).
    """
    count = x.ndim - (together(x) if inner is None else inner)
    size, start = x.element_size(), x.data_ptr()
    if count <= 0:
        yield start, x.numel() * size
        return
    outer = zip(x.shape[:count], x.stride()[:count], strict=True)
    steps = itertools.product(*([at * stride * size for at in range(length)] for length, stride in outer))
    together_bytes = math.prod(x.shape[count:]) * size
    yield from ((start + sum(each), together_bytes) for each in steps)


def together(x: torch.Tensor) -> int:
    """Return how many of the last dimensions lie together."""
    if x.is_contiguous():
        return int(x.ndim)
    count, size = 0, 1
    for length, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if length > 1 and stride != size:
            break
        count, size = count + 1, size * length
    return count


def differing(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor] | None:
    """Begin to compare the bits of tensors of equal shape and dtype; return one int64 of each pair, 0 where all are equal.

    None where that would take more than a launch or two. Both tensors of a pair must live until the launch has been requested.
    """
    device = pairs[0][0].device if pairs else None
    if device is None or not guard_kernel.takes(device) or any(x.device != device for pair in pairs for x in pair):
        return None
    pieces, flags, count = Pieces(device), [], 0
    for one, other in pairs:
        flags.append(pieces.check())
        if not one.numel():
            continue
        inner = min(together(one), together(other))
        for (at, size), (there, _) in zip(runs(one, inner), runs(other, inner), strict=True):
            pieces.equal(at, there, size)
            if (count := count + 1) > _MOST_RUNS:
                return None
    pieces.launch()
    return flags


def clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of plain tensors, those without gaps on one GPU by one launch."""
    device = next((x.device for x in tensors), None)
    if device is None or not guard_kernel.takes(device):
        return [x.detach().clone() for x in tensors]
    pieces, copies = Pieces(device), []
    for x in tensors:
        if x.device == device and x.is_contiguous():
            copies.append(torch.empty_like(x.detach()))
            pieces.copy(copies[-1].data_ptr(), x.data_ptr(), x.numel() * x.element_size())
        else:
            copies.append(x.detach().clone())
    pieces.launch()
    return copies
