"""Whether a Case's values are generic: the aggregate tests assume independent errors, and equal values have equal errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnfuzz.oracles.budgets.forward import Forward
from attnfuzz.oracles.budgets.roundings import direction, near, neighbours
from attnfuzz.oracles.budgets.score_gradient import Gradients
from attnfuzz.oracles.budgets.scores import Scores
from attnfuzz.oracles.formats import LAST_BITS, Format, half_ulp
from attnfuzz.oracles.frames import Placed
from attnfuzz.oracles.fused import fused

__all__ = ["SAMPLED", "Generic", "Repeats", "anywhere", "generic", "repeated", "sums_of_rows"]

_ACROSS = 5.0
"""Weight of equal P across rows: a twentieth is too many, since only some rows are sampled and a bias adds up over all."""
_OF_D = 0.1
"""Largest share of D's errors in dK's for which dK's statistics are computed. On normal values it is a hundredth."""
_DOUBTFUL = 0.05
"""Largest share of rows led by a doubtful 1 for which the statistics are computed."""
_WINDOW = 16.0
"""Values count as equal within u / 16, since values within a few u of each other are rounded alike. Measured with P between
1 - u and 1, from tiny scores: z was 1.1 x its limit, and a window of u / 256 still took 31 such values for generic."""


_NOTHING = 1e-300
SAMPLED = 64
"""Rows and keys of a frame in which values are counted."""


@dataclass(frozen=True, slots=True)
class Generic:
    """How often values repeat in a batch: g, the effective number of rows behind D's error in dK, the mean count of equal dO."""

    g: float = 1.0
    carrying: float = math.inf
    of_d_o: float = 1.0


class Repeats:
    """Collects how often values repeat in P, dS (rows and columns) and in whole rows of q and O, and the spread of dK's error.

    g is the mean count of neighbours, weighted by the squares of the values' roundings, over sampled rows and columns with
    partners; 1 is generic.
    """

    FEWEST = 16
    """Least number of rows for the aggregate tests."""
    LIMIT = 1.25

    def __init__(self) -> None:
        self._frames: list[torch.Tensor] = []
        self._whole = True

    def add(self, t: Scores, f: Forward, g: Gradients, placed: Placed) -> None:
        """Add one frame."""
        self._whole &= placed.frame.whole
        if not self._whole:
            return
        assert g.d_s is not None
        rows, keys = placed.sampled(SAMPLED)
        of_rows = torch.stack([x.flatten(0, 1)[rows] for x in (t.p, g.d_s)])[:, None]
        of_keys = torch.stack([x.mT.flatten(0, 1)[keys] for x in (t.p, g.d_s)])[:, None]
        counts = [repeated(t.form, of_rows), repeated(t.form, of_keys), anywhere(t.form, t.e.flatten(0, 1)[rows][None])]
        self._frames.append(torch.cat([sums_of_rows(t, f, g).sum(0), *counts]))

    def figures(self) -> torch.Tensor | None:
        """Return the sums of every frame, on the device, for `generic`; None where values are not known to be generic."""
        return torch.stack(self._frames) if self._whole and self._frames else None


def generic(frames: Sequence[Sequence[float]]) -> Generic:
    """Return how often values repeat, from `sums_of_rows` (summed), `repeated` of rows and of keys, and `anywhere` of each frame.

    Where rows of dO are equal, for example one element expanded, dV is a multiple of sums of rounded P. Those lie on the steps
    that dV is rounded to: half of its roundings are ties, the same in every dim.
    """
    g, of_d_o, shares, total, squares = [], [], [], 0.0, 0.0
    for of_q, of_o, of_do, live, doubtful, carried, carried2, of_d, sigma2, in_rows, in_keys, apart in frames:
        g += [in_rows, in_keys, 1 + (apart - 1) * _ACROSS, math.inf if doubtful > _DOUBTFUL * live else 0.0]
        g += [each / live if live else math.inf for each in (of_q, of_o)]
        of_d_o.append(of_do / live if live else math.inf)
        shares.append(of_d / max(sigma2, _NOTHING))
        total, squares = total + carried, squares + carried2
    # Where much of dK's error is from D, it is a few numbers spread over all keys: too few for a statistic.
    carrying = total * total / max(squares, _NOTHING) if all(each <= _OF_D for each in shares) else 0.0
    largest = (max(math.inf if math.isnan(x) else x for x in each) for each in (g, of_d_o))
    return Generic(next(largest), carrying, next(largest))


