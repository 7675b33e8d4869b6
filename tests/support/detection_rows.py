"""Rows of campaigns in a file, one a line, written as they end: a run that was cut off goes on where it ended."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from support.detection import Attempt, Found, mutant_of
from support.mutants import SUBJECTS

from attnfuzz.harness.campaign.drawer import draw_round
from attnfuzz.harness.campaign.plan import cases_of, plan_of
from attnfuzz.harness.campaign.rounds import Round
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.faults.planted import planted_source
from attnfuzz.strategies.pools import compile_order

__all__ = ["Rows"]

_BEGIN = b'{"asked":'
"""How every row begins."""


class _Line(msgspec.Struct, frozen=True):
    """One row: what was asked for, the digests of the kernel's sources with the bug and of the Cases, and the result.

    `drawn` is empty in rows of earlier versions, which are not used.
    """

    asked: str
    source: str
    row: Found
    drawn: str = ""


def _line(text: bytes) -> _Line | None:
    """Return a row, or None: it is cut, or what it says of its campaign contradicts itself."""
    try:
        line = msgspec.json.decode(text, type=_Line)
        row = line.row
        if row.case:
            msgspec.json.decode(row.case, type=dict)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    of_row = line.asked.startswith(f"{row.device} {row.mutant} seed {row.seed} cases ")
    return line if of_row and (row.cases is None or row.cases > 0) else None


def _is_whole(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


@functools.cache
def _source(id_: str) -> str:
    """Return the digest of the kernel's sources with the bug: a row says nothing of other ones."""
    mutant, digest = mutant_of(id_), hashlib.sha256()
    for part, module in SUBJECTS[mutant.kernel].modules.items():
        digest.update("\0".join(planted_source(module, mutant.edits(part))).encode())
    return digest.hexdigest()[:16]


def _drawn(task: Attempt) -> str:
    """Return the digest of what a campaign draws: a row says nothing of other Cases.

    That is the order of its compiles and its first round, in which most bugs are found; all rounds would take five times as long.
    """
    return _drawn_of(mutant_of(task.mutant).kernel, task.device, task.seed, task.most)


@functools.cache
def _drawn_of(name: str, device: Device, seed: int, most: int) -> str:
    kernel = registry.get(name)
    settings = Settings(device=device, seed=seed, max_examples=most, all_variants=True)
    plan = plan_of(kernel, settings)
    strategy = cases_of(kernel, plan, settings)
    first = draw_round(strategy, plan.seed, Round(0), plan.values, lambda case: why_not_case(kernel, case, device) is None)
    content = "\0".join([*map(repr, compile_order(plan.variants)), *(each.canonical() for each in first)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _asked(task: Attempt) -> str:
    return f"{task.device} {task.mutant} seed {task.seed} cases {task.most} shrink {task.shrink}"


class Rows:
    """The rows of a file.

    Args:
        path: the file, made with its first row; None: rows are not kept.

    Raises:
        ValueError: it has a line that is neither a row nor the beginning of one; it is not to be written to.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[tuple[str, str, str], Found] = {}
        lines = path.read_bytes().split(b"\n") if path is not None and path.is_file() else []
        for number, line in enumerate(lines, 1):
            if (each := _line(line)) is not None:
                self._known[each.asked, each.source, each.drawn] = each.row
            elif line[: len(_BEGIN)] != _BEGIN[: len(line)] or _is_whole(line):
                raise ValueError(f"line {number} is no row of a campaign")
            # The end of a process may have cut any other.

    def known(self, tasks: Sequence[Attempt]) -> dict[Attempt, Found]:
        """Return the rows of campaigns that have ended by themselves, not by an error or by the end of their time."""
        return {each: row for each, row in self._of(tasks).items() if not (row.cut or row.error)}

    def cut(self, tasks: Sequence[Attempt]) -> dict[Attempt, Found]:
        """Return the rows of campaigns that the end of their time has ended."""
        return {each: row for each, row in self._of(tasks).items() if row.cut}

    def _of(self, tasks: Sequence[Attempt]) -> dict[Attempt, Found]:
        if not self._known:
            return {}
        rows = {each: self._known.get((_asked(each), _source(each.mutant), _drawn(each))) for each in tasks}
        return {each: row for each, row in rows.items() if row is not None}

    def add(self, task: Attempt, row: Found) -> None:
        """Write a row at once."""
        if self._path is None:
            return
        line = msgspec.json.encode(_Line(_asked(task), _source(task.mutant), row, _drawn(task))) + b"\n"
        with self._path.open("ab+") as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                line = b"\n" + line
            file.write(line)
