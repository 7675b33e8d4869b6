"""Folders of this checkout."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
CORPUS = TESTS / "corpus"
