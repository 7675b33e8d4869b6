"""The settings of a gate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from attnfuzz.harness.campaign.settings import ProfileName, Settings
from attnfuzz.harness.gate.parts.accuracy import FEWEST
from attnfuzz.harness.gate.parts.speed import ROUNDS
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import reject

__all__ = ["Choice", "Plan"]

Choice = Literal["auto", "on", "off"]
_SAMPLE: dict[Device, int] = {"cpu": 24, "cuda": 64}


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of one gate. Exactly one of `base` (a git ref), `baseline` and `write` (files) must be set."""

    device: Device
    base: str | None = None
    baseline: Path | None = None
    write: Path | None = None
    kernels: tuple[str, ...] = ()
    """Names, or package.module:OBJECT: gated whether or not they changed."""
    known: tuple[str, ...] = ()
    """The same, in place of all kernels of the checkout, or of the baseline: gated if they changed."""
    everything: bool = False
    """All kernels of the checkout, or of the baseline, whether or not they changed."""
    folder: Path = Path()
    """A folder of the checkout."""
    out: str = ".attnfuzz"
    corpora: tuple[str, ...] = ()
    """Further folders of case files, only read."""
    ledger: Path | None = None
    """None: attnfuzz-ledger.toml in `folder`, if it exists."""
    profile: ProfileName = "gate"
    budget: float | None = None
    max_examples: int | None = None
    seed: int = 0
    deadline: float | None = None
    memory_check: bool = True
    cases: int | None = None
    """Cases on which errors are compared; None: 24 on the CPU, 64 on CUDA."""
    accuracy_threshold: float = 1.25
    speed_threshold: float = 1.10
    speed: Choice = "auto"
    """auto: on CUDA only; an interpreted kernel's time says nothing."""
    rounds: int = ROUNDS
    compile: Choice = "auto"
    """auto: where the command and a compiler are installed."""
    architectures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.base, self.baseline, self.write)) != 1:
            reason = "nothing to compare with is set" if self.base is None and self.baseline is None else "only one can be set"
            raise reject("base, baseline, write", "", reason, "give --base REF, --baseline FILE or --write FILE")
        if self.cases is not None and self.cases < FEWEST:
            raise reject("cases", self.cases, f"must be {FEWEST} or more to compare errors", f"give {FEWEST} or more")
        for name in ("accuracy_threshold", "speed_threshold"):
            if not 1 <= getattr(self, name) < float("inf"):
                raise reject(name, getattr(self, name), "must be finite and at least 1", "give 1 or more")
        if self.rounds < 5:
            raise reject("rounds", self.rounds, "must be 5 or more for an interval", "give 5 or more")
        self.settings()

    def settings(self) -> Settings:
        """Return the settings of each kernel's campaign."""
        return Settings(
            device=self.device,
            profile=self.profile,
            budget=self.budget,
            max_examples=self.max_examples,
            seed=self.seed,
            out=self.out,
            deadline=self.deadline,
            memory_check=self.memory_check,
            replay=False,
        )

    def shared(self, kernels: int) -> Plan:
        """Return the plan of each of so many kernels: its campaign has an even part of the budget."""
        seconds = self.settings().seconds
        return self if seconds is None else replace(self, budget=seconds / max(1, kernels))

    @property
    def sample(self) -> int:
        """Number of Cases on which errors are compared."""
        return _SAMPLE[self.device] if self.cases is None else self.cases

    @property
    def times(self) -> bool:
        """Whether the speed part is run."""
        return self.speed == "on" or (self.speed == "auto" and self.device == "cuda")
