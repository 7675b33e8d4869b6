"""Tests that need a GPU are skipped where there is none; slow ones run only when asked for by `-m slow`."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from attnfuzz.harness.environment import has_cuda

    asked = config.getoption("-m") or ""
    for item in items:
        if item.get_closest_marker("gpu") and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("slow") and "slow" not in asked:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
