"""The compile table, head against base: run `attnfuzz compile` on both sides, if there is that command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnfuzz.harness.compile.figures import rank
from attnfuzz.harness.gate.result import Finding, Part
from attnfuzz.kernels.support.import_trial import SECONDS

__all__ = ["CompileTableError", "NoSuchTableError", "compare_tables", "compile_table"]

_MOST = "6"
"""Variants of a kernel; `attnfuzz compile --baseline` compares all, which may be hundreds."""
_KEY = ("config", "arch", "function", "key")
Row = dict[str, Any]


class NoSuchTableError(Exception):
    """Lack of the command in this attnfuzz, or of a compiler on this machine; the text says which."""


class CompileTableError(Exception):
    """Lack of a table after the command ran; the text is the command's own."""


def compile_table(
    target: str, architectures: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
) -> list[Row]:
    """Return the rows of `attnfuzz compile KERNEL --json`, run with `variables`.

    Raises:
        NoSuchTableError: there is no such command or no compiler here.
        CompileTableError: the command gave no table.
    """
    command = [sys.executable, "-P", "-m", "attnfuzz.harness.cli", "compile", target, "--json", "--max", _MOST]
    command += ["--arch", ",".join(architectures)] if architectures else []
    done = subprocess.run(
        command,
        cwd=folder,
        # This process, or a child of base, has imported the kernel: that does not end a process.
        env={**os.environ, **(variables or {}), SECONDS: "0"},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if "No such command" in done.stderr:
        raise NoSuchTableError("this attnfuzz has no command `compile`")
    try:
        output = json.loads(done.stdout)
    except ValueError:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise CompileTableError(lines[-1] if lines else f"it ended with exit code {done.returncode}") from None
    if isinstance(output, dict) and "error" in output and "rows" not in output:
        raise NoSuchTableError(str(output["error"]).splitlines()[0])
    rows = output.get("rows") if isinstance(output, dict) else output
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "ok" in row for row in rows):
        raise CompileTableError("its table has no readable rows")
    return rows


def compare_tables(kernel: str, head: Sequence[Row], base: Sequence[Row] | None) -> Part:
    """Fail on a new failure, more spills, a lost tensor-core path or a new race; without a base, on any failure or race."""
    before = {_key(row): row for row in base or ()}
    findings = []
    for row in head:
        for check, message in _worse(row, before.get(_key(row))):
            text = f"{_label(row)}: {message}"
            findings.append(Finding("compile", kernel, text, check=check, detail=_detail(row, check)))
    wrong = sum(1 for row in head if not row["ok"])
    summary = f"{len(head)} compiled, {wrong} refused" + ("" if base is not None else "; nothing to compare with")
    return Part("compile", "fail" if findings else "pass", summary, tuple(findings), {"rows": list(head)})


def _worse(row: Row, before: Row | None) -> list[tuple[str, str]]:
    changes = []
    if not row["ok"] and (before is None or before["ok"]):
        changes.append(("failed", f"no longer compiles: {_first(row)}" if before else f"does not compile: {_first(row)}"))
    for name, what in (("spills", "spills"), ("races", "races")):
        now, then = _count(row.get(name)), _count(before.get(name)) if before else 0
        if row["ok"] and now > then and (before is not None or name == "races"):
            changes.append((name, f"{now} {what}, {then} before"))
    if row["ok"] and before and rank(row.get("tensor_core")) < rank(before.get("tensor_core")):
        changes.append(("tensor_core", f"tensor cores by {row.get('tensor_core') or 'nothing'}, {before['tensor_core']} before"))
    return changes


def _detail(row: Row, check: str) -> str:
    races = row.get("races")
    return "\n".join(map(str, races)) if check == "races" and isinstance(races, list | tuple) else str(row.get("error") or "")


def _key(row: Row) -> tuple[str, ...]:
    return tuple(json.dumps(row.get(name), sort_keys=True) for name in _KEY)


def _label(row: Row) -> str:
    config = row.get("config")
    text = " ".join(f"{name}={value}" for name, value in config.items()) if isinstance(config, dict) else str(config or "")
    return " ".join(each for each in (str(row.get("function") or ""), str(row.get("arch") or ""), text) if each) or "a compile"


def _first(row: Row) -> str:
    lines = str(row.get("error") or "no reason was given").strip().splitlines()
    return lines[0] if lines else "no reason was given"


def _count(value: Any) -> int:
    if isinstance(value, list | tuple):
        return len(value)
    return int(value) if isinstance(value, int | float) else 0
