"""The Kernel around a function with flash-attention's signature."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnfuzz.kernels.adapters.call import Call, Running
from attnfuzz.kernels.contract import BuildError, Built, Capabilities, Config, Device, why_unsupported
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.installed_torch import sees_cuda
from attnfuzz.kernels.support.process_setup import ProcessSetup, enter, why_not_set_up
from attnfuzz.kernels.triton import runtime

if TYPE_CHECKING:
    from attnfuzz.kernels.lowering import Unit

__all__ = ["Adapted", "AdaptedTriton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A Kernel; made by `dense` or `varlen`, which check their arguments."""

    name: str
    backend: str
    files: tuple[str, ...]
    capabilities: Capabilities
    call: Call
    choices: tuple[Config, ...]
    process: ProcessSetup | None = None
    """What each process needs before its first launch."""

    def configs(self, problem: Problem) -> tuple[Config, ...]:  # noqa: ARG002 - the contract's signature
        """The same for every Problem."""
        return self.choices

    def unavailable(self, device: Device) -> str | None:
        """An undeclared device, a missing torch or CUDA device, a missing Triton; or None."""
        if device not in self.capabilities.devices:
            return f"device={device!r}: {self.name} is declared for {', '.join(self.capabilities.devices)} only"
        if self.backend == "triton":
            return runtime.unavailable(device)
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed: pip install torch"
        if device == "cuda" and not sees_cuda():
            return "no CUDA device: torch.cuda.is_available() is False"
        return None

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """Why not, or None."""
        if config not in self.choices:
            return f"config={config!r}: supports {', '.join(map(repr, self.choices))}"
        return why_unsupported(self.capabilities, problem, device) or self.call.why_not(problem)

    def compile_key(self, problem: Problem, config: Config) -> str:
        """The usual dependencies of compiled functions, which compile at their first call."""
        form = (problem.dtype, problem.dim_qk, problem.dim_v, problem.causal is not None)
        return f"{self.name} {form} {config.canonical()}"

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """Compile nothing: functions compile at their first call.

        Raises:
            BadArgument: `problem` is not supported.
            BuildError: `set_up` failed in this process.
        """
        if reason := self.supports(problem, config, device):
            raise BadArgument(f"problem: {self.name} does not take it: {reason}; ask supports(problem, config, device) first")
        enter(self, device)
        if reason := why_not_set_up(self, device):
            raise BuildError(f"its set_up() raised {reason}")
        if self.backend == "triton":
            runtime.load(device)
        return Running(self.call, config, contiguous=not self.capabilities.layouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedTriton(Adapted):
    """A Kernel around a function that launches Triton functions, whose machine code can be compiled (`lowering.Lowers`)."""

    def cannot_lower(self) -> str | None:
        """The package that is missing, or None."""
        from attnfuzz.kernels.triton.machine_code import lower

        return lower.cannot_lower()

    def lower(self, problem: Problem, config: Config, arch: str) -> tuple[Unit, ...]:
        """List what the function launches for `problem`: it is called on CPU tensors, and its launches are captured.

        Raises:
            NotLowered: the function fails without a GPU, or launches no Triton function.
        """
        from attnfuzz.kernels.triton.machine_code import capture, lower

        backward = any(each in self.capabilities.outputs for each in ("dq", "dk", "dv"))
        calls = capture.captured_calls(self.build(problem, config, "cuda"), problem, backward=backward)
        return lower.units(calls, arch)
