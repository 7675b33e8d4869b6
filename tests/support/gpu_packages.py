"""Stand-ins for packages that run on a GPU only: modules with their public functions, which compute attention in float64.

Arguments, layouts and the form of LSE are those of the packages' documentation, so that the wrappers around them run on a CPU.
`wrong` names one thing that a stand-in does otherwise than documented: then the wrapper must fail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

LOG_2 = math.log(2.0)


def attended(q: Any, k: Any, v: Any, scale: float | None, causal: bool, window: tuple[int, int], softcap: float = 0.0) -> Any:
    """O `(rows, heads, dim_v)` and natural LSE `(heads, rows)` of one sequence, float64; masks begin at the bottom right."""
    rows, keys, groups = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, 0) for x in (k, v))
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    ahead = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    left, right = window[0], 0 if causal else window[1]
    hidden = ((ahead > right) if causal or right >= 0 else ahead > keys + rows) | (
        (ahead < -left) if left >= 0 else ahead < -keys - rows
    )
    s = s.masked_fill(hidden, -math.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return (p @ v).transpose(0, 1), lse


def ragged(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, *options: Any) -> Any:
    """O `(total, heads, dim_v)` and natural LSE `(heads, total)`, by the starts of the sequences."""
    pairs = zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True)
    parts = [attended(q[a:b], k[c:d], v[c:d], *options) for (a, b), (c, d) in pairs]
    return torch.cat([o for o, _ in parts]).to(q.dtype), torch.cat([lse for _, lse in parts], 1)


def dense(q: Any, k: Any, v: Any, *options: Any) -> Any:
    """O `(batch, rows, heads, dim_v)` and natural LSE `(batch, heads, rows)`."""
    parts = [attended(*each, *options) for each in zip(q, k, v, strict=True)]
    return torch.stack([o for o, _ in parts]).to(q.dtype), torch.stack([lse for _, lse in parts])


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    for each, value in members.items():
        setattr(made, each, value)
    return made


def flash_attn(wrong: str = "") -> dict[str, ModuleType]:
    """flash-attn 2: LSE natural, +inf in a row without keys, `(batch, heads, rows)` or `(heads, total)`."""

    def result(o: Any, lse: Any, probs: bool) -> Any:
        lse = lse.masked_fill(lse == -math.inf, math.inf).float()
        return (o, lse / LOG_2 if wrong == "base of LSE" else lse, None) if probs else o

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert dropout_p == 0.0
        return result(*dense(q, k, v, softmax_scale, causal, window_size, softcap), return_attn_probs)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert dropout_p == 0.0
        assert (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max())) == (max_seqlen_q, max_seqlen_k)
        o, lse = ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size, softcap)
        return result(o, lse, return_attn_probs)

    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    return {"flash_attn": module("flash_attn", **functions), "einops": module("einops")}


@dataclass
class Bias:
    """What a bias of xformers says: lengths of blocks of a ragged batch, a causal mask, a window with the query's own key."""

    lengths: tuple[list[int], list[int]] | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)

    def make_local_attention(self, window_size: int) -> Bias:
        assert self.causal
        return Bias(self.lengths, True, (window_size - 1, -1))

    def make_causal_from_bottomright(self) -> Bias:
        assert self.lengths is not None
        assert all(q <= k for q, k in zip(*self.lengths, strict=True))
        return Bias(self.lengths, True)

    def make_local_attention_from_bottomright(self, window_size: int) -> Bias:
        assert window_size > 0
        return self.make_causal_from_bottomright().make_local_attention(window_size)


class Blocks:
    @staticmethod
    def from_seqlens(q_seqlen, kv_seqlen=None, *, device=None):
        return Bias((list(q_seqlen), list(kv_seqlen or q_seqlen)))


def local_mask(window_left: int, window_right: int) -> Bias:
    assert min(window_left, window_right) >= 0
    return Bias(None, False, (window_left, window_right))


