"""Compiled code of a kernel with a planted bug is never taken for the right kernel's: the keys of caches differ."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.mutant_code import said


@pytest.mark.parametrize(
    ("backend", "step"),
    [
        ("triton", "4"),
        pytest.param("tilelang", "11", marks=pytest.mark.slow),
        pytest.param("triton", "1", marks=pytest.mark.slow),
        pytest.param("tilelang", "1", marks=pytest.mark.slow),
    ],
)
def test_a_function_with_a_bug_has_a_key_of_its_own(backend: str, step: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if importlib.util.find_spec(backend) is None or importlib.util.find_spec("triton") is None:
        pytest.skip(f"{backend} is not installed")
    of_mutants = said(tmp_path, "keys", backend, step)
    assert len(of_mutants) >= 8
    for id_, functions in of_mutants.items():
        differing = [bug for bug, right in functions.values() if bug != right]
        assert differing, f"{id_}: its code would be the right kernel's"
        if backend == "triton":
            assert len(differing) == len(functions), id_
