"""Computation of error maps: run a Case again, and reduce every element's error over its budget to the size of a picture.

Runs in a child process like Trials: tensors stay there, and only maps of some kilobytes are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch

from attnfuzz.harness.core import environment
from attnfuzz.harness.core.clock import Clock
from attnfuzz.harness.judge.batch import Judged
from attnfuzz.harness.judge.contract import broken_contract, heads_first
from attnfuzz.harness.judge.diagnosis.region import tile_of
from attnfuzz.harness.judge.errormap import (
    BROKEN,
    DECADES,
    ENDLESS,
    EXACT,
    FORMAT,
    NOT_JUDGED,
    OUTSIDE,
    STEPS,
    UNWRITTEN,
    Axis,
    ErrorMaps,
    Grid,
    OutputMap,
    axis,
    packed,
)
from attnfuzz.harness.judge.failure import BY_QUERY
from attnfuzz.harness.judge.intervals import Measurement
from attnfuzz.harness.judge.judge import compare, outputs_of_head
from attnfuzz.harness.judge.together import Launched
from attnfuzz.harness.judge.truth import HeadTruths, Truth
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.bench import Bench, WentWrong, completed
from attnfuzz.harness.trial.supports import with_config
from attnfuzz.harness.trial.trial import CHECKS, check_runnable
from attnfuzz.harness.trial.unwritten import OTHER_FILL
from attnfuzz.kernels.contract import Config, Device, Inputs, Outputs
from attnfuzz.kernels.problem import OUTPUT_NAMES, OutputName, Problem
from attnfuzz.oracles.attention import sees
from attnfuzz.oracles.modifiers import Modifiers, leaves_of
from attnfuzz.strategies.case import RELATIONS, Case

__all__ = ["error_maps"]

_MASK_AT_ONCE: Final = 1 << 22
_LARGEST_MASK: Final = 1 << 27
"""Pairs of query and key, all sequences: a larger mask is not drawn."""


@dataclass(slots=True)
class _Levels:
    """One output: a level for each element, uint8 `(heads, tokens, columns)`, and its figures."""

    levels: torch.Tensor
    elements: int = 0
    over: int = 0
    worst: float = 0.0
    unjudged: str = ""


@dataclass(frozen=True, slots=True)
class _Watched(Bench):
    """A Bench that keeps the levels of the last outputs in place of judging them."""

    by_output: dict[OutputName, _Levels] = field(default_factory=dict)

    def judged(self, launched: Launched) -> Judged:
        """Keep levels instead of judging."""
        expected = self.truth(launched.inputs)
        return Judged(self.judge(launched.inputs, launched.outputs, expected), expected)

    def judge(self, inputs: Inputs, outputs: Outputs, expected: dict[OutputName, Truth]) -> Verdict:
        """Keep the levels of every output that fulfils the contract; always pass."""
        with self.clock.stage("judge"), torch.no_grad():
            self.by_output.clear()
            if isinstance(expected, HeadTruths):
                for head, part, truths in expected.parts():
                    self._add(part, outputs_of_head(inputs.problem, outputs, head), truths)
            else:
                self._add(inputs, outputs, expected)
        return Verdict(status="pass")

    def _add(self, inputs: Inputs, outputs: Outputs, expected: dict[OutputName, Truth]) -> None:
        _, measurements, _ = compare(self.case.kernel, inputs, outputs, expected)
        for name, each in measurements.items():
            levels = _levels(each, expected[name])
            old = self.by_output.setdefault(name, _Levels(levels[:0]))
            old.levels = torch.cat([old.levels, levels])
            old.elements += each.figures.elements
            old.over += each.figures.over
            old.worst = max(old.worst, each.figures.worst)
            old.unjudged = each.figures.unjudged


def error_maps(case: Case, device: Device, enter: Callable[[str], None] | None = None) -> ErrorMaps | str:
    """Run `case` again and map its outputs, or return why there is nothing to map. `enter` is called with each stage's name.

    Raises:
        BadArgument: the Case cannot run here.
        DeviceLost: the kernel broke the device for this process.
    """
    if case.check in RELATIONS:
        return f"{case.check} compares two calls with each other, and neither with budgets"
    environment.prepare(device)
    kernel = check_runnable(case, device)
    case = with_config(kernel, case)
    bench = _Watched(case, kernel, device, Clock(enter))
    try:
        completed(bench, CHECKS[case.check](bench))
        _mark_unwritten(bench)
    except WentWrong as error:
        if not bench.by_output:
            return f"{error.failure.kind}: {error.failure.message}"
    if not bench.by_output:
        return "no output has the shape and dtype that could be compared"
    return _reduced(case, bench)


def _levels(measurement: Measurement, true: Truth) -> torch.Tensor:
    """Return the level of each element: uint8 `(heads, tokens, columns)`, on the CPU."""
    ratio = measurement.ratio.double()
    if not ratio.numel():
        return torch.zeros(ratio.shape if ratio.dim() == 3 else (*ratio.shape, 1), dtype=torch.uint8)
    steps = (ratio.clamp(min=1e-30).log10() / DECADES * STEPS).ceil()
    inside = (steps + STEPS).clamp(1, STEPS) + EXACT
    beyond = steps.clamp(1, STEPS) + EXACT + STEPS
    levels = torch.where(measurement.outside, beyond, inside)
    levels = levels.masked_fill((ratio == 0) & ~measurement.outside, EXACT)
    levels = levels.masked_fill(measurement.outside & ratio.isinf(), ENDLESS).masked_fill(measurement.broken, BROKEN)
    levels = levels.masked_fill((true.allowed == math.inf) & ~measurement.outside, NOT_JUDGED)
    levels = levels if levels.dim() == 3 else levels[..., None]
    return levels.to(torch.uint8).cpu()


def _mark_unwritten(bench: _Watched) -> None:
    """If there is NaN, launch again with another filling: elements then not NaN are unwritten, or computed from such."""
    broken = [name for name, each in bench.by_output.items() if bool((each.levels == BROKEN).any())]
    if not broken:
        return
    inputs = bench.inputs()
    again = bench.launch(bench.ready(), inputs, fill=OTHER_FILL)
    for name in broken:
        now, levels = getattr(again, name), bench.by_output[name].levels
        if broken_contract(bench.case.kernel, inputs.problem, name, now, inputs.q.device) is None:
            values = heads_first(inputs.problem, name, now).cpu().reshape(levels.shape)
            levels.masked_fill_((levels == BROKEN) & ~values.isnan(), UNWRITTEN)


def _reduced(case: Case, bench: _Watched) -> ErrorMaps:
    problem = case.problem
    queries, keys = axis(problem.seqlens_q), axis(problem.seqlens_k)
    outputs = []
    for name in OUTPUT_NAMES:
        if (kept := bench.by_output.get(name)) is None:
            continue
        rows = queries if name in BY_QUERY else keys
        heads, tokens, columns = kept.levels.shape
        across = axis((columns,) * heads)
        flat = kept.levels.permute(1, 0, 2).reshape(tokens, heads * columns)
        outputs.append(
            OutputMap(
                output=name,
                grid=_grid(_worst(_worst(flat, rows).T, across).T, rows, across),
                elements=kept.elements,
                over=kept.over,
                worst="inf" if math.isinf(kept.worst) else kept.worst,
                tile=_tile(case.config, name),
                unjudged=kept.unjudged,
            )
        )
    mask, by_head = _mask(problem, bench, queries, keys)
    return ErrorMaps(
        format=FORMAT,
        case=case.to_object(),
        id=case.id,
        outputs=tuple(outputs),
        mask=mask,
        tiles=(_tile(case.config, "o"), _tile(case.config, "dk")),
        mask_heads=by_head,
    )


def _tile(config: Config, name: OutputName) -> int:
    """Return the rows of the kernel's tile for that output, 0 if its Config has none."""
    own = {"dq": "dq_tile_m", "dk": "dkv_tile_n", "dv": "dkv_tile_n"}.get(name, "")
    tile = config.tile(own) if own in config else tile_of(config, name)
    return tile if tile > 1 else 0


