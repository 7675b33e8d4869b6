"""`tilelang.sm100.ss`, `tilelang.sm100.ts`, `tilelang.sm100.wasp`: dense attention for Blackwell (sm_100a), written in TileLang.

A variant is where the products' operands are and who issues them:

    ss    forward and backward take both operands of every product from shared memory
    ts    forward and backward take P and dS from tensor memory where they are left operands
    wasp  the forward divides its warps into roles (softmax, copies, products); the backward is that of ts

All mathematics is in `sm100_forward_device` and `sm100_backward_device`; this module has the choice of tiles, allocation,
launches and the kernels' declarations. No Blackwell GPU was at hand: `Sm100.proof` says what has been shown without one.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from attnfuzz.kernels.contract import BuildError, Built, Config, Device
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.installed_torch import gpu_capability
from attnfuzz.kernels.tilelang.build import Launch
from attnfuzz.kernels.tilelang.dense import DenseBuilt
from attnfuzz.kernels.tilelang.hopper import unfit
from attnfuzz.kernels.tilelang.sm100_tiles import Operands, fits
from attnfuzz.kernels.tilelang.subject import CAPABILITIES, DeviceCode, Function, TileLangKernel

if TYPE_CHECKING:
    import torch

__all__ = ["CONFIGS", "SS", "TS", "VARIANTS", "WASP", "Sm100", "Variant"]

_HERE = Path(__file__).parent
_BLACKWELL = (10, 0)
_NAMES = ("tile_m", "tile_n")


class Variant(NamedTuple):
    """The device functions of one variant."""

    forward: str
    """The factory in `sm100_forward_device`."""
    operands: Operands
    """The backward: `backward_ss` or `backward_ts` of `sm100_backward_device`."""
    back_threads: int
    instead: str | None
    """The forward that takes the place of one that cannot be built for a GPU."""


VARIANTS = {
    "ss": Variant("forward_ss", "ss", 128, None),
    "ts": Variant("forward_ts", "ts", 256, None),
    "wasp": Variant("forward_wasp", "ts", 256, "forward_ts"),
}


def _config(forward: tuple[int, int], backward: tuple[int, int]) -> Config:
    chosen = dict(zip(_NAMES, forward, strict=True))
    return Config(chosen | {f"back_{name}": value for name, value in zip(_NAMES, backward, strict=True)})


CONFIGS = (
    _config((128, 128), (64, 128)),
    _config((128, 64), (64, 128)),
    _config((128, 128), (128, 128)),
    _config((128, 64), (128, 128)),
    _config((128, 64), (32, 128)),
    _config((128, 128), (64, 64)),
)
"""Tiles (query rows x key rows) of forward and backward, the default first."""
_DIMS = ((64, 64), (32, 32), (128, 128), (64, 48), (128, 64))
_DIMS_OF_SHARED = ((48, 80), (192, 128))
"""Dims whose backward fits tensor memory only without P and dS in it. 96/96 does not fit either way."""


class Sm100(TileLangKernel):
    """A `contract.Kernel`. `forward_code` and `backward_code` return edited copies of the device code.

    Raises:
        BadArgument: (a ValueError) `variant` is none of VARIANTS.
    """

    any_strides = True
    """Tensors are read by their own strides, independent of the Problem's layouts."""
    proof = "compiled for sm_100a, run on the CPU, its protocol checked, not run on Blackwell hardware"
    """What has been shown, as the hardware was not at hand."""

    def __init__(
        self, name: str, variant: str, forward_code: DeviceCode | None = None, backward_code: DeviceCode | None = None
    ) -> None:
        if variant not in VARIANTS:
            raise reject("variant", variant, "no forward of sm100 has that name", f"give one of {', '.join(VARIANTS)}")
        can = replace(
            CAPABILITIES,
            packings=("dense",),
            dtypes=("float16", "bfloat16"),
            dims=_DIMS + (_DIMS_OF_SHARED if VARIANTS[variant].operands == "ss" else ()),
            layouts=True,
            architectures=("sm_100a",),
        )
        super().__init__(name, can, ("sm100.py", "sm100_tiles.py", "dense.py", "hopper.py"), "sm100_forward_device", forward_code)
        self.variant = variant
        self._backward_code = backward_code

    def module_of(self, function: str) -> ModuleType:
        """The module with the forward, or that with the rest."""
        if function == "forward":
            return self.device_code()
        if self._backward_code is not None:
            return self._backward_code()
        return importlib.import_module("attnfuzz.kernels.tilelang.sm100_backward_device")

    @property
    def files(self) -> tuple[str, ...]:
        """The sources of this kernel, absolute paths."""
        edited = None if self._backward_code is None else self._backward_code().__file__
        return (*super().files, edited or str(_HERE / "sm100_backward_device.py"))

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """Tiles (query rows x key rows) of forward and backward that fit tensor memory, the default first."""
        return _fitting(problem.dim_qk, problem.dim_v, VARIANTS[self.variant].operands)

    def unavailable(self, device: Device) -> str | None:
        """The package, compiler or device that is missing, a GPU other than Blackwell's sm_100; or None."""
        missing = super().unavailable(device)
        if device != "cuda":
            return missing
        if missing is not None:
            return f"needs an sm_100 GPU: {missing}"
        major, minor = gpu_capability()
        return None if (major, minor) == _BLACKWELL else f"needs an sm_100 GPU, and this one is sm_{major}{minor}"

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """The reason why not, or None."""
        return super().supports(problem, config, device) or unfit(problem, device)

    def compile_key(self, problem: Problem, config: Config) -> str:
        """Dims, whether masked, dtype, Config, whether several query heads share a key/value head."""
        return f"{super().compile_key(problem, config)} grouped={problem.groups > 1}"

    def functions(self, problem: Problem, config: Config, device: Device) -> dict[str, Function]:
        """forward, preprocess, backward, postprocess."""
        of = VARIANTS[self.variant]
        of_forward, of_backward = ({name: config.integer(part + name) for name in _NAMES} for part in ("", "back_"))
        # TileLang's C target has no strides.
        common = {"dtype": problem.dtype, "strided": device == "cuda"}
        masked = {**common, "dim_qk": problem.dim_qk, "dim_v": problem.dim_v, "causal": problem.causal is not None}
        how = {"threads": of.back_threads, "grouped": problem.groups > 1}
        return {
            "forward": Function(of.forward, {**masked, **of_forward}),
            "preprocess": Function("preprocess", {**common, "dim_v": problem.dim_v}),
            "backward": Function(f"backward_{of.operands}", {**masked, **of_backward, **how}),
            "postprocess": Function("postprocess", {**common, "dim": problem.dim_qk}),
        }

    def build_any(self, problem: Problem, config: Config, device: Device = "cuda") -> Built:
        """Compile the four functions for `problem`'s compile key.

        On a GPU a forward with roles that cannot be compiled is replaced by that of ts, with a warning that names both. On the
        CPU it is an error: what ran there is to be what it is called.

        Raises:
            BuildError: the compiler refused.
        """
        try:
            launches = self.compiled(problem, config, device)
        except BuildError as error:
            instead = VARIANTS[self.variant].instead
            if instead is None or device == "cpu":
                raise
            other = Sm100(self.name, "ts", self._device_code, self._backward_code)
            launches = other.compiled(problem, config, device)
            reason = str(error).splitlines()[0]
            text = f"{self.name}: {VARIANTS[self.variant].forward} cannot be built ({reason}); {instead} runs instead"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return _Built(**launches, grouped=problem.groups > 1)


