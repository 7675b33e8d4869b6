"""Modules in the current folder that bear the names of others: no command runs them, nor does the child that tries a kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.hostile import HARMLESS

NAMES = ("torch", "attnfuzz", "click", "sitecustomize", "conftest", "json", "tempfile", "difflib", "inspect", "evil")
"""What attnfuzz imports, what Python imports by itself, and what nothing does."""
MARK = "open(__file__ + '.ran', 'w').close()\nraise SystemExit(0)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a command without a target was run, and then one that imports a kernel from it."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "mine.py").write_text(HARMLESS.format(name="ev.mine") + "KERNEL = Harmless()\n")
    for each in NAMES:
        (folder / f"{each}.py").write_text(MARK)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [str(Path(sys.executable).with_name("attnfuzz")), "list"]
    for more in ([], ["mine:KERNEL"]):
        # With a target, the kernel's own imports come from where `python -m` finds them.
        (folder / "torch.py").unlink() if more else None
        done = subprocess.run([*command, *more], cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert ("ev.mine" in done.stdout) is bool(more)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_module_of_the_current_folder_does_not_run(name: str, folder: Path) -> None:
    assert not (folder / f"{name}.py.ran").exists()
