"""Shrinking that goes on from a case file: the smaller Case is written beside it."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from attnfuzz.harness.campaign.corpus import CaseFile, Corpus
from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.campaign.explain import Explanation
from attnfuzz.harness.campaign.minimise import Minimiser
from attnfuzz.harness.campaign.plan import variants_of
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.campaign.settings import PROFILES, Settings
from attnfuzz.harness.core.signals import ending, uninterrupted
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.repro.reproduce import Where, verdict_or_lost
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import reject
from attnfuzz.strategies.case import Case

__all__ = ["Reshrunk", "identity_in", "minimiser_for", "shrink_further"]


@dataclass(frozen=True, slots=True)
class Reshrunk:
    """Result of shrinking a case file further. `path`: of the smaller Case's file, None where nothing smaller was found.

    `outcome`: SMALLER; MINIMAL, where no simpler Case fails alike; STOPPED, where time was up before one was found; FIXED, where
    the Case itself does not fail any more. `partly`: time was up, or Ctrl-C was pressed, before all steps were tried.
    """

    outcome: Literal["SMALLER", "MINIMAL", "STOPPED", "FIXED"]
    device: Device
    case: Case
    verdict: Verdict
    identity: Identity | None
    path: str | None
    trials: int
    seconds: float
    partly: bool
    rate: tuple[int, int] | None
    explanation: Explanation | None = None


def minimiser_for(kernel: Kernel, device: Device, runner: TrialRunner) -> Minimiser:
    """Return what shrinks and explains a stored Case: within all variants of its kernel, and the limits of short runs."""
    return Minimiser(kernel, device, variants_of(kernel, Settings(device=device)), PROFILES["quick"].limits[device], runner)


def shrink_further(
    stored: CaseFile, seconds: float, where: Where, folder: Path, on_trial: Callable[[int, Case], None] = lambda *_: None
) -> Reshrunk:
    """Shrink from `stored` for at most `seconds`, its first run apart; a smaller Case goes to `folder`, also after an error.

    Args:
        stored: what to begin with.
        seconds: that shrinking may take.
        where: device, deadline and checks.
        folder: where the smaller Case's file goes.
        on_trial: called after each trial with its number and its Case.

    Raises:
        BadArgument: the kernel is absent, cannot run here, or does not support the Problem; `folder` cannot be written to.
    """
    _check(folder)
    device, kernel, case = where.prepared(stored.case)
    stored = replace(stored, case=case)
    start = time.monotonic()
    with where.runner(device, kernel, lambda _, case, __: on_trial(runner.trials, case)) as runner:
        verdict, lost = verdict_or_lost(runner, stored.case, stored.rate)
        identity = identity_in(stored, verdict)
        if identity is None:
            spent = time.monotonic() - start
            return Reshrunk("FIXED", device, stored.case, verdict, None, None, runner.trials, spent, False, stored.rate)
        finding = Finding(identity, stored.case, verdict, rate=stored.rate, shrunk=True, partly=True)

        def keep(now: Finding) -> None:
            nonlocal finding
            finding = now

        path = None
        try:
            with contextlib.suppress(KeyboardInterrupt, DeviceLost):
                if not lost:
                    minimiser_for(kernel, device, runner).minimise(finding, seconds, keep)
            ending()
        finally:
            # A smaller Case is kept also where an error, or Ctrl-C at the last moment, ends this.
            with uninterrupted():
                if finding.case != stored.case:
                    corpus = Corpus(folder)
                    corpus.folder = folder
                    path = corpus.write(finding, stored.finding.seed)
    outcome: Literal["SMALLER", "MINIMAL", "STOPPED"] = "SMALLER" if path else "STOPPED" if finding.partly else "MINIMAL"
    return Reshrunk(
        outcome, device, finding.case, finding.verdict, identity, str(path) if path else None, runner.trials,
        time.monotonic() - start, finding.partly, finding.rate, finding.explanation,
    )  # fmt: skip


def identity_in(stored: CaseFile, verdict: Verdict) -> Identity | None:
    """The failure to follow: the one in the file, if it shows, else the first."""
    before = stored.finding.identity
    identities = [each.identity for each in verdict.failures]
    for identity in identities:
        if before and (identity.kind, identity.output, identity.check) == (before.kind, before.output, before.check):
            return identity
    return identities[0] if identities else None


def _check(folder: Path) -> None:
    """Check before the run that its result can be written."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"a smaller Case could not be written there ({error.strerror})"
        raise reject("folder", str(folder), reason, "copy the case file to a folder that can be written") from None