@functools.cache
def _fitting(dim_qk: int, dim_v: int, operands: Operands) -> tuple[Config, ...]:
    return tuple(each for each in CONFIGS if _fits(dim_qk, dim_v, operands, each))


def _fits(dim_qk: int, dim_v: int, operands: Operands, config: Config) -> bool:
    """Whether the backward has products of these shapes; the forward takes all of them, and less of either memory."""
    tile_m, tile_n = (config.integer(f"back_{name}") for name in _NAMES)
    return fits(operands, tile_m=tile_m, tile_n=tile_n, dim_qk=dim_qk, dim_v=dim_v)


class _Built(DenseBuilt):
    """The compiled functions, run on one Problem's tensors; dQ is scaled by a kernel of its own."""

    def __init__(self, *, forward: Launch, preprocess: Launch, backward: Launch, postprocess: Launch, grouped: bool) -> None:
        reduction: Any = "atomic" if grouped else "none"
        super().__init__(forward=forward, preprocess=preprocess, backward=backward, reduction=reduction)
        self._postprocess = postprocess

    def _scaled(self, dq: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        import torch

        out = torch.empty_like(dq, dtype=dtype)
        self._postprocess(dq, scale, out)
        return out


SS = Sm100("tilelang.sm100.ss", "ss")
TS = Sm100("tilelang.sm100.ts", "ts")
WASP = Sm100("tilelang.sm100.wasp", "wasp")
