"""`tilelang.mha`, `tilelang.mha_pipelined`, `tilelang.gqa.atomic` and `tilelang.gqa.split`: dense attention, written in TileLang.

All mathematics is in `dense_device`; this module has allocation, launches and the kernels' declarations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from attnfuzz.kernels.contract import Built, Config, Device, Inputs
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.memory import allocating
from attnfuzz.kernels.tilelang.build import Launch
from attnfuzz.kernels.tilelang.hopper import HOPPER, exponent_of, fitting, not_hopper, options_of, scaled, signed, unfit
from attnfuzz.kernels.tilelang.subject import DeviceCode, Function, TileLangKernel

if TYPE_CHECKING:
    import torch

__all__ = ["GQA_ATOMIC", "GQA_SPLIT", "MHA", "MHA_PIPELINED", "DenseBuilt", "Reduction", "TileLangDense"]

Reduction = Literal["none", "atomic", "split"]


class TileLangDense(TileLangKernel):
    """A `contract.Kernel`. `device_code` returns the module with `forward`, `preprocess`, `backward`.

    `pipelined`: the backward's products are asynchronous where WGMMA takes them.
    """

    any_strides = True
    """Tensors are read by their own strides, independent of the Problem's layouts."""

    def __init__(self, name: str, reduction: Reduction, device_code: DeviceCode | None = None, *, pipelined: bool = True) -> None:
        alone = () if reduction == "atomic" else ("dk", "dv")
        can = replace(HOPPER, packings=("dense",), layouts=True, deterministic=("o", "lse", *alone))
        can = replace(can, groups=(1,) if reduction == "none" else None)
        self._asynchronous_only = pipelined and reduction == "none"
        if self._asynchronous_only:
            # Without WGMMA this kernel would equal `tilelang.mha`.
            can = replace(can, dtypes=("float16", "bfloat16"))
        super().__init__(name, can, ("dense.py", "hopper.py", "tuned.py"), "dense_device", device_code)
        self.table = f"dense {reduction}" + (" pipelined" if self._asynchronous_only else "")
        self._reduction: Reduction = reduction
        self._pipelined = pipelined

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """Tiles (query rows x key rows), threads and pipeline stages of forward and backward, the default first."""
        choices = fitting(problem, self.table)
        return tuple(each for each in choices if each.integer("back_threads") >= 128) if self._asynchronous_only else choices

    def unavailable(self, device: Device) -> str | None:
        """The package, compiler or device that is missing, a GPU other than Hopper's; or None."""
        return super().unavailable(device) or not_hopper(device)

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """The reason why not, or None."""
        return super().supports(problem, config, device) or unfit(problem, device)

    def functions(self, problem: Problem, config: Config, device: Device) -> dict[str, Function]:
        """forward, preprocess, backward."""
        of_forward, of_backward = options_of(config)
        # TileLang's C target has no strides.
        common = {"dim_v": problem.dim_v, "dtype": problem.dtype, "strided": device == "cuda"}
        masked: dict[str, Any] = {**common, "dim_qk": problem.dim_qk, "causal": problem.causal is not None}
        how = {"reduction": self._reduction, "pipelined": self._pipelined}
        return {
            "forward": Function("forward", {**masked, **of_forward}),
            "preprocess": Function("preprocess", common),
            "backward": Function("backward", {**masked, **of_backward, **how}),
        }

    def build_any(self, problem: Problem, config: Config, device: Device = "cuda") -> Built:
        """Compile the three functions for `problem`'s compile key.

        Raises:
            BuildError: the compiler refused.
        """
        return DenseBuilt(**self.compiled(problem, config, device), reduction=self._reduction)


