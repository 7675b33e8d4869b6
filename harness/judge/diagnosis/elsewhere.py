"""Fits of wrong values to expected values of other places: other rows, heads, sequences, columns, or another output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnfuzz.harness.judge.diagnosis.model import LookKind
from attnfuzz.harness.judge.diagnosis.region import Tokens
from attnfuzz.harness.judge.diagnosis.sample import Fit, Sample, accepted, fitted
from attnfuzz.harness.judge.failure import BY_QUERY, OUTPUT_TITLES
from attnfuzz.kernels.problem import OutputName, Problem

__all__ = ["from_elsewhere"]

_ELEMENTS = 4096
_ROWS = 16
_WINDOW = 2048
_LEAST_DIM = 16
"""Elements that identify a row among thousands."""
_FEWEST = 8
_HALF = 0.5
_MOST = 0.8
_FAR = 0.25
"""Remaining part of the squared error above which an explanation is dropped early."""
_CLOSE = 0.05


def from_elsewhere(
    problem: Problem, name: OutputName, tokens: Tokens, tile: int, sample: Sample, others: dict[OutputName, Tensor]
) -> list[Fit]:
    """Return all fits of got to expected values from elsewhere that pass the residual test, simplest first."""
    kept = torch.arange(0, len(sample), max(1, len(sample) // _ELEMENTS), device=sample.got.device)[:_ELEMENTS]
    sample = sample.where(kept)
    noun, head = ("rows", "head") if name in BY_QUERY else ("keys", "kv head")
    sequence, token = tokens.sequence.to(sample.token.device), sample.token
    start, length = tokens.start.to(token.device), tokens.lengths.to(token.device)
    nearest = _nearest_rows(sample, sequence, noun)
    steps = dict.fromkeys(s * k for k in (1, 2, 3, 4, 8, 16, 32, 64, tile // 2, tile) for s in (1, -1) if k)
    if isinstance(nearest, int):
        steps = {nearest: None} | steps
    fits: list[Fit | None] = []
    for step in steps:
        at = token + step
        valid = (at >= 0) & (at < len(sequence))
        at = at.clamp(0, len(sequence) - 1)
        valid &= sequence[at] == sequence[token]
        text = f"the values expected {abs(step)} {noun if abs(step) > 1 else noun[:-1]} {'further on' if step > 0 else 'before'}"
        fits.append(_read(sample, "shifted", valid, sample.head, at, sample.dim, text, step))
    for step in _near(problem.batch):
        other = sequence[token] + step
        valid = (other >= 0) & (other < problem.batch)
        other = other.clamp(0, problem.batch - 1)
        position = tokens.position.to(token.device)[token]
        valid &= position < length[other]
        at = torch.where(valid, start[other] + position, 0)
        text = f"the values expected {_beside('sequence', step)}"
        fits.append(_read(sample, "shifted", valid, sample.head, at, sample.dim, text, step))
    dims = sample.of_got.shape[2]
    for step in dict.fromkeys(s * k for k in (1, 8, 16, dims // 2) for s in (1, -1) if 0 < k < dims):
        every = torch.ones_like(token, dtype=torch.bool)
        text = (
            f"the values expected {abs(step)} dim{'s' * (abs(step) > 1)} {'further on' if step > 0 else 'before'}, round the end"
        )
        fits.append(_read(sample, "shifted", every, sample.head, token, (sample.dim + step) % dims, text, step))
    fits += [_heads(sample, head), *_outputs(sample, others)]
    fits.append(nearest if isinstance(nearest, Fit) else None)
    return [fit for fit in fits if fit is not None]


def _near(count: int) -> Iterator[int]:
    for step in range(1, min(count, 9)):
        yield from (step, -step)


def _beside(noun: str, step: int) -> str:
    if abs(step) == 1:
        return f"of the {'next' if step > 0 else 'previous'} {noun}"
    return f"{abs(step)} {noun}s {'further on' if step > 0 else 'before'}"


def _read(
    sample: Sample, kind: LookKind, valid: Tensor, head: Tensor, token: Tensor, dim: Tensor, text: str, value: float
) -> Fit | None:
    """Fit got to the values expected at (head, token, dim) where `valid`, which must cover half of the sample."""
    covers = float(valid.double().mean())
    if covers < _HALF or int(valid.sum()) < _FEWEST:
        return None
    rest = (sample.got - sample.of_expected[head, token, dim]) * sample.weight * valid
    before = (sample.got - sample.expected) * sample.weight * valid
    if not float(rest.square().sum()) < _FAR * float(before.square().sum()):
        return None
    part = sample if covers == 1 else sample.where(valid)
    rest = part.got - sample.of_expected[head[valid], token[valid], dim[valid]]
    explained = fitted(part, rest)
    if not accepted(part, rest, explained):
        return None
    return Fit(kind, explained, text, value=value, covers=covers)


def _heads(sample: Sample, noun: str) -> Fit | None:
    """Fit each wrong head to another head."""
    count, n = sample.of_got.shape[0], len(sample)
    if count < 2:
        return None
    every = torch.arange(count, device=sample.head.device)
    rest = (sample.got - sample.of_expected[every[:, None], sample.token, sample.dim]) * sample.weight
    squares = torch.zeros(count, count, dtype=torch.float64, device=rest.device)
    squares.index_add_(1, sample.head, rest.square().nan_to_num(nan=torch.inf))
    numbers = torch.zeros(count, device=rest.device).index_add_(0, sample.head, torch.ones(n, device=rest.device))
    best = squares.argmin(0)
    moved = (best != every) & (squares.gather(0, best[None])[0] <= _CLOSE * squares.diagonal()) & (numbers >= _FEWEST)
    valid = moved[sample.head]
    if not valid.any():
        return None
    pairs = {h: int(best[h]) for h in every[moved].tolist()}
    text = _mapping(pairs, count, noun)
    kind: LookKind = "shifted" if text.startswith("the values") else "swapped"
    return _read(sample, kind, valid, best[sample.head], sample.token, sample.dim, text, len(pairs))


def _mapping(pairs: dict[int, int], count: int, noun: str) -> str:
    """Describe (head, source) pairs: as swapped, as one step or one source for all, or by the first few."""
    swapped = [(a, b) for a, b in pairs.items() if a < b and pairs.get(b) == a]
    if len(swapped) * 2 == len(pairs):
        listed = ", ".join(f"{a} and {b}" for a, b in swapped[:4]) + (" ..." if len(swapped) > 4 else "")
        return f"{noun}s swapped: {listed}"
    steps, sources = {(b - a) % count for a, b in pairs.items()}, set(pairs.values())
    if len(pairs) > 1 and len(steps) == 1:
        step = steps.pop()
        return f"the values expected {_beside(noun, step if 2 * step <= count else step - count)}"
    if len(pairs) > 1 and len(sources) == 1:
        return f"the values expected of {noun} {sources.pop()}"
    listed = ", ".join(f"{a} holds {b}" for a, b in list(pairs.items())[:4]) + (" ..." if len(pairs) > 4 else "")
    return f"{noun}s mixed up: {listed}"


def _outputs(sample: Sample, others: dict[OutputName, Tensor]) -> Iterator[Fit]:
    """Fit got to the values expected of another output, element by element."""
    for name, other in others.items():
        values = other if other.dim() == 3 else other[..., None]
        if values.shape != sample.of_got.shape:
            continue
        rest = sample.got - values[sample.head, sample.token, sample.dim]
        explained = fitted(sample, rest)
        if accepted(sample, rest, explained):
            yield Fit("foreign", explained, f"the values expected of {OUTPUT_TITLES[name]}", name=name)


def _nearest_rows(sample: Sample, sequence: Tensor, noun: str) -> int | Fit | None:
    """Find the rows of the same head that some wrong rows come from: one shift for most, a "stale" Fit, or None."""
    dims = sample.of_got.shape[2]
    rows = torch.stack([sample.head, sample.token]).unique(dim=1)
    if dims < _LEAST_DIM or rows.shape[1] < 2:
        return None
    rows = rows[:, torch.linspace(0, rows.shape[1] - 1, min(_ROWS, rows.shape[1])).long().to(rows.device)]
    few = torch.linspace(0, dims - 1, _LEAST_DIM, dtype=torch.float64).long().to(rows.device)
    kept = []
    for head, token in rows.T.tolist():
        got = sample.of_got[head, token]
        if not torch.isfinite(got).all():
            continue
        low = max(0, token - _WINDOW)
        there = sample.of_expected[head, low : token + _WINDOW]
        source = low + int((there[:, few] - got[few]).square().sum(-1).argmin())
        far = [float((sample.of_expected[head, t] - got).square().sum()) for t in (source, token)]
        kept.append((head, token, source, *far))
    if len(kept) < 2:
        return None
    # Squares of the smallest numbers are 0: they say nothing.
    moved = [each for each in kept if each[3] < _CLOSE * each[4]]
    if len(moved) < _MOST * len(kept):
        return None
    steps = [int(source - token) for _, token, source, *_ in moved]
    step: int = max(set(steps), key=steps.count)
    if steps.count(step) >= _MOST * len(kept):
        return step
    explained = 1 - sum(each[3] for each in moved) / sum(each[4] for each in moved)
    sources = {source for _, _, source, *_ in moved}
    first = torch.searchsorted(sequence, sequence)
    _, token, source, *_ = moved[0]

    def row_name(t: int) -> str:
        return f"{noun[:-1]} {t - int(first[t])} of sequence {int(sequence[t])}"

    text = f"the values expected of {row_name(source)}" if len(sources) == 1 else f"values expected of other {noun}"
    if len(sources) > 1:
        text += f" ({row_name(token)} holds {row_name(source)})"
    return Fit("stale", explained, text, covers=len(moved) / len(kept))
