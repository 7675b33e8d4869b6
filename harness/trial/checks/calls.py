"""Checks of several calls in one process: an earlier call must not change the results of a later one.

The Case's own Problem is always the last call, and is judged by the oracle. Before it come the calls of its check
(strategies/earlier_calls.py); compiled code is shared where the compile key is equal, the inputs are fresh copies for each call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from attnfuzz.harness.core.text import counted
from attnfuzz.harness.judge.contract import heads_first, valid_rows
from attnfuzz.harness.judge.failure import OUTPUT_TITLES, Failure, in_call_before, where
from attnfuzz.harness.judge.judge import place_of
from attnfuzz.harness.judge.together import Launched
from attnfuzz.harness.judge.truth import Truth, flushed_sums
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.bands import Bands
from attnfuzz.harness.trial.bench import Bench, Steps, WentWrong
from attnfuzz.harness.trial.runs import clones, differing
from attnfuzz.harness.trial.unwritten import name_unwritten
from attnfuzz.kernels.contract import Outputs
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.relations.transfer import Move
from attnfuzz.strategies.case import CALLS, Check

__all__ = ["CALL_CHECKS", "alike", "cloned", "compared", "plain"]


def after_other_calls(bench: Bench) -> Steps:
    """Run the calls of the Case's check, its own last; judge that, and compare it with the first equal call."""
    problem, first, kept = bench.case.problem, None, None
    held = []
    for earlier in bench.earlier():
        held.append(Bands())
        outputs = _earlier(bench, earlier, held[-1])
        if earlier == problem and first is None:
            # A kernel may return the same memory every time, so keep a copy of the values.
            first, kept = outputs, cloned(outputs)
    ready, inputs = bench.ready(), bench.inputs()
    last = bench.launch(ready, inputs)
    overstepped = bench.watch(held)
    judged = yield Launched(bench.case.kernel, inputs, last, bench.case.config)
    verdict = judged.verdict
    with bench.clock.stage("judge"):
        failures = [_overstepped(bench, message) for message in overstepped()]
    if first is not None and kept is not None:
        failures += yield from compared(bench, verdict, first, kept, last, judged.truths)
    verdict = name_unwritten(bench, ready, inputs, last, verdict)
    return replace(verdict, status="fail", failures=(*failures, *verdict.failures)) if failures else verdict


CALL_CHECKS: dict[Check, Callable[[Bench], Steps]] = dict.fromkeys(CALLS, after_other_calls)


def _overstepped(bench: Bench, message: str) -> Failure:
    """Return the Failure for memory of an earlier call that a later one wrote past, such as a workspace for other lengths."""
    return Failure(
        kernel=bench.case.kernel,
        kind="guard",
        check="earlier memory",
        message=f"a later call wrote where it may not: {message}",
    )


def compared(
    bench: Bench, verdict: Verdict, first: Outputs, kept: Outputs, last: Outputs, expected: dict[OutputName, Truth]
) -> Generator[Move, list[torch.Tensor], list[Failure]]:
    """Return the differences of two equal calls, without outputs that break the contract.

    Most often all bits are equal, which one launch finds out for all outputs; the others are compared by their values.
    """
    refused = {each.output for each in verdict.failures if each.kind == "contract"}
    names = [name for name in bench.case.problem.needs.outputs if name not in refused]
    with bench.clock.stage("judge"):
        similar = [name for name in names if alike(getattr(kept, name), getattr(last, name))]
        rows = [tuple(valid_rows(bench.case.problem, name, getattr(each, name)) for each in (kept, last)) for name in similar]
        flags = differing([(before, after) for before, after in rows])
    if flags is not None:
        values = yield Move(flags, "judge", outputs=[getattr(last, name) for name in similar])
        equal = {name for name, value in zip(similar, values, strict=True) if not int(value)}
        names = [name for name in names if name not in equal]
    # A batch judged head by head has no whole Truth: only outputs declared deterministic are compared.
    judged = {name: expected.get(name) for name in names}
    with bench.clock.stage("judge"):
        differences = list(_differences(bench, kept, last, judged))
    numbers = [each.count for each in differences if isinstance(each, _Difference)]
    counts = (yield Move(numbers, "judge")) if numbers else []
    with bench.clock.stage("judge"):
        rest = iter(counts)
        failures = [each if isinstance(each, Failure) else each.failure(bench, int(next(rest))) for each in differences]
        return [*(each for each in failures if each is not None), *_reused(bench, first, last)]


def _earlier(bench: Bench, problem: Problem, bands: Bands) -> Outputs:
    """Run one call before the Case's own; a Failure there says so."""
    try:
        return bench.launch(bench.ready(problem), bench.inputs(problem), bands=bands)
    except WentWrong as error:
        if problem == bench.case.problem:
            raise
        raise WentWrong(in_call_before(error.failure, bench.case.check)) from error


