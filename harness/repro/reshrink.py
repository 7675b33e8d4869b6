"""Shrinking that goes on from a case file: the smaller Case is written beside it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attnfuzz.harness.campaign.corpus import CaseFile, Corpus
from attnfuzz.harness.campaign.settings import PROFILES
from attnfuzz.harness.campaign.shrink import Shrinker, Sighting, tries
from attnfuzz.harness.isolation.executors import Executor
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.repro.reproduce import Where
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.problem import reject
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.shapes import Variant, all_variants, modified, pool

__all__ = ["Reshrunk", "shrink_further"]

Told = Callable[[int, Case], None]
"""Hears of each trial: its number, and its Case."""


@dataclass(frozen=True, slots=True)
class Reshrunk:
    """What came of shrinking a case file further. `path`: of the smaller Case's file, None where nothing smaller was found.

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


def shrink_further(stored: CaseFile, seconds: float, where: Where, folder: Path, told: Told = lambda *_: None) -> Reshrunk:
    """Shrink from `stored` for `seconds` at most, its first run apart; what is smaller goes to `folder`, whatever ends this.

    Raises:
        BadArgument: the kernel is absent, cannot run here, or does not support the Problem; `folder` cannot be written to.
    """
    _check(folder)
    device, kernel = where.device_for(stored.case)
    start = time.monotonic()
    with where.executor(device, kernel) as executor:
        work = _Work(executor, told)
        verdict = work.first(stored)
        identity = _identity_in(stored, verdict)
        if identity is None:
            spent = time.monotonic() - start
            return Reshrunk("FIXED", device, stored.case, verdict, None, None, work.trials, spent, False, stored.rate)
        seen = Sighting(stored.case, verdict, 0, 0.0, None, rate=stored.rate)
        shrinker = Shrinker(
            work.attempt,
            lambda case: why_not_case(kernel, case, device) is None,
            executor.fresh,
            {stored.case: verdict},
            _variants(kernel, device),
        )
        path = None
        try:
            try:
                shrinker.shrink(seen, identity, seconds)
            except KeyboardInterrupt:
                seen.partly = True
        finally:
            # A smaller Case is kept also where an error ends this.
            if seen.case != stored.case:
                corpus = Corpus(folder)
                corpus.folder = folder
                seed = stored.found.get("seed")
                path = corpus.write(
                    seen.case, seen.verdict, identity, minimal=not seen.partly, rate=seen.rate,
                    seed=seed if isinstance(seed, int) else 0,
                )  # fmt: skip
    outcome: Literal["SMALLER", "MINIMAL", "STOPPED"] = "SMALLER" if path else "STOPPED" if seen.partly else "MINIMAL"
    return Reshrunk(
        outcome, device, seen.case, seen.verdict, identity, str(path) if path else None, work.trials,
        time.monotonic() - start, seen.partly, seen.rate,
    )  # fmt: skip


class _Work:
    """Trials, counted."""

    def __init__(self, executor: Executor, told: Told) -> None:
        self.executor, self.told, self.trials = executor, told, 0

    def attempt(self, case: Case, patient: bool) -> Verdict:
        self.trials += 1
        self.told(self.trials, case)
        self.executor.begin(case, patient=patient)
        return self.executor.finish()

    def first(self, stored: CaseFile) -> Verdict:
        """The stored Case itself, as often as its rate demands."""
        for _ in range(tries(stored.rate)):
            verdict = self.attempt(stored.case, True)
            if verdict.failure is not None:
                break
        return verdict


def _identity_in(stored: CaseFile, verdict: Verdict) -> Identity | None:
    """The failure to follow: the one that the file tells of, if it shows, else the first."""
    told = stored.found.get("identity")
    shown = [each.identity for each in verdict.failures]
    for identity in shown:
        if isinstance(told, dict) and (identity.kind, identity.output, identity.check) == tuple(
            told.get(name) for name in ("kind", "output", "check")
        ):
            return identity
    return shown[0] if shown else None


def _variants(kernel: Kernel, device: Device) -> tuple[Variant, ...]:
    """Where shrinking may go: all that the kernel declares; few where each is compiled."""
    variants = all_variants(kernel, device)
    if device not in kernel.capabilities.compiles_on:
        return variants
    return modified(pool(variants, PROFILES["quick"].variants[device], 0), kernel, device, 0)


def _check(folder: Path) -> None:
    """Known before the run that its result can be kept."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"a smaller Case could not be written there ({error.strerror})"
        raise reject("folder", str(folder), reason, "copy the case file to a folder that can be written") from None
