"""Copies of inputs between guard bands: those of a GPU are those of a CPU, byte by byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnfuzz.harness.trial.bands import Bands, form_of
from attnfuzz.harness.trial.poison import PoisonEmpty

NAMES = ("q", "odd", "with gaps", "k, v")
"""The copies of `tensors`, in their order."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors(device: str) -> dict[str, torch.Tensor]:
    shared = torch.arange(3000, dtype=torch.float32, device=device).to(torch.float16)
    return {
        "q": torch.arange(105, dtype=torch.float32, device=device).reshape(3, 5, 7),
        "odd": torch.arange(8, dtype=torch.int8, device=device)[1:6],
        "nothing": torch.empty(0, device=device),
        "with gaps": torch.arange(200, dtype=torch.float64, device=device).view(10, 20)[:, 3:9],
        "k": shared[3:500],
        "v": shared[600:].view(8, 300).T,
    }


def copied(device: str) -> tuple[Bands, dict[str, torch.Tensor]]:
    bands = Bands()
    return bands, bands.copies(tensors(device), "its input")


def contents(bands: Bands) -> list[bytes]:
    return [bytes(each.words.cpu().view(torch.uint8).tolist()) for each in bands._kept]


@pytest.mark.gpu
def test_a_gpu_writes_what_a_cpu_writes() -> None:
    on_cpu, _ = copied("cpu")
    on_gpu, copies = copied("cuda")
    assert contents(on_gpu) == contents(on_cpu)
    assert {name: x.tolist() for name, x in copies.items()} == {name: x.tolist() for name, x in tensors("cpu").items()}
    assert on_gpu.broken() is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", ["past the end", "before the start"])
def test_a_write_outside_is_found(device: str, side: str) -> None:
    bands, _ = copied(device)
    band = bands._kept[2]
    band.words[-1 if side == "past the end" else band.before - 1] = 1
    message = bands.broken()
    assert message is not None
    assert message.startswith(f"1 2-byte words were written {side} of its input {NAMES[2]} ")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("own", [False, True])
def test_a_sequence_beyond_the_cumulated_lengths_has_tokens(device: str, dtype: torch.dtype, own: bool) -> None:
    """At either end: one of negative length would do nothing, and nobody would see that its length was read."""
    bands, lengths = Bands(), torch.tensor([0, 5, 12], dtype=dtype, device=device)
    held = (
        bands.like(form_of(lengths), "its own").copy_(lengths)
        if own
        else bands.copies({"lengths": lengths}, "its input")["lengths"]
    )
    before, *own_ones, after = held.as_strided((5,), (1,), held.storage_offset() - 1).tolist()
    assert own_ones == [0, 5, 12]
    assert 0 - before > 1 << 20
    assert after - 12 > 1 << 30
    assert bands.broken() is None
    held.as_strided((1,), (1,), held.storage_offset() + 3).fill_(before)
    assert "past the end" in str(bands.broken())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", ["numbers", "lengths"])
def test_lengths_that_share_an_allocation_have_the_same_bands(device: str, last: str) -> None:
    words = torch.zeros(8, dtype=torch.int32, device=device)
    numbers, lengths = (words[:4], words[4:]) if last == "lengths" else (words[4:], words[:4])
    held = Bands().copies({"numbers": numbers.view(torch.float32), "lengths": lengths}, "its input")[last]
    behind = held.as_strided((1,), (1,), held.storage_offset() + 4)
    assert behind.view(torch.int32).item() > 1 << 30
    assert all(behind.view(each).isnan().all() for each in (torch.float32, torch.float16, torch.bfloat16))


def test_tensors_have_different_bands() -> None:
    bands, _ = copied("cpu")
    first = [int(each.words[0]) for each in bands._kept]
    assert len(set(first)) == len(first) == 4


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.zeros(3, 4, dtype=torch.float16),
        lambda: torch.zeros_like(torch.ones(4, 3).T),
        lambda: torch.ones(2, 2).new_zeros((5,), dtype=torch.int64),
        lambda: torch.zeros(0, 3),
        lambda: torch.zeros_like(torch.ones(2, 2), layout=torch.sparse_coo),
        lambda: torch.zeros_like(torch.ones(2, 2).to_sparse()),
        lambda: torch.zeros(2, device="meta"),
    ],
)
def test_zeros_are_what_torch_makes(made: Callable[[], torch.Tensor]) -> None:
    expected, bands = made(), Bands()
    with PoisonEmpty(bands):
        actual = made()
    assert (actual.dtype, actual.shape, actual.layout, actual.device) == (
        expected.dtype,
        expected.shape,
        expected.layout,
        expected.device,
    )
    if actual.layout is torch.strided and actual.device.type == "cpu":
        assert actual.stride() == expected.stride()
        assert torch.equal(actual, expected)
        assert bool(bands._kept) == bool(actual.numel())
    assert bands.broken() is None
