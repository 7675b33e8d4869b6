"""A child's error as an exception in its parent."""

from __future__ import annotations

import pytest

from attnfuzz.harness.isolation.outcomes import ChildMemoryError, ChildOSError, Error, ExecutionError, exception_of
from attnfuzz.kernels.errors import BadArgument


def kinds(base: type[BaseException]) -> list[type[BaseException]]:
    return [base, *(each for derived in base.__subclasses__() for each in kinds(derived))]


@pytest.mark.parametrize("kind", [each for each in kinds(BadArgument) if each.__module__.startswith("attnfuzz.")])
def test_wrong_use_keeps_its_class_and_its_text_alone(kind: type[BaseException]) -> None:
    error = exception_of(Error(kind.__name__, "dims=0: must be positive; give 8", "Traceback"))
    assert (type(error), str(error)) == (kind, "dims=0: must be positive; give 8")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("MemoryError", ChildMemoryError),
        ("OutOfMemoryError", ChildMemoryError),
        ("PermissionError", ChildOSError),
        ("KeyError", ExecutionError),
    ],
)
def test_an_error_of_the_harness_keeps_its_trace(name: str, kind: type[ExecutionError]) -> None:
    error = exception_of(Error(name, "seven", "Traceback"))
    assert (type(error), str(error)) == (kind, f"{name}: seven\nTraceback")
