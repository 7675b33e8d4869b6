"""The candidate that a package's autotuner takes: the first that compiles, not the fastest of one measurement.

Triton's autotuner times all candidates at the first call with new values of its key. A Case would then run other code in each
process, as times vary, and most of a run would go into compiles of candidates that are not chosen.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

__all__ = ["FirstCandidate", "first_candidates"]

_QUANTILES: Final = 3
"""Times of a candidate that an autotuner asks for."""


class FirstCandidate:
    """Stand-in for Triton's benchmark: the first candidate that runs is the fastest, and no other is tried after it.

    A candidate that does not compile, or does not fit on the device, raises what the autotuner expects of a benchmark.
    """

    def __init__(self) -> None:
        self._chosen: dict[int, Any] = {}
        """By the autotuner: the arguments for which a candidate was chosen."""

    def __call__(self, launch: Callable[[], Any], *_args: Any, **_kwargs: Any) -> list[float]:
        """Return the times of a candidate, in any unit."""
        tuner = inspect.getclosurevars(launch).nonlocals.get("self")
        arguments = getattr(tuner, "nargs", None)
        if arguments is not None and self._chosen.get(id(tuner)) is arguments:
            return [2.0] * _QUANTILES
        if not self.runs(launch):
            return [float("inf")] * _QUANTILES
        self._chosen[id(tuner)] = arguments
        return [1.0] * _QUANTILES

    def runs(self, launch: Callable[[], Any]) -> bool:
        """Launch a candidate; returns False where it cannot be taken."""
        launch()
        return True

    def forget(self) -> None:
        """Release the arguments of what was tuned: an autotuner keeps the benchmark that it asked for first."""
        self._chosen.clear()


_BENCHMARK: Final = FirstCandidate()


@contextlib.contextmanager
def first_candidates() -> Iterator[None]:
    """Have autotuners of compiled Triton functions take their first candidate that compiles and fits on the GPU.

    Holds for autotuners that are first used inside; needs a GPU, whose driver has the benchmark.
    """
    import triton
    import triton.testing

    driver = type(triton.runtime.driver.active)
    with (
        mock.patch.object(triton.testing, "do_bench", _BENCHMARK),
        mock.patch.object(driver, "get_benchmarker", return_value=_BENCHMARK),
    ):
        try:
            yield
        finally:
            _BENCHMARK.forget()