def _worst(levels: torch.Tensor, rows: Axis) -> torch.Tensor:
    """Return the largest level of each cell along the first dimension."""
    reduced = []
    for part in levels.split(list(rows.segments)):
        cells = -(-len(part) // rows.step)
        filled = torch.zeros(cells * rows.step, *part.shape[1:], dtype=part.dtype)
        filled[: len(part)] = part
        reduced.append(filled.reshape(cells, rows.step, *part.shape[1:]).amax(1) if cells else filled)
    return torch.cat(reduced)


def _grid(levels: torch.Tensor, rows: Axis, columns: Axis) -> Grid:
    return Grid(rows=rows, columns=columns, cells=packed(levels.contiguous().numpy().tobytes()))


def _mask(problem: Problem, bench: Bench, queries: Axis, keys: Axis) -> tuple[Grid | None, bool]:
    """Return which keys each query sees (None if too large to draw), and whether that differs by head."""
    pairs = sum(n_q * n_k for n_q, n_k in zip(problem.seqlens_q, problem.seqlens_k, strict=True))
    modifiers = Modifiers.of(problem, tuple(each.cpu() for each in bench.inputs().captured))
    by_head = modifiers.mask is not None and any(each.op == "h" for each in modifiers.mask.walk())
    if queries.merged or keys.merged or pairs * (problem.heads if by_head else 1) > _LARGEST_MASK:
        return None, by_head
    grid = torch.full((queries.cells, keys.cells), OUTSIDE, dtype=torch.uint8)
    for index, ((row, rows, n_q), (column, columns, n_k)) in enumerate(zip(queries.parts(), keys.parts(), strict=True)):
        at_once = max(1, _MASK_AT_ONCE // max(1, n_k * queries.step * (problem.heads if by_head else 1)))
        for begin in range(0, rows if n_k else 0, at_once):
            some = range(begin * queries.step, min(n_q, (begin + at_once) * queries.step))
            visible = _visible(problem, modifiers, index, some, by_head=by_head)
            cells = _shares(visible, queries.step, keys.step)
            grid[row + begin : row + begin + len(cells), column : column + columns] = cells
    return _grid(grid, queries, keys), by_head


def _visible(problem: Problem, modifiers: Modifiers, index: int, rows: range, *, by_head: bool) -> torch.Tensor:
    """Return which keys some rows of a sequence see: bool `(heads or 1, rows, keys)`."""
    n_q, n_k = problem.seqlens_q[index], problem.seqlens_k[index]
    i, j = torch.arange(rows.start, rows.stop)[None, :, None], torch.arange(n_k)[None, None, :]
    heads = torch.arange(problem.heads if by_head else 1)[:, None, None]
    visible = sees(problem, i, j, n_q, n_k)
    unmasked = modifiers.unmasked(leaves_of(torch.tensor(index), heads, i, j, n_q, n_k))
    whole = visible if unmasked is None else visible & unmasked
    return whole.expand(len(heads), len(rows), n_k)


def _shares(visible: torch.Tensor, step_q: int, step_k: int) -> torch.Tensor:
    """Return 0, 1 or 2 for each cell of step_q queries x step_k keys: none of it visible, part, all."""
    any_, all_ = visible.any(0), visible.all(0)
    for step in (step_q, step_k):
        cells = -(-any_.shape[0] // step)
        filled = torch.zeros(2, cells * step, any_.shape[1], dtype=torch.bool)
        filled[1] = True
        filled[0, : any_.shape[0]], filled[1, : any_.shape[0]] = any_, all_
        shaped = filled.reshape(2, cells, step, any_.shape[1])
        any_, all_ = shaped[0].any(1).T, shaped[1].all(1).T
    return any_.to(torch.uint8) + all_.to(torch.uint8)
