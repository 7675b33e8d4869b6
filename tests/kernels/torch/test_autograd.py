"""Kernels as differentiable functions: in a transformer block, with gradients that are not contiguous, and wrong arguments."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.torch.autograd import attention, attention_padded, attention_varlen

assert issubclass(BadArgument, ValueError)

DENSE = (
    pytest.param("tilelang.mha", marks=pytest.mark.slow),
    pytest.param("tilelang.gqa.atomic", marks=pytest.mark.slow),
    "tilelang.gqa.split",
    "torch.reference_cpu",
)


def able(name: str) -> None:
    if reason := registry.get(name).unavailable("cpu"):
        pytest.skip(reason)


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual; heads are split off one projection."""

    def __init__(self, heads: int, kv_heads: int, dim: int, kernel: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.kernel = heads, kv_heads, dim, kernel
        width = heads * dim
        self.into = nn.Linear(width, (heads + 2 * kv_heads) * dim)
        self.out = nn.Linear(width, width)
        self.more = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).unflatten(-1, (-1, self.dim)).split([self.heads, self.kv_heads, self.kv_heads], 2)
        o = self.attend(q, k, v)
        x = x + self.out(o.flatten(2))
        return x + self.more(x)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.kernel == "exact":
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, 2) for x in (k, v))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return attention(q, k, v, kernel=self.kernel, causal="top_left")


@pytest.mark.parametrize("name", DENSE)
def test_a_transformer_block_trains(name: str) -> None:
    able(name)
    torch.manual_seed(0)
    block = Block(4, 4 if name == "tilelang.mha" else 2, 32, name)
    exact = Block(4, block.kv_heads, 32, "exact").double()
    exact.load_state_dict({key: value.double() for key, value in block.state_dict().items()})
    x = torch.randn(2, 37, 128)
    losses = [each(x.to(next(each.parameters()).dtype)).square().mean() for each in (block, exact)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for got, true in zip(block.parameters(), exact.parameters(), strict=True):
        assert got.grad is not None
        assert true.grad is not None
        torch.testing.assert_close(got.grad.double(), true.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("kind", ["transposed", "expanded"])
def test_the_gradient_of_o_may_have_any_strides(name: str, kind: str) -> None:
    able(name)
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, n, 2, 32, requires_grad=True) for n in (9, 12, 12))
    incoming = torch.randn(1, 2, 9, 32).transpose(1, 2) if kind == "transposed" else torch.ones(()).expand(1, 9, 2, 32)
    gradients = []
    for d_o in (incoming, incoming.contiguous()):
        o = attention(q, k, v, kernel=name)
        gradients.append(torch.autograd.grad(o, (q, k, v), d_o))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_ragged_sequences_and_lse() -> None:
    able("tilelang.varlen")
    torch.manual_seed(2)
    q, k, v = (torch.randn(n, h, 32, requires_grad=True) for n, h in ((11, 4), (15, 2), (15, 2)))
    cu_q, cu_k = torch.tensor([0, 4, 4, 10], dtype=torch.int32), torch.tensor([0, 5, 7, 13], dtype=torch.int32)
    o, lse = attention_varlen(q, k, v, cu_q, cu_k, causal="bottom_right", return_lse=True)
    assert (o.shape, lse.shape, lse.requires_grad) == ((11, 4, 32), (4, 11), False)
    d_q, d_k, d_v = torch.autograd.grad(o[:10].sum(), (q, k, v))
    k_first, v_first = (each[:5].repeat_interleave(2, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q[:4], k_first) * 32**-0.5
    hidden = torch.ones(4, 5, dtype=torch.bool).triu(diagonal=2)
    alone = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v_first)
    torch.testing.assert_close(o[:4], alone, rtol=1e-5, atol=1e-6)
    one_q, one_k, one_v = torch.autograd.grad(alone.sum(), (q, k, v))
    torch.testing.assert_close(d_q[:4], one_q[:4], rtol=1e-4, atol=1e-5)
    for whole, part in ((d_k, one_k), (d_v, one_v)):
        torch.testing.assert_close(whole[:5], part[:5], rtol=1e-4, atol=1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("which", ["q", "k", "v", "do"])
@pytest.mark.parametrize("kind", ["transposed", "expanded"])
def test_ragged_tensors_may_have_any_strides(which: str, kind: str) -> None:
    able("triton.varlen")
    torch.manual_seed(4)
    strided = {name: torch.randn(n, 2, 32) for name, n in (("q", 9), ("k", 12), ("v", 12), ("do", 9))}
    x = strided[which]
    strided[which] = x.transpose(0, 1).contiguous().transpose(0, 1) if kind == "transposed" else x[:1, :, :1].expand_as(x)
    assert not strided[which].is_contiguous()
    ends = (torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32))
    results = []
    for tensors in (strided, {name: each.contiguous() for name, each in strided.items()}):
        qkv = [tensors[name].detach().requires_grad_() for name in ("q", "k", "v")]
        o = attention_varlen(*qkv, *ends, kernel="triton.varlen", causal="bottom_right")
        results.append((o, *torch.autograd.grad(o, qkv, tensors["do"])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tilelang.gqa_varlen.atomic", marks=pytest.mark.slow),
        pytest.param("tilelang.gqa_varlen.split", marks=pytest.mark.slow),
        pytest.param("tilelang.varlen", marks=pytest.mark.slow),
        "triton.varlen",
    ],
)
def test_padding_is_left_out(name: str) -> None:
    able(name)
    torch.manual_seed(3)
    q, k, v = (torch.randn(3, n, h, 32) for n, h in ((9, 4), (12, 2), (12, 2)))
    lengths_q, lengths_k = torch.tensor([9, 0, 4]), torch.tensor([5, 12, 0])
    for x, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k)):
        for i, n in enumerate(lengths):
            x[i, n:] = torch.nan
        x.requires_grad_()
    o = attention_padded(q, k, v, lengths_q, lengths_k, kernel=name, causal=True)
    assert o.shape == (3, 9, 4, 32)
    assert not o[1:].any(), "a sequence without queries, and one without keys"
    actual = torch.autograd.grad(o.sum(), (q, k, v))
    ends = (torch.tensor([0, n], dtype=torch.int32) for n in (9, 5))
    alone = attention_varlen(q[0], k[0, :5], v[0, :5], *ends, kernel=name, causal="bottom_right")[None]
    torch.testing.assert_close(o[:1], alone, rtol=1e-5, atol=1e-6)
    for got, true in zip(actual, torch.autograd.grad(alone.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([8, 9]), "lengths_q=9: a sequence has 0 to 8 rows"),
        (torch.tensor([-1, 2]), "lengths_q=-1"),
        (torch.tensor([2]), "lengths_q='(1,) torch.int64': a whole number for each of 2 sequences"),
        (torch.tensor([2.0, 3.0]), "torch.float32"),
        ([2, 3], "lengths_q='list'"),
    ],
)
def test_lengths_are_looked_at(lengths, message: str) -> None:
    able("tilelang.varlen")
    with pytest.raises(BadArgument) as raised:
        attention_padded(Q, Q, Q, lengths, torch.tensor([8, 8]))
    assert message in str(raised.value)


