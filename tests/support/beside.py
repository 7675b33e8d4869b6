"""A device beside the host, in the CPU's own memory: counts what it does, and how often the host waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from attnfuzz.harness.core import environment
from attnfuzz.harness.trial import batch, bench, launch, reading
from attnfuzz.harness.trial.checks import relations
from attnfuzz.oracles.relations import transfer

FREE = {"view", "as_strided", "slice", "select", "split", "split_with_sizes", "transpose", "expand", "detach", "alias", "empty",
        "set_", "unsqueeze", "_unsafe_view", "permute", "empty_like", "new_empty", "empty_strided", "unbind", "unfold",
        "lift_fresh", "squeeze"}  # fmt: skip
"""Views and allocations: nothing for the device to do."""
WAITS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "_unique2"}


class Beside(TorchDispatchMode):
    """Follows which tensors are on the device: those of inputs and launches, and what is computed from them.

    `operations` and `waits` count by section: "inputs" of the Case, "launch", and "compare" for everything else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.section = "compare"
        self.operations, self.waits = Counter[str](), Counter[str]()
        self._here = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, torch.Tensor)]
        on_device = any(self.has(each) for each in given) or (not given and self.section != "compare")
        name = func._schema.name.split("::")[1]
        if on_device:
            self.operations[self.section] += name not in FREE
            masks = name == "index" and any(each.dtype == torch.bool for each in given[1:])
            self.waits[self.section] += name in WAITS or masks
        result = func(*args, **(kwargs or {}))
        self.place(result, on_device=on_device)
        return result

    def has(self, tensor: torch.Tensor) -> bool:
        return bool(self._here.get(tensor, False))

    def place(self, tensors: Any, *, on_device: bool) -> Any:
        for each in tree_leaves(tensors):
            if isinstance(each, torch.Tensor):
                self._here[each] = on_device
        return tensors

    @contextmanager
    def within(self, section: str) -> Iterator[None]:
        before, self.section = self.section, section
        try:
            yield
        finally:
            self.section = before

    def counted(self, function: Callable[..., Any], section: str) -> Callable[..., Any]:
        """Return `function`, counted as `section`."""

        def within(*args: Any, **kwargs: Any) -> Any:
            with self.within(section):
                return function(*args, **kwargs)

        return within

    def fetched(self, flat: torch.Tensor) -> torch.Tensor:
        # What was computed on the host is there already: a tiny Case's truth.
        self.waits[self.section] += self.has(flat)
        return self.place(flat.clone(), on_device=False)

    def sent(self, flat: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert not self.has(flat)
        self.operations[self.section] += 1
        return self.place(flat.clone(), on_device=True)

    def waited(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` of a tensor, which waits if that is on the device."""

        def waits(tensor: Any) -> Any:
            self.waits[self.section] += self.has(tensor)
            return function(tensor)

        return waits


def install(monkeypatch: pytest.MonkeyPatch) -> Beside:
    """Let relations take the CPU for a device beside the host, and return what counts; it is to be entered."""
    beside = Beside()
    monkeypatch.setattr(transfer, "is_remote", lambda inputs: True)
    monkeypatch.setattr(transfer, "_fetched", beside.fetched)
    monkeypatch.setattr(transfer, "_sent", beside.sent)
    for module, name in ((bench, "materialise"), (batch, "materialise"), (batch, "numbers_of")):
        monkeypatch.setattr(module, name, beside.counted(getattr(module, name), "inputs"))
    for name in ("start", "start_in_place"):
        monkeypatch.setattr(relations, name, beside.counted(getattr(launch, name), "launch"))
    for name in ("tolist", "item", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, beside.waited(getattr(torch.Tensor, name)))
    synchronise = environment.synchronise

    def synchronised(device: Any) -> None:
        beside.waits[beside.section] += 1
        synchronise(device)

    monkeypatch.setattr(environment, "synchronise", synchronised)
    monkeypatch.setattr(relations, "copied", beside.counted(relations.copied, "launch"))
    monkeypatch.setattr(reading, "_read", beside.counted(reading._read, "compare"))
    return beside
