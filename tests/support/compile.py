"""Kernels to be compiled only: one function each, with a fault planted by Config or under the same compile key."""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import dataclass, field
from typing import Any

from attnfuzz.kernels.contract import BuildError, Built, Capabilities, Config, Device, why_unsupported
from attnfuzz.kernels.lowering import MachineCode, Unit
from attnfuzz.kernels.problem import Problem

TILE = 64


@dataclass
class Compilable:
    """`plants`: a Config for each; `hidden`: planted whatever the Config says, under its key."""

    name: str
    backend: str = "triton"
    plants: tuple[str, ...] = ("none",)
    hidden: str | None = None
    architectures: tuple[str, ...] | None = None
    missing: str | None = None
    files: tuple[str, ...] = ()
    tilelang: tuple[str, str, str] = ("support.compile_tilelang", "copy", "copied")
    """Module, function and factory of a TileLang kernel."""
    asked: list[str] = field(default_factory=list)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=("float16",), architectures=self.architectures)

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        return tuple(Config(plant=each) for each in self.plants)

    def unavailable(self, device: Device) -> str | None:
        return "it is there to be compiled"

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        return why_unsupported(self.capabilities, problem, device)

    def compile_key(self, problem: Problem, config: Config) -> str:
        return f"{problem.dtype} {config}"

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        raise BuildError("it is there to be compiled")

    def cannot_lower(self) -> str | None:
        return self.missing

    def lower(self, problem: Problem, config: Config, arch: str) -> tuple[Unit, ...]:
        plant = self.hidden or str(config["plant"])
        if self.backend == "planted":
            return () if plant == "nothing" else (Dying(plant),)
        if self.backend == "tilelang":
            from attnfuzz.kernels.tilelang import lower

            module, function, factory = self.tilelang
            return lower.units(importlib.import_module(module), {function: (factory, {"plant": plant})}, arch)
        return triton_units(plant, arch)


def triton_units(plant: str, arch: str) -> tuple[Unit, ...]:
    import torch

    from attnfuzz.kernels.triton import runtime
    from attnfuzz.kernels.triton.machine_code import lower

    runtime.load("cuda")
    half, single = torch.float16, torch.float32
    more: dict[str, Any] = {"shared": {"num_stages": 16}, "spill": {"maxnreg": 64}}.get(plant, {})
    constants = {"PLANT": plant, "TILE": TILE, **more}
    function = importlib.import_module("support.compile_triton").product
    return lower.units((lower.Call("product", function, (half, half, single, 40), constants),), arch)


class Dying:
    """Takes its process along, or all the time there is."""

    function = "dying"

    def __init__(self, plant: str) -> None:
        self._plant = plant

    def identity(self) -> str | None:
        if self._plant == "hang":
            time.sleep(1000)
        if self._plant == "abort":
            os.abort()
        return None

    def compile(self) -> MachineCode:
        raise BuildError("it refuses")
