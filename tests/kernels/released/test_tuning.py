"""Autotuners take their first candidate that compiles and fits: on a GPU, and of which times an autotuner is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnfuzz.kernels.released.tuning import FirstCandidate


class Tuner:
    """What an autotuner is for its benchmark: `nargs`, and a launch that closes over it."""

    def __init__(self) -> None:
        self.nargs: dict[str, int] | None = {"n": 1}
        self.launched: list[str] = []

    def launch(self, name: str, error: Exception | None = None) -> Callable[[], None]:
        def kernel_call() -> None:
            self.launched.append(name)
            if error is not None:
                raise error

        return kernel_call


def test_after_the_first_candidate_no_other_is_launched() -> None:
    benchmark, tuner = FirstCandidate(), Tuner()
    times = [benchmark(tuner.launch(name), quantiles=(0.5, 0.2, 0.8)) for name in ("a", "b", "c")]
    assert tuner.launched == ["a"]
    assert min(times) == times[0]
    tuner.nargs = {"n": 2}
    benchmark(tuner.launch("d"))
    benchmark(tuner.launch("e"))
    assert tuner.launched == ["a", "d"]


def test_a_candidate_that_does_not_fit_raises_and_the_next_is_taken() -> None:
    benchmark, tuner = FirstCandidate(), Tuner()
    with pytest.raises(MemoryError):
        benchmark(tuner.launch("a", MemoryError()))
    assert benchmark(tuner.launch("b"))[0] < benchmark(tuner.launch("c"))[0]
    assert tuner.launched == ["a", "b"]


def test_arguments_are_not_kept() -> None:
    benchmark, tuner = FirstCandidate(), Tuner()
    benchmark(tuner.launch("a"))
    benchmark.forget()
    benchmark(tuner.launch("b"))
    assert tuner.launched == ["a", "b"]


@pytest.mark.gpu
def test_compiled_functions_take_the_first_candidate_that_fits() -> None:
    from support.triton_mode import loaded

    triton = loaded()
    from support import tuned_device

    from attnfuzz.kernels.released.tuning import first_candidates

    function: Any = tuned_device.tuned_kernel
    x = torch.zeros(70, dtype=torch.int32, device="cuda")
    with first_candidates():
        function[lambda meta: (triton.cdiv(70, meta["block"]),)](x, 70, most=32)
    assert set(x.tolist()) == {16}
    # Of three candidates the first does not compile, and the third was not tried.
    assert [each.kwargs["block"] for each, times in function.configs_timings.items() if times[0] == 1.0] == [16]
    assert len(function.configs_timings) == 3
