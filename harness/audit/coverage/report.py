"""Show what Cases reach on a terminal, or as JSON."""

from __future__ import annotations

import dataclasses
import linecache
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnfuzz.harness.audit.coverage.lines import LineCoverage
from attnfuzz.harness.audit.coverage.measure import Coverage
from attnfuzz.harness.audit.coverage.pairs import Feature, Pair, PairCoverage
from attnfuzz.harness.audit.coverage.source import FunctionCoverage
from attnfuzz.harness.campaign.coverage import Tally
from attnfuzz.harness.core.text import counted, one_line
from attnfuzz.harness.report.progress import ProgressView, progress_on

__all__ = ["CoverageProgress", "coverage_object", "show_coverage"]

_EVERY = 30.0
"""Seconds between two lines of progress where there is no terminal."""
_MOST_GROUPS, _MOST_OTHERS, _RAREST = 20, 6, 10
"""Groups of pairs with one feature in common, pairs of a group, and rare pairs that are shown."""


class CoverageProgress(ProgressView):
    """Shows how far it has come: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console, self._last = console, time.monotonic()
        super().__init__(progress_on(console, bar=True, count=True, left=True))
        self._task = self.bars.add_task("drawing", total=None)

    def __call__(self, doing: str, done: int, total: int) -> None:
        """Show that so much is done."""
        self.bars.update(self._task, description=doing, completed=done, total=total)
        if not self._console.is_terminal and time.monotonic() - self._last > _EVERY:
            self._last = time.monotonic()
            self._console.print(f"{doing}: {done} of {total}", highlight=False)


def show_coverage(console: Console, coverage: Coverage) -> None:
    """Print the counts, what was never reached, and the pairs; lines too where Cases were run for them."""
    cases = coverage.tally.cases
    each = coverage.draw_seconds / cases * 1e3 if cases else 0.0
    head = f"{coverage.kernel} on {coverage.device}: {counted(cases, 'Case')} drawn with seed {coverage.seed}, {each:.1f} ms each"
    _print(console, f"{head} (profile {coverage.profile})")
    if coverage.compiled is not None:
        _print(console, f"drawn from all variants; a run compiles {coverage.compiled} of them, and draws from those")
    _show_counts(console, coverage.tally)
    _show_never(console, coverage.never, coverage.profile)
    _show_pairs(console, coverage.pairs)
    if coverage.lines is not None:
        _show_lines(console, coverage.lines)


def _print(console: Console, text: str, style: str | None = None) -> None:
    console.print(one_line(text), highlight=False, soft_wrap=True, markup=False, style=style)


def _show_counts(console: Console, tally: Tally) -> None:
    """Print a row for each thing that is drawn with its values, most frequent first; what all Cases have in common last."""
    table = Table("drawn", "Cases that had each value", box=SIMPLE)
    counts = {"features": _own_features(tally.features), **tally.drawn}
    for name, values in counts.items():
        if len(values) > 1 or name == "features":
            ordered = sorted(values.items(), key=lambda item: (-item[1], item[0]))
            table.add_row(
                *(escape(one_line(each)) for each in (name, ", ".join(f"{value}: {count}" for value, count in ordered)))
            )
    console.print(table)
    common = [f"{name} {value}" for name, values in counts.items() for value in values if len(values) == 1 and name != "features"]
    _print(console, f"in all of them: {', '.join(common)}")


def _own_features(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the features that are no value of something else that is drawn."""
    return {name: count for name, count in counts.items() if not name.startswith(("dtype ", "causal ", "pattern "))}


def _show_never(console: Console, never: Mapping[str, Sequence[str]], profile: str) -> None:
    if not never:
        what = "it takes every model" if profile == "models" else "every declared value and every relation of sizes was drawn"
        _print(console, what, "green")
        return
    _print(console, "never drawn:", "yellow")
    for name, values in never.items():
        _print(console, f"   {name}: {', '.join(values)}")


