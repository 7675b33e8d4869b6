"""`tilelang.gqa_varlen.atomic` and `tilelang.gqa_varlen.split`: ragged GQA attention for Hopper, written in TileLang.

All mathematics is in `ragged_device`; here are only allocation, launches and what the kernels declare of themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from attnfuzz.kernels.contract import Built, Capabilities, Config, Deviations, Device, Inputs, why_unsupported
from attnfuzz.kernels.problem import BadArgument, Problem
from attnfuzz.kernels.tilelang.build import Launch, compiled, unavailable
from attnfuzz.kernels.tilelang.tiles import exponent_of, fitting, options_of, signed

if TYPE_CHECKING:
    import torch

__all__ = ["ATOMIC", "SPLIT", "TileLangRagged"]

Reduction = Literal["atomic", "split"]
_HERE = Path(__file__).parent
_DEVICE_MODULE = "attnfuzz.kernels.tilelang.ragged_device"
_COMMON = Capabilities(
    dtypes=("float16", "bfloat16", "float32"),
    dims=((64, 64), (32, 32), (128, 128), (64, 48), (48, 80), (96, 96), (192, 128)),
    groups=None,
    causal=(None, "bottom_right", "top_left"),
    zero_q=True,
    zero_k=True,
    unequal=True,
    slack=True,
    scale_any=True,
    # It lowers for sm_90a (tests/test_tilelang_ragged.py), but has run on no GPU yet.
    devices=("cpu",),
    compiles_on=("cpu",),
    deviations=Deviations(tf32_on=("cuda",)),
)


def _default_device_code() -> ModuleType:
    return importlib.import_module(_DEVICE_MODULE)


class TileLangRagged:
    """Fulfils `contract.Kernel`. `device_code` gives the module with `forward`, `preprocess`, `backward`.

    An edited copy of `ragged_device`, given by `device_code` under another `name`, is a kernel of its own.
    """

    def __init__(self, name: str, reduction: Reduction, device_code: Callable[[], ModuleType] = _default_device_code) -> None:
        self.name = name
        self.backend = "tilelang"
        alone = ("dk", "dv") if reduction == "split" else ()
        self.capabilities = replace(_COMMON, deterministic=("o", "lse", *alone))
        self._reduction: Reduction = reduction
        self._device_code = device_code

    @property
    def files(self) -> tuple[str, ...]:
        """The sources of this kernel, absolute paths."""
        device_file = str(_HERE / "ragged_device.py")
        if self._device_code is not _default_device_code:
            device_file = self._device_code().__file__ or device_file
        return (device_file, *(str(_HERE / name) for name in ("ragged.py", "tiles.py", "cpu.py", "build.py")))

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """Tiles (query rows x key rows), threads and pipeline stages of forward and backward, the default first."""
        return fitting(problem, ragged=True)

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
        """Dims, mask or none, dtype and Config; lengths, totals, batch, heads, groups, alignment and scale are a call's own."""
        return f"dim_qk={problem.dim_qk} dim_v={problem.dim_v} masked={problem.causal is not None} dtype={problem.dtype} {config}"

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """The three functions compiled for `problem`'s compile key.

        Raises:
            BuildError: the compiler refused.
        """
        module = self._device_code()
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
            self._forward(signed(q, p.scale), _not_empty(inputs.k), _not_empty(inputs.v), *starts, *scalars, o, lse)
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


def _not_empty(x: torch.Tensor) -> torch.Tensor:
    """`x`, or one row of zeros, which no sequence reaches, for a tensor without rows: TileLang takes no empty tensor."""
    return x if x.shape[0] else x.new_zeros((1, *x.shape[1:]))


ATOMIC = TileLangRagged("tilelang.gqa_varlen.atomic", "atomic")
SPLIT = TileLangRagged("tilelang.gqa_varlen.split", "split")
