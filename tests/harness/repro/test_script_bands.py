"""Guard bands of a printed script: odd sizes, and behind integers positive ones, also where these share an allocation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attnfuzz.harness.repro.script.runtime import Bands, PackedCase, Stored, called  # noqa: E402
from attnfuzz.kernels.contract import Config  # noqa: E402
from attnfuzz.kernels.problem import Problem  # noqa: E402


class Built(Exception):
    """The inputs are made."""


class NoKernel(SimpleNamespace):
    def build(self, *_: Any) -> Any:
        raise Built


def behind(count: int, *, integers: bool) -> list[int]:
    bands = Bands()
    held = bands.between(count, "cpu", "a tensor", integers=integers)
    assert held.numel() == count
    held.fill_(7)
    assert not bands.broken()
    (_, words, end, _) = bands.buffers[0]
    words[end] ^= 1
    assert bands.broken() == ["a tensor: memory beyond its ends was written to"]
    return [int(words[end + 1]), int(words[-1])]


@pytest.mark.parametrize("count", [0, 1, 3, 12, 24])
def test_what_is_behind_integers_is_positive(count: int) -> None:
    assert min(behind(count, integers=True)) > 0
    assert max(behind(count, integers=False)) < 0


@pytest.mark.parametrize("shared", [False, True])
def test_lengths_that_share_an_allocation_have_positive_bands(shared: bool) -> None:
    problem = Problem(seqlens_q=(1,), seqlens_k=(1,), heads=1, kv_heads=1, dim_qk=8, dim_v=8, dtype="float16")
    numbers = {name: Stored(0, "float16", (1, 1, 8), (8, 8, 1), 0) for name in ("q", "k", "v", "d_o")}
    # 16 bytes of numbers are four of the lengths' elements.
    lengths = {f"cu_seqlens_{side}": Stored(int(not shared), "int32", (2,), (1,), 4) for side in "qk"}
    memory = [torch.zeros(24, dtype=torch.uint8) for _ in range(2)]
    case = PackedCase(NoKernel(), "cpu", Config(), (), {}, {}, (), 1, "", {}, memory)  # type: ignore[arg-type]
    bands = Bands()
    with pytest.raises(Built):
        called(case, problem, numbers | lengths, bands)
    *_, end = bands.buffers[-1][1].tolist()
    assert end > 0
    assert (len(bands.buffers), bands.broken()) == (1 if shared else 2, [])