def sums_of_rows(t: Scores, f: Forward, g: Gradients) -> torch.Tensor:
    """Return for each Z of a frame what `generic` takes of its rows, `(Z, 9)`.

    The counts of equal rows of q, O and dO, the rows that see a key and those led by a doubtful 1; the sums of `carried` and of
    its squares, the part of dK's sigma^2 from the errors of D, and all of it.
    """
    assert g.carried is not None
    assert g.of_d is not None
    assert g.sigma2_dk is not None
    live = t.dead.shape[1] - t.dead[..., 0].sum(-1)
    carried = [g.carried.sum(-1), g.carried.square().sum(-1)]
    return torch.stack([*_equal_rows(t, f), live, _doubtful_leads(t), *carried, g.of_d, g.sigma2_dk], -1)


def repeated(form: Format, sample: torch.Tensor) -> torch.Tensor:
    """Return the mean count of neighbours in sampled rows, weighted by their squared roundings: the largest of several values.

    `sample (values, parts, rows, terms)`; the result has one number a part.
    """
    weight = _rounding2(sample, form)
    counted = (neighbours(sample, form.u / _WINDOW) * weight).sum((-2, -1)) / weight.sum((-2, -1)).clamp_(min=_NOTHING)
    return counted.amax(0)


def anywhere(form: Format, sample: torch.Tensor) -> torch.Tensor:
    """Return the mean count of exactly equal P before normalising, over all sampled rows; few-valued scores have them.

    `sample (parts, rows, keys)`; the result has one number a part.
    """
    sample = sample.flatten(1)
    weight = _rounding2(sample, form)
    return (neighbours(sample, form.u * 2.0**-14) * weight).sum(-1) / weight.sum(-1).clamp_(min=_NOTHING)


def _doubtful_leads(t: Scores) -> torch.Tensor:
    """Return the number of rows led by a P of 1 that may be off by 4 u, a bound some 20 x the real error.

    Below 1 the rounding steps of P are half those above, so that roundings around 1 have a mean, and so has O. Measured on a
    GPU: with one-hot scores of some 8,000, scaled by a separately rounded multiplication, z was 1.2 x its limit.
    """
    return ((t.p > 0.5 * (1 + LAST_BITS)) & (t.delta >= 4 * t.form.u)).any(-1).sum(-1)


@fused
def _rounding2(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Return the square of each rounding to the dtype: values that need no rounding, such as P = 1 and P = 1/2, add no error."""
    unit = 2 * half_ulp(x, form)
    return torch.round(x / unit).mul_(unit).sub_(x).square_()


def _equal_rows(t: Scores, f: Forward) -> torch.Tensor:
    """Return the counts of equal rows of q, O and dO, each summed, `(3, Z)`.

    Rows are equal within u / 128 of their norm (q: of half of it), and compared by a random projection.
    """
    hidden = t.dead[..., 0] != 0
    rows = ((t.q, 2.0), (f.o, 1.0), (t.d_o, 1.0))
    places = torch.stack([x @ direction(x.shape[-1], x.device) for x, _ in rows]).masked_fill_(hidden, torch.inf)
    norms = torch.stack([torch.linalg.vector_norm(x, dim=-1).mul_(t.form.u / (128 * parts)) for x, parts in rows])
    return near(places, norms).masked_fill_(hidden, 0.0).sum(-1)