def cloned(outputs: Outputs) -> Outputs:
    """Return the outputs in memory of their own."""
    values = {each.name: getattr(outputs, each.name) for each in dataclasses.fields(outputs)}
    tensors = {name: value for name, value in values.items() if plain(value)}
    return Outputs(**values | dict(zip(tensors, clones(list(tensors.values())), strict=True)))


def alike(before: object, after: object) -> bool:
    """Whether both are tensors with readable elements, of one shape and dtype."""
    if not (plain(before) and plain(after)):
        return False
    assert isinstance(before, torch.Tensor)
    assert isinstance(after, torch.Tensor)
    return bool(before.shape == after.shape and before.dtype == after.dtype)


def plain(value: object) -> bool:
    """Whether it is a tensor with readable elements; the judge reports other values."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    assert isinstance(value, torch.Tensor)
    if value.layout is not torch.strided:
        return False
    return not value.numel() or value.untyped_storage().nbytes() >= (1 + _extent(value)[1]) * value.element_size()


def _differences(
    bench: Bench, first: Outputs, last: Outputs, expected: dict[OutputName, Truth | None]
) -> Iterator[Failure | _Difference]:
    """Compare the outputs of two equal calls: bit by bit if declared deterministic, else up to an order of additions."""
    for name, true in expected.items():
        before, after = getattr(first, name), getattr(last, name)
        exact = name in bench.kernel.capabilities.deterministic
        if not (plain(before) and plain(after)) or (true is None and not exact):
            continue
        if before.shape != after.shape or before.dtype != after.dtype:
            message = f"{OUTPUT_TITLES[name]}: {_form(before)} in the first of two equal calls, {_form(after)} in the last"
            yield _failure(bench, name, message)
        else:
            yield _difference(bench.case.problem, name, before, after, true, exact=exact)


@dataclass(frozen=True, slots=True, eq=False)
class _Difference:
    """Where an output of two equal calls differs, computed and not read yet."""

    name: OutputName
    was: torch.Tensor
    now: torch.Tensor
    same: torch.Tensor
    limit: torch.Tensor
    exact: bool

    @property
    def count(self) -> torch.Tensor:
        """The number of elements that differ: int64, of one element."""
        return (~self.same).sum()[None]

    def failure(self, bench: Bench, count: int) -> Failure | None:
        """Return the Failure of `count` elements that differ, at the worst one."""
        if not count:
            return None
        name, was, now = self.name, self.was, self.now
        # NaN on one side only counts as the largest difference.
        size = torch.where(self.same, -1.0, (now - was).abs().nan_to_num(nan=torch.inf))
        true = Truth(expected=was, allowed=self.limit)
        place = place_of(bench.case.problem, name, int(size.flatten().argmax()), now, true)
        rule = "declared deterministic" if self.exact else f"another order of additions explains {place.allowed:.3g}"
        differ = f"{count} of {counted(was.numel(), 'element')} {'differs' if count == 1 else 'differ'}"
        message = (
            f"{OUTPUT_TITLES[name]}: {differ} between two equal calls ({rule}); worst at "
            f"{where(name, place)}: {place.expected:.9g} in the first call, {place.got:.9g} in the last"
        )
        return replace(_failure(bench, name, message), place=place)


def _difference(
    problem: Problem, name: OutputName, before: torch.Tensor, after: torch.Tensor, true: Truth | None, *, exact: bool
) -> _Difference:
    device = after.device if true is None else true.expected.device
    was, now = (heads_first(problem, name, each.to(device)) for each in (before, after))
    same = (was == now) & (was.signbit() == now.signbit()) | was.isnan() & now.isnan()
    limit = torch.zeros_like(was) if exact or true is None else true.reorder(was, now, flushed_sums(problem, name))
    if not exact:
        same |= (was == now) | ((now - was).abs() <= limit)
    return _Difference(name, was, now, same, limit, exact)


def _reused(bench: Bench, first: Outputs, last: Outputs) -> Iterator[Failure]:
    """Yield a Failure for outputs of the last call in the memory of the first's, which a caller may still use."""
    for name in bench.case.problem.needs.outputs:
        before, after = getattr(first, name), getattr(last, name)
        if not (plain(before) and plain(after) and before.numel() and after.numel()):
            continue
        if before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr() and _meet(before, after):
            message = f"{OUTPUT_TITLES[name]} of the last call lies in the memory of the first call's, whose values it replaces"
            yield Failure(kernel=bench.case.kernel, kind="guard", check="outputs reused", output=name, message=message)


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the extents of two tensors in one storage overlap."""
    (low_a, high_a), (low_b, high_b) = _extent(a), _extent(b)
    return low_a <= high_b and low_b <= high_a


def _extent(x: torch.Tensor) -> tuple[int, int]:
    start = x.storage_offset()
    return start, start + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _form(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"


def _failure(bench: Bench, name: OutputName, message: str) -> Failure:
    return Failure(kernel=bench.case.kernel, kind="nondeterministic", check=bench.case.check, output=name, message=message)
