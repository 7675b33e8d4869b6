"""Common part of the TileLang kernels under `contract.Kernel`: sources, capabilities, compile key."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from attnfuzz.kernels.contract import Built, Capabilities, Config, Deviations, Device, why_unsupported
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.lowering import Unit
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.tilelang import lower
from attnfuzz.kernels.tilelang.build import Launch, compiled, unavailable

if TYPE_CHECKING:
    import torch

__all__ = ["CAPABILITIES", "SHARED_BYTES_MAX", "DeviceCode", "Function", "TileLangKernel", "not_empty"]

DeviceCode = Callable[[], ModuleType]
"""Returns the module with a kernel's device functions: its own, or an edited copy of it."""
_HERE = Path(__file__).parent
_SHARED = ("subject.py", "cpu.py", "cpu_floats.py", "build.py", "loading.py")

CAPABILITIES = Capabilities(
    dtypes=("float16", "bfloat16", "float32"),
    dims=((64, 64), (32, 32), (128, 128), (64, 48), (48, 80), (96, 96), (192, 128)),
    groups=None,
    causal=(None, "bottom_right"),
    zero_q=True,
    zero_k=True,
    unequal=True,
    slack=True,
    scale_any=True,
    devices=("cpu", "cuda"),
    compiles_on=("cpu", "cuda"),
    # Their Configs need 227 KiB of shared memory, more than sm_80 has.
    architectures=("sm_90a", "sm_100a"),
    deterministic=("o", "lse"),
    deviations=Deviations(tf32_on=("cuda",)),
)
"""Capabilities that all of them have, and those of `tilelang.varlen`."""


SHARED_BYTES_MAX = 226 * 1024
"""Limit of a block on sm_90 (227 KiB), minus the rows of LSE and Delta and the buffers of reductions."""


class Function(NamedTuple):
    """One PrimFunc: the function of the device code that makes it, and its options."""

    factory: str
    options: dict[str, Any]


class TileLangKernel:
    """A kernel whose device code is the file `device` and whose host code is the files `host`, both in this folder.

    A subclass adds `configs`, `functions` and `build_any`. With `device_code`, which returns an edited copy of the device code,
    and another `name` it is another kernel.
    """

    def __init__(
        self, name: str, capabilities: Capabilities, host: tuple[str, ...], device: str, device_code: DeviceCode | None = None
    ) -> None:
        self.name = name
        self.backend = "tilelang"
        self.capabilities = capabilities
        self._host = host
        self._device = device
        self._device_code = device_code
        self._schedule: tuple[int, ...] | None = None
        """How the executor of roles is to run all functions; None: only those that need it run there, as late as allowed."""

    def device_code(self) -> ModuleType:
        """The module with the device functions."""
        if self._device_code is not None:
            return self._device_code()
        return importlib.import_module(f"attnfuzz.kernels.tilelang.{self._device}")

    @property
    def files(self) -> tuple[str, ...]:
        """The sources of this kernel, absolute paths."""
        own = str(_HERE / f"{self._device}.py")
        edited = None if self._device_code is None else self._device_code().__file__
        return (edited or own, *(str(_HERE / name) for name in (*self._host, *_SHARED)))

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """The Configs that may be drawn for `problem`, the default first."""
        raise NotImplementedError

    def functions(self, problem: Problem, config: Config, device: Device) -> dict[str, Function]:
        """The functions that `build` compiles."""
        raise NotImplementedError

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """Compile all functions for `problem`'s compile key.

        Raises:
            BadArgument: `problem` or `config` is not supported.
            BuildError: the compiler refused.
        """
        if reason := self.supports(problem, config, device):
            raise BadArgument(f"problem: {self.name} does not take it: {reason}; ask supports(problem, config, device) first")
        return self.build_any(problem, config, device)

    def build_any(self, problem: Problem, config: Config, device: Device = "cuda") -> Built:
        """As `build`, for any Config, also one that `configs` does not return: to time candidates."""
        raise NotImplementedError

    def compiled(self, problem: Problem, config: Config, device: Device) -> dict[str, Launch]:
        """Compile `functions`.

        Raises:
            BuildError: the compiler refused.
        """
        schedule = self._schedule
        launches = {
            name: compiled(self.module_of(name), each.factory, each.options, device, by_roles=schedule is not None)
            for name, each in self.functions(problem, config, device).items()
        }
        if schedule is None:
            return launches
        return {name: functools.partial(launch, schedule=schedule) for name, launch in launches.items()}

    def protocol(self, problem: Problem, config: Config, schedule: tuple[int, ...]) -> Built:
        """As `build` for the CPU, but every function runs as its warp roles under `schedule`, with the protocol checked.

        Raises:
            BadArgument: `problem` or `config` is not supported.
            BuildError: TileLang's passes refused, or a function uses what the executor of roles does not know.
        """
        by_roles = copy.copy(self)
        by_roles._schedule = schedule
        return by_roles.build(problem, config, "cpu")

    def module_of(self, function: str) -> ModuleType:  # noqa: ARG002 - that of a kernel with several files
        """The module that makes one of `functions`, for a kernel with device code in several files."""
        return self.device_code()

    def unavailable(self, device: Device) -> str | None:
        """The package, compiler or device that is missing, or None."""
        return unavailable(device)

    def cannot_lower(self) -> str | None:
        """The package or compiler that is missing, or None."""
        return lower.cannot_lower()

    def lower(self, problem: Problem, config: Config, arch: str) -> tuple[Unit, ...]:
        """Everything that `build` compiles for CUDA."""
        functions = self.functions(problem, config, "cuda").items()
        return tuple(unit for name, each in functions for unit in lower.units(self.module_of(name), {name: each}, arch))

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """The reason why not, or None."""
        if reason := why_unsupported(self.capabilities, problem, device):
            return reason
        if config not in self.configs(problem):
            return f"config={config}: supports {'; '.join(map(str, self.configs(problem)))}"
        return None

    def compile_key(self, problem: Problem, config: Config) -> str:
        """Dims, whether masked, dtype, Config; not lengths, batch, heads, groups, alignment, scale, strides."""
        return f"dim_qk={problem.dim_qk} dim_v={problem.dim_v} masked={problem.causal is not None} dtype={problem.dtype} {config}"


def not_empty(x: torch.Tensor) -> torch.Tensor:
    """`x`, or for a tensor without rows one row of zeros, which no sequence reads: TileLang takes no empty tensors."""
    return x if x.shape[0] else x.new_zeros((1, *x.shape[1:]))
