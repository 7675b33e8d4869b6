"""A Place in words."""

from __future__ import annotations

from attnfuzz.harness.judge.failure import Place
from attnfuzz.kernels.problem import OutputName

__all__ = ["where"]


def where(name: OutputName, place: Place) -> str:
    """ "sequence 0, key 3, head 1, dim 5"."""
    rows = "key" if name in ("dk", "dv") else "query"
    dim = "" if place.dim is None else f", dim {place.dim}"
    return f"sequence {place.sequence}, {rows} {place.position}, head {place.head}{dim}"
