"""The executor of warp roles: numbers, roles, and what it refuses."""

from __future__ import annotations

import math
import random

import pytest

pytest.importorskip("tilelang")
torch = pytest.importorskip("torch")

from support.role_kernels import ROWS, accumulated, cut, doubled, exchanged, made, summed, tensors  # noqa: E402

from attnfuzz.kernels.support.protocol import ProtocolFault  # noqa: E402
from attnfuzz.kernels.tilelang import dense_device, sm100_forward_device  # noqa: E402
from attnfuzz.kernels.tilelang.roles.executor import collected, executable, run  # noqa: E402
from attnfuzz.kernels.tilelang.roles.expressions import UnsupportedByRolesError  # noqa: E402

HOPPER = {"tl.force_let_inline": True}
MADE = {
    "wasp": lambda **of: sm100_forward_device.forward_wasp(**of, tile_m=128, tile_n=64, strided=False),
    "hopper": lambda **of: dense_device.forward(**of, tile_m=64, tile_n=64, threads=128, stages=2, strided=False),
}


def attention(which: str, dtype: str, schedule: tuple[int, ...] = ()) -> tuple[torch.Tensor, ...]:
    """Run a forward on lengths that are no multiples of its tiles; return o, lse and what they must be."""
    n_q, n_k, heads, groups = 70, 150, 2, 2
    make = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    q = torch.randn((1, n_q, heads, 32), generator=make).to(kind)
    k, v = (torch.randn((1, n_k, heads // groups, 32), generator=make).to(kind) for _ in range(2))
    o, lse = torch.full_like(q, math.nan), torch.full((1, heads, n_q), math.nan)
    func = MADE[which](dim_qk=32, dim_v=32, causal=True, dtype=dtype)
    run(func, (q, k, v, groups, n_k - n_q, 0.25, o, lse), schedule=schedule, passes=HOPPER)
    scores = 0.25 * torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(groups, 2))
    scores = scores.masked_fill(~torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q), -math.inf)
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double().repeat_interleave(groups, 2))
    return o, lse, expected, scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("which", ["wasp", "hopper"])
def test_forwards_with_roles_are_right(which: str, dtype: str) -> None:
    o, lse, expected, expected_lse = attention(which, dtype)
    assert (o.double() - expected).abs().max() < 4 * {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert (lse.double() - expected_lse).abs().max() < 1e-5


@pytest.mark.parametrize("which", ["wasp", "hopper"])
def test_no_schedule_changes_a_bit(which: str) -> None:
    first = attention(which, "float16")[:2]
    source = random.Random(1)
    for _ in range(3):
        again = attention(which, "float16", tuple(source.randrange(4) for _ in range(200)))[:2]
        assert all(map(torch.equal, first, again))


def test_roles_are_named_by_what_they_do() -> None:
    (block,) = made(doubled()).programs(tensors(4 * ROWS))
    assert [role.name for role in block.roles] == ["compute threads 0-127", "DMA threads 128-159"]
    func = MADE["wasp"](dim_qk=32, dim_v=32, causal=False, dtype="float16")
    q, k, lse = torch.zeros(1, 128, 1, 32).half(), torch.zeros(1, 64, 1, 32).half(), torch.zeros(1, 1, 128)
    (block,) = executable(func, HOPPER).programs((q, k, k, 1, 0, 1.0, q, lse))
    assert [role.name for role in block.roles] == ["compute threads 0-127", "DMA threads 128-159", "MMA threads 160-191"]


def test_rows_beyond_a_tensor_are_read_as_zeros_and_not_written() -> None:
    x, y = tensors(2 * ROWS + 5)
    made(doubled())(x, y)
    assert torch.equal(y, 2 * x)


def test_an_operation_that_expects_bytes_and_arrives_does_both() -> None:
    x, y = tensors(3 * ROWS)
    made(doubled(joined=True, filled=33))(x, y)
    assert torch.equal(y, 2 * x)
    for wrong in ({"joined": False, "filled": 33}, {"joined": True, "filled": 34}):
        with pytest.raises(ProtocolFault, match="wait"):
            made(doubled(**wrong))(x, y)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_store_under_a_condition_leaves_other_elements(dtype: str) -> None:
    x, y = tensors(ROWS)
    made(cut(dtype))(x, torch.tensor([5], dtype=getattr(torch, dtype)), y)
    assert torch.equal(y[:5], x[:5])
    assert not y[5:].any()


def test_a_named_barrier_orders_roles() -> None:
    x, y = tensors(ROWS)
    made(exchanged())(x, y, schedule=(1, 1, 1))
    assert torch.equal(y, x)
    with pytest.raises(ProtocolFault) as caught:
        made(exchanged(signals=False))(x, y)
    assert caught.value.kind in ("early-read", "early-overwrite")
    assert caught.value.__notes__ == ["in block (0, 0, 0) of main"]


def test_what_is_not_known_is_named() -> None:
    with pytest.raises(UnsupportedByRolesError, match=r"^tl\.tileop\.cumsum: the executor of roles does not know this operation"):
        made(accumulated())
    with pytest.raises(UnsupportedByRolesError, match="control flow or an index depends on the contents of a buffer"):
        made(summed())


def test_launches_can_be_collected_instead_of_run() -> None:
    x, y = tensors(ROWS)
    function = made(doubled())
    with collected() as launches:
        function(x, y)
    assert [(each, len(arguments)) for each, arguments in launches] == [(function, 2)]
    assert y.isnan().all()
