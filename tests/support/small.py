"""Small Cases in runs of the command line, whose own size and simplicity do not matter to a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnfuzz.harness.campaign.settings import PROFILES
from attnfuzz.strategies.cases import Limits


def small_cases(patch: pytest.MonkeyPatch, shrink: float = 1.0) -> None:
    """Let the profile `quick` draw small Cases on the CPU, and shrink and explain a failure for `shrink` seconds."""
    limits = {**PROFILES["quick"].limits, "cpu": Limits(batch=2, heads=3, length=60, tiles=4)}
    patch.setitem(PROFILES, "quick", replace(PROFILES["quick"], shrink=shrink, limits=limits))
