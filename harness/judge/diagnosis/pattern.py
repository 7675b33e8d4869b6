"""In what pattern an output is wrong: where, on which tiles, and what the wrong values look like. Run upon a failure only."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attnfuzz.harness.judge.diagnosis.diagnose import Looks
from attnfuzz.harness.judge.diagnosis.model import Pattern
from attnfuzz.harness.judge.diagnosis.region import region
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import OutputName, Problem

__all__ = ["pattern"]


def pattern(
    problem: Problem,
    config: Config,
    name: OutputName,
    got: Tensor,
    expected: Tensor,
    allowed: Tensor,
    bad: Tensor,
    others: Mapping[OutputName, Tensor] | None = None,
) -> Pattern:
    """The Pattern of one output's wrong elements.

    Args:
        problem: its lengths and heads place the elements.
        config: its `tile_m` (O, LSE, dQ) or `tile_n` (dK, dV), where it has them.
        name: the output.
        got, expected, allowed: float64, heads first, slack left out: `(heads, tokens, dim)`, LSE `(heads, tokens)`.
        bad: bool of the same shape: the wrong elements, at least one.
        others: expected values of other outputs in the same form, in which wrong values are looked for.
    """
    where = region(problem, config, name, bad)
    thick = [x if x.dim() == 3 else x[..., None] for x in (got, expected, allowed, bad)]
    elsewhere = {other: values for other, values in (others or {}).items() if other != name}
    seen = Looks(problem, config, name, *thick).all(elsewhere)
    text = where.text + (f": {'; '.join(each.text for each in seen)}" if seen else "")
    return Pattern(where=where, looks=seen, text=text)
