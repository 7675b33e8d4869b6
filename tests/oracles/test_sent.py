"""Numbers that are sent to a device at once arrive as they are."""

from __future__ import annotations

import torch

from attnfuzz.oracles.slots import integers, reals_sent, sent


def test_lists_arrive_apart_and_as_they_were() -> None:
    lists = [[3, -1, 1 << 40], [], [0]]
    reals = [0.1, -2.0, float("inf")]
    arrived, numbers = sent(list(map(integers, lists)), torch.device("cpu")), reals_sent([reals, [], [2]], torch.device("cpu"))
    assert [each.tolist() for each in arrived] == lists
    assert [each.tolist() for each in numbers] == [reals, [], [2.0]]
    assert all(each.dtype == torch.int64 for each in (*arrived, integers([])))
    assert all(each.dtype == torch.float64 for each in (*numbers, *reals_sent([[]], torch.device("cpu"))))
