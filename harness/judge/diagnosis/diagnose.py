"""Diagnosis of one output's wrong values: counts, then least squares on a sample. Every fitted look passes a residual test."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attnfuzz.harness.judge.diagnosis.elsewhere import from_elsewhere
from attnfuzz.harness.judge.diagnosis.fits import (
    constant,
    factor,
    known_factor,
    noise,
    offset,
    part,
    per_row,
    rounded,
    truncated,
    unrelated,
)
from attnfuzz.harness.judge.diagnosis.model import Look, LookKind, Pattern
from attnfuzz.harness.judge.diagnosis.region import region, tile_of, tokens_of
from attnfuzz.harness.judge.diagnosis.sample import Sample, around, sampled
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import OutputName, Problem

__all__ = ["Looks", "diagnose"]

_FEWEST = 8
"""Least number of finite wrong elements to fit a free parameter: it would explain 0.95 of 8 unrelated errors once in 30,000."""
_SOME = 0.05
"""Least share of the wrong elements for scattered zeros to count as missing values; a whole region of them always does."""


class Looks:
    """Finds the looks of one output's wrong elements. All tensors are `(heads, tokens, dim)`, dim 1 for LSE."""

    def __init__(
        self, problem: Problem, config: Config, name: OutputName, got: Tensor, expected: Tensor, allowed: Tensor, bad: Tensor
    ) -> None:
        self.problem, self.config, self.name = problem, config, name
        self.got, self.expected, self.allowed, self.bad = got, expected, allowed, bad
        self.wrong = int(torch.count_nonzero(bad))

    def all(self, others: dict[OutputName, Tensor]) -> tuple[Look, ...]:
        """Return looks that are counted (NaN, infinities, zeros), then one fitted to the rest. `others`: see `diagnose`."""
        looks, rest = self._not_finite()
        zero = rest & (self.got == 0) & (self.expected != 0)
        missing = self._counted("missing", "zeros where values are expected", zero)
        if missing is not None:
            looks.append(missing)
            rest &= ~zero
        sample = sampled(self.problem, self.name, self.got, self.expected, self.allowed, rest)
        if sample is not None:
            look = self._fitted(sample, int(torch.count_nonzero(rest)) / self.wrong, others)
            looks += [look] if look else []
        return tuple(looks)

    def _not_finite(self) -> tuple[list[Look], Tensor]:
        """Return looks of NaN and infinities, and the wrong elements that remain: got and expected both finite."""
        got, expected, bad = self.got, self.expected, self.bad
        finite = torch.isfinite(got) & torch.isfinite(expected) & bad
        if int(torch.count_nonzero(finite)) == self.wrong:
            return [], finite
        nan, endless = torch.isnan(got) & bad, torch.isinf(got) & bad
        unmet = torch.isinf(expected) & torch.isfinite(got) & bad
        values = got[endless].unique().tolist() if endless.any() else []
        looks = [
            self._counted("nan", "NaN", nan),
            self._counted("inf", f"{values[0]:g}" if len(values) == 1 else "infinities", endless),
            self._counted("inf", "finite values where an infinity is expected", unmet),
        ]
        return [look for look in looks if look is not None], finite

    def _counted(self, kind: LookKind, text: str, mask: Tensor) -> Look | None:
        """Return the Look of the elements in `mask`, with their own region unless they are all."""
        count = int(torch.count_nonzero(mask))
        share = count / self.wrong
        if not count:
            return None
        if share < 0.995:
            where = region(self.problem, self.config, self.name, mask if self.name != "lse" else mask[..., 0])
            if kind == "missing" and share < _SOME and not (where.share >= 0.995 and count >= _FEWEST):
                return None
            text = f"{text} ({100 * share:.2g} % of them: {where.text})"
        return Look(kind=kind, share=share, confidence=1.0, text=text)

    def _fitted(self, sample: Sample, share: float, others: dict[OutputName, Tensor]) -> Look | None:
        """Return the look of finite values: the best fit with at most one parameter, else the first weaker one that fits."""
        problem, name = self.problem, self.name
        if len(sample) < _FEWEST:
            few = known_factor(problem, name, sample)
            return few.look(share) if few else None
        if same := constant(sample):
            return same.look(share)
        rows = around(problem, name, sample)
        shapes = [fit for fit in (factor(problem, sample, rows), offset(problem, sample, rows)) if fit is not None]
        tokens, tile = tokens_of(problem, name), tile_of(self.config, name)
        fits = [*from_elsewhere(problem, name, tokens, tile, sample, others), *shapes]
        cut = truncated(problem, name, sample)
        best = max(fits, key=lambda fit: fit.explained, default=None)
        if cut is not None and (best is None or best.kind != "scaled" or best.explained <= cut.explained):
            best = cut
        best = best or rounded(problem, name, sample) or per_row(sample)
        best = best or part(problem, sample) or unrelated(sample) or noise(sample)
        return best.look(share)


def diagnose(
    problem: Problem,
    config: Config,
    name: OutputName,
    got: Tensor,
    expected: Tensor,
    allowed: Tensor,
    bad: Tensor,
    others: Mapping[OutputName, Tensor] | None = None,
) -> Pattern:
    """Return the Pattern of one output's wrong elements.

    Args:
        problem: gives the lengths and heads.
        config: gives `tile_m` (O, LSE, dQ) or `tile_n` (dK, dV), if it has them.
        name: the output.
        got, expected, allowed: float64, heads first, without slack: `(heads, tokens, dim)`, LSE `(heads, tokens)`.
        bad: the wrong elements, at least one: bool of the same shape.
        others: expected values of other outputs in the same form, compared with the wrong values.
    """
    where = region(problem, config, name, bad)
    thick = [x if x.dim() == 3 else x[..., None] for x in (got, expected, allowed, bad)]
    elsewhere = {other: values for other, values in (others or {}).items() if other != name}
    looks = Looks(problem, config, name, *thick).all(elsewhere)
    text = where.text + (f": {'; '.join(each.text for each in looks)}" if looks else "")
    return Pattern(where=where, looks=looks, text=text)
