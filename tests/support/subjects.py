"""A kernel that is only drawn for, never run, and limits for its Cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attnfuzz.kernels.contract import Built, Capabilities, Config, Device, why_unsupported
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.cases import Limits

CONFIGS = (Config(tile_m=64, tile_n=32), Config(tile_m=32, tile_n=64))
LIMITS = Limits(batch=4, heads=6, length=200, tiles=8)
WIDE: dict[str, Any] = {
    "dtypes": ("float32", "float16", "bfloat16"),
    "dims": ((64, 64), (64, 48), (192, 128)),
    "groups": None,
    "causal": ("top_left", None, "bottom_right"),
    "zero_q": True,
    "zero_k": True,
    "unequal": True,
    "slack": True,
    "scale_any": True,
    "devices": ("cpu",),
}


@dataclass(frozen=True)
class Subject:
    """A kernel that is only drawn for, never run."""

    can: dict[str, Any] = field(default_factory=dict)
    tiles: tuple[Config, ...] = CONFIGS
    refuse: Callable[[Problem, Config], str | None] = lambda problem, config: None
    name: str = "acme.flash"
    backend: str = "acme"
    files: tuple[str, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(**{**WIDE, **self.can})

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        return self.tiles

    def unavailable(self, device: Device) -> str | None:
        return None

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        return why_unsupported(self.capabilities, problem, device) or self.refuse(problem, config)

    def compile_key(self, problem: Problem, config: Config) -> str:
        return config.canonical()

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        raise NotImplementedError
