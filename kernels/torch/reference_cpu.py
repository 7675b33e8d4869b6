"""`torch.reference_cpu`: torch's own flash attention for the CPU, called once for a dense batch, or once for each sequence."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from attnfuzz.kernels.contract import Built, Capabilities, Config, Device, Inputs, why_unsupported
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import OUTPUT_NAMES, Problem
from attnfuzz.kernels.support.installed_torch import built_with, has_op

if TYPE_CHECKING:
    import torch

__all__ = ["KERNEL", "ReferenceCpu"]

_Index = tuple[slice, ...]

_OP: Final = "_scaled_dot_product_flash_attention_for_cpu"
_CAPABILITIES: Final = Capabilities(
    packings=("ragged", "dense"),
    # In float16 and bfloat16 the op uses a fast exponential of relative error 5e-5, which shows in LSE.
    dtypes=("float32",),
    dims=((64, 64), (32, 32), (16, 16), (128, 128), (96, 96), (40, 40), (7, 7), (1, 1), (256, 256)),
    groups=None,
    causal=(None, "top_left"),
    # The op ends the process with SIGFPE on an empty tensor; here it is never called with one.
    zero_q=True,
    zero_k=True,
    unequal=True,
    slack=True,
    slack_rows="zero",
    # It masks before it scales: with causal and a scale of 0 or less, NaN.
    scale_any=False,
    devices=("cpu",),
    compiles_on=(),
    deterministic=OUTPUT_NAMES,
)


class ReferenceCpu:
    """`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward, with the op's own grouped heads."""

    name = "torch.reference_cpu"
    backend = "torch"
    files = (__file__,)
    capabilities = _CAPABILITIES

    def configs(self, problem: Problem) -> tuple[Config, ...]:  # noqa: ARG002 - the contract's signature
        """One Config: the op chooses its tiles itself."""
        return (Config(),)

    def unavailable(self, device: Device) -> str | None:
        """A missing torch, a torch without this op, another device than the CPU; or None."""
        if device != "cpu":
            return f"device={device!r}: the op runs on the CPU only"
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed: pip install torch"
        if not has_op(_OP):
            return f"torch {built_with()[0]} has no {_OP}: install torch 2.2 or newer"
        return None

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """Why not, or None."""
        if config != Config():
            return f"config={config!r}: there is nothing to choose"
        return why_unsupported(self.capabilities, problem, device)

    def compile_key(self, problem: Problem, config: Config) -> str:  # noqa: ARG002 - the contract's signature
        """One key: nothing is compiled."""
        return self.name

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """Compile nothing.

        Raises:
            BadArgument: `problem` is not supported.
        """
        if reason := self.supports(problem, config, device):
            raise BadArgument(f"problem: {self.name} does not take it: {reason}; ask supports(problem, config, device) first")
        return _Reference()


class _Reference:
    """The op, called for every sequence that has queries and keys; elsewhere O = 0, LSE = -inf and there is no gradient."""

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """`o` like q with dim_v, and `lse (heads, total_q)` or `(batch, heads, seqlen_q)`; slack rows are 0 and -inf."""
        import torch

        problem, q = inputs.problem, inputs.q
        o = torch.zeros((*q.shape[:-1], problem.dim_v), dtype=q.dtype, device=q.device)
        lse = torch.full(_lse_shape(q), -torch.inf, dtype=torch.float32, device=q.device)
        for at_q, at_k in _calls(inputs):
            o_part, lse_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _heads_first(q[at_q]),
                _heads_first(inputs.k[at_k]),
                _heads_first(inputs.v[at_k]),
                0.0,
                problem.causal is not None,
                scale=problem.scale,
            )
            o[at_q] = o_part.transpose(1, 2).reshape(o[at_q].shape)
            lse[_of_lse(at_q)] = lse_part.reshape(lse[_of_lse(at_q)].shape)
        return o, lse

    def backward(
        self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`dq, dk, dv` like `q, k, v`; slack rows are 0. `lse` is required."""
        import torch

        if lse is None:
            raise BadArgument("lse=None: the op's backward reads it; pass what forward returned")
        problem = inputs.problem
        gradients = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k), torch.zeros_like(inputs.v)
        for at_q, at_k in _calls(inputs):
            lse_part = lse[_of_lse(at_q)]
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(inputs.d_o[at_q]),
                _heads_first(inputs.q[at_q]),
                _heads_first(inputs.k[at_k]),
                _heads_first(inputs.v[at_k]),
                _heads_first(o[at_q]),
                lse_part if lse_part.dim() == 3 else lse_part[None],
                0.0,
                problem.causal is not None,
                scale=problem.scale,
            )
            for gradient, part, at in zip(gradients, parts, (at_q, at_k, at_k), strict=True):
                gradient[at] = part.transpose(1, 2).reshape(gradient[at].shape)
        return gradients


def _calls(inputs: Inputs) -> Iterator[tuple[_Index, _Index]]:
    """Yield the places of queries and keys for each call of the op."""
    problem = inputs.problem
    if problem.packing == "dense":
        seqlen_q, seqlen_k = problem.seqlens_q[0], problem.seqlens_k[0]
        if seqlen_q and seqlen_k:
            yield (slice(None), slice(seqlen_q)), (slice(None), slice(seqlen_k))
        return
    begin_q = begin_k = 0
    for seqlen_q, seqlen_k in zip(problem.seqlens_q, problem.seqlens_k, strict=True):
        if seqlen_q and seqlen_k:
            yield (slice(begin_q, begin_q + seqlen_q),), (slice(begin_k, begin_k + seqlen_k),)
        begin_q, begin_k = begin_q + seqlen_q, begin_k + seqlen_k


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """(batch, heads, rows, dim) of (batch, rows, heads, dim), or of one sequence (rows, heads, dim)."""
    return (x if x.dim() == 4 else x[None]).transpose(1, 2)


def _lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    """(batch, heads, rows) for a dense q, (heads, rows) for a ragged one."""
    *batch, rows, heads, _ = q.shape
    return (*batch, heads, rows)


def _of_lse(at: _Index) -> _Index:
    """The place in LSE of the queries `at`: LSE has its heads before its rows."""
    return (*at[:-1], slice(None), at[-1])


KERNEL: Final = ReferenceCpu()
