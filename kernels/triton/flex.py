"""`triton.flex`: dense block-sparse attention with a score_mod and a mask_mod of the Problem's own, forward and backward.

The modifiers' trees are printed as Triton source (`printer`) and compiled into the kernel; which blocks are visited, and which
of them unmasked, is worked out in torch before each call (`blockmask`), or remembered where no captured tensor decides it.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from attnfuzz.kernels.contract import BuildError, Capabilities, Config, Deviations, Device, Gradients, Inputs, why_unsupported
from attnfuzz.kernels.modified import mask_of, score_of, tensors_of
from attnfuzz.kernels.problem import LAYOUTS, OUTPUT_NAMES, BadArgument, Layout, Problem
from attnfuzz.kernels.triton import runtime
from attnfuzz.kernels.triton.flex_configs import configs_for
from attnfuzz.kernels.triton.printer import load_source, source, taking_gradients

if TYPE_CHECKING:
    import torch

    from attnfuzz.kernels.triton.blockmask import Band, BlockMask

__all__ = ["KERNEL", "PRESCALED", "TF32", "BuiltFlex", "TritonFlex"]

_CAPABILITIES: Final = Capabilities(
    packings=("dense",),
    dtypes=("float16", "bfloat16", "float32"),
    dims=((64, 64), (32, 32), (16, 16), (128, 128), (64, 48), (40, 72), (192, 128), (96, 96), (1, 1)),
    dim_multiple=1,
    dim_max=256,
    groups=None,
    causal=(None, "bottom_right", "top_left"),
    window=True,
    softcap=True,
    score_mod=True,
    mask_mod=True,
    captured_gradients=True,
    zero_q=True,
    zero_k=True,
    unequal=True,
    slack=True,
    layouts=True,
    scale_any=True,
    devices=("cpu", "cuda"),
    dlse=True,
    deterministic=OUTPUT_NAMES,
)
_PRESCALED: Final = replace(
    _CAPABILITIES,
    dtypes=("float16", "bfloat16"),
    softcap=False,
    score_mod=False,
    captured_gradients=False,
    deviations=Deviations(prescaled_q=True),
)
_TF32: Final = replace(_CAPABILITIES, dtypes=("float32",), devices=("cuda",), deviations=Deviations(tf32_on=("cuda",)))

# Rows per program of the Delta kernel, and of the one that merges parts: no Config changes them.
_PREPROCESS_ROWS: Final = 64
_MERGE_ROWS: Final = 16
# On CUDA, p = 2^(s - m) must not contract with the product inside s: the largest p would no longer be exactly 1. In the
# backward there is no such p.
_FORWARD_OPTIONS: Final[dict[str, Any]] = {"enable_fp_fusion": False}
_BACKWARD_OPTIONS: Final[dict[str, Any]] = {"enable_fp_fusion": True}


def _default_device_code() -> ModuleType:
    return importlib.import_module("attnfuzz.kernels.triton.flex_device")


def _default_masks() -> ModuleType:
    return importlib.import_module("attnfuzz.kernels.triton.blockmask")


class TritonFlex:
    """The adapter of one device module.

    Args:
        name: the kernel's name.
        capabilities: what it declares; a `prescaled_q` or `tf32_on` declared is also done.
        device_code: returns the module with `forward`, `merge`, `preprocess` and `backward`, but for `merge` each also
            `_strided`; called once, after Triton is loaded.
        masks: returns the module with `band_of` and `block_mask`; called once.
        files: the source files of those modules; None: this package's own.
    """

    backend = "triton"

    def __init__(
        self,
        *,
        name: str = "triton.flex",
        capabilities: Capabilities = _CAPABILITIES,
        device_code: Callable[[], ModuleType] | None = None,
        masks: Callable[[], ModuleType] | None = None,
        files: tuple[str, ...] | None = None,
    ) -> None:
        here = Path(__file__).parent
        own = ("flex.py", "flex_device.py", "flex_configs.py", "printer.py", "folding.py", "blockmask.py")
        self.name, self.capabilities = name, capabilities
        self.files = files or tuple(str(here / file) for file in own)
        self._device_code, self._masks = device_code or _default_device_code, masks or _default_masks
        self._modules: tuple[ModuleType, ModuleType] | None = None
        self._built: dict[tuple[str, Device], BuiltFlex] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: not what this one has loaded and compiled."""
        return {**self.__dict__, "_modules": None, "_built": {}}

    @property
    def prescaled(self) -> bool:
        """Whether q is scaled and rounded before the first product."""
        return self.capabilities.deviations.prescaled_q

    @property
    def precision(self) -> str:
        """Of float32 products: "ieee" or "tf32"."""
        return "tf32" if self.capabilities.deviations.tf32_on else "ieee"

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """Tiles that fit shared memory on sm_90; few for exact float32, whose products compile slowly."""
        return configs_for(problem, tf32=self.precision == "tf32", prescaled=self.prescaled)

    def unavailable(self, device: Device) -> str | None:
        """A missing package or CUDA device, or None."""
        return runtime.unavailable(device)

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """Why not, or None."""
        reason = why_unsupported(self.capabilities, problem, device)
        if reason is None and config not in self.configs(problem):
            reason = f"config={config!r}: not among configs(problem)"
        return reason

    def compile_key(self, problem: Problem, config: Config) -> str:
        """What the code is made for.

        Dims, dtype, modifiers, whether causal or window hide anything, whether lengths are whole blocks, whether dLSE is given
        and whether all is contiguous, and the Config; lengths, widths of windows, heads, strides and scale are run-time values.
        """
        p = problem
        masks = "band" if _banded(p) else "free"
        even = "".join("even "[: 5 * flag] or "ragged " for flag in _even(p, config))
        flags = f"{masks} {even}{'dlse ' * p.needs.dlse}{'strided ' * _strided(p)}"
        modifiers = f"{p.softcap} {p.score_mod} {p.mask_mod}"
        return f"{self.name} {p.dim_qk} {p.dim_v} {p.dtype} {flags}{modifiers} {config.canonical()}"

    def build(self, problem: Problem, config: Config, device: Device) -> BuiltFlex:
        """Print the modifiers, and compile all device functions at once on CUDA; nothing to compile on the CPU.

        Raises:
            BuildError: Triton is missing, or its compiler refused.
            BadArgument: `problem` is not supported, or this process uses Triton in the other mode.
        """
        if reason := self.supports(problem, config, device):
            raise BadArgument(f"problem: {self.name} does not take it: {reason}; ask supports(problem, config, device) first")
        key = (self.compile_key(problem, config), device)
        if key not in self._built:
            runtime.load(device)
            if self._modules is None:
                self._modules = (self._device_code(), self._masks())
            built = BuiltFlex(*self._modules, problem, config, prescaled=self.prescaled, precision=self.precision)
            if device == "cuda":
                built.compile()
            self._built[key] = built
        return self._built[key]


