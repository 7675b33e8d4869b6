"""`triton.varlen`: ragged attention with grouped heads, forward and backward, for CUDA and for the interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.contract import Capabilities, Config, Device, Gradients, Inputs, beyond_grid, why_unsupported
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.lowering import Unit
from attnfuzz.kernels.problem import LAYOUTS, OUTPUT_NAMES, Layout, Problem
from attnfuzz.kernels.support.memory import allocating
from attnfuzz.kernels.triton import runtime
from attnfuzz.kernels.triton.machine_code import lower
from attnfuzz.kernels.triton.machine_code.lower import Call
from attnfuzz.kernels.triton.padding import padded, padded_dims

if TYPE_CHECKING:
    import torch

__all__ = ["KERNEL", "BuiltVarlen", "TritonVarlen"]

_CAPABILITIES: Final = Capabilities(
    dtypes=("float16", "bfloat16", "float32"),
    dims=((64, 64), (32, 32), (16, 16), (128, 128), (64, 48), (40, 72), (192, 128), (96, 96), (1, 1)),
    dim_multiple=1,
    dim_max=256,
    groups=None,
    causal=(None, "bottom_right"),
    zero_q=True,
    zero_k=True,
    unequal=True,
    slack=True,
    slack_rows="untouched",
    layouts=True,
    scale_any=True,
    sinks=True,
    devices=("cpu", "cuda"),
    deterministic=OUTPUT_NAMES,
    cuda_graphs=("forward", "backward"),
)


def _config(tile_m: int, tile_n: int, num_warps: int, num_stages: int) -> Config:
    return Config(tile_m=tile_m, tile_n=tile_n, num_warps=num_warps, num_stages=num_stages)


def _half_configs(warps: int) -> tuple[Config, ...]:
    """Tiles for half precision; `warps` of those of 64 x 64."""
    return (
        _config(32, 32, 4, 2),
        _config(64, 64, warps, 2),
        _config(16, 16, 4, 1),
        _config(64, 32, 4, 2),
        _config(32, 64, 4, 1),
    )


_HALF_CONFIGS: Final = (*_half_configs(4), _config(128, 64, 8, 2), _config(64, 128, 8, 2))
# Eight warps: with four, ptxas 12.8 (of Triton 3.6) makes wrong code of the forward for dims (168, 16) and rows apart on an H200;
# without its optimisations, and with CUDA 13's, it is right.
_HALF_CONFIGS_BEYOND_128: Final = _half_configs(8)
_SINGLE_CONFIGS: Final = (_config(32, 32, 4, 1), _config(16, 16, 4, 1))
# 32 x 32 takes 11 to 40 seconds to compile.
_SINGLE_CONFIGS_BEYOND_128: Final = (_config(16, 16, 4, 1),)

# Rows per program of the Delta kernel: no Config changes it.
_PREPROCESS_ROWS: Final = 64
# On CUDA, p = 2^(s - m) must not contract with the product inside s: the largest p would no longer be exactly 1.
_COMPILE_OPTIONS: Final[dict[str, Any]] = {"enable_fp_fusion": False}


def _default_device_code() -> ModuleType:
    return importlib.import_module("attnfuzz.kernels.triton.varlen_device")


class TritonVarlen:
    """The adapter of one device module.

    Args:
        name: the kernel's name.
        device_code: returns the module with `forward`, `preprocess` and `backward`, each also `_strided`; called once, after
            Triton is loaded.
        files: the source files of that module; None: this package's own.
    """

    backend = "triton"
    capabilities = _CAPABILITIES

    def __init__(
        self,
        *,
        name: str = "triton.varlen",
        device_code: Callable[[], ModuleType] | None = None,
        files: tuple[str, ...] | None = None,
    ) -> None:
        here = Path(__file__).parent
        self.name = name
        self.files = files or tuple(str(here / file) for file in ("varlen.py", "varlen_device.py", "padding.py"))
        self._device_code = device_code or _default_device_code
        self._module: ModuleType | None = None
        self._built: dict[tuple[str, Device], BuiltVarlen] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The state for another process, without loaded modules and compiled code."""
        return {**self.__dict__, "_module": None, "_built": {}}

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """Tiles that fit shared memory on sm_90; few for float32, whose exact products compile slowly."""
        small = max(problem.dim_qk, problem.dim_v) <= 128
        if problem.dtype == "float32":
            return _SINGLE_CONFIGS if small else _SINGLE_CONFIGS_BEYOND_128
        return _HALF_CONFIGS if small else _HALF_CONFIGS_BEYOND_128

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
        """Dims, causal, dtype, sinks, Config, whether all tensors are contiguous; the rest are run-time values."""
        strided, sinks = " strided" if _strided(problem) else "", " sinks" if problem.sinks else ""
        form = f"{problem.dim_qk} {problem.dim_v} {problem.causal} {problem.dtype}{strided}{sinks}"
        return f"{self.name} {form} {config.canonical()}"

    def build(self, problem: Problem, config: Config, device: Device) -> BuiltVarlen:
        """Compile all three device functions at once on CUDA; nothing to compile on the CPU.

        Raises:
            BuildError: Triton is missing, or its compiler refused.
            BadArgument: `problem` is not supported, or this process uses Triton in the other mode.
        """
        if reason := self.supports(problem, config, device):
            raise BadArgument(f"problem: {self.name} does not take it: {reason}; ask supports(problem, config, device) first")
        key = (self.compile_key(problem, config), device)
        if key not in self._built:
            built = BuiltVarlen(self._loaded(device), problem, config)
            if device == "cuda":
                lower.compile_now(built.calls())
            self._built[key] = built
        return self._built[key]

    def cannot_lower(self) -> str | None:
        """The package that is missing, or None."""
        return lower.cannot_lower()

    def lower(self, problem: Problem, config: Config, arch: str) -> tuple[Unit, ...]:
        """List everything that `build` compiles on CUDA."""
        return lower.units(BuiltVarlen(self._loaded("cuda"), problem, config).calls(), arch)

    def _loaded(self, device: Device) -> ModuleType:
        runtime.load(device)
        if self._module is None:
            self._module = self._device_code()
        return self._module


