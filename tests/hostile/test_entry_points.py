"""Entry points of installed packages that give no kernel: each is a row of `list`, an error of `run`, and no other's business."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.hostile import HARMLESS, attnfuzz, json_of, refused

from attnfuzz.harness.gate.subjects import named
from attnfuzz.kernels import registry
from attnfuzz.kernels.support import import_trial

POINTS = {
    "exit 0": ("import sys; sys.exit(0)", "importing {module} failed with SystemExit: 0 ({module}.py:1)"),
    "the process ended with 0": ("import os; os._exit(0)", "importing {module} failed: it ended the process, with exit code 0"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "it ended the process, by SIGSEGV ({module}.py:1)"),
    "hang": ("while True: pass", "it does not end within 1 s"),
    "an exception": ("raise RuntimeError('no')", "importing {module} failed with RuntimeError: no ({module}.py:1)"),
    "its own KeyboardInterrupt": ("raise KeyboardInterrupt", "importing {module} failed with KeyboardInterrupt"),
    "exit at its name": (
        "class K(Harmless):\n    @property\n    def name(self): raise SystemExit(3)\nKERNEL = K()",
        "making it failed with SystemExit: 3",
    ),
    "no such object": ("OTHER = 1", "the module '{module}' has no 'KERNEL'"),
    "no kernel": ("KERNEL = 3", "kernel=3: it lacks name, backend, files"),
    "another name": ("KERNEL = Harmless()", "calls itself 'ev.other'; give both the same name"),
    "a package that exits": ("", "importing {module}.inner failed with SystemExit: 0"),
}


@pytest.fixture(params=POINTS)
def point(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """An installed package with an entry point `ev.ep`; returns what is expected of it, and its module's file."""
    row: str = request.param
    code, reason = POINTS[row]
    module = f"evm_{row.replace(' ', '_')}"
    where = f"{module}:KERNEL"
    if row == "a package that exits":
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text("import sys; sys.exit(0)\n")
        (tmp_path / module / "inner.py").write_text("")
        where = f"{module}.inner:KERNEL"
    text = HARMLESS.format(name="ev.other") if "Harmless" in code else ""
    (tmp_path / f"{module}.py").write_text(f"{text}{code}\n")
    info = tmp_path / "evm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attnfuzz.kernels]\nev.ep = {where}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_BUILT_IN", {"torch.reference_cpu": registry._BUILT_IN["torch.reference_cpu"]})
    for table in ("_RELEASED", "_registered", "_loaded", "_origins"):
        monkeypatch.setattr(registry, table, {})
    monkeypatch.setattr(import_trial, "_fatal", {})
    monkeypatch.setenv(import_trial.SECONDS, "1" if row == "hang" else "60")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    return reason.format(module=module), module


def test_it_is_a_row_of_the_list_and_an_error_of_a_run(point: tuple[str, str]) -> None:
    reason, module = point
    listed = attnfuzz("list", "--json")
    assert listed.exit_code == 0, listed.output
    rows = {row["kernel"]: row for row in json_of(listed)["kernels"]}
    assert set(rows) == {"torch.reference_cpu", "ev.ep"}
    assert reason in rows["ev.ep"]["reasons"]["any device"]
    assert rows["torch.reference_cpu"]["runs_on"] == ["cpu"]
    refused(attnfuzz("run", "ev.ep", "--device", "cpu"), [reason])

    # By default all that are listed: the others are tried, and the exit code says that not all were.
    result = attnfuzz("run", "--device", "cpu", "--max-examples", "1", "--in-process", "--json")
    assert result.exit_code == 2, result.output
    run = json_of(result)
    assert [(row["kernel"], row["cases"]) for row in run["kernels"]] == [("torch.reference_cpu", 1)]
    [broken] = run["broken"]
    assert broken["kernel"] == "ev.ep"
    assert reason in broken["error"]
    assert "not every kernel was tried" in result.stderr

    # A gate of another checkout leaves it alone, and imports none of its packages to find that out.
    subjects, errors = named((), Path(__file__).parent)
    assert (subjects, errors) == ([], {})
    assert f"{module}.inner" not in sys.modules


def test_a_run_of_nothing_else_is_an_error(point: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    reason, _ = point
    monkeypatch.setattr(registry, "_BUILT_IN", {})
    refused(
        attnfuzz("run", "--device", "cpu", "--max-examples", "1", "--in-process"), ["no kernel can run here (ev.ep: ", reason]
    )
    result = attnfuzz("compile")
    refused(result, ["nothing was compiled; ev.ep: ", reason])