class DenseBuilt:
    """The compiled functions, run on one Problem's tensors. Launches over empty grids are skipped."""

    def __init__(self, *, forward: Launch, preprocess: Launch, backward: Launch, reduction: Reduction) -> None:
        self._forward = forward
        self._preprocess = preprocess
        self._backward = backward
        self._reduction = reduction

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(o, lse), with slack rows: `(batch, seqlen_q, heads, dim_v)` in the input dtype, `(batch, heads, seqlen_q)` float32."""
        import torch

        p, q = inputs.problem, inputs.q
        with allocating() as empty:
            o = empty((*q.shape[:3], p.dim_v), dtype=q.dtype, device=q.device)
            lse = empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
        if not p.seqlens_q[0]:
            return o, lse
        if not p.seqlens_k[0]:
            return o.zero_(), lse.fill_(-torch.inf)
        q, k, v = signed(_tokens(q, p.seqlens_q), p.scale), _tokens(inputs.k, p.seqlens_k), _tokens(inputs.v, p.seqlens_k)
        into, rows = _taken(o, 1, p.seqlens_q[0]), _taken(lse, 2, p.seqlens_q[0])
        self._forward(q, k, v, p.groups, _offset(p), exponent_of(p.scale), into, rows)
        _put(o, 1, into)
        _put(lse, 2, rows)
        return o, lse

    def backward(
        self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) in the input dtype; shares of query heads are summed in float32."""
        import torch

        if lse is None:
            raise BadArgument("lse=None: the backward recomputes P from it; give the forward's lse")
        p = inputs.problem
        n_q, n_k = p.seqlens_q[0], p.seqlens_k[0]
        if not n_q or not n_k:
            dq = torch.zeros_like(inputs.q, memory_format=torch.contiguous_format)
            return dq, torch.zeros_like(inputs.k), torch.zeros_like(inputs.v)
        q, k, v = signed(_tokens(inputs.q, p.seqlens_q), p.scale), _tokens(inputs.k, p.seqlens_k), _tokens(inputs.v, p.seqlens_k)
        d_o, o, lse = _tokens(inputs.d_o, p.seqlens_q), _tokens(o, p.seqlens_q), _tokens(lse, p.seqlens_q, 2)
        with allocating():
            dq = torch.zeros_like(inputs.q, dtype=torch.float32, memory_format=torch.contiguous_format)
            delta, lse2 = _rows_of(lse), _rows_of(lse)
            dk, dv = (self._shares(x, p) for x in (inputs.k, inputs.v))
        self._preprocess(o, d_o, lse, delta, lse2)
        into = _taken(dq, 1, n_q)
        keys = tuple(_taken(each, 1, n_k) for each in (dk, dv))
        scalars = (p.groups, _offset(p), exponent_of(p.scale), abs(p.scale))
        self._backward(q, k, v, d_o, lse2, delta, *scalars, into, *keys)
        _put(dq, 1, into)
        for whole, part in zip((dk, dv), keys, strict=True):
            _put(whole, 1, part)
        return self._scaled(dq, p.scale, q.dtype), self._summed(dk, p).to(k.dtype), self._summed(dv, p).to(v.dtype)

    def _scaled(self, dq: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        """Scale the blocks' sum to dQ in `dtype`."""
        return scaled(dq, scale, dtype)

    def _shares(self, x: torch.Tensor, problem: Problem) -> torch.Tensor:
        """Allocate the tensor to which the blocks write dK or dV."""
        import torch

        heads = problem.kv_heads if self._reduction == "atomic" else problem.heads
        shape, dtype = (*x.shape[:2], heads, x.shape[3]), x.dtype if self._reduction == "none" else torch.float32
        allocate = torch.zeros if self._reduction == "atomic" else torch.empty
        return allocate(shape, dtype=dtype, device=x.device)

    def _summed(self, shares: torch.Tensor, problem: Problem) -> torch.Tensor:
        return shares.unflatten(2, (-1, problem.groups)).sum(3) if self._reduction == "split" else shares


def _offset(problem: Problem) -> int:
    return problem.seqlens_k[0] - problem.seqlens_q[0] if problem.causal == "bottom_right" else 0


def _tokens(x: torch.Tensor, lengths: tuple[int, ...], axis: int = 1) -> torch.Tensor:
    """The rows of `x` that are tokens, with strides and alignment that a kernel can read."""
    import torch

    rows = x.narrow(axis, 0, lengths[0])
    if x.is_cuda:
        # Not `contiguous`: it would return a contiguous but unaligned tensor unchanged.
        return rows if _by_strides(rows) else rows.clone(memory_format=torch.contiguous_format)
    return rows.contiguous()


def _rows_of(lse: torch.Tensor) -> torch.Tensor:
    """`(batch, heads, seqlen_q)` float32, uninitialised, each row at a multiple of 16 bytes."""
    pitch = -(-lse.shape[2] // 4) * 4 if lse.is_cuda else lse.shape[2]
    return lse.new_empty((*lse.shape[:2], pitch))[..., : lse.shape[2]]


def _by_strides(x: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can read `x`, in units of 16 bytes."""
    steps = [stride * x.element_size() for stride in x.stride()[:-1]]
    return x.stride(-1) == 1 and all(step > 0 and step % 16 == 0 for step in steps) and x.data_ptr() % 16 == 0


def _taken(whole: torch.Tensor, axis: int, rows: int) -> torch.Tensor:
    """The tensor to which a kernel writes the first `rows` of `whole`: a view, or on the CPU a contiguous copy."""
    part = whole.narrow(axis, 0, rows)
    return part if whole.is_cuda else part.contiguous()


def _put(whole: torch.Tensor, axis: int, part: torch.Tensor) -> None:
    """Copy `part`, from `_taken`, back into `whole` where it is not a view."""
    if part.data_ptr() != whole.data_ptr():
        whole.narrow(axis, 0, part.shape[axis]).copy_(part)


MHA = TileLangDense("tilelang.mha", "none", pipelined=False)
MHA_PIPELINED = TileLangDense("tilelang.mha_pipelined", "none")
GQA_ATOMIC = TileLangDense("tilelang.gqa.atomic", "atomic")
GQA_SPLIT = TileLangDense("tilelang.gqa.split", "split")
