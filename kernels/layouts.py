"""Where the elements of a tensor lie in memory, by its Layout."""

from __future__ import annotations

from collections.abc import Sequence

from attnfuzz.kernels.problem import ORDERS, Layout, Packing

__all__ = ["strides_of"]


def strides_of(packing: Packing, layout: Layout, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the strides of a tensor of `shape` in the packing's default order, and the elements that it takes, less its offset.

    Dimensions are stored in the layout's order, with its pitch after each row: the part of a token that lies together.
    """
    own = ORDERS[packing][0]
    order = layout.order or own
    sizes = dict(zip(own, shape, strict=True))
    row_begins = max(order.index(axis) for axis in order if axis in "bst") + 1
    strides, step = {}, 1
    for at in reversed(range(len(order))):
        if at == row_begins - 1:
            step += layout.pitch
        strides[order[at]] = step
        step *= sizes[order[at]]
    return tuple(strides[axis] for axis in own), step
