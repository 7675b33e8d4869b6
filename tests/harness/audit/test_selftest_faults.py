"""`attnfuzz selftest faults`: a line for each fault as it ends; what follows the campaigns has time after their budget."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from attnfuzz.harness.audit.selftest import faults as selftest
from attnfuzz.harness.audit.selftest.report import FaultProgress


def test_each_fault_is_a_line_as_it_ends_and_the_restarts_come_after_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_CASES", 40)
    text = io.StringIO()
    with FaultProgress(Console(file=text, width=200), "cpu") as progress:
        done = selftest.faults("cpu", progress, ["fault.abort"], restarts=2, budget=15.0)
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("fault.abort: crash in ")
    assert lines[1].startswith("torch.reference_cpu: nothing in ")
    assert done.leaks.restarts == 2
    assert not done.leaks.wrong
