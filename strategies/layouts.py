"""Memory layouts of q, k, v and dO that a packing allows, contiguous first."""

from __future__ import annotations

import functools

from hypothesis import strategies as st

from attnfuzz.kernels.contract import Capabilities
from attnfuzz.kernels.problem import LAYOUTS, ORDERS, Dtype, Layout, Packing

__all__ = ["layouts", "of_pages"]

_ITEM_BYTES: dict[Dtype, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
_ALIGNED_TO = (2, 4, 8, 16)
"""Bytes: an offset aligned to exactly this many shows which vector loads a kernel may use."""
_PITCHES = (0, 1, 2, 3, 8, 16, 64)
_OTHER_KINDS = ("one", "each", "each", "constant dO", "packed k, v", "packed q, k, v")
_KIND, _OTHER_KIND = st.sampled_from((*["contiguous"] * 8, *_OTHER_KINDS)), st.sampled_from(_OTHER_KINDS)
_NAME, _PITCH = st.sampled_from(LAYOUTS), st.sampled_from(_PITCHES)


@st.composite
def layouts(draw: st.DrawFn, can: Capabilities, packing: Packing, dtype: Dtype, *, plain: bool = True) -> dict[str, Layout]:
    """Draw layout fields of a Problem: always none where the kernel takes contiguous tensors only, and often none elsewhere.

    Where q is packed, the Problem must have as many keys as queries in every sequence, and as much slack. Without `plain`, a
    kernel that takes them has always some, although what is drawn for a tensor may be contiguous.
    """
    kind = draw(_KIND if plain else _OTHER_KIND) if can.layouts else "contiguous"
    match kind:
        case "one":
            name = draw(_NAME)
            return {name: draw(_layout(packing, dtype, name))}
        case "each":
            return {name: draw(_layout(packing, dtype, name)) for name in LAYOUTS}
        case "constant dO":
            return {"layout_do": Layout(expanded=True, offset=draw(_offsets(dtype)))}
        case "packed k, v" | "packed q, k, v":
            packed = Layout(packed=True, offset=draw(_offsets(dtype)), pitch=draw(_PITCH))
            names = LAYOUTS[:3] if kind == "packed q, k, v" else LAYOUTS[1:3]
            return {**dict.fromkeys(names, packed), "layout_do": draw(_layout(packing, dtype, "layout_do"))}
        case _:
            return {}


def of_pages(layouts: dict[str, Layout]) -> dict[str, Layout]:
    """Return those of q and dO, not packed with others: k and v lie in pages."""
    return {name: each for name, each in layouts.items() if name in ("layout_q", "layout_do") and not each.packed}


@functools.cache
def _layout(packing: Packing, dtype: Dtype, name: str) -> st.SearchStrategy[Layout]:
    expanded = st.sampled_from((False, False, True)) if name in ("layout_k", "layout_v") else st.just(False)
    return st.builds(
        Layout,
        order=st.sampled_from((None, *ORDERS[packing][1:])),
        expanded_heads=expanded,
        pitch=_PITCH,
        offset=_offsets(dtype),
    )


@functools.cache
def _offsets(dtype: Dtype) -> st.SearchStrategy[int]:
    """Return a strategy of offsets in elements, the best aligned first."""
    size = _ITEM_BYTES[dtype]
    return st.sampled_from((0, 0, *(width // size for width in reversed(_ALIGNED_TO) if width >= size)))
