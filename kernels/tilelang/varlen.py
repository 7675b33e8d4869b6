"""`tilelang.varlen`: ragged GQA attention, forward and backward, written in TileLang.

All mathematics is in `varlen_device`; here are only allocation, launches and what the kernel declares of itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attnfuzz.kernels.contract import Built, Capabilities, Config, Deviations, Device, Inputs, why_unsupported
from attnfuzz.kernels.problem import BadArgument, Problem
from attnfuzz.kernels.tilelang.build import Launch, compiled, unavailable

if TYPE_CHECKING:
    import torch

__all__ = ["KERNEL", "TileLangVarlen"]

_HERE = Path(__file__).parent
_DEVICE_MODULE = "attnfuzz.kernels.tilelang.varlen_device"

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
    deterministic=("o", "lse"),
    deviations=Deviations(tf32_on=("cuda",)),
)

SHARED_BYTES_MAX = 226 * 1024
"""What a block can have on sm_90 (227 KiB), less the rows of LSE and Delta and what reductions use."""

CONFIGS = (
    Config(tile_m=64, tile_n=64, threads=128, stages=1),
    Config(tile_m=64, tile_n=32, threads=128, stages=1),
    Config(tile_m=32, tile_n=64, threads=128, stages=1),
    Config(tile_m=128, tile_n=64, threads=256, stages=1),
    Config(tile_m=32, tile_n=32, threads=64, stages=1),
)


def _default_device_code() -> ModuleType:
    return importlib.import_module(_DEVICE_MODULE)


class TileLangVarlen:
    """Fulfils `contract.Kernel`. `device_code` gives the module with `forward`, `preprocess`, `backward`.

    An edited copy of `varlen_device`, given by `device_code` under another `name`, is a kernel of its own.
    """

    def __init__(self, name: str = "tilelang.varlen", device_code: Callable[[], ModuleType] = _default_device_code) -> None:
        self.name = name
        self.backend = "tilelang"
        self.capabilities = CAPABILITIES
        self._device_code = device_code

    @property
    def files(self) -> tuple[str, ...]:
        """The sources of this kernel, absolute paths."""
        device_file = str(_HERE / "varlen_device.py")
        if self._device_code is not _default_device_code:
            device_file = self._device_code().__file__ or device_file
        return (device_file, *(str(_HERE / name) for name in ("varlen.py", "cpu.py", "build.py")))

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """Tiles (tile_m query rows, tile_n key rows), threads and pipeline stages, the default first."""
        return tuple(config for config in CONFIGS if _shared_bytes(problem, config) <= SHARED_BYTES_MAX)

    def unavailable(self, device: Device) -> str | None:
        """The package, compiler or device that is missing, or None."""
        return unavailable(device)

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """The reason why not, or None."""
        if reason := why_unsupported(self.capabilities, problem, device):
            return reason
        if config not in self.configs(problem):
            return f"config={config}: supports {'; '.join(map(str, self.configs(problem)))}"
        return None

    def compile_key(self, problem: Problem, config: Config) -> str:
        """Dims, mask, dtype and Config; lengths, totals, batch, heads, groups and scale are arguments at run time."""
        return f"dim_qk={problem.dim_qk} dim_v={problem.dim_v} causal={problem.causal} dtype={problem.dtype} {config}"

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """The three functions compiled for `problem`'s compile key.

        Raises:
            BuildError: the compiler refused.
        """
        module = self._device_code()
        tiles: dict[str, Any] = {name: config.integer(name) for name in ("tile_m", "tile_n", "threads", "stages")}
        options = {
            "dim_qk": problem.dim_qk,
            "dim_v": problem.dim_v,
            "causal": problem.causal is not None,
            "dtype": problem.dtype,
            **tiles,
        }
        rows = {name: options[name] for name in ("dim_v", "dtype", "tile_m", "threads")}
        return _Built(
            forward=compiled(module, "forward", options, device),
            preprocess=compiled(module, "preprocess", rows, device),
            backward=compiled(module, "backward", options, device),
        )


class _Built:
    """The compiled functions, run on one Problem's tensors. A launch over an empty grid is left out."""

    def __init__(self, *, forward: Launch, preprocess: Launch, backward: Launch) -> None:
        self._forward = forward
        self._preprocess = preprocess
        self._backward = backward

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(o, lse): `(total_q + slack_q, heads, dim_v)` in the input dtype, `(heads, total_q + slack_q)` float32."""
        import torch

        problem, q = inputs.problem, inputs.q
        o = torch.empty((q.shape[0], problem.heads, problem.dim_v), dtype=q.dtype, device=q.device)
        lse = torch.empty((problem.heads, q.shape[0]), dtype=torch.float32, device=q.device)
        if inputs.max_seqlen_q > 0:
            k, v = _not_empty(inputs.k), _not_empty(inputs.v)
            starts = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
            self._forward(q, k, v, *starts, inputs.max_seqlen_q, problem.groups, problem.scale, o, lse)
        return o, lse

    def backward(
        self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) in the input dtype, summed in float32."""
        import torch

        if lse is None:
            raise BadArgument("lse=None: the backward recomputes P from it; give the forward's lse")
        problem, q, k, v = inputs.problem, inputs.q, inputs.k, inputs.v
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        if inputs.max_seqlen_q > 0 and inputs.max_seqlen_k > 0:
            delta = torch.empty_like(lse)
            self._preprocess(o, inputs.d_o, inputs.cu_seqlens_q, inputs.max_seqlen_q, delta)
            starts = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
            scalars = (inputs.max_seqlen_k, problem.groups, problem.scale)
            self._backward(q, k, v, inputs.d_o, lse, delta, *starts, *scalars, dq, dk, dv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _not_empty(x: torch.Tensor) -> torch.Tensor:
    """`x`, or one row of zeros, which no sequence reaches, for a tensor without rows: TileLang takes no empty tensor."""
    return x if x.shape[0] else x.new_zeros((1, *x.shape[1:]))


def _shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of the backward, the larger of the two: q, dO, k, v and dS tiles; in float32 P and dS operands too."""
    size, squares = (4, 3) if problem.dtype == "float32" else (2, 1)
    tile_m, tile_n = config.tile("tile_m"), config.tile("tile_n")
    return size * ((tile_m + tile_n) * (problem.dim_qk + problem.dim_v) + squares * tile_m * tile_n)


KERNEL = TileLangVarlen()
