"""`triton.flex` built for one compile key: allocation, launches, and the block lists that the device code reads."""

from __future__ import annotations

import importlib
import weakref
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.contract import Config, Gradients, Inputs
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.modified import mask_of, score_of, tensors_of
from attnfuzz.kernels.problem import LAYOUTS, Layout, Problem
from attnfuzz.kernels.support.memory import allocating
from attnfuzz.kernels.triton.machine_code.lower import Call
from attnfuzz.kernels.triton.padding import padded_dims
from attnfuzz.kernels.triton.printer import load_source, source, taking_gradients

if TYPE_CHECKING:
    import torch

    from attnfuzz.kernels.triton.blockmask import Band, BlockMask, Lists

__all__ = ["BuiltFlex", "banded", "even", "strided"]

# Rows per program of the Delta kernel, and of the one that merges parts: no Config changes them.
_PREPROCESS_ROWS: Final = 64
_MERGE_ROWS: Final = 16
# On CUDA, p = 2^(s - m) must not contract with the product inside s: the largest p would no longer be exactly 1. The
# backward has no such p.
_FORWARD_OPTIONS: Final[dict[str, Any]] = {"enable_fp_fusion": False}
_BACKWARD_OPTIONS: Final[dict[str, Any]] = {"enable_fp_fusion": True}