def xformers(wrong: str = "", *, packed: bool = True) -> dict[str, ModuleType]:
    """xformers: LSE natural, dense with more rows than queries; of a ragged batch packed or padded."""

    def computed(query, key, value, bias, scale):
        bias = bias or Bias()
        if bias.lengths is None:
            return dense(query, key, value, scale, bias.causal, bias.window)
        assert query.shape[0] == key.shape[0] == value.shape[0] == 1
        starts = [torch.tensor([0, *each]).cumsum(0) for each in bias.lengths]
        o, lse = ragged(query[0], key[0], value[0], *starts, scale, bias.causal, bias.window)
        if packed:
            return o[None], lse[None]
        rows = lse.split(bias.lengths[0], 1)
        padded = [torch.nn.functional.pad(each, (0, max(bias.lengths[0]) - each.shape[1]), value=7.0) for each in rows]
        return o[None], torch.stack(padded)

    def forward_requires_grad(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
        with torch.no_grad():
            o, lse = computed(query, key, value, attn_bias, scale)
        more = -lse.shape[-1] % 32
        return o, torch.nn.functional.pad(lse / LOG_2 if wrong == "base of LSE" else lse, (0, more), value=9.0).float()

    def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
        return computed(query, key, value, attn_bias, scale)[0]

    attn_bias = module(
        "xformers.ops.fmha.attn_bias",
        BlockDiagonalMask=Blocks,
        LowerTriangularFromBottomRightMask=lambda: Bias(None, True),
        LocalAttentionFromBottomRightMask=local_mask,
    )
    fmha = module("xformers.ops.fmha", attn_bias=attn_bias)
    ops = module(
        "xformers.ops",
        fmha=fmha,
        memory_efficient_attention=memory_efficient_attention,
        memory_efficient_attention_forward_requires_grad=forward_requires_grad,
    )
    return {each.__name__: each for each in (module("xformers", ops=ops), ops, fmha, attn_bias)}


def flashinfer(wrong: str = "") -> dict[str, ModuleType]:
    """FlashInfer: LSE in base 2, `(tokens, heads)`; pages by starts, indices and the tokens of each sequence's last page."""

    def result(o: Any, lse: Any, return_lse: bool) -> Any:
        lse = (lse if wrong == "base of LSE" else lse / LOG_2).t()
        return (o, (lse.t() if wrong == "layout of LSE" else lse).float().contiguous()) if return_lse else o

    def single_prefill_with_kv_cache(
        q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None, causal=False,
        kv_layout="NHD", pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
        logits_soft_cap=None, rope_scale=None, rope_theta=None, backend="auto", return_lse=False,
    ):  # fmt: skip
        o, lse = attended(q, k, v, sm_scale, causal, (window_left, -1), logits_soft_cap or 0.0)
        return result(o.to(q.dtype), lse, return_lse)

    class Planned:
        def __init__(self, float_workspace_buffer, kv_layout="NHD"):
            assert float_workspace_buffer.dtype == torch.uint8
            assert float_workspace_buffer.numel() >= 128 << 20
            assert kv_layout == "NHD"

        def keep(self, heads, kv_heads, dim, causal, options):
            assert {*options} == {"sm_scale", "window_left", "logits_soft_cap", "q_data_type"}
            self.sizes, self.causal, self.options = (heads, kv_heads, dim), causal, options

        def attend(self, q, k, v, starts_q, starts_k, return_lse):
            assert (q.shape[1], k.shape[1], q.shape[2]) == self.sizes
            assert q.dtype == self.options["q_data_type"]
            window = (self.options["window_left"], -1)
            scale, cap = self.options["sm_scale"], self.options["logits_soft_cap"]
            return result(*ragged(q, k, v, starts_q, starts_k, scale, self.causal, window, cap), return_lse)

        def tokens(self, cache, pages):
            starts, indices, last, size = pages
            assert {each.dtype for each in (starts, indices, last)} == {torch.int32}
            assert cache[0].shape[1] == size
            assert int(starts[-1]) == len(indices)
            lengths = [(int(b) - int(a) - 1) * size + int(n) for (a, b), n in zip(pairwise(starts), last, strict=True)]
            parts = [
                [x[indices[a:b].long()].flatten(0, 1)[:n] for x in cache]
                for (a, b), n in zip(pairwise(starts), lengths, strict=True)
            ]
            k, v = (torch.cat(each) for each in zip(*parts, strict=True))
            return k, v, torch.tensor([0, *lengths]).cumsum(0)

    class Ragged(Planned):
        def plan(
            self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, *, causal=False, **options
        ):
            self.keep(num_qo_heads, num_kv_heads, head_dim_qk, causal, options)
            self.starts = qo_indptr, kv_indptr

        def run(self, q, k, v, *, return_lse=False):
            return self.attend(q, k, v, *self.starts, return_lse)

    class Paged(Planned):
        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
            page_size, *, causal=False, **options,
        ):  # fmt: skip
            self.keep(num_qo_heads, num_kv_heads, head_dim_qk, causal, options)
            self.starts, self.pages = qo_indptr, (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)

        def run(self, q, paged_kv_cache, *, return_lse=False):
            k, v, starts = self.tokens(paged_kv_cache, self.pages)
            return self.attend(q, k, v, self.starts, starts, return_lse)

    class Decode(Planned):
        def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **options):
            self.keep(num_qo_heads, num_kv_heads, head_dim, True, options)
            self.pages = indptr, indices.roll(1) if wrong == "pages" else indices, last_page_len, page_size

        def run(self, q, paged_kv_cache, *, return_lse=False):
            k, v, starts = self.tokens(paged_kv_cache, self.pages)
            return self.attend(q, k, v, torch.arange(len(starts)), starts, return_lse)

    members = {
        "single_prefill_with_kv_cache": single_prefill_with_kv_cache,
        "BatchPrefillWithRaggedKVCacheWrapper": Ragged,
        "BatchPrefillWithPagedKVCacheWrapper": Paged,
        "BatchDecodeWithPagedKVCacheWrapper": Decode,
    }
    return {"flashinfer": module("flashinfer", **members), "tvm_ffi": module("tvm_ffi")}
