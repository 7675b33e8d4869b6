"""Campaigns as contestants: one started with its log, and what the times in a log say of its rate."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from throughput.processes import Session

__all__ = ["LogFile", "NotMeasured", "Stamps", "Trials", "campaign", "run_for", "trials_in"]

_PROGRAM = Path(__file__).with_name("logged_run.py")
_TICK = 0.02


class NotMeasured(RuntimeError):
    """A contestant ended before it judged anything; the text is its own last output."""


@dataclass(frozen=True, slots=True)
class Stamps:
    """Times at which one contestant had judged, as of `time.monotonic`, between its start and the end of its time."""

    started: float
    ended: float
    at: Sequence[float]

    @property
    def count(self) -> int:
        """Judged by the end."""
        return sum(each <= self.ended for each in self.at)

    @property
    def first(self) -> float | None:
        """Seconds from the start to the first judged; None where nothing was."""
        return min(self.at) - self.started if self.count else None

    @property
    def cold(self) -> float:
        """Judged a second from the start of the process on."""
        return self.count / (self.ended - self.started)

    @property
    def warm(self) -> float | None:
        """Judged a second after the first one; None where there was at most one."""
        inside = sorted(each for each in self.at if each <= self.ended)
        if len(inside) < 2 or self.ended <= inside[0]:
            return None
        return sum(each > inside[0] for each in inside) / (self.ended - inside[0])


@dataclass(frozen=True, slots=True)
class Trials:
    """What a campaign's log holds: its distinct Cases' trials, compiles, and its result if it came to its end."""

    cases: list[dict[str, Any]] = field(default_factory=list)
    """Trials of stored and of drawn Cases; shrinking and reruns are no Cases."""
    others: list[dict[str, Any]] = field(default_factory=list)
    compiles: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None

    def stamps(self, started: float, ended: float) -> Stamps:
        """Return the times at which Cases were judged."""
        return Stamps(started, ended, [each["trial"] for each in self.cases])

    def mean(self, name: str) -> float | None:
        """Return the mean of a number of the Cases, such as "tokens"; None without Cases."""
        return sum(each[name] for each in self.cases) / len(self.cases) if self.cases else None


class LogFile:
    """A log that is read while it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._rest = path, 0, b""
        self.trials = Trials()

    def update(self) -> Trials:
        """Read what has been written since, and return all of it; a line that is not whole yet stays for the next time."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
            self._read += len(content)
            *lines, self._rest = (self._rest + content).split(b"\n")
            for line in lines:
                self._add(json.loads(line))
        return self.trials

    def _add(self, line: dict[str, Any]) -> None:
        if "trial" in line:
            (self.trials.cases if line["phase"] in ("replay", "generate") else self.trials.others).append(line)
        elif "compile" in line:
            self.trials.compiles.append(line)
        else:
            self.trials = Trials(self.trials.cases, self.trials.others, self.trials.compiles, line["campaign"])


def trials_in(path: Path) -> Trials:
    """Return the content of a log as far as it was written."""
    return LogFile(path).update()


@contextmanager
def campaign(
    kernels: Sequence[str], device: str, folder: Path, options: Mapping[str, str], *,
    limits: Mapping[str, int] | None = None, environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[Session, LogFile]]:  # fmt: skip
    """Start a campaign whose log is in `folder`; whatever of it still runs at the end of the block is ended.

    Args:
        kernels: their names.
        device: cpu or cuda.
        folder: its current folder; its stored Cases are in "out".
        options: of `attnfuzz run`, by name.
        limits: fields of `Limits` in place of the profile's.
        environment: variables in addition to this process's.
    """
    log = folder / "log.jsonl"
    request = {
        "kernels": list(kernels), "device": device, "options": {"out": str(folder / "out"), **options},
        "limits": dict(limits or {}), "log": str(log),
    }  # fmt: skip
    with Session([sys.executable, "-P", str(_PROGRAM), json.dumps(request)], folder, environment) as session:
        yield session, LogFile(log)


def run_for(session: Session, seconds: float, enough: Callable[[], bool] = lambda: False) -> float:
    """Let a session run until `seconds` have passed since its start, it has ended, or `enough`; return when that was."""
    end = session.started + seconds
    while session.running and time.monotonic() < end and not enough():
        session.wait(min(_TICK, end - time.monotonic()))
    return min(end, session.ended or time.monotonic())
