"""Baselines of `gate` and of `compile` of which somebody else chose every byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostile_files import CODE, NO_FILES, apart, attnfuzz, case, digits, nested, refused, written


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with apart(tmp_path, monkeypatch):
        yield


GATE = ("gate", "--device", "cpu", "--kernel", "torch.reference_cpu", "--max-examples", "1", "--out", "out", "--baseline")
COMPILE = ("compile", "triton.varlen", "--max", "1", "--out", "out", "--baseline")


def recorded(**changed: Any) -> dict[str, Any]:
    return {"fingerprint": "0" * 64, "deterministic": [], "measured": [], "compile": None, **changed}


def baseline(**changed: Any) -> dict[str, Any]:
    return {"format": 1, "device": "cpu", "environment": {}, "kernels": {"torch.reference_cpu": recorded()}, **changed}


def measured(**changed: Any) -> dict[str, Any]:
    return baseline(kernels={"torch.reference_cpu": recorded(measured=[{"case": case(), "errors": {}, **changed}])})


BROKEN: dict[str, tuple[Any, str]] = {
    "empty": (b"", "not JSON"),
    "not UTF-8": (b'{"device": "\xff"}', "not JSON"),
    "200,000 brackets": (b"[" * 200_000, "nested too deeply"),
    "900 levels": (baseline(environment={"a": nested(900)}), "nested too deeply"),
    "a list": ([], "Expected `object`"),
    "a version of 5,000 digits": (baseline(format=digits(5000)), "out of range"),
    "a version of 4,000 digits": (baseline(format=digits(4000)), "its format is 999"),
    "another device": (baseline(device="cuda"), "it was written on cuda, and this runs on cpu"),
    "a device of code": (baseline(device=CODE), "Invalid enum value"),
    "an unknown field": (baseline(command=CODE), "unknown field `command`"),
    "a broken case": (measured(case={"format": 1}), "case.kernel: it is missing"),
    "a case to import": (measured(case=case(kernel="os:system")), "a kernel's own name is expected"),
    "a case with code for a choice": (measured(case=case(config={f"x={CODE}": 1})), "case.config="),
    "an error of an unknown output": (measured(errors={"os": {}}), "Invalid enum value 'os'"),
    "errors in words": (measured(errors={"o": "large"}), "Expected `object`"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_hostile_baseline_of_a_gate_is_refused(name: str) -> None:
    content, reason = BROKEN[name]
    Path("base.json").write_bytes(content if isinstance(content, bytes) else written(content))
    assert len(refused(attnfuzz(*GATE, "base.json"), "baseline='base.json': ", reason)) < 3000


def table(**changed: Any) -> dict[str, Any]:
    return {"format": 1, "versions": {}, "rows": [], **changed}


BROKEN_TABLES: dict[str, tuple[Any, str]] = {
    "empty": (b"", "it is broken (not JSON"),
    "200,000 brackets": (b"[" * 200_000, "nested too deeply"),
    "a list": ([], "Expected `object`"),
    "a version of 5,000 digits": (table(format=digits(5000)), "out of range"),
    "another version": (table(format=2), "its format is 2"),
    "rows in words": (table(rows="all"), "Expected `array`"),
    "a row of nothing": (table(rows=[{}]), "missing required field"),
    "versions of objects": (table(versions={"triton": {}}), "Expected `str`"),
}


@pytest.mark.parametrize("name", BROKEN_TABLES)
def test_a_hostile_baseline_of_a_compile_is_refused(name: str) -> None:
    content, reason = BROKEN_TABLES[name]
    Path("base.json").write_bytes(content if isinstance(content, bytes) else written(content))
    assert len(refused(attnfuzz(*COMPILE, "base.json"), "baseline='base.json': ", reason)) < 3000


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_is_refused_as_a_baseline(name: str) -> None:
    make, reason = NO_FILES[name]
    make(Path.cwd() / "base.json")
    for command in (GATE, COMPILE):
        refused(attnfuzz(*command, "base.json"), f"baseline='base.json': {reason}")