def _show_pairs(console: Console, pairs: PairCoverage) -> None:
    declared = pairs.declared()
    for what, each in (("pairs of declared features", declared), ("with values and checks", pairs)):
        _print(console, f"{what}: {len(each.counts)} of {each.possible} possible ones reached ({100 * each.share:.1f} %)")
    if pairs.missing:
        _print(console, "pairs that no Case had:", "yellow")
    groups = [*_grouped(list(declared.missing)), *_grouped([each for each in pairs.missing if each not in declared.missing])]
    for common, others in groups[:_MOST_GROUPS]:
        more = f" and {len(others) - _MOST_OTHERS} more" if len(others) > _MOST_OTHERS else ""
        _print(console, f"   {_named(common)} with {', '.join(map(_named, others[:_MOST_OTHERS]))}{more}")
    if len(groups) > _MOST_GROUPS:
        left = sum(len(others) for _, others in groups[_MOST_GROUPS:])
        _print(console, f"   and {counted(left, 'pair')} more: --json has all of them")
    rarest = sorted(declared.counts.items(), key=lambda item: item[1])[:_RAREST]
    if rarest:
        _print(console, "the rarest pairs of declared features:")
    for pair, count in rarest:
        _print(console, f"   {counted(count, 'Case'):>9}  {' with '.join(map(_named, pair))}")


def _grouped(pairs: list[Pair]) -> list[tuple[Feature, list[Feature]]]:
    """Return the pairs as features with all others of their pairs, the one with most of them first."""
    groups = []
    while pairs:
        (common, _), *_ = Counter(each for pair in pairs for each in pair).most_common(1)
        groups.append((common, [other for pair in pairs if common in pair for other in pair if other != common]))
        pairs = [pair for pair in pairs if common not in pair]
    return groups


def _named(feature: Feature) -> str:
    name, value = feature
    return f"[{name}: {value}]"


def _show_lines(console: Console, lines: LineCoverage) -> None:
    if lines.reason:
        _print(console, f"lines of device code: unknown: {lines.reason}", "yellow")
        return
    failed = f"; {lines.failed} failed: attnfuzz run shows how" if lines.failed else ""
    _print(console, f"lines of device code after {counted(lines.cases, 'Case')}{failed}:")
    for path, functions in lines.files.items():
        known = [each for each in functions if each.called]
        total, never = sum(each.statements for each in known), sum(len(each.never) for each in known)
        name = os.path.relpath(path)
        name = path if name.startswith("..") else name
        of = f"{counted(total, 'statement')} of {counted(len(known), 'called function')}"
        _print(console, f"{name}: {total - never} of {of} ran")
        for each in functions:
            for line, text in sorted(_unreached(each)):
                source = linecache.getline(path, line).strip()
                _print(console, f"   {name}:{line}: {text}: {source}", "yellow")


def _unreached(function: FunctionCoverage) -> Iterator[tuple[int, str]]:
    """Yield (line, what was not reached) of a function."""
    if not function.called:
        yield function.line, "never called"
    for line in function.never:
        yield line, "never ran"
    for line, value in function.one_way:
        yield line, f"always {'true' if value else 'false'}"
    for line, operation, value in function.one_valued:
        yield line, f"{'every' if value else 'no'} element passed the mask of {operation}"


def coverage_object(coverage: Coverage) -> dict[str, Any]:
    """Return the result as plain values."""
    pairs, declared = coverage.pairs, coverage.pairs.declared()
    return {
        "kernel": coverage.kernel,
        "device": coverage.device,
        "profile": coverage.profile,
        "seed": coverage.seed,
        "cases": coverage.tally.cases,
        "seconds_to_draw": coverage.draw_seconds,
        "compiled_variants": coverage.compiled,
        "features": coverage.tally.features,
        "drawn": coverage.tally.drawn,
        "never": {name: list(values) for name, values in coverage.never.items()},
        "pairs": {
            "share": pairs.share,
            "share_of_declared": declared.share,
            "reached": [{"features": [list(each) for each in pair], "cases": count} for pair, count in pairs.counts.items()],
            "missing": [
                {"features": [list(each) for each in pair], "case": case.to_object()} for pair, case in pairs.missing.items()
            ],
        },
        "lines": None if coverage.lines is None else _lines_object(coverage.lines),
    }


def _lines_object(lines: LineCoverage) -> dict[str, Any]:
    files = {path: [dataclasses.asdict(each) for each in functions] for path, functions in lines.files.items()}
    return {"cases": lines.cases, "failed": lines.failed, "reason": lines.reason, "files": files}
