"""Modifiers' trees as functions of torch: a captured tensor may be called as an index, a function or a module is."""

from __future__ import annotations

import pytest

from attnfuzz.kernels.expressions.tree import Captured, H, S, load
from attnfuzz.kernels.torch.trees import function_of

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["gain", "score", "q_idx", "b", "torch", "make", "modify", "t0", "seqlen_q"])
def test_the_name_of_a_captured_tensor_is_free(name: str) -> None:
    tree = S * load(Captured(name, ("heads",)), H) + 1.0
    lengths = (torch.tensor(4), torch.tensor(5))
    modify = function_of(tree, lengths, {name: torch.tensor([2.0, 3.0])})
    zero = torch.tensor(0)
    assert float(modify(torch.tensor(5.0), zero, torch.tensor(1), zero, zero)) == 16.0
