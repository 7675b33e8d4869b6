"""What a gate is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.gate.parts.accuracy import FEWEST
from attnfuzz.harness.gate.parts.speed import ROUNDS
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import reject

__all__ = ["Choice", "Plan"]

Choice = Literal["auto", "on", "off"]
_SAMPLE: dict[Device, int] = {"cpu": 24, "cuda": 64}


@dataclass(frozen=True, slots=True)
class Plan:
    """One gate's settings. Exactly one of `base` (a git ref), `baseline` and `write` (files) says what to compare with."""

    device: Device
    base: str | None = None
    baseline: Path | None = None
    write: Path | None = None
    kernels: tuple[str, ...] = ()
    """Names, or package.module:OBJECT; these are gated whether or not they changed."""
    everything: bool = False
    """All kernels of the checkout, or of the baseline, whether or not they changed."""
    folder: Path = Path()
    """Where the checkout is."""
    out: str = ".attnfuzz"
    corpora: tuple[str, ...] = ()
    """More folders of case files, which are read only."""
    ledger: Path | None = None
    """None: attnfuzz-ledger.toml in `folder`, if it is there."""
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
    """auto: where there is the command and a compiler."""
    architectures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.base, self.baseline, self.write)) != 1:
            reason = (
                "nothing says what to compare with" if self.base is None and self.baseline is None else "only one can be meant"
            )
            raise reject("base, baseline, write", "", reason, "give --base REF, --baseline FILE or --write FILE")
        if self.cases is not None and self.cases < FEWEST:
            raise reject("cases", self.cases, f"fewer than {FEWEST} say nothing of accuracy", f"give {FEWEST} or more")
        for name in ("accuracy_threshold", "speed_threshold"):
            if not 1 <= getattr(self, name) < float("inf"):
                raise reject(name, getattr(self, name), "what did not change would fail, or nothing could", "give 1 or more")
        if self.rounds < 5:
            raise reject("rounds", self.rounds, "fewer than 5 leave no interval", "give 5 or more")
        self.settings()

    def settings(self) -> Settings:
        """Of each kernel's campaign."""
        return Settings(
            device=self.device,
            profile="gate",
            budget=self.budget,
            max_examples=self.max_examples,
            seed=self.seed,
            out=self.out,
            deadline=self.deadline,
            memory_check=self.memory_check,
            replay=False,
        )

    @property
    def sample(self) -> int:
        """Cases on which errors are compared."""
        return _SAMPLE[self.device] if self.cases is None else self.cases

    @property
    def times(self) -> bool:
        """Whether the speed part is run."""
        return self.speed == "on" or (self.speed == "auto" and self.device == "cuda")
