"""Bits of many tensors compared and copied by one launch: whatever their layouts, as torch would say of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.fused_c import Compiled, generated

from attnfuzz.harness.trial.runs import clones, differing, runs


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("runs"))


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.arange(60.0).view(3, 4, 5),
    "transposed": lambda: torch.arange(60.0).view(5, 4, 3).permute(2, 1, 0),
    "rows of a larger one": lambda: torch.arange(120.0).view(6, 4, 5)[1:4],
    "columns of a larger one": lambda: torch.arange(120.0).view(3, 8, 5)[:, 2:6],
    "expanded": lambda: torch.arange(20.0).view(1, 4, 5).expand(3, 4, 5),
    "half": lambda: torch.arange(60.0).view(3, 4, 5).to(torch.float16),
    "nothing": lambda: torch.empty(0, 4, 5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_all_elements_of_a_tensor(layout: str) -> None:
    x = LAYOUTS[layout]()
    if not x.numel():
        return
    addresses = [at + step for at, size in runs(x) for step in range(0, size, x.element_size())]
    steps = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        steps = (steps[:, None] + stride * torch.arange(size)).flatten()
    assert addresses == [x.data_ptr() + x.element_size() * step for step in steps.tolist()]


@pytest.mark.parametrize("one", LAYOUTS)
@pytest.mark.parametrize("other", LAYOUTS)
def test_one_launch_tells_which_tensors_differ_anywhere(one: str, other: str, compiled: Compiled) -> None:
    x, y = LAYOUTS[one](), LAYOUTS[other]()
    if x.shape != y.shape or x.dtype != y.dtype:
        return
    equal = y.clone() if other == "expanded" else y
    equal.copy_(x)
    nan = torch.full((4,), torch.nan)
    with generated(compiled):
        compiled.calls.clear()
        flags = differing([(nan, nan.clone()), (x, equal), (torch.zeros(2), -torch.zeros(2))])
        assert flags is not None
        assert [int(each) for each in flags] == [0, 0, 1]
        assert compiled.calls == {"guarded_pieces": 1}
        for at in range(equal.numel()):
            place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), equal.shape))
            before = equal[place].clone()
            equal[place] = 1000.0
            flags = differing([(x, equal)])
            assert flags is not None
            assert [int(each) for each in flags] == [1 if not torch.equal(x, equal) else 0]
            equal[place] = before


def test_many_parts_are_left_to_others(compiled: Compiled) -> None:
    x = torch.zeros(300, 2)[:, :1]
    with generated(compiled):
        assert differing([(x, x)]) is None
        assert differing([]) is None


def test_clones_are_equal_and_apart(compiled: Compiled) -> None:
    every = [make() for make in LAYOUTS.values()]
    with generated(compiled):
        compiled.calls.clear()
        copies = clones(every)
        assert compiled.calls == {"guarded_pieces": 1}
    for x, copy in zip(every, copies, strict=True):
        assert torch.equal(x, copy)
        assert x.dtype == copy.dtype
        assert not x.numel() or x.untyped_storage().data_ptr() != copy.untyped_storage().data_ptr()
