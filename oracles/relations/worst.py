"""How far values that must be equal differ: a ratio of every Difference by few operations, and the place of the worst."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from attnfuzz.kernels.problem import OutputName
from attnfuzz.oracles.fused import fused
from attnfuzz.oracles.relations.difference import Difference

__all__ = ["Comparison", "Ratio", "Worst", "limit", "ratios", "worst"]

_FEWEST = 4
"""Terms that a row counts as at least: each has the bounded errors of a rounding or two, and none the tails of a normal one."""
_AT_ONCE = 1 << 17
"""Elements of differences that are compared together, on a CPU by the same operations: a larger one is not copied for that."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """The largest error of a Difference of `elements` elements in units of what is allowed."""

    output: OutputName
    elements: int
    value: float


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest error of a Difference in units of what is allowed, and its place: `rule` is element, row or head.

    `bad_row` is the first row over a limit, or the worst one where none is.
    """

    ratio: float
    rule: str
    over: int
    head: int
    bad_row: int
    dim: int | None
    got: float
    expected: float
    allowed: float


def limit(errors: float) -> float:
    """Return the largest RMS error over so many independent errors, in units of an element's typical one: 1.2 + 5 / sqrt(errors).

    The typical error of `sizes.Noise` is an upper estimate of the deviation. A mean square of m independent errors varies by
    sqrt(2 / m) of itself, its root by 1 / sqrt(2 m): this leaves seven such deviations above 1.2.
    """
    return 1.2 + 5 / math.sqrt(errors)


def _limits(shape: tuple[int, int, int], terms: float | torch.Tensor | None) -> tuple[float | torch.Tensor, float | torch.Tensor]:
    """Return the limits of a row and of a head: `(rows,)` and no dimension where the rows' terms are many numbers."""
    _, rows, dims = shape
    if isinstance(terms, torch.Tensor):
        errors = terms.clamp(min=_FEWEST, max=dims)
        return 1.2 + 5 * errors.rsqrt(), 1.2 + 5 * errors.sum().rsqrt()
    errors_of_row = dims if terms is None else min(dims, max(_FEWEST, terms))
    return limit(errors_of_row), limit(rows * errors_of_row)


def ratios(differences: Iterable[Difference]) -> list[Ratio]:
    """Return the `ratio` of `worst` for each Difference, waiting for the device once."""
    comparison = Comparison(differences)
    return comparison.ratios(comparison.numbers.tolist())


class Comparison:
    """The ratios of Differences, computed on their device and not read yet.

    Of a Difference only numbers are kept once some of its size are compared: those of long sequences take gigabytes.
    """

    def __init__(self, differences: Iterable[Difference]) -> None:
        table = _Table()
        for difference in differences:
            table.add(difference)
        self._rows, self._counts, self.numbers = table.computed()

    numbers: torch.Tensor
    """What is to be read: float64, of one dimension."""

    def ratios(self, values: Iterable[float]) -> list[Ratio]:
        """Return the `ratio` of `worst` for each Difference, given the values of `numbers`."""
        rest = iter(values)
        return [row.ratio(list(itertools.islice(rest, count))) for row, count in zip(self._rows, self._counts, strict=True)]


@dataclass(frozen=True, slots=True)
class _Row:
    """What is known of a Difference without reading its tensors."""

    output: OutputName
    shape: tuple[int, int, int]
    noise: bool

    def ratio(self, numbers: Sequence[float]) -> Ratio:
        """Return the largest ratio: `numbers` are those of `_numbers`."""
        largest = [numbers[0] / (limit(1) if self.noise else 1.0)] if numbers else []
        if self.noise and numbers:
            largest += numbers[1:]
        return Ratio(self.output, math.prod(self.shape), max(largest, default=0.0))