class BuiltVarlen:
    """The three device functions with the constants of one compile key.

    Args:
        module: the device module.
        problem: any problem of the compile key.
        config: tile sizes, warps and stages.
    """

    def __init__(self, module: ModuleType, problem: Problem, config: Config) -> None:
        strided = _strided(problem)
        self._forward, self._preprocess, self._backward = (
            getattr(module, f"{name}_strided" if strided else name) for name in ("forward", "preprocess", "backward")
        )
        self._dtype = problem.dtype
        self._sinks = problem.sinks
        self._sink_gradient = module.sink_gradient if problem.sinks else None
        self._tile_m, self._tile_n = config.integer("tile_m"), config.integer("tile_n")
        pad_qk, pad_v = padded_dims(problem, exact=True)
        options = {**_COMPILE_OPTIONS, "num_warps": config.integer("num_warps")}
        self._attention: dict[str, Any] = {
            "DIM_QK": problem.dim_qk,
            "DIM_V": problem.dim_v,
            "PAD_QK": pad_qk,
            "PAD_V": pad_v,
            "CAUSAL": problem.causal == "bottom_right",
            "STRIDED": strided,
            "TILE_M": self._tile_m,
            "TILE_N": self._tile_n,
            "num_stages": config.integer("num_stages"),
            **options,
        }
        self._of_sinks: dict[str, Any] = {"TILE_M": _PREPROCESS_ROWS, **options}
        self._delta: dict[str, Any] = {
            "DIM_V": problem.dim_v,
            "PAD_V": padded(problem.dim_v),
            "STRIDED": strided,
            "TILE_M": _PREPROCESS_ROWS,
            **options,
        }

    def calls(self) -> tuple[Call, ...]:
        """Launches for tensors aligned to 16 bytes as torch's are; any alignment and strides where inputs are strided."""
        import torch

        x, f32, i32 = getattr(torch, self._dtype), torch.float32, torch.int32
        scale, heads, kv_heads, stride, tiles = 1.0, 2, 2, 2, 2
        steps = (stride,) * 9
        forward = (x, x, x, x, f32, f32, i32, i32, scale, heads, kv_heads, stride, *steps[:6])
        backward = (x, x, x, x, f32, f32, x, x, x, i32, i32, scale, heads, kv_heads, stride, tiles, tiles, *steps)
        calls = (
            Call("forward", self._forward, forward, self._attention | {"SINKS": self._sinks}),
            Call("preprocess", self._preprocess, (x, x, f32, stride, heads, *steps[6:]), self._delta),
            Call("backward", self._backward, backward, self._attention),
        )
        if self._sink_gradient is None:
            return calls
        return (*calls, Call("sink_gradient", self._sink_gradient, (f32, f32, f32, f32, stride, heads, stride), self._of_sinks))

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """`o (total_q + slack_q, heads, dim_v)` and `lse (heads, total_q + slack_q)`, slack rows unwritten."""
        import torch

        problem = inputs.problem
        rows = inputs.q.shape[0]
        with allocating() as empty:
            o = empty((rows, problem.heads, problem.dim_v), dtype=inputs.q.dtype, device=inputs.q.device)
            lse = empty((problem.heads, rows), dtype=torch.float32, device=inputs.q.device)
        grid = (_tiles(inputs.max_seqlen_q, self._tile_m), problem.heads, problem.batch)
        if grid[0]:
            self._forward[grid](
                inputs.q,
                inputs.k,
                inputs.v,
                o,
                lse,
                # Without sinks nothing is read there.
                lse if inputs.sinks is None else inputs.sinks,
                inputs.cu_seqlens_q,
                inputs.cu_seqlens_k,
                float(problem.scale),
                problem.heads,
                problem.kv_heads,
                rows,
                *_steps(inputs)[:6],
                SINKS=self._sinks,
                **self._attention,
            )
        return o, lse

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:
        """`dq, dk, dv`, shaped like `q, k, v`, slack rows unwritten, and those of sinks. `lse` is required."""
        import torch

        if lse is None:
            raise BadArgument("lse=None: the backward reads it; pass what forward returned")
        problem = inputs.problem
        rows_total = problem.total_q * problem.heads
        with allocating() as empty:
            dq, dk, dv = (empty(x.shape, dtype=x.dtype, device=x.device) for x in (inputs.q, inputs.k, inputs.v))
            delta = empty((problem.total_q, problem.heads), dtype=torch.float32, device=inputs.q.device)
        if rows_total:
            grid_delta = (_tiles(rows_total, _PREPROCESS_ROWS),)
            self._preprocess[grid_delta](o, inputs.d_o, delta, rows_total, problem.heads, *_steps(inputs)[6:], **self._delta)
        q_tiles, k_tiles = _tiles(inputs.max_seqlen_q, self._tile_m), _tiles(inputs.max_seqlen_k, self._tile_n)
        grid = (k_tiles * problem.kv_heads + q_tiles * problem.heads, problem.batch)
        if grid[0]:
            self._backward[grid](
                inputs.q,
                inputs.k,
                inputs.v,
                inputs.d_o,
                lse,
                delta,
                dq,
                dk,
                dv,
                inputs.cu_seqlens_q,
                inputs.cu_seqlens_k,
                float(problem.scale),
                problem.heads,
                problem.kv_heads,
                inputs.q.shape[0],
                q_tiles,
                k_tiles,
                *_steps(inputs),
                **self._attention,
            )
        if inputs.sinks is None:
            return dq, dk, dv
        return dq, dk, dv, (self._d_sinks(inputs.sinks, lse, delta),)

    def _d_sinks(self, sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """The gradient of sinks, float32 `(heads,)`: the shares of tiles of rows, added in one order."""
        import torch

        assert self._sink_gradient is not None
        total, heads = delta.shape
        tiles = _tiles(total, _PREPROCESS_ROWS)
        shares = torch.empty((tiles, heads), dtype=torch.float32, device=delta.device)
        if tiles:
            self._sink_gradient[(tiles, heads)](sinks, lse, delta, shares, total, heads, lse.shape[1], **self._of_sinks)
        return shares.sum(0)


def _strided(problem: Problem) -> bool:
    """Whether any tensor is other than contiguous."""
    return any(getattr(problem, name) != Layout() for name in LAYOUTS)


def _steps(inputs: Inputs) -> tuple[int, ...]:
    """Strides of tokens and heads in q, k, v, whose last stride is always 1; of tokens, heads and dims in dO."""
    return (*inputs.q.stride()[:2], *inputs.k.stride()[:2], *inputs.v.stride()[:2], *inputs.d_o.stride())


def _tiles(length: int, tile: int) -> int:
    return -(-length // tile)


KERNEL: Final = TritonVarlen()
