"""Short scripts for an issue tracker: they show a planted fault in a fresh process, and pass where the fault is mended."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fresh import Fresh
from support.short_faults import FAULTS, Fault

from attnfuzz.harness.campaign.corpus import CaseFile, StoredFinding
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.repro.script.short import ShortScript, short_script
from attnfuzz.harness.repro.script.short_text import LINES
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.strategies.case import Case, Recipe


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fresh]:
    process = Fresh(tmp_path_factory.mktemp("fresh"))
    yield process
    process.close()


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_registered", "_loaded", "_origins"):
        monkeypatch.setattr(registry, table, {})


def stored_of(case: Case, output: str | None = None) -> CaseFile:
    """The case file of a Case that fails, as a campaign would write it."""
    failures = run_trial(case, "cpu").failures
    failure: Failure = next(each for each in failures if output in (None, each.output))
    return CaseFile(case, StoredFinding(identity=failure.identity, message=failure.message), Path("case.json"))


def body_of(text: str) -> list[str]:
    """The lines of a script without the comments at its top."""
    lines = text.splitlines()
    return lines[next(i for i, line in enumerate(lines) if not line.startswith("#")) :]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_shown_until_it_is_mended(
    name: str, fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault: Fault = FAULTS[name]
    module = f"short_{list(FAULTS).index(name)}"
    for folder, mended in (("faulty", False), ("mended", True)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{module}.py").write_text(fault.module(mended=mended))
    monkeypatch.syspath_prepend(tmp_path / "faulty")
    monkeypatch.delitem(sys.modules, module, raising=False)
    needs = Needs(outputs=registry.get(f"{module}:KERNEL").capabilities.outputs)
    recipe = Recipe(pattern=fault.pattern, seed=5)
    case = Case(kernel="acme.short", problem=Problem(**fault.problem, needs=needs), recipe=recipe)
    script: ShortScript = short_script(
        stored_of(case, fault.output), "cpu", run=lambda text, deadline: fresh.run(text, deadline, tmp_path / "faulty")
    )
    assert script.random is fault.random
    assert 20 <= len(body_of(script.text)) <= LINES, script.text
    assert [part for part in fault.contains if part not in script.text] == [], script.text
    assert f"from {module} import " in script.text
    imported = {node.module for node in ast.walk(ast.parse(script.text)) if isinstance(node, ast.ImportFrom)}
    assert not any(each and each.startswith("attnfuzz") for each in imported)
    assert max(len(line) for line in script.text.splitlines() if not line.startswith("data = ")) <= 130, script.text
    ran = fresh.run(script.text, 60.0, tmp_path / "faulty")
    assert ran.code == 1, ran
    ran = fresh.run(script.text, 60.0, tmp_path / "mended")
    assert ran.code == 0, ran
    assert "max error" in ran.out
