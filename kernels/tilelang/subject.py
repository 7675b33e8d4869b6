"""What the TileLang kernels have in common under `contract.Kernel`: their sources, what they support, the key of a compile."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from attnfuzz.kernels.contract import Built, Capabilities, Config, Deviations, Device, why_unsupported
from attnfuzz.kernels.lowering import Unit
from attnfuzz.kernels.problem import BadArgument, Problem
from attnfuzz.kernels.tilelang import lower
from attnfuzz.kernels.tilelang.build import Launch, compiled, unavailable

if TYPE_CHECKING:
    import torch

__all__ = ["CAPABILITIES", "SHARED_BYTES_MAX", "DeviceCode", "Function", "TileLangKernel", "not_empty"]

DeviceCode = Callable[[], ModuleType]
"""Gives the module with a kernel's device functions: its own, or an edited copy of it."""
_HERE = Path(__file__).parent
_SHARED = ("subject.py", "cpu.py", "build.py")

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
    # Their Configs are made for 227 KiB of shared memory, which sm_80 has not.
    architectures=("sm_90a", "sm_100a"),
    deterministic=("o", "lse"),
    deviations=Deviations(tf32_on=("cuda",)),
)
"""What all of them can do, and `tilelang.varlen` does."""


SHARED_BYTES_MAX = 226 * 1024
"""What a block can have on sm_90 (227 KiB), less the rows of LSE and Delta and what reductions use."""


class Function(NamedTuple):
    """One PrimFunc: the function of the device code that makes it, and with what."""

    factory: str
    options: dict[str, Any]


class TileLangKernel:
    """A kernel whose device code is `device` (a file beside this one) and whose host code is `host`.

    A subclass adds `configs`, `functions` and `build_any`. An edited copy of the device code, given by `device_code` under
    another `name`, is a kernel of its own.
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
        """Everything that `build` compiles."""
        raise NotImplementedError

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """All functions compiled for `problem`'s compile key.

        Raises:
            BadArgument: `problem` or `config` is not supported.
            BuildError: the compiler refused.
        """
        if reason := self.supports(problem, config, device):
            raise BadArgument(f"problem: {self.name} does not take it: {reason}; ask supports(problem, config, device) first")
        return self.build_any(problem, config, device)

    def build_any(self, problem: Problem, config: Config, device: Device = "cuda") -> Built:
        """As `build`, of a Config that `configs` need not have: to time what might become one."""
        raise NotImplementedError

    def compiled(self, problem: Problem, config: Config, device: Device) -> dict[str, Launch]:
        """`functions`, compiled.

        Raises:
            BuildError: the compiler refused.
        """
        module = self.device_code()
        return {
            name: compiled(module, each.factory, each.options, device)
            for name, each in self.functions(problem, config, device).items()
        }

    def unavailable(self, device: Device) -> str | None:
        """The package, compiler or device that is missing, or None."""
        return unavailable(device)

    def cannot_lower(self) -> str | None:
        """The package or compiler that is missing, or None."""
        return lower.cannot_lower()

    def lower(self, problem: Problem, config: Config, arch: str) -> tuple[Unit, ...]:
        """Everything that `build` compiles for CUDA."""
        return lower.units(self.device_code(), self.functions(problem, config, "cuda"), arch)

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """The reason why not, or None."""
        if reason := why_unsupported(self.capabilities, problem, device):
            return reason
        if config not in self.configs(problem):
            return f"config={config}: supports {'; '.join(map(str, self.configs(problem)))}"
        return None

    def compile_key(self, problem: Problem, config: Config) -> str:
        """Dims, mask or none, dtype and Config; lengths, batch, heads, groups, alignment, scale and strides are a call's own."""
        return f"dim_qk={problem.dim_qk} dim_v={problem.dim_v} masked={problem.causal is not None} dtype={problem.dtype} {config}"


def not_empty(x: torch.Tensor) -> torch.Tensor:
    """`x`, or one row of zeros, which no sequence reaches, for a tensor without rows: TileLang takes no empty tensor."""
    return x if x.shape[0] else x.new_zeros((1, *x.shape[1:]))
