"""Stand-ins on the CPU for PyTorch's CUDA attention ops: float64 inside, the ops' own layouts outside.

They say no to what the real ops would read wrongly: rows beyond cu_seqlens[-1], another LSE in the backward than in the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

__all__ = ["install"]

INF = float("inf")


def attention(q: Any, k: Any, v: Any, scale: float, shift: int | None) -> tuple[Any, Any]:
    """float64 (o, lse) of one sequence: q (heads, n_q, dim); query i sees key j <= i + shift. Rows without keys: 0, -inf."""
    scores = masked_scores(q, k, scale, shift)
    lse = scores.logsumexp(-1) if k.shape[1] else torch.full(q.shape[:2], -INF, dtype=torch.float64)
    return probabilities(q, k, scale, shift) @ v.repeat_interleave(q.shape[0] // k.shape[0], 0), lse


def masked_scores(q: Any, k: Any, scale: float, shift: int | None) -> Any:
    scores = scale * q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).mT
    if shift is None:
        return scores
    seen = torch.arange(k.shape[1]) <= torch.arange(q.shape[1])[:, None] + shift
    return scores.masked_fill(~seen, -INF)


def probabilities(q: Any, k: Any, scale: float, shift: int | None) -> Any:
    """P, 0 in rows that see no key."""
    return masked_scores(q, k, scale, shift).softmax(-1).nan_to_num(nan=0.0)


class Emulated:
    """One family of ops over (rows, heads, dim) sequences: remembers each LSE that it gave."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.calls: list[dict[str, Any]] = []

    def batch(self, q: Any, k: Any, v: Any, offsets: tuple[Any, Any], longest: tuple[int, int]) -> list[tuple[slice, slice]]:
        """Where each ragged sequence is."""
        cu_q, cu_k = (x.tolist() for x in offsets)
        assert q.shape[0] == cu_q[-1], "rows beyond the last sequence of queries"
        assert k.shape[0] == v.shape[0] == cu_k[-1], "rows beyond the last sequence of keys"
        assert longest == tuple(max(b - a for a, b in pairwise(x)) for x in (cu_q, cu_k))
        return [(slice(*rows_q), slice(*rows_k)) for rows_q, rows_k in zip(pairwise(cu_q), pairwise(cu_k), strict=True)]

    def forward(self, q: Any, k: Any, v: Any, scale: float, aligned: str | None) -> tuple[Any, Any]:
        """(o, lse (heads, rows) float32) of one sequence, o in q's dtype."""
        o, lse = attention(*(x.double().transpose(0, 1) for x in (q, k, v)), scale, shift_of(q, k, aligned))
        return o.transpose(0, 1).to(q.dtype), lse.float()

    def backward(self, d_o: Any, q: Any, k: Any, v: Any, scale: float, aligned: str | None) -> list[Any]:
        """(dq, dk, dv) of one sequence."""
        # By hand: within a custom op there is no autograd.
        q_, k_, v_, d_o_ = (x.double().transpose(0, 1) for x in (q, k, v, d_o))
        o, p = attention(q_, k_, v_, scale, shift_of(q, k, aligned))[0], probabilities(q_, k_, scale, shift_of(q, k, aligned))
        groups = q_.shape[0] // k_.shape[0]
        d_s = p * (d_o_ @ v_.repeat_interleave(groups, 0).mT - (d_o_ * o).sum(-1, keepdim=True))
        per_head = scale * d_s.mT @ q_, p.mT @ d_o_
        found = [
            scale * d_s @ k_.repeat_interleave(groups, 0),
            *(x.unflatten(0, (k_.shape[0], groups)).sum(1) for x in per_head),
        ]
        return [x.transpose(0, 1).to(q.dtype) for x in found]


def shift_of(q: Any, k: Any, aligned: str | None) -> int | None:
    return None if aligned is None else k.shape[0] - q.shape[0] if aligned == "bottom_right" else 0


