"""`tilelang.gqa_varlen.atomic` and `tilelang.gqa_varlen.split`: ragged GQA attention for Hopper, written in TileLang.

All mathematics is in `ragged_device`; this module has allocation, launches and the kernels' declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from attnfuzz.kernels.contract import Built, Config, Device, Inputs
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.memory import Empty, allocating
from attnfuzz.kernels.tilelang.build import Launch
from attnfuzz.kernels.tilelang.hopper import HOPPER, PAD, exponent_of, fitting, not_hopper, options_of, signed, unfit
from attnfuzz.kernels.tilelang.subject import DeviceCode, Function, TileLangKernel, not_empty

if TYPE_CHECKING:
    import torch

__all__ = ["ATOMIC", "SPLIT", "TileLangRagged"]

Reduction = Literal["atomic", "split"]


class TileLangRagged(TileLangKernel):
    """A `contract.Kernel`. `device_code` returns the module with `forward`, `preprocess`, `backward`."""

    def __init__(self, name: str, reduction: Reduction, device_code: DeviceCode | None = None) -> None:
        alone = ("dk", "dv") if reduction == "split" else ()
        can = replace(HOPPER, deterministic=("o", "lse", *alone))
        super().__init__(name, can, ("ragged.py", "dense_device.py", "hopper.py", "tuned.py"), "ragged_device", device_code)
        self.table = f"ragged {reduction}"
        self._reduction: Reduction = reduction

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """Tiles (query rows x key rows), threads and pipeline stages of forward and backward, the default first."""
        return fitting(problem, self.table, beside=self._reduction == "atomic", part_of=PAD)

    def unavailable(self, device: Device) -> str | None:
        """The package, compiler or device that is missing, a GPU other than Hopper's; or None."""
        return super().unavailable(device) or not_hopper(device)

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """The reason why not, or None."""
        return super().supports(problem, config, device) or unfit(problem, device)

    def functions(self, problem: Problem, config: Config, device: Device) -> dict[str, Function]:  # noqa: ARG002
        """forward, preprocess, backward, and pad and finish for each head dim."""
        p, (of_forward, of_backward) = problem, options_of(config)
        masked: dict[str, Any] = {"dim_v": p.dim_v, "dtype": p.dtype, "dim_qk": p.dim_qk, "causal": p.causal is not None}
        functions = {
            "forward": Function("forward", {**masked, **of_forward}),
            "preprocess": Function("preprocess", {"dim_v": p.dim_v, "dtype": p.dtype}),
            "backward": Function("backward", {**masked, **of_backward, "reduction": self._reduction}),
        }
        for dim in (p.dim_qk, p.dim_v):
            functions |= {f"{factory} {dim}": Function(factory, {"dim": dim, "dtype": p.dtype}) for factory in ("pad", "finish")}
        return functions

    def build_any(self, problem: Problem, config: Config, device: Device = "cuda") -> Built:
        """Compile all functions for `problem`'s compile key.

        Raises:
            BuildError: the compiler refused.
        """
        launches = self.compiled(problem, config, device)
        dims = (problem.dim_qk, problem.dim_v)
        return _Built(
            pad={dim: launches[f"pad {dim}"] for dim in dims},
            forward_=launches["forward"],
            preprocess=launches["preprocess"],
            backward_=launches["backward"],
            finish={dim: launches[f"finish {dim}"] for dim in dims},
            reduction=self._reduction,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """The compiled functions, run on one Problem's tensors. Launches over empty grids are skipped."""

    pad: dict[int, Launch]
    """By head dim, as is `finish`."""
    forward_: Launch
    preprocess: Launch
    backward_: Launch
    finish: dict[int, Launch]
    reduction: Reduction

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(o, lse): `(total_q + slack_q, heads, dim_v)` in the input dtype, `(heads, total_q + slack_q)` float32."""
        import torch

        p, q = inputs.problem, inputs.q
        with allocating() as empty:
            o = empty((q.shape[0], p.heads, p.dim_v), dtype=q.dtype, device=q.device)
            lse = empty((p.heads, q.shape[0]), dtype=torch.float32, device=q.device)
            rooms = [_room(empty, x, inputs.cu_seqlens_k) for x in (inputs.k, inputs.v)]
        if inputs.max_seqlen_q > 0:
            starts = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
            of_k = (inputs.cu_seqlens_k, inputs.max_seqlen_k)
            keys = [self._padded(x, *of_k, room) for x, room in zip((inputs.k, inputs.v), rooms, strict=True)]
            scalars = (inputs.max_seqlen_q, p.groups, _bottom(p), exponent_of(p.scale))
            self.forward_(signed(q, p.scale), *keys, *starts, *scalars, o, lse)
        return o, lse

    def backward(
        self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) in the input dtype; shares of query heads are summed in float32."""
        import torch

        if lse is None:
            raise BadArgument("lse=None: the backward recomputes P from it; give the forward's lse")
        p = inputs.problem
        of_q, of_k = (inputs.cu_seqlens_q, inputs.max_seqlen_q), (inputs.cu_seqlens_k, inputs.max_seqlen_k)
        if not inputs.max_seqlen_q or not inputs.max_seqlen_k:
            return torch.zeros_like(inputs.q), torch.zeros_like(inputs.k), torch.zeros_like(inputs.v)
        atomic = self.reduction == "atomic"
        with allocating() as empty:
            heads, allocate = (p.kv_heads, torch.zeros) if atomic else (p.heads, empty)
            q, d_o = (_room(empty, x, inputs.cu_seqlens_q) for x in (inputs.q, inputs.d_o))
            k, v = (_room(empty, x, inputs.cu_seqlens_k) for x in (inputs.k, inputs.v))
            delta, lse2 = (empty((p.heads, q.shape[0]), dtype=lse.dtype, device=lse.device) for _ in range(2))
            dq = torch.zeros_like(q, dtype=torch.float32)
            dk, dv = (allocate((x.shape[0], heads, x.shape[2]), dtype=torch.float32, device=x.device) for x in (k, v))
            own = [empty(x.shape, dtype=x.dtype, device=x.device) for x in (inputs.q, inputs.k, inputs.v)]
        self._padded(signed(inputs.q, p.scale), *of_q, q)
        for x, (starts, longest), room in ((inputs.d_o, of_q, d_o), (inputs.k, of_k, k), (inputs.v, of_k, v)):
            self._padded(x, starts, longest, room)
        self.preprocess(o, inputs.d_o, lse, *of_q, delta, lse2)
        scalars = (inputs.max_seqlen_k, p.groups, _bottom(p), exponent_of(p.scale), abs(p.scale))
        self.backward_(q, k, v, d_o, lse2, delta, of_q[0], of_k[0], *scalars, dq, dk, dv)
        groups = 1 if atomic else p.groups
        return (
            self._finished(dq, *of_q, 1, p.scale, own[0]),
            self._finished(dk, *of_k, groups, 1.0, own[1]),
            self._finished(dv, *of_k, groups, 1.0, own[2]),
        )

    def _padded(self, x: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, room: torch.Tensor) -> torch.Tensor:
        """Copy `x` to `room` with zeros after every sequence."""
        self.pad[x.shape[2]](not_empty(x), cu_seqlens, longest, room)
        return room

    def _finished(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, groups: int, scale: float, out: torch.Tensor
    ) -> torch.Tensor:
        self.finish[x.shape[2]](x, cu_seqlens, longest, groups, scale, out)
        return out


def _room(empty: Empty, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Allocate `(rows, heads, dim)` for `x` with padding after every sequence."""
    rows = (x.shape[0] // PAD + cu_seqlens.shape[0] - 1) * PAD
    return empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)


def _bottom(problem: Problem) -> int:
    return 0 if problem.causal == "top_left" else 1


ATOMIC = TileLangRagged("tilelang.gqa_varlen.atomic", "atomic")
SPLIT = TileLangRagged("tilelang.gqa_varlen.split", "split")
