"""A test of what calls leave behind in a process: sequences of calls until one is wrong, which is then shrunk and kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from attnfuzz.harness.core.signals import interrupted_once
from attnfuzz.harness.plugin.run import executor_of, message_of, run_cases, subject_of

if TYPE_CHECKING:
    from attnfuzz.harness.campaign.events import Finding
    from attnfuzz.harness.campaign.runner import TrialRunner
    from attnfuzz.harness.campaign.settings import Settings
    from attnfuzz.kernels.contract import Device, Kernel
    from attnfuzz.strategies.shapes import Variant

__all__ = ["run_calls"]

_MOST_VARIANTS = 6
"""Variants of the calls, each of which may have to be compiled in the middle of a sequence."""
_TILES, _LENGTH = 4, 96
"""Most tiles and tokens of a call: what is kept between calls depends little on their size."""


class _CallFailed(Exception):
    """Ends the sequences: a call has failed."""


def run_calls(
    kernel: Kernel | str, sequences: int, most: int, request: pytest.FixtureRequest, *, seed: int | None = None
) -> None:
    """Try sequences of at most `most` calls, each sequence in a new process; with --attnfuzz-case run those Cases.

    `seed`: the test's own.
    """
    from attnfuzz.kernels.problem import BadArgument

    if cases := request.config.getoption("--attnfuzz-case"):
        run_cases(kernel, cases, request)
        return
    subject, settings = subject_of(kernel, request.config, 0, 1, sequences, seed=seed)
    try:
        with interrupted_once():
            tried, finding = _first_failure(subject, settings, most, request)
    except BadArgument as error:
        pytest.fail(str(error), pytrace=False)
    names = {"kernel": subject.name, "device": settings.device, "seed": settings.seed, "calls": tried}
    request.node.user_properties.extend((f"attnfuzz.{name}", str(value)) for name, value in names.items())
    if finding is not None:
        pytest.fail(message_of([finding], subject, request, keeps=False), pytrace=False)


def _first_failure(kernel: Kernel, settings: Settings, most: int, request: pytest.FixtureRequest) -> tuple[int, Finding | None]:
    """Return the number of calls that were made, and the first failure, minimal and kept; None: no call failed."""
    from hypothesis import HealthCheck, Phase
    from hypothesis import seed as seeded
    from hypothesis import settings as of_hypothesis
    from hypothesis.stateful import run_state_machine_as_test

    from attnfuzz.harness.campaign.events import Finding
    from attnfuzz.harness.campaign.runner import TrialRunner
    from attnfuzz.harness.campaign.settings import PROFILES
    from attnfuzz.strategies.call_sequences import call_machine
    from attnfuzz.strategies.case import Case
    from attnfuzz.strategies.cases import Limits

    executor = executor_of(request.config, kernel, settings)
    runner, failures = TrialRunner(executor), list[Finding]()
    variants = _few(kernel, settings.device)
    limits = Limits(batch=3, heads=4, length=_LENGTH, tiles=_TILES)
    end = None if settings.budget is None else time.monotonic() + settings.budget

    def call(case: Case) -> None:
        if end is not None and time.monotonic() >= end:
            return
        verdict = runner.run(case, "generate")
        if verdict.failures:
            failures.append(Finding(verdict.failures[0].identity, case, verdict, cases_to_find=runner.trials))
            raise _CallFailed

    machine = call_machine(kernel, device=settings.device, limits=limits, variants=variants, begin=executor.fresh, call=call)
    try:
        run_state_machine_as_test(
            seeded(settings.seed)(machine),
            settings=of_hypothesis(
                max_examples=settings.max_examples or 1,
                stateful_step_count=most,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
                deadline=None,
                database=None,
                print_blob=False,
                report_multiple_bugs=False,
            ),
        )
    except BaseException:
        # Hypothesis runs the sequence again, and raises other errors where it passes then.
        if not failures:
            raise
    tried = runner.trials
    seconds = PROFILES[settings.profile].shrink if settings.shrink is None else settings.shrink
    return tried, _minimal(failures[0], kernel, settings, runner, variants, seconds) if failures else None


def _few(kernel: Kernel, device: Device) -> tuple[Variant, ...]:
    """Return some variants, spread over all of them."""
    from attnfuzz.strategies.shapes import all_variants

    variants = all_variants(kernel, device)
    step = max(1, len(variants) // _MOST_VARIANTS)
    return tuple(variants[::step][:_MOST_VARIANTS])


def _minimal(
    finding: Finding, kernel: Kernel, settings: Settings, runner: TrialRunner, variants: Sequence[Variant], seconds: float
) -> Finding:
    """Shrink a failure with the calls that it needs, and write its case file."""
    import dataclasses

    from attnfuzz.harness.campaign.corpus import Corpus
    from attnfuzz.harness.campaign.minimise import Minimiser
    from attnfuzz.harness.campaign.settings import PROFILES

    latest = [finding]
    limits = PROFILES[settings.profile].limits[settings.device]
    Minimiser(kernel, settings.device, variants, limits, runner).minimise(finding, seconds, latest.append)
    if settings.out is None:
        return latest[-1]
    path = Corpus(settings.out).write(latest[-1], settings.seed)
    return dataclasses.replace(latest[-1], path=str(path))