class BuiltFlex:
    """The device functions with the constants of one compile key.

    Args:
        module: the device module.
        masks: the module that makes block lists.
        problem: any problem of the compile key.
        config: tile sizes, warps, stages and parts.
        prescaled: whether q is scaled and rounded first.
        precision: of float32 products.
    """

    def __init__(
        self, module: ModuleType, masks: ModuleType, problem: Problem, config: Config, *, prescaled: bool, precision: str
    ) -> None:
        strided = _strided(problem)
        self._forward, self._preprocess, self._backward = (
            getattr(module, f"{name}_strided" if strided else name) for name in ("forward", "preprocess", "backward")
        )
        self._merge, self._masks = module.merge, masks
        self._problem, self._config = problem, config
        self._split = config.integer("split")
        self._block = (config.integer("block"),) * 2
        self._tensors = tensors_of(problem)
        self._last: _Remembered | None = None
        score, mask = score_of(problem), mask_of(problem)
        printed = load_source(source(score, mask, self._tensors)) if score is not None or mask is not None else None
        functions = {
            constant: getattr(printed, name, None)
            for constant, name in (
                ("SCORE", "score_mod"), ("SLOPE", "score_gradient"), ("MASK", "mask_mod"), ("CAPTURED", "captured_gradients")
            )
        }  # fmt: skip
        even_q, even_k = _even(problem, config)
        shape: dict[str, Any] = {
            "DIM_QK": problem.dim_qk, "DIM_V": problem.dim_v, "PAD_QK": _padded(problem.dim_qk), "PAD_V": _padded(problem.dim_v),
        }  # fmt: skip
        common: dict[str, Any] = {
            **shape, "BAND": _banded(problem), "PRESCALED": prescaled, "EVEN_Q": even_q, "EVEN_K": even_k, "STRIDED": strided,
            "BLOCK_Q": self._block[0], "BLOCK_K": self._block[1], "PRECISION": precision,
        }  # fmt: skip
        warps, back_warps = {"num_warps": config.integer("num_warps")}, {"num_warps": config.integer("back_warps")}
        self._for_forward: dict[str, Any] = {
            **common,
            "SCORE": functions["SCORE"],
            "MASK": functions["MASK"],
            "SAFE": bool(config.get("rows_safe", False)),
            "TILE_M": config.integer("tile_m"),
            "TILE_N": config.integer("tile_n"),
            "SPLIT": self._split,
            "num_stages": config.integer("num_stages"),
            **_FORWARD_OPTIONS,
            **warps,
        }
        of_v = {name: shape[name] for name in ("DIM_V", "PAD_V")}
        self._for_merge: dict[str, Any] = {**of_v, "SPLIT": self._split, "TILE_M": _MERGE_ROWS, **_FORWARD_OPTIONS}
        self._for_preprocess: dict[str, Any] = {
            **of_v, "STRIDED": strided, "DLSE": problem.needs.dlse, "TILE_M": _PREPROCESS_ROWS, **_FORWARD_OPTIONS,
        }  # fmt: skip
        self._for_backward: dict[str, Any] = {
            **common,
            **functions,
            **{name.upper(): config.integer(name) for name in ("dq_tile_m", "dq_tile_n", "dkv_tile_m", "dkv_tile_n")},
            "num_stages": config.integer("back_stages"),
            **_BACKWARD_OPTIONS,
            **back_warps,
        }

    def compile(self) -> None:
        """Compile for CUDA now: for 16-byte aligned tensors as torch allocates them, or for any where the inputs are strided.

        Raises:
            BuildError: with the compiler's text.
        """
        import torch

        mock = importlib.import_module("triton.runtime.jit").MockTensor
        x, f32, i32 = getattr(torch, self._problem.dtype), torch.float32, torch.int32
        o = f32 if self._split > 1 else x
        captured = tuple(mock(f32 if each.kind == "float" else i32) for each in self._tensors) or (mock(f32),)
        gradients = tuple(mock(f32) for _ in taking_gradients(self._tensors)) or (mock(f32),)
        scale, ints = 1.0, (2,) * 22
        lists = (i32,) * 4
        try:
            self._forward.warmup(x, x, x, o, f32, f32, *lists, captured, scale, *ints, grid=(1,), **self._for_forward)
            if self._split > 1:
                self._merge.warmup(f32, f32, f32, x, f32, *ints[:4], grid=(1,), **self._for_merge)
            self._preprocess.warmup(x, x, f32, f32, f32, f32, *ints[:7], grid=(1,), **self._for_preprocess)
            self._backward.warmup(
                *(x, x, x, x, f32, f32, x, x, x, *lists, *lists, captured, gradients, scale, *ints, *ints[:4]),
                grid=(1,),
                **self._for_backward,
            )
        except Exception as error:  # Triton raises a dozen unrelated types
            raise BuildError(f"{type(error).__name__}: {error}") from error

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """`o (batch, seqlen_q + slack_q, heads, dim_v)` and `lse (batch, heads, seqlen_q + slack_q)`, slack rows unwritten."""
        import torch

        p, q = inputs.problem, inputs.q
        rows = q.shape[1]
        o = torch.empty((p.batch, rows, p.heads, p.dim_v), dtype=q.dtype, device=q.device)
        lse = torch.empty((p.batch, p.heads, rows), dtype=torch.float32, device=q.device)
        tiles = _tiles(p.seqlens_q[0], self._for_forward["TILE_M"])
        if not tiles:
            return o, lse
        out, row_max, row_sum = o, lse, lse
        if self._split > 1:
            out = torch.empty((self._split, *o.shape), dtype=torch.float32, device=q.device)
            row_max, row_sum = (torch.empty((self._split, *lse.shape), device=q.device) for _ in range(2))
        band, mask = self._lists(inputs)
        self._forward[(tiles * self._split, p.heads, p.batch)](
            q,
            inputs.k,
            inputs.v,
            out,
            row_max,
            row_sum,
            *_flat(mask.keys_partial, mask.keys_full),
            self._captured(inputs) or (lse,),
            *_scalars(inputs, band, mask),
            **self._for_forward,
        )
        if self._split > 1:
            merge_grid = (_tiles(p.seqlens_q[0], _MERGE_ROWS), p.heads, p.batch)
            sizes = (p.batch, p.heads, p.seqlens_q[0], rows)
            self._merge[merge_grid](out, row_max, row_sum, o, lse, *sizes, **self._for_merge)
        return o, lse

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:
        """`dq, dk, dv`, shaped like `q, k, v`, slack rows unwritten, and the captured tensors'. `lse` is required."""
        import torch

        if lse is None:
            raise BadArgument("lse=None: the backward reads it; pass what forward returned")
        p, device = inputs.problem, inputs.q.device
        seqlen_q, seqlen_k = p.seqlens_q[0], p.seqlens_k[0]
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (inputs.q, inputs.k, inputs.v))
        captured = self._captured(inputs)
        gradients = tuple(
            torch.zeros_like(tensor) if each.gradient else None for each, tensor in zip(self._tensors, captured, strict=True)
        )
        row_lse, delta = (torch.empty((p.batch, p.heads, seqlen_q), device=device) for _ in range(2))
        if seqlen_q:
            self._preprocess[(_tiles(seqlen_q, _PREPROCESS_ROWS), p.heads, p.batch)](
                o,
                inputs.d_o,
                lse,
                lse if inputs.d_lse is None else inputs.d_lse.contiguous(),
                row_lse,
                delta,
                p.heads,
                seqlen_q,
                inputs.q.shape[1],
                *inputs.d_o.stride(),
                **self._for_preprocess,
            )
        constants = self._for_backward
        programs = _tiles(seqlen_k, constants["DKV_TILE_N"]) + _tiles(seqlen_q, constants["DQ_TILE_M"]) * p.groups
        if programs:
            band, mask = self._lists(inputs)
            self._backward[(programs, p.kv_heads, p.batch)](
                inputs.q,
                inputs.k,
                inputs.v,
                inputs.d_o,
                row_lse,
                delta,
                dq,
                dk,
                dv,
                *_flat(mask.keys_partial, mask.keys_full, mask.queries_partial, mask.queries_full),
                captured or (row_lse,),
                tuple(each for each in gradients if each is not None) or (row_lse,),
                *_scalars(inputs, band, mask),
                *inputs.d_o.stride(),
                **constants,
            )
        return (dq, dk, dv, gradients) if taking_gradients(self._tensors) else (dq, dk, dv)

    def _captured(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return tuple(each.contiguous() for each in inputs.captured)

    def _lists(self, inputs: Inputs) -> tuple[Band, BlockMask]:
        """The band and the block lists; those of the last call, if the captured tensors are the same and unchanged."""
        p = inputs.problem
        band: Band = self._masks.band_of(p)
        if self._last is None or not self._last.fits(inputs):
            tensors = {each.name: tensor for each, tensor in zip(self._tensors, inputs.captured, strict=True)}
            made = self._masks.block_mask(mask_of(p), band, p.sizes, tensors, self._block, inputs.q.device)
            of = tuple((weakref.ref(each), each._version) for each in inputs.captured)
            self._last = _Remembered(p, inputs.q.device, of, made)
        return band, self._last.mask


@dataclass(frozen=True, slots=True, eq=False)
class _Remembered:
    """The block lists of a call: good for the next one with the same problem and the same captured tensors, unchanged."""

    problem: Problem
    device: Any
    captured: tuple[tuple[weakref.ref[Any], int], ...]
    mask: BlockMask

    def fits(self, inputs: Inputs) -> bool:
        same = self.problem == inputs.problem and self.device == inputs.q.device
        now = tuple(inputs.captured)
        return same and all(
            version == tensor._version and known() is tensor for (known, version), tensor in zip(self.captured, now, strict=True)
        )


def _scalars(inputs: Inputs, band: Band, mask: BlockMask) -> tuple[int | float, ...]:
    """The numbers that forward and backward take, dO's strides left out."""
    p = inputs.problem
    by_batch, by_head = (mask.heads if mask.batches > 1 else 0), int(mask.heads > 1)
    blocks = (mask.keys_partial.index.shape[2], mask.keys_partial.index.shape[3])
    sizes = (p.batch, p.heads, p.kv_heads, p.seqlens_q[0], p.seqlens_k[0], inputs.q.shape[1], inputs.k.shape[1])
    # No layout has q, k, v with another last stride than 1.
    steps = (*inputs.q.stride()[:3], *inputs.k.stride()[:3], *inputs.v.stride()[:3])
    return (float(p.scale), band.low, band.high, *sizes, by_batch, by_head, *blocks, *steps)


def _flat(*lists: Any) -> tuple[torch.Tensor, ...]:
    return tuple(tensor for each in lists for tensor in (each.count, each.index))


def _strided(problem: Problem) -> bool:
    """Whether any tensor is other than contiguous."""
    return any(getattr(problem, name) != Layout() for name in LAYOUTS)


def _banded(problem: Problem) -> bool:
    """Whether causal or window are given, though they may hide nothing."""
    return problem.causal is not None or problem.window not in (None, (None, None))


def _even(problem: Problem, config: Config) -> tuple[bool, bool]:
    """Whether queries and keys are whole blocks."""
    block = config.integer("block")
    return problem.seqlens_q[0] % block == 0, problem.seqlens_k[0] % block == 0


def _padded(dim: int) -> int:
    """The next power of two, at least 16: what the dot products take."""
    return max(16, 1 << (dim - 1).bit_length())


def _tiles(length: int, tile: int) -> int:
    return -(-length // tile)


KERNEL: Final = TritonFlex()
PRESCALED: Final = TritonFlex(name="triton.flex.prescaled", capabilities=_PRESCALED)
TF32: Final = TritonFlex(name="triton.flex.tf32", capabilities=_TF32)
