"""`triton.flex`: dense block-sparse attention with a score_mod and a mask_mod of the Problem's own, forward and backward.

The modifiers' trees are printed as Triton source (`printer`) and compiled into the kernel. The blocks to visit, and those of
them without a mask, are computed in torch before each call (`blockmask`), or cached where no captured tensor decides.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Config, Deviations, Device, beyond_grid, why_unsupported
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.lowering import Unit
from attnfuzz.kernels.problem import OUTPUT_NAMES, Problem
from attnfuzz.kernels.triton import runtime
from attnfuzz.kernels.triton.assembler import assembler
from attnfuzz.kernels.triton.flex_built import BuiltFlex, banded, even, strided
from attnfuzz.kernels.triton.flex_configs import configs_for
from attnfuzz.kernels.triton.machine_code import lower

__all__ = ["KERNEL", "PRESCALED", "TF32", "BuiltFlex", "TritonFlex"]

_CAPABILITIES: Final = Capabilities(
    packings=("dense",),
    dtypes=("float16", "bfloat16", "float32"),
    dims=((64, 64), (32, 32), (16, 16), (128, 128), (64, 48), (40, 72), (192, 128), (96, 96), (1, 1)),
    dim_multiple=1,
    dim_max=256,
    groups=None,
    causal=(None, "bottom_right", "top_left"),
    window=True,
    softcap=True,
    score_mod=True,
    mask_mod=True,
    captured=True,
    captured_gradients=True,
    zero_q=True,
    zero_k=True,
    unequal=True,
    slack=True,
    layouts=True,
    scale_any=True,
    devices=("cpu", "cuda"),
    dlse=True,
    deterministic=OUTPUT_NAMES,
)
_PRESCALED: Final = replace(
    _CAPABILITIES,
    dtypes=("float16", "bfloat16"),
    softcap=False,
    score_mod=False,
    captured_gradients=False,
    deviations=Deviations(prescaled_q=True),
)
_PRESCALED_PTXAS: Final = (12, 9)
"""The oldest ptxas for the prescaled kernel: 12.8 builds descriptors in its backward from registers that hold no address."""
_HOPPER: Final = 9
"""Major compute capability of the GPUs whose products use these descriptors."""
_TF32: Final = replace(_CAPABILITIES, dtypes=("float32",), devices=("cuda",), deviations=Deviations(tf32_on=("cuda",)))


def _default_device_code() -> ModuleType:
    return importlib.import_module("attnfuzz.kernels.triton.flex_device")


def _default_masks() -> ModuleType:
    return importlib.import_module("attnfuzz.kernels.triton.blockmask")


class TritonFlex:
    """The adapter of one device module.

    Args:
        name: the kernel's name.
        capabilities: what the kernel declares; a declared `prescaled_q` or `tf32_on` also switches it on.
        device_code: returns the module with `forward`, `merge`, `preprocess` and `backward`, all except `merge` also as
            `_strided`; called once, after Triton is loaded.
        masks: returns the module with `band_of` and `block_mask`; called once.
        files: the source files of these modules; None: this package's own.
    """

    backend = "triton"

    def __init__(
        self,
        *,
        name: str = "triton.flex",
        capabilities: Capabilities = _CAPABILITIES,
        device_code: Callable[[], ModuleType] | None = None,
        masks: Callable[[], ModuleType] | None = None,
        files: tuple[str, ...] | None = None,
    ) -> None:
        here = Path(__file__).parent
        own = ("flex.py", "flex_built.py", "flex_device.py", "flex_configs.py", "padding.py", "printer.py", "blockmask.py")
        self.name, self.capabilities = name, capabilities
        self.files = files or (*(str(here / file) for file in own), str(here.parent / "expressions" / "folding.py"))
        self._device_code, self._masks = device_code or _default_device_code, masks or _default_masks
        self._modules: tuple[ModuleType, ModuleType] | None = None
        self._built: dict[tuple[str, Device], BuiltFlex] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The state for another process, without loaded modules and compiled code."""
        return {**self.__dict__, "_modules": None, "_built": {}}

    @property
    def prescaled(self) -> bool:
        """Whether q is scaled and rounded before the first product."""
        return self.capabilities.deviations.prescaled_q

    @property
    def precision(self) -> str:
        """Precision of float32 products: "ieee" or "tf32"."""
        return "tf32" if self.capabilities.deviations.tf32_on else "ieee"

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """Tiles that fit shared memory on sm_90; few for exact float32, whose products compile slowly."""
        return configs_for(problem, tf32=self.precision == "tf32", prescaled=self.prescaled)

    def unavailable(self, device: Device) -> str | None:
        """A missing package or CUDA device, an assembler that makes wrong code, or None."""
        return runtime.unavailable(device) or (self._miscompiled() if device == "cuda" else None)

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """Why not, or None."""
        reason = why_unsupported(self.capabilities, problem, device)
        if reason is None and config not in self.configs(problem):
            reason = f"config={config!r}: not among configs(problem)"
        return reason or beyond_grid(problem, device)

    def compile_key(self, problem: Problem, config: Config) -> str:
        """Everything that is compiled in.

        Dims, dtype, modifiers, whether there is a causal mask or window, whether both lengths are whole blocks, whether all
        tensors are contiguous, and the Config; lengths, widths of windows, heads, strides and scale are run-time values.
        """
        p = problem
        flags = f"{'banded ' * banded(p)}{'strided ' * strided(p)}{'whole' if even(p, config) else 'ragged'}"
        modifiers = f"{p.softcap} {p.score_mod} {p.mask_mod}"
        return f"{self.name} {p.dim_qk} {p.dim_v} {p.dtype} {flags} {modifiers} {config.canonical()}"

    def build(self, problem: Problem, config: Config, device: Device) -> BuiltFlex:
        """Print the modifiers, and compile all device functions at once on CUDA; nothing to compile on the CPU.

        Raises:
            BuildError: Triton is missing, or its compiler refused.
            BadArgument: `problem` is not supported, or this process uses Triton in the other mode.
        """
        if reason := self.supports(problem, config, device):
            raise BadArgument(f"problem: {self.name} does not take it: {reason}; ask supports(problem, config, device) first")
        return self.build_any(problem, config, device)

    def build_any(self, problem: Problem, config: Config, device: Device = "cuda") -> BuiltFlex:
        """As `build`, for any Config, also one that `configs` does not return: to time candidates.

        Raises:
            BuildError: Triton is missing, or its compiler refused.
            BadArgument: this process uses Triton in the other mode, or a tile does not divide its block.
        """
        block = config.integer("block")
        for name in ("tile_m", "tile_n", "dq_tile_m", "dq_tile_n", "dkv_tile_m", "dkv_tile_n"):
            if block % config.integer(name):
                reason = f"it does not divide a block of {block}"
                raise reject(name, config.integer(name), reason, "give a divisor")
        key = (self.compile_key(problem, config), device)
        if key not in self._built:
            built = self._instance(problem, config, device)
            if device == "cuda":
                lower.compile_now(built.calls())
            self._built[key] = built
        return self._built[key]

    def cannot_lower(self) -> str | None:
        """The package that is missing, or None."""
        return lower.cannot_lower()

    def lower(self, problem: Problem, config: Config, arch: str) -> tuple[Unit, ...]:
        """List everything that `build` compiles on CUDA."""
        return lower.units(self._instance(problem, config, "cuda").calls(), arch)

    def _miscompiled(self) -> str | None:
        """Why this machine's ptxas must not assemble the kernel for its GPU, or None."""
        if not self.prescaled:
            return None
        capability, version = assembler() or (0, None)
        if capability and (capability // 10 != _HOPPER or (version and version >= _PRESCALED_PTXAS)):
            return None
        if version is None:
            return "some versions of ptxas make wrong code of it, and the version of Triton's is unknown: use triton.flex"
        here, needed = "{}.{}".format(*version), "{}.{}".format(*_PRESCALED_PTXAS)
        variables = "TRITON_PTXAS_PATH (or TRITON_PTXAS_BLACKWELL_PATH, where this Triton reads that)"
        remedy = f"set {variables} to ptxas {needed} or newer (Triton's ptxas-blackwell is), or use triton.flex"
        return f"ptxas {here} makes wrong code of it: {remedy}"

    def _instance(self, problem: Problem, config: Config, device: Device) -> BuiltFlex:
        runtime.load(device)
        if self._modules is None:
            self._modules = (self._device_code(), self._masks())
        return BuiltFlex(*self._modules, problem, config, prescaled=self.prescaled, precision=self.precision)


KERNEL: Final = TritonFlex()
PRESCALED: Final = TritonFlex(name="triton.flex.prescaled", capabilities=_PRESCALED)
TF32: Final = TritonFlex(name="triton.flex.tf32", capabilities=_TF32)
