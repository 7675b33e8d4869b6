"""Settings of a run: profiles, durations, and the header line that shows what differs from the defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import reject
from attnfuzz.strategies.cases import Limits

__all__ = ["PROFILES", "Profile", "ProfileName", "Settings", "duration", "profile"]

ProfileName = Literal["quick", "gate", "nightly", "models"]
_GRACE, _LEAST_GRACE = 0.05, 10.0
"""Shrinking may go on for that share of the budget after its end, and for 10 s at least."""
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Profile:
    """How much a run tries: time for all kernels together, variants a kernel compiles, and how large a Case may be."""

    name: ProfileName
    budget: float
    """Seconds from the start of the run, compiles included, shared by the kernels."""
    shrink: float
    """Seconds that shrinking one failure may take."""
    variants: dict[Device, int]
    limits: dict[Device, Limits]
    models: bool = False
    """Whether Cases have the attention shapes of published models (strategies/models.py)."""


_CPU = Limits(batch=4, heads=6, length=300, tiles=12, scores=1 << 17)
_CUDA = Limits(batch=8, heads=8, length=4096, tiles=4096)

PROFILES: dict[ProfileName, Profile] = {
    "quick": Profile("quick", 60.0, 60.0, {"cpu": 4, "cuda": 10}, {"cpu": _CPU, "cuda": _CUDA}),
    "gate": Profile("gate", 300.0, 120.0, {"cpu": 8, "cuda": 24}, {"cpu": _CPU, "cuda": _CUDA}),
    "nightly": Profile(
        "nightly",
        3600.0,
        300.0,
        {"cpu": 24, "cuda": 96},
        {
            "cpu": Limits(batch=6, heads=7, length=400, tiles=24, scores=1 << 18),
            "cuda": Limits(batch=16, heads=16, length=8192, tiles=16384),
        },
    ),
    "models": Profile(
        "models",
        300.0,
        120.0,
        {"cpu": 8, "cuda": 48},
        {"cpu": Limits(batch=3, heads=8, length=300, tiles=16), "cuda": Limits(batch=8, heads=128, length=8192, tiles=16384)},
        models=True,
    ),
}


def profile(name: str) -> Profile:
    """The profile called `name`.

    Raises:
        BadArgument: there is no such profile.
    """
    for each in PROFILES.values():
        if each.name == name:
            return each
    raise reject("profile", name, "there is no such profile", f"use one of {', '.join(PROFILES)}")


def duration(text: str, name: str = "budget") -> float:
    """Seconds of "60s", "5m", "1.5h", "500ms" or "2m30s".

    Raises:
        BadArgument: it is not a duration, or not positive.
    """
    parts = re.findall(r"(\d+(?:\.\d*)?)(ms|s|min|m|h)", text.strip())
    if not parts or "".join(n + unit for n, unit in parts) != text.strip():
        raise reject(name, text, "it is not a duration", "give a number and a unit, such as 60s, 5m or 1h")
    seconds = sum(float(n) * _UNITS[unit] for n, unit in parts)
    if seconds <= 0:
        raise reject(name, text, "must be positive", "give a positive duration, such as 60s")
    return seconds


@dataclass(frozen=True, slots=True)
class Settings:
    """One run's settings. `budget` or `max_examples` (distinct Cases per kernel) ends it, whichever comes first.

    Shards share `max_examples`, and each has the whole `budget`.
    """

    device: Device = "cpu"
    profile: ProfileName = "quick"
    budget: float | None = None
    max_examples: int | None = None
    max_failures: int | None = None
    """Failures after which a kernel is not tried further."""
    seed: int = 0
    shard: int = 0
    """Which of the `shards` of a run this is, from 0: all draw from the same rounds, each its own of them."""
    shards: int = 1
    out: str | None = ".attnfuzz"
    jobs: int | None = None
    replay: bool = True
    """Try the stored Cases of a kernel first."""
    in_process: bool = False
    """Run Trials in this process, for a debugger, and not in children."""
    deadline: float | None = None
    """Seconds that a stage of a Trial may take before it hangs, by default 60; a compile may take ten times that."""
    plain: bool = False
    """Only one call against the oracle: no sequences of calls, no relations."""
    memory_check: bool = True
    """Check every access to memory of interpreted kernels (docs/memory.md)."""
    maps: bool = True
    """Keep maps of the errors of each minimal Case, for reports; where there is an `out`."""
    memory: int | None = None
    """Bytes that a child process may hold; by default half of the machine's memory, shared by xdist's workers."""
    workers: int = 1
    """Processes that draw Cases and run them; with 1, this process draws."""
    share_gpu: bool = True
    """Where a GPU has several workers, start a server of CUDA's MPS, by which they use it at once, until one breaks it."""
    shrink: float | None = None
    """Seconds that shrinking one failure may take, by default as the profile says."""
    all_variants: bool = False
    """Draw from all variants from the start, also under a budget: the Cases are those of a run without one, in the order in which
    their code is compiled."""
    batch: int | None = None
    """Cases that run and are judged together on a GPU, at most; those of a batch that ends its process run again one by one."""

    def __post_init__(self) -> None:
        if self.out == "":
            raise reject("out", self.out, "it is empty, so failing Cases could not be written", "give a folder")
        for name in ("max_examples", "max_failures"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise reject(name, getattr(self, name), "must be positive", "give 1 or more")
        if self.seed < 0:
            raise reject("seed", self.seed, "must not be negative", "give 0 or more")
        if self.device not in ("cpu", "cuda"):
            raise reject("device", self.device, "no such device", "use cpu or cuda")
        profile(self.profile)
        if self.budget is not None and not self.budget > 0:
            raise reject("budget", self.budget, "must be positive", "give a positive number of seconds")
        if self.shards < 1 or not 0 <= self.shard < self.shards:
            raise reject("shard", self.shard, f"there are {self.shards} shards", "count shards from 0, and have at least 1")
        if self.deadline is not None and not self.deadline > 0:
            raise reject("deadline", self.deadline, "must be positive", "give a positive number of seconds")
        if self.shrink is not None and not self.shrink > 0:
            raise reject("shrink", self.shrink, "must be positive", "give a positive number of seconds")
        if self.memory is not None and self.memory < 1 << 30:
            raise reject("memory", self.memory, "a process that has imported torch holds half of that", "give 1 GiB or more")
        if self.workers < 1:
            raise reject("workers", self.workers, "must be positive", "give 1 or more, or auto")
        if self.workers > 1 and self.in_process:
            raise reject("workers", self.workers, "with --in-process all runs in this process", "leave one of the two out")
        if self.jobs is not None and self.jobs < 1:
            raise reject("jobs", self.jobs, "must be positive", "give 1 or more")

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults: the run's header shows just that."""
        return {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default}

    @property
    def may_be_empty(self) -> bool:
        """Whether this shard may have no Case: there are fewer of them than shards."""
        return self.max_examples is not None and self.max_examples < self.shards

    @property
    def grace(self) -> float:
        """Seconds that shrinking may go on after the end of the budget."""
        return min(PROFILES[self.profile].shrink, max(_LEAST_GRACE, _GRACE * (self.seconds or 0.0)))

    @property
    def seconds(self) -> float | None:
        """Seconds of the whole run, compiles included; None where only `max_examples` ends it."""
        if self.budget is None and self.max_examples is not None:
            return None
        return PROFILES[self.profile].budget if self.budget is None else self.budget
