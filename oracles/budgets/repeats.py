"""Whether a Case's values are generic: the aggregate tests assume independent errors, and equal values have equal errors."""

from __future__ import annotations

import torch

from attnfuzz.oracles.budgets.backward import Gradients
from attnfuzz.oracles.budgets.forward import Forward, Scores
from attnfuzz.oracles.budgets.roundings import direction, near, neighbours
from attnfuzz.oracles.formats import half_ulp
from attnfuzz.oracles.frames import Placed

__all__ = ["Repeats"]

_SAMPLED = 64
_ACROSS = 5.0
"""Weight of equal P across rows: a twentieth is too many, since only some rows are sampled and a bias adds up over all."""
_OF_D = 0.1
"""Largest share of D's errors in dK's for which dK's statistics are computed. On normal values it is a hundredth."""
_DOUBTFUL = 0.05
"""Largest share of rows led by a doubtful 1 for which the statistics are computed."""
_WINDOW = 16.0
"""Values count as equal within u / 16, since values within a few u of each other are rounded alike. Measured with P between
1 - u and 1, from tiny scores: z was 1.1 x its limit, and a window of u / 256 still took 31 such values for generic."""


class Repeats:
    """Collects how often values repeat in P, dS (rows and columns) and in whole rows of q and O, and the spread of dK's error.

    g is the mean count of neighbours, weighted by the squares of the values' roundings, over sampled rows and columns with
    partners; 1 is generic.
    """

    FEWEST = 16
    """Least number of rows for the aggregate tests."""
    LIMIT = 1.25

    def __init__(self) -> None:
        self._g: list[torch.Tensor] = []
        self._of_d_o: list[torch.Tensor] = []
        self._carried: list[torch.Tensor] = []
        self._share: list[torch.Tensor] = []
        self._whole = True

    def add(self, t: Scores, f: Forward, g: Gradients, placed: Placed) -> None:
        """Add one frame."""
        self._whole &= placed.frame.whole
        if not self._whole:
            return
        assert g.d_s is not None
        assert g.carried is not None
        assert g.share is not None
        rows, keys = placed.sampled(_SAMPLED)
        self._g += [_repeated(t, [t.p, g.d_s], rows), _repeated(t, [t.p.mT, g.d_s.mT], keys), _repeated_rows(t, f)]
        self._g.append(1 + (_repeated_anywhere(t, rows) - 1) * _ACROSS)
        self._g.append(_doubtful_leads(t))
        self._of_d_o.append(_equal_rows(t, t.d_o, 1.0))
        self._carried.append(g.carried.flatten())
        self._share.append(g.share)

    def figures(self) -> torch.Tensor | None:
        """Return g, the effective number of rows behind D's error in dK, and the mean count of equal rows of dO; on the device.

        None: not known to be generic. Where rows of dO are equal, for example one element expanded, dV is a multiple of sums of
        rounded P. Those lie on the steps that dV is rounded to: half of its roundings are ties, the same in every dim.
        """
        if not self._whole or not self._g:
            return None
        carried = torch.cat(self._carried)
        rows = carried.sum().square() / carried.square().sum().clamp(min=1e-300)
        # Where much of dK's error is from D, it is a few numbers spread over all keys: too few for a statistic.
        rows = torch.where(torch.stack(self._share).amax() <= _OF_D, rows, 0.0)
        g, of_d_o = (torch.stack(each).nan_to_num(nan=torch.inf).amax() for each in (self._g, self._of_d_o))
        return torch.stack([g, rows, of_d_o])


def _doubtful_leads(t: Scores) -> torch.Tensor:
    """Return infinity if many rows are led by a P of 1 that may be off by 4 u, a bound some 20 x the real error; else 0.

    Below 1 the rounding steps of P are half those above, so that roundings around 1 have a mean, and so has O. Measured on a
    GPU: with one-hot scores of some 8,000, scaled by a separately rounded multiplication, z was 1.2 x its limit.
    """
    doubtful = ((t.p > 0.5) & (t.delta >= 4 * t.form.u)).any(-1).sum()
    live = t.dead.numel() - t.dead.sum()
    return torch.where(doubtful > _DOUBTFUL * live, torch.inf, 0.0).to(torch.float64)


def _repeated(t: Scores, values: list[torch.Tensor], sampled: torch.Tensor) -> torch.Tensor:
    """Return the mean count of neighbours in sampled rows, weighted by their squared roundings: the largest of `values`."""
    sample = torch.stack([x.flatten(0, 1)[sampled] for x in values])
    weight = _rounding2(t, sample)
    counted = (neighbours(sample, t.form.u / _WINDOW) * weight).sum((1, 2)) / weight.sum((1, 2)).clamp_(min=1e-300)
    return counted.amax()


def _repeated_anywhere(t: Scores, sampled: torch.Tensor) -> torch.Tensor:
    """Return the mean count of exactly equal P before normalising, over all sampled rows; few-valued scores have them."""
    sample = t.e.flatten(0, 1)[sampled].flatten()
    weight = _rounding2(t, sample)
    return (neighbours(sample, t.form.u * 2.0**-14) * weight).sum() / weight.sum().clamp(min=1e-300)


def _rounding2(t: Scores, x: torch.Tensor) -> torch.Tensor:
    """Return the square of each rounding to the dtype: values that need no rounding, such as P = 1 and P = 1/2, add no error."""
    unit = 2 * half_ulp(x, t.form)
    return torch.round(x / unit).mul_(unit).sub_(x).square_()


def _repeated_rows(t: Scores, f: Forward) -> torch.Tensor:
    """Return the mean count of rows with the same q, or the same O."""
    return torch.maximum(_equal_rows(t, t.q, 2.0), _equal_rows(t, f.o, 1.0))


def _equal_rows(t: Scores, x: torch.Tensor, parts: float) -> torch.Tensor:
    """Return the mean count of equal rows: within u / 128 of their norm over `parts`, compared by a random projection."""
    place = (x @ direction(x.shape[-1], x.device))[None].masked_fill(t.dead[None, ..., 0], torch.inf)
    norm = x.norm(dim=-1).div_(parts)[None]
    counts = near(place, norm.mul_(t.form.u / 128)).masked_fill_(t.dead[None, ..., 0], 0.0)
    return counts.sum() / (t.dead.numel() - t.dead.sum())
