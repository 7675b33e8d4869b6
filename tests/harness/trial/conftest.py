"""A driver of CUDA that has virtual memory of the host."""

from __future__ import annotations

import pytest
from support.libcuda import VirtualMemory


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> VirtualMemory:
    return VirtualMemory(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def cuda(compiled: VirtualMemory, monkeypatch: pytest.MonkeyPatch) -> VirtualMemory:
    monkeypatch.setattr("attnfuzz.kernels.support.driver._LIBRARY", str(compiled.path))
    monkeypatch.setattr("attnfuzz.harness.trial.sparse._unused", [])
    compiled.begin()
    return compiled