Q = torch.zeros(2, 8, 4, 64, dtype=torch.float16)
CU = torch.tensor([0, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": Q[..., :3, :], "v": Q[..., :3, :]}, "k.shape=(2, 8, 3, 64): its 3 heads do not divide q's 4"),
        ({"k": Q[..., :0, :], "v": Q[..., :0, :]}, "its 0 heads do not divide q's 4"),
        ({"k": Q[:1], "v": Q[:1]}, "q has a batch of 2"),
        ({"v": Q[:, :7]}, "v.shape=(2, 7, 4, 64): k has (2, 8, 4, 64)"),
        ({"k": Q[..., :32]}, "k.shape=(2, 8, 4, 32)"),
        ({"k": Q.float()}, "k.dtype=torch.float32: q has torch.float16"),
        ({"q": Q.double()}, "q.dtype=torch.float64: no kernel takes it"),
        ({"q": Q[0]}, "q.shape=(8, 4, 64): 4 dimensions are expected"),
        ({"q": "q"}, "q.shape='str'"),
        ({"v": Q.to("meta")}, "v.device="),
        ({"causal": "left"}, "causal='left': no such mask"),
        ({"softmax_scale": float("nan")}, "softmax_scale=nan: it must be finite"),
        ({"kernel": "tilelang.mhaa"}, "tilelang.mha"),
        ({"kernel": "tilelang.varlen"}, "packing='dense'"),
        ({"q": Q[..., :40], "k": Q[..., :40], "v": Q[..., :40]}, "dim_qk, dim_v=(40, 40)"),
    ],
)
def test_wrong_arguments_are_told_before_a_compile(changes: dict, message: str) -> None:
    able("tilelang.mha")
    arguments = {"q": Q, "k": Q, "v": Q, "kernel": "tilelang.mha", **changes}
    with pytest.raises(BadArgument) as raised:
        attention(**arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("cu_q", "message"),
    [
        (torch.tensor([1, 3, 8], dtype=torch.int32), "cu_seqlens_q[0]=1: the first sequence begins at 0"),
        (torch.tensor([0, 5, 3], dtype=torch.int32), "cu_seqlens_q[2]=3: it is less than the one before (5)"),
        (torch.tensor([0, 5, 9], dtype=torch.int32), "cu_seqlens_q[-1]=9: there are 8 rows"),
        (torch.tensor([0, 5, 8]), "(3,) torch.int64"),
        (torch.tensor([0], dtype=torch.int32), "one int32 offset for each sequence and the end"),
        (torch.tensor([0, 8], dtype=torch.int32), "seqlens_k"),
        ([0, 3, 8], "cu_seqlens_q='list'"),
    ],
)
def test_offsets_are_looked_at(cu_q, message: str) -> None:
    able("tilelang.varlen")
    with pytest.raises(BadArgument) as raised:
        attention_varlen(Q[0], Q[0], Q[0], cu_q, CU)
    assert message in str(raised.value)


