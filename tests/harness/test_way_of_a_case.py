"""The way of one Case through the packages of harness/, traced: it is short, and ARCHITECTURE.md draws it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from click.testing import CliRunner
from support.paths import ROOT

import attnfuzz.harness.cli.main as cli
from attnfuzz.harness.campaign.kernel_run import KernelRun
from attnfuzz.harness.trial.trial import rehearse

HARNESS = Path(cli.__file__).parents[1]
MOST_CROSSINGS = 12


def package_of(frame: FrameType) -> str | None:
    """The package of harness/ that a frame's code belongs to; none for core, which knows nothing of Cases, and for imports."""
    path = Path(frame.f_code.co_filename)
    if frame.f_code.co_name == "<module>" or not path.is_relative_to(HARNESS):
        return None
    package = path.relative_to(HARNESS).parts[0]
    return None if package == "core" else package


@contextmanager
def traced(way: list[str]) -> Iterator[None]:
    """Note the package whose code runs, from one function call to the next."""
    stack: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        package = package_of(frame)
        if package is None or event not in ("call", "return"):
            return
        if event == "call":
            stack.append(package)
        elif stack:
            stack.pop()
        if stack and way[-1] != stack[-1]:
            way.append(stack[-1])

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_a_case_crosses_few_borders(tmp_path: Path, monkeypatch: Any) -> None:
    """From the command line to its verdict in the reports and back: drawn, run in this process, judged, counted.

    Traced is what a turn does again and again: it draws and tries one Case. The command line calls it and takes back its result.
    A child process, which runs trials by default, would receive the Case from isolation/ and run the same trial.
    """
    way = ["cli"]
    try_next = KernelRun._try_next

    def tried(run: KernelRun) -> bool:
        with traced(way):
            return try_next(run)

    monkeypatch.setattr(KernelRun, "_try_next", tried)
    arguments = ["run", "torch.reference_cpu", "--device", "cpu", "--max-examples", "1", "--in-process", "--no-maps"]
    rehearse("cpu")
    result = CliRunner().invoke(cli.main, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    way.append("cli")
    print(" > ".join(way))
    assert way.count("judge") == 1
    assert {"campaign", "isolation", "trial", "judge", "report"} < set(way)
    assert len(way) - 1 <= MOST_CROSSINGS, " > ".join(way)


def test_one_class_runs_a_kernel() -> None:
    """What was one class of 325 lines and 17 constructor arguments stays small."""
    import inspect

    assert len(inspect.getsource(KernelRun).splitlines()) <= 150
    assert len(inspect.signature(KernelRun).parameters) <= 8
    assert (ROOT / "harness" / "campaign" / "kernel_run.py").exists()
