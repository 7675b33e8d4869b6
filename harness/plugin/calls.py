"""A test of what calls leave behind in a process: sequences of calls until one is wrong, which is then shrunk and kept."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attnfuzz.harness.core.signals import interrupted_once
from attnfuzz.harness.plugin.run import executor_of, hear_no_more, message_of, run_cases, subject_of

if TYPE_CHECKING:
    from attnfuzz.harness.campaign.events import Finding
    from attnfuzz.harness.campaign.runner import TrialRunner
    from attnfuzz.harness.campaign.settings import Settings
    from attnfuzz.kernels.contract import Device, Kernel
    from attnfuzz.strategies.case import Case
    from attnfuzz.strategies.variants import Variant

__all__ = ["run_calls"]

_MOST_VARIANTS = 6
"""Variants of the calls, each of which may have to be compiled in the middle of a sequence."""
_TILES, _LENGTH = 4, 96
"""Most tiles and tokens of a call: what is kept between calls depends little on their size."""
_ENDLESS = 1_000_000
"""Sequences of a test that ends with its time."""


class _Ended(BaseException):
    """Ends the sequences: a call has failed, or the time is over. Not an Exception: Hypothesis would run the sequence again."""


def run_calls(
    kernel: Kernel | str, sequences: int, most: int, request: pytest.FixtureRequest, *, seed: int | None = None
) -> None:
    """Try sequences of at most `most` calls, each sequence in a new process; with --attnfuzz-case run those Cases.

    `seed`: the test's own.
    """
    from attnfuzz.harness.trial.errors import describe_exception
    from attnfuzz.kernels.errors import BadArgument

    if cases := request.config.getoption("--attnfuzz-case"):
        run_cases(kernel, cases, request)
        return
    subject, settings = subject_of(kernel, request.config, 0, 1, sequences, seed=seed)
    if settings.in_process:
        pytest.skip("--attnfuzz-in-process: each sequence of calls needs a process of its own")
    rest = None
    try:
        with interrupted_once():
            search = _Search(subject, settings, _runner(request, subject, settings))
            try:
                search.run(most)
                search.minimise()
            except KeyboardInterrupt:
                hear_no_more(request.config)
                if search.finding is None:
                    raise
                # pytest shows no test that a KeyboardInterrupt ends: this one has failed, and is the last.
                request.session.shouldfail = "interrupted by Ctrl-C: no other test was run"
            except Exception as error:  # what ends the shrinking must not hide what it was to shrink
                if search.finding is None:
                    raise
                rest = f"shrinking ended with {describe_exception(error)}"
    except BadArgument as error:
        pytest.fail(str(error), pytrace=False)
    names = {"kernel": subject.name, "device": settings.device, "seed": settings.seed, "calls": search.calls}
    request.node.user_properties.extend((f"attnfuzz.{name}", str(value)) for name, value in names.items())
    if search.finding is not None:
        rest = "\n".join(filter(None, (rest, search.not_kept)))
        pytest.fail(message_of([search.finding], subject, request, rest), pytrace=False)
    if not search.calls:
        pytest.fail(f"no call was made within {settings.budget:.3g} s; give it more time", pytrace=False)


def _runner(request: pytest.FixtureRequest, kernel: Kernel, settings: Settings) -> TrialRunner:
    """Return a runner of Cases in the session's child processes."""
    from attnfuzz.harness.campaign.runner import TrialRunner

    return TrialRunner(executor_of(request.config, kernel, settings))


@dataclass
class _Search:
    """Sequences of calls of one kernel up to the first failure; `finding` is in a case file as soon as it is seen."""

    kernel: Kernel
    settings: Settings
    runner: TrialRunner
    finding: Finding | None = None
    calls: int = 0
    not_kept: str | None = None
    """Why there is no case file."""
    _end: float | None = field(default=None, init=False)
    _over: bool = field(default=False, init=False)
    """Whether a call has failed, or the time is over."""

    def run(self, most: int) -> None:
        """Make the calls."""
        from hypothesis import HealthCheck, Phase
        from hypothesis import seed as seeded
        from hypothesis import settings as of_hypothesis
        from hypothesis.stateful import run_state_machine_as_test

        from attnfuzz.strategies.call_sequences import call_machine
        from attnfuzz.strategies.cases import Limits
        from attnfuzz.strategies.draw import no_local_constants

        settings = self.settings
        self._end = None if settings.budget is None else time.monotonic() + settings.budget
        machine = call_machine(
            self.kernel,
            device=settings.device,
            limits=Limits(batch=3, heads=4, length=_LENGTH, tiles=_TILES),
            variants=_few(self.kernel, settings.device),
            begin=self.runner.fresh,
            call=self._call,
        )
        with self._until_ended(), no_local_constants():
            run_state_machine_as_test(
                seeded(settings.seed)(machine),
                settings=of_hypothesis(
                    max_examples=settings.max_examples or _ENDLESS,
                    stateful_step_count=most,
                    phases=(Phase.generate,),
                    suppress_health_check=list(HealthCheck),
                    deadline=None,
                    database=None,
                    print_blob=False,
                ),
            )

    def minimise(self) -> None:
        """Shrink the failure, if there is one, with the calls that it needs."""
        from attnfuzz.harness.campaign.minimise import Minimiser
        from attnfuzz.harness.campaign.settings import PROFILES

        if self.finding is None:
            return
        profile, device = PROFILES[self.settings.profile], self.settings.device
        seconds = profile.shrink if self.settings.shrink is None else self.settings.shrink
        minimiser = Minimiser(self.kernel, device, _few(self.kernel, device), profile.limits[device], self.runner)
        minimiser.minimise(self.finding, seconds, self._keep)

    def _call(self, case: Case) -> None:
        from attnfuzz.harness.campaign.events import Finding

        if self._end is not None and time.monotonic() >= self._end:
            self._over = True
            raise _Ended
        verdict = self.runner.run(case, "generate")
        self.calls += 1
        if verdict.failures:
            self._keep(Finding(verdict.failures[0].identity, case, verdict, cases_to_find=self.calls))
            self._over = True
            raise _Ended

    @contextlib.contextmanager
    def _until_ended(self) -> Iterator[None]:
        """Let sequences end at `_Ended`; one that began as an earlier one did is then called flaky by Hypothesis."""
        from hypothesis.errors import Flaky

        try:
            yield
        except _Ended:
            pass
        except Flaky:
            if not self._over:
                raise

    def _keep(self, finding: Finding) -> None:
        """Write a case file, which replaces that of the Case before."""
        from attnfuzz.harness.campaign.corpus import Corpus

        before, self.finding = self.finding, finding
        if self.settings.out is None:
            return
        corpus = Corpus(self.settings.out)
        try:
            path = corpus.write(finding, self.settings.seed)
        except OSError as error:
            self.not_kept = f"the case could not be kept on disk: {error}; make room, or choose another --attnfuzz-out"
            return
        self.not_kept = None
        self.finding = dataclasses.replace(finding, path=str(path))
        if before is not None and before.path is not None and before.path != str(path):
            corpus.remove(Path(before.path))


def _few(kernel: Kernel, device: Device) -> tuple[Variant, ...]:
    """Return some variants, spread over all of them."""
    from attnfuzz.strategies.variants import all_variants

    variants = all_variants(kernel, device)
    step = max(1, len(variants) // _MOST_VARIANTS)
    return tuple(variants[::step][:_MOST_VARIANTS])
