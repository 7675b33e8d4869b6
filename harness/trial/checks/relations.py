"""The checks that are metamorphic relations: related launches of one kernel, compared with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from attnfuzz.harness.judge.contract import why_unfit
from attnfuzz.harness.judge.failure import BY_QUERY, OUTPUT_TITLES, Failure, Place
from attnfuzz.harness.judge.verdict import Figures, Verdict, four_digits
from attnfuzz.harness.trial.bench import Bench, Steps, WentWrong
from attnfuzz.harness.trial.launch import is_out_of_memory, launch_in_place
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels.contract import Inputs, Outputs
from attnfuzz.kernels.problem import OutputName, reject
from attnfuzz.oracles.relations import constant, rearranged, revalued, strides
from attnfuzz.oracles.relations.difference import Difference, Related, Setup, Worst, worst
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


def against_itself(bench: Bench) -> Verdict:
    """Run the launches of the Case's relation, and judge whether they agree.

    Raises:
        BadArgument: the relation does not apply to the Case, or the kernel does not support a related launch.
    """
    case = bench.case
    if reason := why_not_case(bench.kernel, case, bench.device):
        raise reject("case", case.canonical(), reason, "give a Case that its check applies to")
    with bench.clock.stage("inputs"):
        can, seed = bench.kernel.capabilities, case.recipe.seed
        problems = related_problems(case.check, case.problem, seed)
        inputs = bench.inputs()
        related = _RELATIONS[case.check](Setup(inputs, problems, seed, bench.device, can.deviations, can.deterministic))
    results: list[Outputs] = []
    for each in related.inputs:
        outputs = _launched(bench, each, apart=case.check == "huge_strides" and bool(results))
        if isinstance(outputs, str):
            figures = {name: Figures(elements=0, unjudged=outputs) for name in case.problem.needs.outputs}
            return Verdict(status="pass", figures=figures)
        if failures := why_unfit(case.kernel, each, outputs):
            return Verdict(status="fail", failures=failures)
        results.append(outputs)
    with bench.clock.stage("judge"):
        return _judged(bench, related.differences(results))


def _steps(bench: Bench) -> Steps:
    """Run the relation; nothing is judged by the oracle."""
    yield from ()
    return against_itself(bench)


RELATION_CHECKS: dict[Check, Callable[[Bench], Steps]] = dict.fromkeys(_RELATIONS, _steps)


def _launched(bench: Bench, inputs: Inputs, *, apart: bool) -> Outputs | str:
    """Return the outputs of one launch, or why there is no memory for its inputs."""
    ready = bench.ready(inputs.problem)
    if not apart:
        return bench.launch(ready, inputs)
    try:
        with bench.clock.stage("inputs"):
            wide = strides.stretch(inputs)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return "no memory for rows that pass 2^31 elements"
    with bench.clock.stage("kernel"):
        outcome = launch_in_place(bench.case, ready, wide, bench.device)
    if isinstance(outcome, Failure):
        raise WentWrong(outcome)
    for name, _ in strides.TENSORS:
        if not torch.equal(getattr(wide, name), getattr(inputs, name)):
            message = f"the kernel wrote to its input {name}"
            raise WentWrong(Failure(kernel=bench.case.kernel, kind="guard", check=f"input {name}", message=message))
    return outcome


def _judged(bench: Bench, differences: Iterable[Difference]) -> Verdict:
    """Return figures of every output, and a Failure for each that is over its limit."""
    figures: dict[OutputName, Figures] = {}
    failing: dict[OutputName, tuple[Difference, Worst]] = {}
    for difference in differences:
        name = difference.output
        figures.setdefault(name, Figures(elements=0))
        largest = worst(difference)
        if largest is None:
            continue
        old = figures[name]
        figures[name] = Figures(
            elements=old.elements + difference.got.numel(),
            worst=max(old.worst, four_digits(largest.ratio)),
            over=old.over + largest.over,
        )
        if not largest.ratio <= 1 and (name not in failing or largest.ratio > failing[name][1].ratio):
            failing[name] = (difference, largest)
    failures = tuple(_failure(bench, *pair) for pair in failing.values())
    return Verdict(status="fail" if failures else "pass", figures=figures, failures=failures)


def _failure(bench: Bench, difference: Difference, largest: Worst) -> Failure:
    name, relation = difference.output, bench.case.check
    place = Place(
        sequence=difference.sequence,
        position=largest.bad_row,
        head=largest.head,
        dim=largest.dim,
        got=largest.got,
        expected=largest.expected,
        allowed=largest.allowed,
    )
    rows = "query" if name in BY_QUERY else "key"
    dim = "" if largest.dim is None else f", dim {largest.dim}"
    of = f" ({difference.what})" if difference.what else ""
    message = (
        f"{OUTPUT_TITLES[name]}{of} breaks {relation}: sequence {place.sequence}, head {place.head}, "
        f"first at {rows} {place.position}{dim}: got {place.got:.9g}, expected {place.expected:.9g}, "
        f"allowed error {place.allowed:.3g}; by {largest.rule} {largest.ratio:.3g} x what is allowed"
    )
    return Failure(kernel=bench.case.kernel, kind="relation", output=name, check=relation, message=message, place=place)
