"""One process compiles a generated kernel; a death, a full disk or a folder that is not there stops nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnfuzz.oracles.fused.claims import claim, folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTORCH_KERNEL_CACHE_PATH", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_one_compiles_and_the_others_do_without() -> None:
    first = claim("code")
    assert first is not None
    assert claim("code") is None
    assert claim("other code") is not None
    with first:
        assert claim("code") is None
    for _ in range(2):
        later = claim("code")
        assert later is not None
        with later:
            pass


def test_a_compile_that_fails_is_nobodys() -> None:
    first = claim("code")
    assert first is not None
    with pytest.raises(RuntimeError), first:
        raise RuntimeError
    assert claim("code") is not None


def test_a_process_that_dies_holds_nothing() -> None:
    script = (
        "import os; from attnfuzz.oracles.fused.claims import claim; turn = claim('code'); assert turn; os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert claim("code") is not None


def test_without_a_folder_everybody_compiles(cache: Path) -> None:
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file")
    for _ in range(2):
        turn = claim("code")
        assert turn is not None
        with turn:
            pass


def test_the_folder_is_pytorchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert folder() == Path(os.environ["PYTORCH_KERNEL_CACHE_PATH"])
    monkeypatch.delenv("PYTORCH_KERNEL_CACHE_PATH")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "torch" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert folder() == Path("/home/somebody/.cache/torch/kernels")
