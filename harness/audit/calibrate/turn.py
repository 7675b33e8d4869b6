"""One kernel's turn of a calibration: its campaign, what of its failures is known, and figures of every output."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from attnfuzz.harness.audit.calibrate.known import Known, matching
from attnfuzz.harness.campaign.campaign import executor_for, run_campaign
from attnfuzz.harness.campaign.events import Event, FailureFound, Found, KernelStarted, KernelSummary, Shrunk, TrialFinished
from attnfuzz.harness.campaign.settings import ProfileName, Settings
from attnfuzz.harness.campaign.shrink import tries
from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.executors import Executor
from attnfuzz.harness.isolation.isolated import ExecutionError
from attnfuzz.harness.isolation.kernel_ref import unpacked
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import BadArgument, OutputName

__all__ = ["WHOLE", "Asked", "Count", "Plan", "Progress", "Told", "Turn", "take_turn"]

WHOLE: Final = "run"
"""Where a failure of no single output is counted: an exception, a crash, a write out of bounds."""
_MOST_FAILURES: Final = 50
"""A peer with a defect still gets all its Cases; one that fails in ever new ways does not go on for ever."""
_SAY_EVERY: Final = 0.5
_LEAST_MEMORY: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: distinct Cases per kernel, the seed, kernels at a time, the folder of case files, and what is known."""

    device: Device
    cases: int
    seed: int = 0
    jobs: int = 1
    profile: ProfileName = "quick"
    out: str = ".attnfuzz"
    known: tuple[Known, ...] = ()

    def __post_init__(self) -> None:
        # Settings says what is wrong with the rest.
        self.settings("any")

    def settings(self, kernel: str) -> Settings:
        """Of one kernel's campaign, in a folder of its own; processors and memory are shared by those that run beside it."""
        cores = len(os.sched_getaffinity(0))
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Settings(
            device=self.device,
            profile=self.profile,
            max_examples=self.cases,
            max_failures=_MOST_FAILURES,
            seed=self.seed,
            out=str(Path(self.out) / "calibrate" / kernel),
            jobs=max(1, cores // self.jobs),
            replay=False,
            plain=True,
            maps=False,
            memory=max(_LEAST_MEMORY, total // 2 // self.jobs) if self.jobs > 1 else None,
        )


@dataclass(frozen=True, slots=True)
class Count:
    """Cases in which an output was wrong: in a way that is not known, and only in known ones."""

    alarms: int = 0
    known: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One kernel's result: figures, Cases that were wrong per output (or WHOLE), failures told apart, or why there is none."""

    kernel: str
    summary: KernelSummary | None = None
    counts: dict[str, Count] = field(default_factory=dict)
    alarms: tuple[Found, ...] = ()
    known: tuple[tuple[Known, int], ...] = ()
    """What is known and showed, in so many Cases (0: only in its own Case)."""
    gone: tuple[Known, ...] = ()
    """What is known to be wrong with these very versions, and is not."""
    elsewhere: tuple[Known, ...] = ()
    """What is known of other versions: not judged here."""
    environment: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""
    """Why it cannot run here."""
    broken: str = ""
    """The error that ended it, which is no finding."""
    lost: str = ""
    """The kernel broke the device, which ended it."""
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one kernel is: Cases tried, failures found, what it is doing."""

    kernel: str
    cases: int = 0
    failures: int = 0
    doing: str = ""
    over: bool = False


Told = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """What another process needs for one turn: the kernel as harness/isolation/kernel_ref.py packs it."""

    kernel: str
    parcel: dict[str, Any]
    plan: Plan


def take_turn(asked: Asked, tell: Told) -> Turn:
    """One kernel's campaign in this process, its Trials in children."""
    plan, name = asked.plan, asked.kernel
    counter = _Counter(name, tuple(each for each in plan.known if each.identity.kernel == name), tell)
    executor: Executor | None = None
    try:
        kernel = unpacked(asked.parcel)
        settings = plan.settings(name)
        executor = executor_for([kernel], settings)
        environment = executor.describe()
        counter.versions = environment["versions"]
        finished = run_campaign([kernel], settings, counter, executor)
        summary = finished.summaries[0]
        seen = [] if finished.interrupted or finished.lost else counter.seen_again(executor)
    except KeyboardInterrupt:
        return Turn(name, interrupted=True)
    except (BadArgument, ExecutionError, ChildError, OSError) as error:
        return Turn(name, broken=str(error) or type(error).__name__)
    finally:
        if executor is not None:
            executor.close()
        tell(Progress(name, over=True))
    return Turn(
        kernel=name,
        summary=summary,
        counts=counter.counts,
        alarms=tuple(each for each in summary.found if matching(counter.known, each.identity, counter.versions) is None),
        known=tuple((each, counter.shown.get(each.stored.path, 0)) for each in counter.known if each.stored.path in counter.shown)
        + tuple((each, 0) for each, again in seen if again),
        gone=tuple(each for each, again in seen if not again),
        elsewhere=tuple(each for each in counter.known if not each.holds_for(counter.versions)),
        environment=environment,
        lost=finished.lost or "",
        interrupted=finished.interrupted,
    )


class _Counter:
    """Listens to one kernel's campaign: counts what is wrong per output, by whether it is known, and says how far it is."""

    def __init__(self, kernel: str, known: tuple[Known, ...], tell: Told) -> None:
        self.kernel, self.known, self.tell = kernel, known, tell
        self.versions: dict[str, str] = {}
        self.counts: dict[str, Count] = {}
        self.shown: dict[Path, int] = {}
        self._cases = self._failures = 0
        self._said = 0.0

    def __call__(self, event: Event) -> None:
        """Hear one event."""
        doing = "trying"
        if isinstance(event, TrialFinished):
            if event.phase == "shrink":
                doing = "shrinking"
            else:
                self._cases += 1
                self._count(event.verdict)
        elif isinstance(event, FailureFound):
            self._failures += 1
            doing = "shrinking"
        elif isinstance(event, KernelStarted):
            doing = f"compiling {event.compiles} variants" if event.compiles else "trying"
        elif not isinstance(event, Shrunk):
            return
        self._say(doing, at_once=not isinstance(event, TrialFinished))

    def seen_again(self, executor: Executor) -> list[tuple[Known, bool]]:
        """What is known of these versions and did not show: whether its own Case still fails in that way."""
        found = []
        for each in self.known:
            if each.stored.path not in self.shown and each.holds_for(self.versions):
                self._say("trying what is known again", at_once=True)
                found.append((each, _again(each, executor)))
        return found

    def _count(self, verdict: Verdict) -> None:
        places: dict[str, bool] = {}
        defects = set()
        for failure in verdict.failures:
            place: OutputName | str = failure.output or WHOLE
            defect = matching(self.known, failure.identity, self.versions)
            places[place] = places.get(place, True) and defect is not None
            if defect is not None:
                defects.add(defect.stored.path)
        for place, known in places.items():
            old = self.counts.get(place, Count())
            self.counts[place] = Count(old.alarms + (not known), old.known + known)
        for path in defects:
            self.shown[path] = self.shown.get(path, 0) + 1

    def _say(self, doing: str, *, at_once: bool) -> None:
        now = time.monotonic()
        if at_once or now - self._said >= _SAY_EVERY:
            self._said = now
            self.tell(Progress(self.kernel, self._cases, self._failures, doing))


def _again(known: Known, executor: Executor) -> bool:
    for _ in range(tries(known.stored.rate)):
        executor.begin(known.stored.case, patient=True)
        if any(each.identity == known.identity for each in executor.finish().failures):
            return True
    return False
