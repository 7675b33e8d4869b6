"""Numbers that are sent to a device at once arrive as they are."""

from __future__ import annotations

import torch

from attnfuzz.oracles.slots import bits_of, integers, sent


def test_lists_arrive_apart_and_as_they_were() -> None:
    lists = [[3, -1, 1 << 40], [], [0]]
    reals = [0.1, -2.0, float("inf")]
    *arrived, bits = sent([*map(integers, lists), bits_of(reals)], torch.device("cpu"))
    assert [each.tolist() for each in arrived] == lists
    assert bits.view(torch.float64).tolist() == reals
    assert all(each.dtype == torch.int64 for each in (*arrived, bits, integers([]), bits_of([])))