SLACK = ("tilelang.gqa_varlen.split", "triton.varlen")


@pytest.mark.interpreted
@pytest.mark.parametrize("name", SLACK)
def test_rows_of_no_sequence_have_no_gradient(name: str) -> None:
    """And are 0 in O: what memory held before must reach no weight."""
    able(name)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        cu = torch.tensor([0, 5, 13], dtype=torch.int32)
        into = nn.Linear(64, 3 * 4 * 64)
        q, k, v = into(torch.randn(16, 64)).unflatten(1, (3, 4, 64)).half().unbind(1)
        o = attention_varlen(q, k, v, cu, cu, kernel=name)
        assert not o[13:].any()
        o.float().square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
    assert into.weight.grad is not None
    assert torch.isfinite(into.weight.grad).all()


@pytest.mark.interpreted
def test_offsets_may_not_change_between_forward_and_backward() -> None:
    able("triton.varlen")
    cu = torch.tensor([0, 5, 13], dtype=torch.int32)
    q, k, v = (torch.randn(13, 2, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    o = attention_varlen(q, k, v, cu, cu, kernel="triton.varlen")
    cu[1] = 7
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize(
    ("name", "dtype"), [("tilelang.mha_pipelined", torch.float16), ("tilelang.gqa_varlen.atomic", torch.float32)]
)
def test_gradients_are_those_of_the_definition(name: str, dtype: torch.dtype) -> None:
    able(name)
    generator = torch.Generator().manual_seed(2)
    q, k, v, d_o = (torch.randn(2, 37, 2, 32, generator=generator).to(dtype) for _ in range(4))
    exact = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    nn.functional.scaled_dot_product_attention(*exact, is_causal=True).backward(d_o.double().transpose(1, 2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    if "varlen" in name:
        cu = torch.tensor([0, 37, 74], dtype=torch.int32)
        o = attention_varlen(*(x.flatten(0, 1) for x in leaves), cu, cu, kernel=name, causal=True).unflatten(0, (2, 37))
    else:
        o = attention(*leaves, kernel=name, causal=True)
    # as the gradient of a transposed output has it: other strides than O's
    o.transpose(1, 2).backward(d_o.transpose(1, 2).contiguous())
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    for mine, true in zip(leaves, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), true.grad.transpose(1, 2), rtol=tolerance, atol=tolerance)


ODD = {
    "kernel": ({"kernel": 3}, "it is not a kernel"),
    "causal": ({"causal": torch.tensor([True, False])}, "no such mask"),
    "scale": ({"kernel": "tilelang.gqa.split", "softmax_scale": 3e38}, "does not fit float32"),
    "meta": ({name: torch.empty(2, 5, 4, 32, device="meta") for name in ("q", "k", "v")}, "kernels read plain memory"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_arguments_are_told_as_well(name: str) -> None:
    able("tilelang.gqa.split")
    changes, message = ODD[name]
    arguments = {each: torch.zeros(2, 5, 4, 32) for each in ("q", "k", "v")} | {"kernel": "torch.reference_cpu"} | changes
    with pytest.raises(BadArgument, match=message):
        attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize("name", ["tilelang.gqa_varlen.split", "triton.varlen"])
def test_a_grid_has_its_limit(name: str) -> None:
    kernel = registry.get(name)
    problem = Problem(seqlens_q=(1,) * 70000, seqlens_k=(1,) * 70000, dim_qk=64, dim_v=64)
    reason = kernel.supports(problem, kernel.configs(problem)[0], "cuda")
    assert reason == "batch=70000: a launch has at most 65535 of them; call it in parts"
    assert kernel.supports(problem, kernel.configs(problem)[0], "cpu") is None