class Op:
    """Callable as the packet and as its default overload."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.default = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.default(*args, **kwargs)


def flash() -> dict[str, Op]:
    """Bottom-right causal; LSE (batch, heads, rows) or (heads, total); +inf where no key is seen."""
    emulated = Emulated()

    def parts(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int) -> list[tuple[Any, Any]]:
        if cu_q is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            return [(i, i) for i in range(q.shape[0])]
        return list(emulated.batch(q, k, v, (cu_q, cu_k), (max_q, max_k)))

    def forward(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, p: float, causal: bool, debug: bool = False,
        return_debug_mask: bool = False, *, scale: float, window_size_left: int = -1, window_size_right: int = -1, **_: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert (p, debug, return_debug_mask, window_size_left) == (0.0, False, False, -1)
        aligned = "bottom_right" if causal or window_size_right == 0 else None
        o = torch.full(q.shape, float("nan"), dtype=q.dtype)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]) if cu_q is None else (q.shape[1], q.shape[0]), float("nan"))
        for at_q, at_k in parts(q, k, v, cu_q, cu_k, max_q, max_k):
            o[at_q], part = emulated.forward(q[at_q], k[at_k], v[at_k], scale, aligned)
            lse[at_q if cu_q is None else (slice(None), at_q)] = part.masked_fill(part == -INF, INF)
        emulated.given.append(lse)
        return o, lse, torch.zeros(2), torch.zeros(()), torch.zeros(0)

    def backward(
        d_o: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, p: float,
        causal: bool, rng: Any, unused: Any, *, scale: float, window_size_right: int = -1, **_: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert torch.equal(lse, emulated.given[-1])
        aligned = "bottom_right" if causal or window_size_right == 0 else None
        found = [torch.full(x.shape, float("nan"), dtype=x.dtype) for x in (q, k, v)]
        for at_q, at_k in parts(q, k, v, cu_q, cu_k, max_q, max_k):
            for x, at, part in zip(
                found, (at_q, at_k, at_k), emulated.backward(d_o[at_q], q[at_q], k[at_k], v[at_k], scale, aligned), strict=True
            ):
                x[at] = part
        return tuple(found)

    return {"_flash_attention_forward": Op(forward), "_flash_attention_backward": Op(backward)}


def efficient() -> dict[str, Op]:
    """(batch, rows, heads, dim) always; LSE (batch or sequences, heads, longest padded to 32) with +inf in the padding."""
    emulated = Emulated()
    masks = {0: None, 1: "top_left", 2: "bottom_right"}

    def parts(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int) -> list[tuple[Any, Any]]:
        if cu_q is None:
            return [((i, slice(None)), (i, slice(None))) for i in range(q.shape[0])]
        assert q.shape[0] == 1
        return [((0, at_q), (0, at_k)) for at_q, at_k in emulated.batch(q[0], k[0], v[0], (cu_q, cu_k), (max_q, max_k))]

    def forward(
        q: Any, k: Any, v: Any, bias: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, p: float, mask: int, want: bool,
        *, scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert (bias, p, want) == (None, 0.0, True)
        assert q.shape[2] == k.shape[2], "no grouped heads"
        places = parts(q, k, v, cu_q, cu_k, max_q, max_k)
        o = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype)
        lse = torch.full((len(places), q.shape[2], -(-max_q // 32) * 32), INF)
        for number, (at_q, at_k) in enumerate(places):
            o[at_q], part = emulated.forward(q[at_q], k[at_k], v[at_k], scale, masks[mask])
            lse[number, :, : part.shape[1]] = part
        emulated.given.append(lse)
        return o, lse, torch.zeros(()), torch.zeros(()), max_q, max_k

    def backward(
        d_o: Any, q: Any, k: Any, v: Any, bias: Any, o: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, lse: Any, p: float,
        seed: Any, offset: Any, mask: int, bias_grad: bool, *, scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert lse is emulated.given[-1]
        found = [torch.full(x.shape, float("nan"), dtype=x.dtype) for x in (q, k, v)]
        for at_q, at_k in parts(q, k, v, cu_q, cu_k, max_q, max_k):
            for x, at, part in zip(
                found,
                (at_q, at_k, at_k),
                emulated.backward(d_o[at_q], q[at_q], k[at_k], v[at_k], scale, masks[mask]),
                strict=True,
            ):
                x[at] = part
        return (*found, torch.zeros(0))

    return {"_efficient_attention_forward": Op(forward), "_efficient_attention_backward": Op(backward)}


def cudnn() -> dict[str, Op]:
    """Top-left causal. Dense: (batch, heads, rows, dim), LSE (batch, heads, rows, 1); ragged: LSE (total, heads, 1)."""
    emulated = Emulated()

    def dense(q: Any, k: Any, v: Any, bias: Any, want: bool, p: float, causal: bool, debug: bool, *, scale: float) -> Any:
        assert (bias, want, p, debug) == (None, True, 0.0, False)
        aligned = "top_left" if causal else None
        made = [emulated.forward(*(x[i].transpose(0, 1) for x in (q, k, v)), scale, aligned) for i in range(q.shape[0])]
        o, lse = torch.stack([o.transpose(0, 1) for o, _ in made]), torch.stack([lse for _, lse in made])[..., None]
        emulated.given.append(lse)
        return o, lse, None, None, q.shape[2], k.shape[2], torch.zeros(()), torch.zeros(()), None

    def dense_backward(
        d_o: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, seed: Any, offset: Any, bias: Any, cu_q: Any, cu_k: Any, max_q: int,
        max_k: int, p: float, causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert lse is emulated.given[-1]
        assert (bias, cu_q, cu_k, max_q, max_k, p) == (None, None, None, q.shape[2], k.shape[2], 0.0)
        aligned = "top_left" if causal else None
        made = [emulated.backward(*(x[i].transpose(0, 1) for x in (d_o, q, k, v)), scale, aligned) for i in range(q.shape[0])]
        return tuple(torch.stack([each[n].transpose(0, 1) for each in made]) for n in range(3))

    def ragged(
        q: Any, k: Any, v: Any, bias: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, want: bool, p: float, causal: bool,
        debug: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert (bias, want, p, debug) == (None, True, 0.0, False)
        o = torch.full((*q.shape[:2], v.shape[2]), float("nan"), dtype=q.dtype)
        lse = torch.full((q.shape[0], q.shape[1], 1), float("nan"))
        for at_q, at_k in emulated.batch(q, k, v, (cu_q, cu_k), (max_q, max_k)):
            o[at_q], part = emulated.forward(q[at_q], k[at_k], v[at_k], scale, "top_left" if causal else None)
            lse[at_q, :, 0] = part.transpose(0, 1)
        emulated.given.append(lse)
        return o, lse, cu_q, cu_k, max_q, max_k, torch.zeros(()), torch.zeros(()), None

    def ragged_backward(
        d_o: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, seed: Any, offset: Any, bias: Any, cu_q: Any, cu_k: Any, max_q: int,
        max_k: int, p: float, causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert lse is emulated.given[-1]
        assert bias is None
        found = [torch.full(x.shape, float("nan"), dtype=x.dtype) for x in (q, k, v)]
        for at_q, at_k in emulated.batch(q, k, v, (cu_q, cu_k), (max_q, max_k)):
            made = emulated.backward(d_o[at_q], q[at_q], k[at_k], v[at_k], scale, "top_left" if causal else None)
            for x, at, part in zip(found, (at_q, at_k, at_k), made, strict=True):
                x[at] = part
        return tuple(found)

    return {
        "_scaled_dot_product_cudnn_attention": Op(dense),
        "_scaled_dot_product_cudnn_attention_backward": Op(dense_backward),
        "_cudnn_attention_forward": Op(ragged),
        "_cudnn_attention_backward": Op(ragged_backward),
    }


def flex_function(_: str) -> Callable[..., Any]:
    """What torch.compile(flex_attention) with LSE computes, from its mask_mod and score_mod, differentiable."""

    def attend(q: Any, k: Any, v: Any, score_mod: Any, block_mask: Any, scale: float, grouped: bool) -> tuple[Any, Any]:
        assert not torch.utils._python_dispatch._get_current_dispatch_mode(), "torch.compile would not compile"
        assert torch.is_grad_enabled()
        assert grouped or q.shape[1] == k.shape[1]
        groups = q.shape[1] // k.shape[1]
        q_, k_, v_ = q.double(), k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        scores = scale * q_ @ k_.mT
        if score_mod is not None:
            scores = score_mod(scores, None, None, i, j)
        if block_mask is not None:
            assert tuple(block_mask.shape[-2:]) == (q.shape[2], k.shape[2])
            scores = scores.masked_fill(~block_mask.mask_mod(None, None, i, j), -INF)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse.masked_fill(lse == -INF, 0.0)[..., None])
        return (p @ v_).to(q.dtype), lse.float()

    return attend


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins where the adapters look."""
    from attnfuzz.kernels.torch import flex

    for name, op in {**flash(), **efficient(), **cudnn()}.items():
        monkeypatch.setattr(torch.ops.aten, name, op)
    monkeypatch.setattr(flex, "function", flex_function)
