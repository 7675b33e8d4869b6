"""The compile table, head against base: `attnfuzz compile` on both sides, where there is that command."""

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

__all__ = ["CompileTableError", "NoSuchTableError", "compare_tables", "compile_table"]

_MOST = "6"
"""Variants of a kernel; of all that one may have, hundreds, `attnfuzz compile --baseline` tells."""
_KEY = ("config", "arch", "function", "key")
Row = dict[str, Any]


class NoSuchTableError(Exception):
    """This attnfuzz has no such command, or this machine no compiler: the text says which."""


class CompileTableError(Exception):
    """The command was run and gave no table: the text is its own."""


def compile_table(
    asked: str, architectures: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
) -> list[Row]:
    """The rows of `attnfuzz compile KERNEL --json` in a process with `variables`.

    Raises:
        NoSuchTableError: there is no such command here.
        CompileTableError: it ended without a table.
    """
    command = [sys.executable, "-P", "-m", "attnfuzz.harness.cli", "compile", asked, "--json", "--max", _MOST]
    command += ["--arch", ",".join(architectures)] if architectures else []
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if "No such command" in done.stderr:
        raise NoSuchTableError("this attnfuzz has no command `compile`")
    try:
        found = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise CompileTableError(said[-1] if said else f"it ended with exit code {done.returncode}") from None
    if isinstance(found, dict) and "error" in found and "rows" not in found:
        raise NoSuchTableError(str(found["error"]).splitlines()[0])
    rows = found.get("rows") if isinstance(found, dict) else found
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "ok" in row for row in rows):
        raise CompileTableError("its table has no rows that can be read")
    return rows


def compare_tables(kernel: str, head: Sequence[Row], base: Sequence[Row] | None) -> Part:
    """Fails on a new failure, more spills, a lost tensor-core path or a new race; without a base, on any failure or race."""
    before = {_key(row): row for row in base or ()}
    findings = []
    for row in head:
        for check, message in _worse(row, before.get(_key(row))):
            text = f"{_told(row)}: {message}"
            findings.append(Finding("compile", kernel, text, check=check, detail=_detail(row, check)))
    wrong = sum(1 for row in head if not row["ok"])
    summary = f"{len(head)} compiled, {wrong} refused" + ("" if base is not None else "; nothing to compare with")
    return Part("compile", "fail" if findings else "pass", summary, tuple(findings), {"rows": list(head)})


def _worse(row: Row, before: Row | None) -> list[tuple[str, str]]:
    found = []
    if not row["ok"] and (before is None or before["ok"]):
        found.append(("failed", f"no longer compiles: {_first(row)}" if before else f"does not compile: {_first(row)}"))
    for name, what in (("spills", "spills"), ("races", "races")):
        now, then = _count(row.get(name)), _count(before.get(name)) if before else 0
        if row["ok"] and now > then and (before is not None or name == "races"):
            found.append((name, f"{now} {what}, {then} before"))
    if row["ok"] and before and rank(row.get("tensor_core")) < rank(before.get("tensor_core")):
        found.append(("tensor_core", f"tensor cores by {row.get('tensor_core') or 'nothing'}, {before['tensor_core']} before"))
    return found


def _detail(row: Row, check: str) -> str:
    races = row.get("races")
    return "\n".join(map(str, races)) if check == "races" and isinstance(races, list | tuple) else str(row.get("error") or "")


def _key(row: Row) -> tuple[str, ...]:
    return tuple(json.dumps(row.get(name), sort_keys=True) for name in _KEY)


def _told(row: Row) -> str:
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
