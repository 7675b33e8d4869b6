"""The checks that are metamorphic relations: related launches of one kernel, compared with each other."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

import torch

from attnfuzz.harness.judge.contract import why_unfit
from attnfuzz.harness.judge.failure import BY_QUERY, OUTPUT_TITLES, Failure, Place
from attnfuzz.harness.judge.verdict import Figures, Verdict, four_digits
from attnfuzz.harness.trial import sparse
from attnfuzz.harness.trial.bands import Bands
from attnfuzz.harness.trial.bench import Bench, Steps, WentWrong
from attnfuzz.harness.trial.gpu_memory import is_out_of_memory
from attnfuzz.harness.trial.launch import copied, start, start_in_place
from attnfuzz.harness.trial.reading import Reading, read_together
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.harness.trial.writes import Writes
from attnfuzz.kernels.contract import Inputs, Outputs
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.relations import constant, rearranged, revalued, strides, transfer, worst
from attnfuzz.oracles.relations.difference import Difference, Related, Setup
from attnfuzz.oracles.relations.worst import Worst
from attnfuzz.strategies.case import Check
from attnfuzz.strategies.relation_problems import related_problems

__all__ = ["RELATION_CHECKS"]

_RELATIONS: dict[Check, Callable[[Setup], Related]] = {
    "split_batch": rearranged.split_batch,
    "permuted_keys": rearranged.permuted_keys,
    "repeated_heads": rearranged.repeated_heads,
    "shifted_scores": revalued.shifted_scores,
    "constant_v": constant.constant_v,
    "scaled_values": revalued.scaled_values,
    "future_keys": revalued.future_keys,
    "split_keys": rearranged.split_keys,
    "huge_strides": strides.huge_strides,
}


_INPUTS = ("q", "k", "v", "d_o", "cu_seqlens_q", "cu_seqlens_k")
_ON_HOST, _TOGETHER = 1 << 16, 1 << 23
"""Elements of all launches up to which values are compared on the host, and launches of a batch are not waited for: of more,
the inputs and outputs of several Cases would take gigabytes at once."""


def against_itself(bench: Bench) -> Steps:
    """Run the launches of the Case's relation, and judge whether they agree; nothing is judged by the oracle.

    On a device beside the host, a small Case is prepared and compared on the host: a value there costs less than an operation on
    the device. Whatever waits for the device is a Move, so that the Cases of a batch wait together.

    Raises:
        BadArgument: the relation does not apply to the Case, or the kernel does not support a related launch.
    """
    case = bench.case
    if reason := why_not_case(bench.kernel, case, bench.device):
        raise reject("case", case.canonical(), reason, "give a Case that its check applies to")
    can, seed = bench.kernel.capabilities, case.recipe.seed
    problems = related_problems(case.check, case.problem, seed)
    original = inputs = bench.inputs()
    size = transfer.elements((case.problem, *problems))
    on_host = size <= _ON_HOST and transfer.is_remote(original)
    if on_host:
        inputs = yield from transfer.inputs_on_host(original)
    with bench.clock.stage("inputs"):
        related = _RELATIONS[case.check](Setup(inputs, problems, seed, bench.device, can.deviations, can.deterministic))
    each_inputs: Sequence[Inputs] = related.inputs
    if on_host:
        each_inputs = yield from transfer.launches_on_device(related.inputs, inputs, original)
    launches, stop = _launched(bench, each_inputs, together=size <= _TOGETHER and not bench.waits)
    if stop is not None:
        _read(bench, launches)
        return stop
    results = yield from (_outputs_on_host(launches) if on_host else _outputs(launches))
    # What they were launched with is free while the outputs are judged.
    del launches
    return (yield from _judged(bench, functools.partial(related.differences, results)))


RELATION_CHECKS: dict[Check, Callable[[Bench], Steps]] = dict.fromkeys(_RELATIONS, against_itself)


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """One launch, and where it wrote, which may not be read yet."""

    problem: Problem
    outputs: Outputs
    readings: Sequence[Reading]
    failure: Callable[[], Failure | None]
    """What was written where it may not be."""


def _launched(bench: Bench, inputs: Sequence[Inputs], *, together: bool) -> tuple[list[_Launch], Verdict | None]:
    """Run all launches; return also the Verdict if there is nothing to compare.

    `together`: where they wrote is read later, for all. A launch that raises is then reported if no earlier one wrote wrongly.
    """
    launches: list[_Launch] = []
    for number, each in enumerate(inputs):
        try:
            apart = number > 0 and bench.case.check == "huge_strides"
            launch = _launch_apart(bench, each) if apart else _launch(bench, each)
            if isinstance(launch, str):
                figures = {name: Figures(elements=0, unjudged=launch) for name in bench.case.problem.needs.outputs}
                return launches, Verdict(status="pass", figures=figures)
            if not together:
                _read(bench, [launch])
                launch = dataclasses.replace(launch, readings=(), failure=_nothing)
            launches.append(launch)
        except WentWrong:
            _read(bench, launches)
            raise
        if failures := why_unfit(bench.case.kernel, each, launch.outputs):
            return launches, Verdict(status="fail", failures=failures)
    return launches, None


def _nothing() -> None:
    """Say that nothing was written wrongly: it was read before."""


def _launch(bench: Bench, inputs: Inputs) -> _Launch:
    ready = bench.ready(inputs.problem)
    with bench.clock.stage("kernel"):
        outcome = start(bench.case, ready, inputs, bench.device, fill=math.nan, bands=None, wait=bench.waits)
        if isinstance(outcome, Failure):
            raise WentWrong(outcome)
        readings = [each.reading for each in outcome.writes.later() if each.reading is not None]
    return _Launch(inputs.problem, outcome.outputs, readings, outcome.writes.failure)


def _launch_apart(bench: Bench, inputs: Inputs) -> _Launch | str:
    """Launch with the rows of one input far apart; or return why there is no memory for them.

    The next launch may have that memory before this one has run: what is asked of one stream is done in order.
    """
    ready, bands, kernel = bench.ready(inputs.problem), Bands(), bench.case.kernel
    try:
        with bench.clock.stage("inputs"):
            copies = copied(inputs, bands)
            wide = strides.stretch(copies, sparse.empty_strided)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return "no memory for rows that pass 2^31 elements"
    with bench.clock.stage("kernel"):
        outcome = start_in_place(bench.case, ready, wide, bench.device, bands, wait=bench.waits)
        if isinstance(outcome, Failure):
            raise WentWrong(outcome)
        before, after = ({name: getattr(each, name) for name in _INPUTS} for each in (inputs, copies))
        writes = Writes(kernel, bands, before, after)
        (name,) = (name for name in _INPUTS if getattr(wide, name) is not getattr(copies, name))
        # Between its rows are gigabytes that nobody reads.
        same = Reading([(getattr(wide, name) != getattr(inputs, name)).any().long()[None]], [0])

    def failure() -> Failure | None:
        if (elsewhere := writes.failure()) is not None or same.as_expected():
            return elsewhere
        return Failure(kernel=kernel, kind="guard", check=f"input {name}", message=f"the kernel wrote to its input {name}")

    readings = [same, *(each.reading for each in writes.later() if each.reading is not None)]
    return _Launch(inputs.problem, outcome, readings, failure)


def _read(bench: Bench, launches: Sequence[_Launch]) -> None:
    """Wait for the launches.

    Raises:
        WentWrong: one wrote where it may not.
    """
    with bench.clock.stage("kernel"):
        read_together([each for launch in launches for each in launch.readings])
        _check_writes(launches)


def _outputs_on_host(launches: Sequence[_Launch]) -> Generator[transfer.Move, list[torch.Tensor], list[Outputs]]:
    """Return the outputs of the launches on the host.

    Raises:
        WentWrong: a launch wrote where it may not.
    """
    pairs, numbers = [(each.problem, each.outputs) for each in launches], _numbers(launches)
    outputs, values = yield from transfer.outputs_on_host(pairs, numbers)
    _take(launches, values)
    _check_writes(launches)
    return outputs


def _outputs(launches: Sequence[_Launch]) -> Generator[transfer.Move, list[torch.Tensor], list[Outputs]]:
    """Return the outputs of the launches once it is known where they wrote.

    Raises:
        WentWrong: a launch wrote where it may not.
    """
    if numbers := _numbers(launches):
        outputs = [getattr(each.outputs, name) for each in launches for name in each.problem.needs.outputs]
        _take(launches, (yield transfer.Move(numbers, "kernel", outputs=outputs)))
        _check_writes(launches)
    return [each.outputs for each in launches]


def _numbers(launches: Sequence[_Launch]) -> list[torch.Tensor]:
    return [number for launch in launches for reading in launch.readings for number in reading.numbers]


def _take(launches: Sequence[_Launch], values: Sequence[torch.Tensor]) -> None:
    """Give the values of `_numbers` to the readings."""
    rest = iter(values)
    for reading in [each for launch in launches for each in launch.readings]:
        parts = list(itertools.islice(rest, len(reading.numbers)))
        reading.take([value for part in parts for value in part.tolist()])


def _check_writes(launches: Sequence[_Launch]) -> None:
    for launch in launches:
        if (failure := launch.failure()) is not None:
            raise WentWrong(failure)


def _judged(
    bench: Bench, differences: Callable[[], Iterable[Difference]]
) -> Generator[transfer.Move, list[torch.Tensor], Verdict]:
    """Compare, and return the Verdict once the ratios are read."""
    with bench.clock.stage("judge"):
        comparison = worst.Comparison(differences())
    (values,) = yield transfer.Move([comparison.numbers], "judge")
    with bench.clock.stage("judge"):
        return _verdict(bench, comparison.ratios(values.tolist()), differences)


def _verdict(bench: Bench, ratios: Sequence[worst.Ratio], differences: Callable[[], Iterable[Difference]]) -> Verdict:
    """Return figures of every output, and a Failure for each that is over its limit."""
    figures: dict[OutputName, Figures] = {}
    over = {number for number, ratio in enumerate(ratios) if not ratio.value <= 1}
    # Computed again where one is over: most often none is.
    places = {number: _placed(each) for number, each in enumerate(differences()) if number in over} if over else {}
    failing: dict[OutputName, _Placed] = {}
    for number, ratio in enumerate(ratios):
        name, old = ratio.output, figures.get(ratio.output, Figures(elements=0))
        place = places.get(number)
        figures[name] = Figures(
            elements=old.elements + ratio.elements,
            worst=max(old.worst, four_digits(ratio.value)),
            over=old.over + (place.largest.over if place else 0),
        )
        if place and (name not in failing or place.largest.ratio > failing[name].largest.ratio):
            failing[name] = place
    failures = tuple(_failure(bench, place) for place in failing.values())
    return Verdict(status="fail" if failures else "pass", figures=figures, failures=failures)


@dataclass(frozen=True, slots=True)
class _Placed:
    """What a message says of a Difference that is over its limit."""

    output: OutputName
    sequence: int
    what: str
    largest: Worst


def _placed(difference: Difference) -> _Placed:
    largest = worst.worst(difference)
    assert largest is not None
    return _Placed(difference.output, difference.sequence, difference.what, largest)


def _failure(bench: Bench, placed: _Placed) -> Failure:
    name, relation, largest = placed.output, bench.case.check, placed.largest
    place = Place(
        sequence=placed.sequence,
        position=largest.bad_row,
        head=largest.head,
        dim=largest.dim,
        got=largest.got,
        expected=largest.expected,
        allowed=largest.allowed,
    )
    rows = "query" if name in BY_QUERY else "key"
    dim = "" if largest.dim is None else f", dim {largest.dim}"
    of = f" ({placed.what})" if placed.what else ""
    message = (
        f"{OUTPUT_TITLES[name]}{of} breaks {relation}: sequence {place.sequence}, head {place.head}, "
        f"first at {rows} {place.position}{dim}: got {place.got:.9g}, expected {place.expected:.9g}, "
        f"allowed error {place.allowed:.3g}; by {largest.rule} {largest.ratio:.3g} x what is allowed"
    )
    return Failure(kernel=bench.case.kernel, kind="relation", output=name, check=relation, message=message, place=place)
