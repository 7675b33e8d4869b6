"""A diagnosis as data and in words: where an output is wrong and what its wrong values look like. Readable without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

__all__ = ["Look", "LookKind", "Pattern", "Region", "Span", "span_words", "spans"]

LookKind = Literal[
    "nan",
    "inf",
    "missing",
    "sign",
    "scaled",
    "offset",
    "shifted",
    "swapped",
    "stale",
    "foreign",
    "partial",
    "truncated",
    "rounded",
    "noise",
]
_MOST_SPANS = 4
_RUN = 0.8


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """The indices start, start + step, ... below stop."""

    start: int
    stop: int
    step: int = 1

    def __len__(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def words(self) -> str:
        """Describe it: "5", "64-127", or "every 2nd from 1 to 7"."""
        last = range(self.start, self.stop, self.step)[-1]
        if self.step > 1:
            return f"every {_ordinal(self.step)} from {self.start} to {last}"
        return str(self.start) if last == self.start else f"{self.start}-{last}"


class Region(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The smallest simple region that holds all wrong elements: sequences x rows x heads x columns.

    Rows are positions within their sequence (queries of O, LSE and dQ, keys of dK and dV), columns are dims (none for LSE). If
    positions or columns are too scattered to be listed, they are one span from first to last, and `share` is small.
    """

    sequences: tuple[Span, ...]
    heads: tuple[Span, ...]
    rows: tuple[Span, ...]
    columns: tuple[Span, ...] = ()
    share: float
    """Wrong elements / elements of the region."""
    rows_are: tuple[str, ...] = ()
    """What these rows have in common: "the last row of each sequence", "rows that see no key"."""
    tiles: str = ""
    """How the rows lie on the kernel's tiles; "" where that does not show."""
    text: str = ""


class Look(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One description of wrong values, and its confidence."""

    kind: LookKind
    share: float
    """Share of the wrong elements that it describes."""
    confidence: float
    """Share of the squared error that it explains; 1 for looks that are counted, not fitted."""
    value: float | None = None
    """The kind's number: a factor, an offset, a shift, or an error in budgets."""
    name: str = ""
    """Name of a known value: "1/ln 2"."""
    text: str


class Pattern(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one output is wrong, and its looks, most informative first; none if too few elements are wrong."""

    where: Region
    looks: tuple[Look, ...] = ()
    text: str


def spans(indices: Iterable[int], thin: bool = False) -> tuple[Span, ...]:
    """Return sorted indices as at most four Spans; if they need more, as one from the first to the last.

    `thin`: indices in between may be right by chance, so that 80 % of a run count as a run.
    """
    ordered = list(indices)
    if not ordered:
        return ()
    if thin and len(ordered) > 2 and len(ordered) >= _RUN * (ordered[-1] + 1 - ordered[0]):
        return (Span(ordered[0], ordered[-1] + 1),)
    steps = {b - a for a, b in pairwise(ordered)}
    if len(steps) == 1 and len(ordered) > 2:
        (step,) = steps
        return (Span(ordered[0], ordered[-1] + 1, step),)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b > a + 1)]
    stops = [*(a + 1 for a, b in pairwise(ordered) if b > a + 1), ordered[-1] + 1]
    if len(starts) > _MOST_SPANS:
        return (Span(ordered[0], ordered[-1] + 1),)
    return tuple(Span(a, b) for a, b in zip(starts, stops, strict=True))


def span_words(noun: str, parts: Sequence[Span], total: int | None = None) -> str:
    """Describe spans: "row 5", "heads 0-1 and 6", "every 2nd head from 1 to 7"; with a total: "head 3 (of 8)"."""
    of = "" if total is None else f" (of {total})"
    if len(parts) == 1 and parts[0].step > 1:
        each = parts[0]
        return f"every {_ordinal(each.step)} {noun} from {each.start} to {range(each.start, each.stop, each.step)[-1]}{of}"
    words = [each.words() for each in parts]
    plural = "s" if sum(map(len, parts)) > 1 else ""
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"{noun}{plural} {listed}{of}"


def _ordinal(n: int) -> str:
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"
