"""Kernels that use autograd, or views at offsets of their own, are right between guard bands too."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnfuzz.harness.trial import own_storage
from attnfuzz.harness.trial.bands import Bands
from attnfuzz.harness.trial.own_storage import with_own_storage
from attnfuzz.harness.trial.poison import PoisonEmpty
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Capabilities, Config, Inputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def slices_in_place(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).clone()
    y[1:3] = x[1:3] * 3
    return y


def view_at_an_offset(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((3, 2), (4, 1), 5) * 2


def view_from_the_start(x: torch.Tensor) -> torch.Tensor:
    factors = x.new_empty((6, 2))
    return x[:3, :2] * factors.as_strided((3, 2), (2, 1), 0).fill_(2.0)


def view_at_its_own_offset(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x).copy_(x)[2:]
    return y.as_strided((2, 2), (4, 1), y.storage_offset()) * 3


def strided_memory(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty_strided((5, 4), (4, 1)).copy_(x) * 2


FUNCTIONS = (slices_in_place, view_at_an_offset, view_from_the_start, view_at_its_own_offset, strided_memory)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda x: x.__name__)
def test_gradients_are_those_without_bands(function: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
    x = torch.arange(20.0, device=device).view(5, 4).requires_grad_()

    def gradient() -> tuple[torch.Tensor, torch.Tensor]:
        y = function(x)
        return y.detach().clone(), torch.autograd.grad(y.square().sum(), x)[0]

    expected, bands = gradient(), Bands()
    with PoisonEmpty(bands):
        got = gradient()
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
    assert bands.broken() is None


@pytest.mark.parametrize("device", DEVICES)
def test_a_view_of_an_input_counts_from_the_inputs_storage(device: str) -> None:
    storage, bands = torch.arange(40.0, device=device), Bands()
    x = bands.copies({"q": storage[8:20]}, "its input")["q"]
    with PoisonEmpty(bands):
        assert x.as_strided((3,), (1,), 8).tolist() == [8, 9, 10]
        assert x.as_strided((3,), (1,), x.storage_offset()).tolist() == [8, 9, 10]
        assert x.as_strided((2,), (1,), 6).isnan().all(), "in front of the tensor"


def test_a_write_past_a_tensor_with_a_storage_of_its_own_is_found() -> None:
    bands = Bands()
    with PoisonEmpty(bands):
        x = torch.zeros(4).new_empty_strided((4,), (1,))
    assert x.storage_offset() == 0
    assert x.isnan().all()
    whole = bands._kept[-1].words.view(torch.float32)
    whole[-(1 << 14)] = 1.0
    assert "past the end" in (bands.broken() or "")


def test_a_part_keeps_the_memory_of_the_whole_alive() -> None:
    whole = torch.arange(20, dtype=torch.uint8)
    part = with_own_storage(whole[4:9])
    assert part is not None
    del whole
    gc.collect()
    assert part.tolist() == [4, 5, 6, 7, 8]


def test_without_numpy_a_gpu_has_no_such_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_storage.importlib.util, "find_spec", lambda _: None)
    assert with_own_storage(SimpleNamespace(device=torch.device("cuda"))) is None  # type: ignore[arg-type]


class InPlace:
    """A right kernel that writes O in slices, and has its gradients from autograd."""

    name, backend, files = "test.in_place", "torch", (__file__,)
    capabilities = Capabilities(dtypes=("float32",), dims=((16, 16),), packings=("dense",), devices=("cpu",))

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        return (Config(),)

    def unavailable(self, device: str) -> str | None:
        return None

    def supports(self, problem: Problem, config: Config, device: str) -> str | None:
        return None

    def compile_key(self, problem: Problem, config: Config) -> str:
        return "one"

    def build(self, problem: Problem, config: Config, device: str) -> Any:
        return self

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return self._attention(inputs, inputs.q, inputs.k, inputs.v)

    def _attention(self, inputs: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = inputs.problem
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * p.scale
        o, rows = torch.empty_like(inputs.d_o), q.shape[1]
        for first in range(0, rows, 2):
            weights = scores[:, :, first : first + 2].softmax(-1)
            o[:, first : first + 2] = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        return o, scores.logsumexp(-1)

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
            return torch.autograd.grad(self._attention(inputs, *leaves)[0], leaves, inputs.d_o)


def test_a_right_kernel_that_writes_slices_under_autograd_passes() -> None:
    kernel = registry.register(InPlace())
    try:
        problem = Problem(seqlens_q=(5, 5), seqlens_k=(7, 7), dim_qk=16, dim_v=16, dtype="float32", packing="dense")
        verdict = run_trial(Case(kernel=kernel.name, problem=problem), "cpu")
    finally:
        registry.unregister(kernel.name)
    assert verdict.status == "pass", verdict.failures


PREPARED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "padded": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 3)),
    "joined": lambda x: torch.cat([x, x]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", PREPARED.values(), ids=PREPARED.keys())
def test_what_a_wrapper_prepares_for_its_kernel_lies_between_bands(
    make: Callable[[torch.Tensor], torch.Tensor], device: str
) -> None:
    x, bands = torch.arange(20.0, device=device).view(5, 4), Bands()
    expected = make(x)
    with PoisonEmpty(bands):
        got = make(x)
    assert torch.equal(got, expected)
    assert got.stride() == expected.stride()
    assert bands.broken() is None
    # The kernel writes one element past the end.
    band = bands._kept[-1]
    assert band.words.data_ptr() + 2 * band.before == got.data_ptr()
    band.words[band.before + got.numel() * got.element_size() // 2] = 1
    assert "past the end of a tensor of the kernel's own" in (bands.broken() or "")


def test_a_read_past_what_a_wrapper_has_padded_shows() -> None:
    bands = Bands()
    with PoisonEmpty(bands):
        x = torch.nn.functional.pad(torch.ones(5, 4), (0, 0, 0, 3))
    words, first = bands._kept[-1].words.view(torch.float32), bands._kept[-1].before // 2
    assert torch.equal(words[first : first + x.numel()], x.flatten())
    assert words[first + x.numel() : first + x.numel() + 8].isnan().all()
    assert words[first - 8 : first].isnan().all()


def test_views_of_joined_tensors_are_right_at_any_offset() -> None:
    x = torch.arange(100_000.0)
    with PoisonEmpty(Bands()):
        assert torch.cat([x, x]).as_strided((3,), (1,), 170_000).tolist() == [70_000, 70_001, 70_002]


def test_results_of_arithmetic_and_of_many_joins_are_not_kept() -> None:
    x, bands = torch.ones(1 << 22), Bands()
    with PoisonEmpty(bands):
        for _ in range(40):
            x * 0.5
            torch.cat([x, x])
    assert sum(each.words.numel() * 2 for each in bands._kept) <= 1 << 28


def test_nested_tensors_are_left_alone() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    with PoisonEmpty(Bands()):
        assert nested.mul(2).unbind()[1].sum() == 24
        assert nested.clone().unbind()[0].sum() == 6


def test_an_offset_that_only_the_whole_storage_has_is_left_alone() -> None:
    bands = Bands()
    with PoisonEmpty(bands):
        x = torch.empty(4)
        whole = x.as_strided((x.untyped_storage().nbytes() // 4,), (1,), 0)
    assert whole.data_ptr() == x.untyped_storage().data_ptr()
