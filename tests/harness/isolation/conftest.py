"""A stand-in for CUDA's MPS server, and one that is shared."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine import alive
from support.mps import FakeServer
from support.paths import TESTS

from attnfuzz.harness.isolation import sharing
from attnfuzz.harness.isolation.sharing import Sharing


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    for name in sharing.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sharing, "_USUAL", tmp_path / "none")
    monkeypatch.syspath_prepend(str(TESTS))
    return FakeServer(tmp_path / "bin", monkeypatch)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: pytest's own may be too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="mps-", dir="/tmp") as made:
        yield Path(made) / "mps"


@pytest.fixture
def shared(server: FakeServer, folder: Path) -> Iterator[Sharing]:
    made = sharing.start(folder, {}, [])
    yield made
    made.close()
    assert not alive([server.pid])
