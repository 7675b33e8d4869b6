"""Compiled code of a kernel with a planted bug is never taken for the right kernel's: the keys of caches differ."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import mutant_code
from support.paths import TESTS


def said(tmp_path: Path, *arguments: str) -> dict[str, dict[str, list[str]]]:
    """What support/mutant_code.py says, with caches of its own."""
    caches = {f"{name}_CACHE_DIR": str(tmp_path / name) for name in ("TRITON", "TILELANG")}
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = [str(TESTS), *(each for each in sys.path if each)]
    run = subprocess.run(
        [sys.executable, "-P", "-m", mutant_code.__name__, *arguments],
        env={**variables, **caches, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    content: dict[str, dict[str, list[str]]] = json.loads(run.stdout.splitlines()[-1])
    return content


@pytest.mark.parametrize(
    ("backend", "step"),
    [("triton", "1"), ("tilelang", "8"), pytest.param("tilelang", "1", marks=pytest.mark.slow)],
)
def test_a_function_with_a_bug_has_a_key_of_its_own(backend: str, step: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if importlib.util.find_spec(backend) is None or importlib.util.find_spec("triton") is None:
        pytest.skip(f"{backend} is not installed")
    of_mutants = said(tmp_path, backend, step)
    assert len(of_mutants) >= 8
    for id_, functions in of_mutants.items():
        differing = [bug for bug, right in functions.values() if bug != right]
        assert differing, f"{id_}: its code would be the right kernel's"
        if backend == "triton":
            assert len(differing) == len(functions), id_