class BuiltFlex:
    """The device functions with the constants of one compile key.

    Args:
        module: the device module.
        masks: the module that makes block lists.
        problem: any problem of the compile key.
        config: tile sizes, warps, stages and parts.
        prescaled: whether q is scaled and rounded first.
        precision: precision of float32 products.
    """

    def __init__(
        self, module: ModuleType, masks: ModuleType, problem: Problem, config: Config, *, prescaled: bool, precision: str
    ) -> None:
        self._strided = strided(problem)
        self._forward, self._preprocess, self._backward = (
            getattr(module, f"{name}_strided" if self._strided else name) for name in ("forward", "preprocess", "backward")
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
        pad_qk, pad_v = padded_dims(problem, exact=precision == "ieee")
        shape: dict[str, Any] = {"DIM_QK": problem.dim_qk, "DIM_V": problem.dim_v, "PAD_QK": pad_qk, "PAD_V": pad_v}
        common: dict[str, Any] = {
            **shape, **dict.fromkeys(("EVEN_Q", "EVEN_K"), even(problem, config)), "BAND": banded(problem),
            "BLOCK_Q": self._block[0], "BLOCK_K": self._block[1], "STRIDED": self._strided, "PRESCALED": prescaled,
            "PRECISION": precision,
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
            **of_v, "STRIDED": self._strided, "TILE_M": _PREPROCESS_ROWS, **_FORWARD_OPTIONS,
        }  # fmt: skip
        self._for_backward: dict[str, Any] = {
            **common,
            **functions,
            **{name.upper(): config.integer(name) for name in ("dq_tile_m", "dq_tile_n", "dkv_tile_m", "dkv_tile_n")},
            "num_stages": config.integer("back_stages"),
            **_BACKWARD_OPTIONS,
            **back_warps,
        }

    def calls(self) -> tuple[Call, ...]:
        """The launches, for tensors aligned to 16 bytes as torch's are, or for any alignment where inputs are strided."""
        import torch

        mock = importlib.import_module("triton.runtime.jit").MockTensor
        x, f32, i32 = getattr(torch, self._problem.dtype), torch.float32, torch.int32
        o = f32 if self._split > 1 else x
        captured = tuple(mock(f32 if each.kind == "float" else i32) for each in self._tensors) or (mock(f32),)
        gradients = tuple(mock(f32) for _ in taking_gradients(self._tensors)) or (mock(f32),)
        scale, ints = 1.0, (2,) * 23
        lists = (i32,) * 3
        forward = (x, x, x, o, f32, f32, *lists, captured, scale, *ints)
        backward = (x, x, x, x, f32, f32, x, x, x, *lists, *lists, captured, gradients, scale, *ints, *ints[:4])
        merge = Call("merge", self._merge, (f32, f32, f32, x, f32, *ints[:4]), self._for_merge)
        return (
            Call("forward", self._forward, forward, self._for_forward),
            *((merge,) if self._split > 1 else ()),
            *(
                Call(name, self._preprocess, (x, x, *(f32,) * 4, *ints[:7]), {**self._for_preprocess, "DLSE": dlse})
                for name, dlse in (("preprocess", False), ("preprocess dlse", True))
            ),
            Call("backward", self._backward, backward, self._for_backward),
        )

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """`o (batch, seqlen_q + slack_q, heads, dim_v)` and `lse (batch, heads, seqlen_q + slack_q)`, slack rows unwritten."""
        import torch

        p, q = inputs.problem, inputs.q
        rows = q.shape[1]
        with allocating() as empty:
            o = empty((p.batch, rows, p.heads, p.dim_v), dtype=q.dtype, device=q.device)
            lse = empty((p.batch, p.heads, rows), dtype=torch.float32, device=q.device)
        tiles = _tiles(p.seqlens_q[0], self._for_forward["TILE_M"])
        if not tiles:
            return o, lse
        out, row_max, row_sum = o, lse, lse
        if self._split > 1:
            with allocating() as empty:
                out = empty((self._split, *o.shape), dtype=torch.float32, device=q.device)
                row_max, row_sum = (empty((self._split, *lse.shape), dtype=torch.float32, device=q.device) for _ in range(2))
        band, lists = self._lists(inputs)
        self._forward[(tiles * self._split, p.heads, p.batch)](
            q,
            inputs.k,
            inputs.v,
            out,
            row_max,
            row_sum,
            *lists.keys,
            self._captured(inputs) or (lse,),
            *self._scalars(inputs, band, lists),
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
        captured = self._captured(inputs)
        with allocating() as empty:
            dq, dk, dv = (empty(x.shape, dtype=x.dtype, device=device) for x in (inputs.q, inputs.k, inputs.v))
            gradients = tuple(
                torch.zeros_like(tensor) if each.gradient else None for each, tensor in zip(self._tensors, captured, strict=True)
            )
            row_lse, delta = (empty((p.batch, p.heads, seqlen_q), dtype=torch.float32, device=device) for _ in range(2))
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
                *self._d_o_steps(inputs),
                DLSE=inputs.d_lse is not None,
                **self._for_preprocess,
            )
        constants = self._for_backward
        programs = _tiles(seqlen_k, constants["DKV_TILE_N"]) + _tiles(seqlen_q, constants["DQ_TILE_M"]) * p.groups
        if programs:
            band, lists = self._lists(inputs)
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
                *lists.keys,
                *lists.queries,
                captured or (row_lse,),
                tuple(each for each in gradients if each is not None) or (row_lse,),
                *self._scalars(inputs, band, lists),
                *self._d_o_steps(inputs),
                **constants,
            )
        return (dq, dk, dv, gradients) if taking_gradients(self._tensors) else (dq, dk, dv)

    def _scalars(self, inputs: Inputs, band: Band, lists: _Joined) -> tuple[int | float, ...]:
        """The numbers that forward and backward take, without dO's strides."""
        p = inputs.problem
        batches, heads, *blocks = lists.keys[2].shape
        by_batch, by_head = (heads if batches > 1 else 0), int(heads > 1)
        sizes = (p.batch, p.heads, p.kv_heads, p.groups, p.seqlens_q[0], p.seqlens_k[0], inputs.q.shape[1], inputs.k.shape[1])
        # In every layout the last stride of q, k, v is 1. Strides that are not read might still exceed int32.
        strides = (step for x in (inputs.q, inputs.k, inputs.v) for step in x.stride()[:3])
        return (
            float(p.scale),
            band.low,
            band.high,
            *sizes,
            by_batch,
            by_head,
            *blocks,
            *(strides if self._strided else (0,) * 9),
        )

    def _d_o_steps(self, inputs: Inputs) -> tuple[int, ...]:
        return inputs.d_o.stride() if self._strided else (0, 0, 0, 1)

    def _captured(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return tuple(each.contiguous() for each in inputs.captured)

    def _lists(self, inputs: Inputs) -> tuple[Band, _Joined]:
        """The band and the block lists; outside a capture those of the last call, if captured tensors are unchanged."""
        p = inputs.problem
        band: Band = self._masks.band_of(p)
        stream: int = self._masks.stream_of(inputs.q.device)
        remembers = not self._masks.captures(inputs.q.device)
        if remembers and self._last is not None and self._last.fits(inputs, stream):
            return band, self._last.lists
        tensors = {each.name: tensor for each, tensor in zip(self._tensors, inputs.captured, strict=True)}
        mask: BlockMask = self._masks.block_mask(mask_of(p), band, p.sizes, tensors, self._block, inputs.q.device)
        lists = _Joined(_joined(mask.keys_partial, mask.keys_full), _joined(mask.queries_partial, mask.queries_full))
        if remembers:
            of = tuple((weakref.ref(each), _version(each)) for each in inputs.captured)
            self._last = _Remembered(p, inputs.q.device, stream, of, lists)
        return band, lists


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """A block mask in the device code's form: lists of key blocks for query blocks, and the other way round."""

    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    queries: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Remembered:
    """The block lists of the last call, valid for the same problem, stream and captured tensors, unchanged."""

    problem: Problem
    device: Any
    stream: int
    captured: tuple[tuple[weakref.ref[Any], int | None], ...]
    lists: _Joined

    def fits(self, inputs: Inputs, stream: int) -> bool:
        same = self.problem == inputs.problem and self.device == inputs.q.device and self.stream == stream
        now = tuple(inputs.captured)
        return same and all(
            known() is tensor and version == _version(tensor) is not None
            for (known, version), tensor in zip(self.captured, now, strict=True)
        )


def _version(tensor: torch.Tensor) -> int | None:
    """Count of writes to `tensor`; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def _joined(partial: Lists, full: Lists) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each block the number of partial ones, the number of all, and one list of both, the partial ones first."""
    import torch

    masked = partial.count[..., None]
    at = torch.arange(partial.index.shape[-1], device=masked.device) - masked
    index = torch.where(at < 0, partial.index, full.index.gather(-1, at.clamp(min=0)))
    return partial.count, partial.count + full.count, index.contiguous()


def strided(problem: Problem) -> bool:
    """Whether any tensor is other than contiguous."""
    return any(getattr(problem, name) != Layout() for name in LAYOUTS)


def banded(problem: Problem) -> bool:
    """Whether there is a causal mask or a window, even one that hides nothing."""
    return problem.causal is not None or problem.window not in (None, (None, None))


def even(problem: Problem, config: Config) -> bool:
    """Whether both queries and keys are whole blocks: two variants are compiled, not four."""
    block = config.integer("block")
    return problem.seqlens_q[0] % block == problem.seqlens_k[0] % block == 0


def _tiles(length: int, tile: int) -> int:
    return -(-length // tile)
