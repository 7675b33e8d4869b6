"""Child processes keep bytecode where Python is told not to write it and packages have none."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnfuzz.harness.core.bytecode import bytecode_variables


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch without bytecode, in a process that writes none."""
    module = tmp_path / "site" / "torch" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: importlib.machinery.ModuleSpec("torch", None, origin=str(module)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return module


def test_bytecode_is_kept_apart(bare: Path, tmp_path: Path) -> None:
    variables = bytecode_variables()
    assert Path(variables["PYTHONPYCACHEPREFIX"]).is_relative_to(tmp_path / "caches")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables, "PYTHONPATH": str(bare.parent.parent)}
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True)
    assert not bare.with_name("__pycache__").exists()
    assert list((tmp_path / "caches").rglob("torch/__init__*.pyc"))


def test_what_is_there_is_used(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare.with_name("__pycache__").mkdir()
    assert bytecode_variables() == {}
    bare.with_name("__pycache__").rmdir()
    assert bytecode_variables()
    monkeypatch.setattr(sys, "pycache_prefix", "/somewhere")
    assert bytecode_variables() == {}


def test_a_python_that_writes_bytecode_needs_nothing(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert bytecode_variables() == {}
