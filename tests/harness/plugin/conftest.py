"""A folder with the kernels of a team named acme."""

from __future__ import annotations

import os

import pytest
from support.acme import KERNEL_FILE

from attnfuzz.kernels import registry

XDIST = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
OF_THIS_RUN = ("PYTEST_ADDOPTS", *XDIST, "CI", "BUILD_NUMBER", "FORCE_COLOR", "PY_COLORS")


@pytest.fixture(autouse=True)
def _environment_of_a_plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the pytest that runs these tests reaches the pytest that they run.

    With CI or BUILD_NUMBER, pytest's summary repeats each failure whole; two others color what it prints.
    """
    for name in OF_THIS_RUN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def acme(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with the kernels of a team named acme, as importable as an installed package."""
    pytester.makepyfile(acme=KERNEL_FILE)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(pytester.path)
    monkeypatch.setattr(registry, "_registered", {})
    return pytester
