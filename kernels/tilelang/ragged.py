"""`tilelang.gqa_varlen.atomic` and `tilelang.gqa_varlen.split`: ragged GQA attention for Hopper, written in TileLang.

All mathematics is in `ragged_device`; here are only allocation, launches and what the kernels declare of themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from attnfuzz.kernels.contract import Built, Config, Device, Inputs
from attnfuzz.kernels.problem import BadArgument, Problem
from attnfuzz.kernels.tilelang.build import Launch, compiled
from attnfuzz.kernels.tilelang.subject import DeviceCode, TileLangKernel, not_empty
from attnfuzz.kernels.tilelang.tiles import HOPPER, exponent_of, fitting, options_of, signed

if TYPE_CHECKING:
    import torch

__all__ = ["ATOMIC", "SPLIT", "TileLangRagged"]

Reduction = Literal["atomic", "split"]


class TileLangRagged(TileLangKernel):
    """Fulfils `contract.Kernel`. `device_code` gives the module with `forward`, `preprocess`, `backward`."""

    def __init__(self, name: str, reduction: Reduction, device_code: DeviceCode | None = None) -> None:
        alone = ("dk", "dv") if reduction == "split" else ()
        can = replace(HOPPER, deterministic=("o", "lse", *alone))
        super().__init__(name, can, ("ragged.py", "tiles.py"), "ragged_device", device_code)
        self._reduction: Reduction = reduction

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """Tiles (query rows x key rows), threads and pipeline stages of forward and backward, the default first."""
        return fitting(problem, ragged=True)

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """The three functions compiled for `problem`'s compile key.

        Raises:
            BuildError: the compiler refused.
        """
        module = self.device_code()
        of_forward, of_backward = options_of(config)
        rows = {name: of_forward[name] for name in ("tile_m", "threads")}
        common = {"dim_v": problem.dim_v, "dtype": problem.dtype}
        masked: dict[str, Any] = {**common, "dim_qk": problem.dim_qk, "causal": problem.causal is not None}
        return _Built(
            forward=compiled(module, "forward", {**masked, **of_forward}, device),
            preprocess=compiled(module, "preprocess", {**common, **rows}, device),
            backward=compiled(module, "backward", {**masked, **of_backward, "reduction": self._reduction}, device),
            reduction=self._reduction,
        )


class _Built:
    """The compiled functions, run on one Problem's tensors. A launch over an empty grid is left out."""

    def __init__(self, *, forward: Launch, preprocess: Launch, backward: Launch, reduction: Reduction) -> None:
        self._forward = forward
        self._preprocess = preprocess
        self._backward = backward
        self._reduction = reduction

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(o, lse): `(total_q + slack_q, heads, dim_v)` in the input dtype, `(heads, total_q + slack_q)` float32."""
        import torch

        p, q = inputs.problem, inputs.q
        o = torch.empty((q.shape[0], p.heads, p.dim_v), dtype=q.dtype, device=q.device)
        lse = torch.empty((p.heads, q.shape[0]), dtype=torch.float32, device=q.device)
        if inputs.max_seqlen_q > 0:
            starts = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
            scalars = (inputs.max_seqlen_q, p.groups, _bottom(p), exponent_of(p.scale))
            self._forward(signed(q, p.scale), not_empty(inputs.k), not_empty(inputs.v), *starts, *scalars, o, lse)
        return o, lse

    def backward(
        self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) in the input dtype; shares of query heads are summed in float32."""
        import torch

        if lse is None:
            raise BadArgument("lse=None: the backward recomputes P from it; give the forward's lse")
        p, k, v = inputs.problem, inputs.k, inputs.v
        dq = torch.zeros_like(inputs.q, dtype=torch.float32)
        heads = p.kv_heads if self._reduction == "atomic" else p.heads
        # Split stores every key of a sequence, but for those that no query may be launched for.
        reached = self._reduction == "split" and inputs.max_seqlen_q > 0
        allocate = torch.empty if reached else torch.zeros
        dk, dv = (allocate((x.shape[0], heads, x.shape[2]), dtype=torch.float32, device=x.device) for x in (k, v))
        if inputs.max_seqlen_q > 0 and inputs.max_seqlen_k > 0:
            delta = torch.empty_like(lse)
            self._preprocess(o, inputs.d_o, inputs.cu_seqlens_q, inputs.max_seqlen_q, delta)
            starts = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
            scalars = (inputs.max_seqlen_k, p.groups, _bottom(p), exponent_of(p.scale), abs(p.scale))
            self._backward(signed(inputs.q, p.scale), k, v, inputs.d_o, lse, delta, *starts, *scalars, dq, dk, dv)
        if self._reduction == "split":
            dk, dv = (x.unflatten(1, (-1, p.groups)).sum(2) for x in (dk, dv))
        return signed(dq, p.scale).to(inputs.q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _bottom(problem: Problem) -> int:
    return 0 if problem.causal == "top_left" else 1


ATOMIC = TileLangRagged("tilelang.gqa_varlen.atomic", "atomic")
SPLIT = TileLangRagged("tilelang.gqa_varlen.split", "split")
