"""`triton.paged`: attention over a paged key/value cache, prefill and decoding, forward only; for CUDA and the interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.contract import Capabilities, Config, Device, Gradients, Inputs, beyond_grid, why_unsupported
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.lowering import Unit
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.memory import allocating
from attnfuzz.kernels.triton import runtime
from attnfuzz.kernels.triton.machine_code import lower
from attnfuzz.kernels.triton.machine_code.lower import Call
from attnfuzz.kernels.triton.padding import padded_dims

if TYPE_CHECKING:
    import torch

__all__ = ["KERNEL", "BuiltPaged", "TritonPaged"]

_CAPABILITIES: Final = Capabilities(
    dtypes=("float16", "bfloat16", "float32"),
    dims=((64, 64), (32, 32), (16, 16), (128, 128), (40, 72), (192, 128)),
    groups=None,
    causal=(None, "bottom_right"),
    zero_q=True,
    zero_k=True,
    unequal=True,
    slack=True,
    slack_rows="untouched",
    scale_any=True,
    page_sizes=(16, 64, 1, 24, 128),
    devices=("cpu", "cuda"),
    outputs=("o", "lse"),
    deterministic=("o", "lse"),
)
_CONFIGS: Final = tuple(
    Config(tile_m=tile_m, tile_n=tile_n, num_warps=4, num_stages=1) for tile_m, tile_n in ((16, 32), (16, 16), (32, 64))
)
# As in varlen.py: the largest p must be exactly 1.
_COMPILE_OPTIONS: Final[dict[str, Any]] = {"enable_fp_fusion": False}


def _default_device_code() -> ModuleType:
    return importlib.import_module("attnfuzz.kernels.triton.paged_device")


class TritonPaged:
    """The adapter of one device module.

    Args:
        name: the kernel's name.
        device_code: returns the module with `forward`; called once, after Triton is loaded.
        files: the source files of that module; None: this package's own.
    """

    backend = "triton"
    capabilities = _CAPABILITIES

    def __init__(
        self,
        *,
        name: str = "triton.paged",
        device_code: Callable[[], ModuleType] | None = None,
        files: tuple[str, ...] | None = None,
    ) -> None:
        here = Path(__file__).parent
        self.name = name
        self.files = files or tuple(
            str(here / file) for file in ("paged.py", "paged_device.py", "varlen_device.py", "padding.py")
        )
        self._device_code = device_code or _default_device_code
        self._module: ModuleType | None = None
        self._built: dict[tuple[str, Device], BuiltPaged] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The state for another process, without loaded modules and compiled code."""
        return {**self.__dict__, "_module": None, "_built": {}}

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """Tiles; the smallest alone for float32, whose exact products compile slowly."""
        return _CONFIGS[1:2] if problem.dtype == "float32" else _CONFIGS

    def unavailable(self, device: Device) -> str | None:
        """A missing package or CUDA device, or None."""
        return runtime.unavailable(device)

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """Why not, or None."""
        reason = why_unsupported(self.capabilities, problem, device)
        if reason is None and config not in self.configs(problem):
            reason = f"config={config!r}: not among configs(problem)"
        return reason or beyond_grid(problem, device)

    def compile_key(self, problem: Problem, config: Config) -> str:
        """Dims, causal, dtype, page size and Config; the rest are run-time values."""
        form = f"{problem.dim_qk} {problem.dim_v} {problem.causal} {problem.dtype} {problem.page_size}"
        return f"{self.name} {form} {config.canonical()}"

    def build(self, problem: Problem, config: Config, device: Device) -> BuiltPaged:
        """Compile on CUDA; nothing to compile on the CPU.

        Raises:
            BuildError: Triton is missing, or its compiler refused.
            BadArgument: `problem` is not supported, or this process uses Triton in the other mode.
        """
        if reason := self.supports(problem, config, device):
            raise BadArgument(f"problem: {self.name} does not take it: {reason}; ask supports(problem, config, device) first")
        key = (self.compile_key(problem, config), device)
        if key not in self._built:
            built = BuiltPaged(self._loaded(device), problem, config)
            if device == "cuda":
                lower.compile_now(built.calls())
            self._built[key] = built
        return self._built[key]

    def cannot_lower(self) -> str | None:
        """The package that is missing, or None."""
        return lower.cannot_lower()

    def lower(self, problem: Problem, config: Config, arch: str) -> tuple[Unit, ...]:
        """List everything that `build` compiles on CUDA."""
        return lower.units(BuiltPaged(self._loaded("cuda"), problem, config).calls(), arch)

    def _loaded(self, device: Device) -> ModuleType:
        runtime.load(device)
        if self._module is None:
            self._module = self._device_code()
        return self._module


class BuiltPaged:
    """The device function with the constants of one compile key.

    Args:
        module: the device module.
        problem: any problem of the compile key.
        config: tile sizes, warps and stages.
    """

    def __init__(self, module: ModuleType, problem: Problem, config: Config) -> None:
        self._forward = module.forward
        self._dtype = problem.dtype
        self._tile_m = config.integer("tile_m")
        pad_qk, pad_v = padded_dims(problem, exact=True)
        self._constants: dict[str, Any] = {
            "DIM_QK": problem.dim_qk,
            "DIM_V": problem.dim_v,
            "PAD_QK": pad_qk,
            "PAD_V": pad_v,
            "CAUSAL": problem.causal == "bottom_right",
            "PAGE": problem.page_size,
            "TILE_M": self._tile_m,
            "TILE_N": config.integer("tile_n"),
            "num_warps": config.integer("num_warps"),
            "num_stages": config.integer("num_stages"),
            **_COMPILE_OPTIONS,
        }

    def calls(self) -> tuple[Call, ...]:
        """The launch for tensors aligned to 16 bytes as torch's are."""
        import torch

        x, f32, i32 = getattr(torch, self._dtype), torch.float32, torch.int32
        return (Call("forward", self._forward, (x, x, x, x, f32, i32, i32, i32, 1.0, 2, 2, 2, 2), self._constants),)

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """`o (total_q + slack_q, heads, dim_v)` and `lse (heads, total_q + slack_q)`, slack rows unwritten."""
        import torch

        problem, table = inputs.problem, inputs.page_table
        if table is None:
            raise BadArgument("page_table=None: keys and values are read from pages; give a problem with a page_size")
        rows, device = inputs.q.shape[0], inputs.q.device
        with allocating() as empty:
            o = empty((rows, problem.heads, problem.dim_v), dtype=inputs.q.dtype, device=device)
            lse = empty((problem.heads, rows), dtype=torch.float32, device=device)
        grid = (-(-inputs.max_seqlen_q // self._tile_m), problem.heads, problem.batch)
        if grid[0]:
            self._forward[grid](
                inputs.q,
                inputs.k_pages,
                inputs.v_pages,
                o,
                lse,
                inputs.cu_seqlens_q,
                inputs.seqlens_k,
                table,
                float(problem.scale),
                problem.heads,
                problem.kv_heads,
                rows,
                table.shape[1],
                **self._constants,
            )
        return o, lse

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:  # noqa: ARG002
        """Raise: there is none."""
        raise BadArgument("backward: a paged cache has no gradient; ask for o and lse")


KERNEL: Final = TritonPaged()