@dataclass(slots=True)
class _Table:
    """Numbers of Differences, computed on their device for several at once, and read together."""

    _rows: list[_Row] = field(default_factory=list)
    _numbers: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    _waiting: dict[int, Difference] = field(default_factory=dict)
    _elements: int = 0

    def add(self, difference: Difference) -> None:
        """Add one, and compute numbers if those that wait are many elements."""
        heads, rows, *dims = difference.got.shape
        row = _Row(difference.output, (heads, rows, *dims) if dims else (heads, rows, 1), difference.noise)
        self._rows.append(row)
        if not difference.got.numel():
            return
        if self._elements + difference.got.numel() > _AT_ONCE:
            self._compute()
        self._waiting[len(self._rows) - 1] = difference
        self._elements += difference.got.numel()

    def computed(self) -> tuple[list[_Row], list[int], torch.Tensor]:
        """Return the rows, how many numbers each has, and the numbers."""
        self._compute()
        counts = [len(self._numbers.get(number, ())) for number in range(len(self._rows))]
        flat = [each for number in range(len(self._rows)) for each in self._numbers.get(number, ())]
        return self._rows, counts, torch.stack(flat) if flat else torch.empty(0, dtype=torch.float64)

    def _compute(self) -> None:
        for infinite in (False, True):
            group = {number: each for number, each in self._waiting.items() if (each.output == "lse") == infinite}
            if group:
                for number, scaled in zip(group, _all_scaled(list(group.values()), infinite=infinite), strict=True):
                    row = self._rows[number]
                    self._numbers[number] = _numbers(scaled.reshape(row.shape), self._waiting[number].terms, noise=row.noise)
        self._waiting, self._elements = {}, 0


def _all_scaled(differences: Sequence[Difference], *, infinite: bool) -> Sequence[torch.Tensor]:
    """Return `_scaled` of each; on a CPU of several together, flat: on a GPU each is one operation."""
    if len(differences) == 1 or differences[0].got.device.type != "cpu":
        return [_scaled(each.got, each.expected, each.allowed, infinite) for each in differences]
    parts = [(each.got, each.expected, each.allowed.expand_as(each.got)) for each in differences]
    got, expected, allowed = (torch.cat([each.reshape(-1) for each in column]) for column in zip(*parts, strict=True))
    flat = _scaled(got, expected, allowed, infinite)
    return list(flat.split([each.got.numel() for each in differences]))


def _numbers(scaled: torch.Tensor, terms: float | torch.Tensor | None, *, noise: bool) -> list[torch.Tensor]:
    """Return the largest scaled error, and for noise the largest root mean square of a row and of a head over their limits."""
    if not noise:
        return [scaled.amax()]
    heads, rows, dims = scaled.shape
    of_row, of_head = _limits((heads, rows, dims), terms)
    by_row = torch.linalg.vector_norm(scaled, dim=2)
    by_head = torch.linalg.vector_norm(by_row, dim=1).amax() / (of_head * math.sqrt(rows * dims))
    return [scaled.amax(), (by_row / (of_row * math.sqrt(dims))).amax(), by_head]


@fused
def _scaled(got: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor, infinite: bool) -> torch.Tensor:
    """Return each error in units of what is allowed; equal infinite values are no error if `infinite`."""
    error = (got - expected).abs()
    equal = got == expected if infinite else error == 0
    # A NaN or infinite limit would allow every error: values that are not finite are wrong, except equal LSEs.
    sound = (error < torch.inf) & (allowed < torch.inf)
    return torch.where(equal, 0.0, torch.where(sound, error / allowed, torch.inf))


def worst(difference: Difference) -> Worst | None:
    """Return the largest ratio over elements and, for noise, over rows and whole heads; None without elements."""
    got, expected = difference.got, difference.expected
    if not got.numel():
        return None
    allowed = difference.allowed.expand_as(got)
    scaled = _scaled(got, expected, allowed, difference.output == "lse")
    one = limit(1) if difference.noise else 1.0
    scaled = scaled.reshape(*got.shape[:2], -1)
    heads, rows, dims = scaled.shape
    by_element = scaled / one
    ratios = {"element": by_element.amax(2)}
    if difference.noise:
        square = scaled.square().mean(2)
        of_row, of_head = _limits((heads, rows, dims), difference.terms)
        ratios["row"] = square.sqrt() / of_row
        ratios["head"] = (square.mean(1).sqrt() / of_head)[:, None].expand(heads, rows)
    rule = max(ratios, key=lambda name: float(ratios[name].max()))
    by_row = torch.maximum(ratios["element"], ratios.get("row", ratios["element"]))
    over = by_row > 1
    head = int((over.any(1) if over.any() else ratios[rule].amax(1)).double().argmax())
    row = int((over[head] if over[head].any() else by_row[head]).double().argmax())
    dim = int(by_element[head, row].argmax())
    at = (head, row) if got.dim() == 2 else (head, row, dim)
    return Worst(
        ratio=float(ratios[rule].max()),
        rule=rule,
        over=int((by_element > 1).sum()),
        head=head,
        bad_row=row,
        dim=None if got.dim() == 2 else dim,
        got=float(got[at]),
        expected=float(expected[at]),
        allowed=float(allowed[at]) * one,
    )
