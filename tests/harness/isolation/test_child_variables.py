"""Environment variables of child processes."""

from __future__ import annotations

import pytest

from attnfuzz.harness.isolation.child_variables import child_variables

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_the_allocator_of_a_gpu_gets_its_setting() -> None:
    assert {child_variables("cuda")[name] for name in NAMES} == {"expandable_segments:True"}
    assert not set(NAMES) & child_variables("cpu").keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_users_own_setting_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert not set(NAMES) & child_variables("cuda").keys()
