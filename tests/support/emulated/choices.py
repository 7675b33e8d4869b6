"""What the emulated kernel may choose and still be right: its Config, as typed fields, and how Configs are drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any, Literal

from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.problem import Problem

_SAMPLE = 24
_RZ_WORK, _TC_WORK = 12_000_000, 800_000
"""Multiplications of one product up to which the slow accumulations are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The Config of an emulated kernel: every combination is a correct kernel within the verdict's contract."""

    tile_m: int = 64
    tile_n: int = 64
    mma: Literal["f32", "rz", "tc"] = "f32"
    """How products are accumulated (see arithmetic.Accumulation)."""
    exp: Literal["separate", "fma", "natural"] = "separate"
    """exp2(s c - m c) of two roundings or of one; or exp(s scale - m scale)."""
    delta: Literal["rounded_o", "fp32_o"] = "rounded_o"
    ds_scale: Literal["before", "after"] = "before"
    """Whether softmax_scale is applied to dS before its rounding or to dQ and dK."""
    reversed_tiles: bool = False
    """Key tiles of the forward from the last to the first."""
    exp2_noise_bits: int = 0
    """exp2 is off by up to 2 ** -bits, as a GPU's is; 0: torch's own."""
    division: Literal["quotient", "reciprocal"] = "quotient"
    dq_order: Literal["ascending", "permuted"] = "ascending"
    """Order in which key tiles are added to dQ (atomics have none)."""
    seed: int = 0
    """Of the noise and the permutation."""

    @staticmethod
    def of(config: Config) -> Choices:
        """The typed form of `config`; what it leaves out is the default.

        Raises:
            BadArgument: an unknown name or value.
        """
        for name, value in config.items():
            if name not in _KINDS:
                raise reject("config", name, "no such choice", f"use some of {', '.join(_KINDS)}")
            kind, values = _KINDS[name], _VALUES.get(name)
            if type(value) is not kind or (values is not None and value not in values) or (type(value) is int and value < 0):
                raise reject(f"config.{name}", value, "no such value", f"use {_described(name)}")
        choices: dict[str, Any] = dict(config)
        for name in ("tile_m", "tile_n"):
            if choices.get(name, 1) < 1:
                raise reject(f"config.{name}", choices[name], "a tile has rows", "use 1 or more")
        return Choices(**choices)

    def config(self) -> Config:
        """As a Config, every choice spelled out."""
        return Config({each.name: getattr(self, each.name) for each in fields(self)})


_KINDS: dict[str, type] = {each.name: type(each.default) for each in fields(Choices)}
_VALUES: dict[str, tuple[Any, ...]] = {
    "mma": ("f32", "rz", "tc"),
    "exp": ("separate", "fma", "natural"),
    "delta": ("rounded_o", "fp32_o"),
    "ds_scale": ("before", "after"),
    "division": ("quotient", "reciprocal"),
    "dq_order": ("ascending", "permuted"),
}


def _described(name: str) -> str:
    values = _VALUES.get(name)
    if values is not None:
        return "one of " + ", ".join(map(repr, values))
    return "true or false" if _KINDS[name] is bool else "a whole number, 0 or more"


def drawn_config(rng: random.Random, problem: Problem, *, plain_mma: bool = False) -> Config:
    """A Config by `rng`, equal for equal generators; slow accumulations only where `problem` is small enough for them."""
    pairs = max((n * m for n, m in zip(problem.seqlens_q, problem.seqlens_k, strict=True)), default=0)
    work = problem.heads * pairs * max(problem.dim_qk, problem.dim_v)
    modes = ["f32", "f32"]
    if problem.dtype != "float32" and not plain_mma:
        modes += ["rz"] if work < _RZ_WORK else []
        modes += ["tc", "tc"] if work < _TC_WORK else []
    return Choices(
        tile_m=rng.choice((32, 64, 128)),
        tile_n=rng.choice((32, 64, 128)),
        mma=rng.choice(modes),  # type: ignore[arg-type]
        exp=rng.choice(("separate", "fma", "natural")),
        delta=rng.choice(("rounded_o", "rounded_o", "fp32_o")),
        ds_scale=rng.choice(("before", "after")),
        reversed_tiles=rng.random() < 0.3,
        exp2_noise_bits=rng.choice((0, 22)),
        division=rng.choice(("quotient", "reciprocal")),
        dq_order="permuted",
        seed=rng.randrange(1 << 16),
    ).config()


def sample(problem: Problem) -> tuple[Config, ...]:
    """The default and some two dozen others, the same for equal dtypes and sizes: what strategies draw from."""
    rng = random.Random(f"emulated:{problem.dtype}")
    small = Problem(seqlens_q=(16,), seqlens_k=(16,), dim_qk=16, dim_v=16, dtype=problem.dtype)
    configs = [Choices(tile_m=32, tile_n=32).config()]
    while len(configs) < _SAMPLE:
        config = drawn_config(rng, small, plain_mma=len(configs) > _SAMPLE // 4)
        configs += [config] if config not in configs else []
    return tuple(configs)
