"""`tilelang.varlen`: ragged GQA attention, forward and backward, written in TileLang.

All mathematics is in `varlen_device`; this module has allocation, launches and the kernel's declaration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnfuzz.kernels.contract import Built, Config, Device, Inputs
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.memory import allocating
from attnfuzz.kernels.tilelang.build import Launch
from attnfuzz.kernels.tilelang.subject import CAPABILITIES, SHARED_BYTES_MAX, DeviceCode, Function, TileLangKernel, not_empty

if TYPE_CHECKING:
    import torch

__all__ = ["KERNEL", "TileLangVarlen"]


CONFIGS = (
    Config(tile_m=64, tile_n=64, threads=128, stages=1),
    Config(tile_m=64, tile_n=32, threads=128, stages=1),
    Config(tile_m=32, tile_n=64, threads=128, stages=1),
    Config(tile_m=128, tile_n=64, threads=256, stages=1),
    Config(tile_m=32, tile_n=32, threads=64, stages=1),
)


class TileLangVarlen(TileLangKernel):
    """A `contract.Kernel`. `device_code` returns the module with `forward`, `preprocess`, `backward`."""

    def __init__(self, name: str = "tilelang.varlen", device_code: DeviceCode | None = None) -> None:
        super().__init__(name, CAPABILITIES, ("varlen.py",), "varlen_device", device_code)

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """Tiles (tile_m query rows, tile_n key rows), threads and pipeline stages, the default first."""
        return tuple(config for config in CONFIGS if _shared_bytes(problem, config) <= SHARED_BYTES_MAX)

    def functions(self, problem: Problem, config: Config, device: Device) -> dict[str, Function]:  # noqa: ARG002
        """forward, preprocess, backward."""
        tiles: dict[str, Any] = {name: config.integer(name) for name in ("tile_m", "tile_n", "threads", "stages")}
        options = {
            "dim_qk": problem.dim_qk,
            "dim_v": problem.dim_v,
            "causal": problem.causal is not None,
            "dtype": problem.dtype,
            **tiles,
        }
        rows = {name: options[name] for name in ("dim_v", "dtype", "tile_m", "threads")}
        # The blocks' real threads, a warp per 16 rows of their tile: `cuda_passes` decides by them.
        by_query, by_key = ({**options, "threads": min(options["threads"], 2 * options[of])} for of in ("tile_m", "tile_n"))
        return {
            "forward": Function("forward", by_query),
            "preprocess": Function("preprocess", rows),
            "backward": Function("backward", by_key),
        }

    def build_any(self, problem: Problem, config: Config, device: Device = "cuda") -> Built:
        """Compile the three functions for `problem`'s compile key.

        Raises:
            BuildError: the compiler refused.
        """
        return _Built(**self.compiled(problem, config, device))


class _Built:
    """The compiled functions, run on one Problem's tensors. Launches over empty grids are skipped."""

    def __init__(self, *, forward: Launch, preprocess: Launch, backward: Launch) -> None:
        self._forward = forward
        self._preprocess = preprocess
        self._backward = backward

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(o, lse): `(total_q + slack_q, heads, dim_v)` in the input dtype, `(heads, total_q + slack_q)` float32."""
        import torch

        problem, q = inputs.problem, inputs.q
        with allocating():
            o = torch.empty((q.shape[0], problem.heads, problem.dim_v), dtype=q.dtype, device=q.device)
            lse = torch.empty((problem.heads, q.shape[0]), dtype=torch.float32, device=q.device)
        if inputs.max_seqlen_q > 0:
            k, v = not_empty(inputs.k), not_empty(inputs.v)
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
        with allocating():
            dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
            delta = torch.empty_like(lse)
        if inputs.max_seqlen_q > 0 and inputs.max_seqlen_k > 0:
            self._preprocess(o, inputs.d_o, inputs.cu_seqlens_q, inputs.max_seqlen_q, delta)
            starts = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
            scalars = (inputs.max_seqlen_k, problem.groups, problem.scale)
            self._backward(q, k, v, inputs.d_o, lse, delta, *starts, *scalars, dq, dk, dv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of the backward, the larger of the two: q, dO, k, v and dS tiles; in float32 P and dS operands too."""
    size, squares = (4, 3) if problem.dtype == "float32" else (2, 1)
    tile_m, tile_n = config.tile("tile_m"), config.tile("tile_n")
    return size * ((tile_m + tile_n) * (problem.dim_qk + problem.dim_v) + squares * tile_m * tile_n)


KERNEL = TileLangVarlen()
