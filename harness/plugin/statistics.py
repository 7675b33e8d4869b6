"""What the fuzz tests of a session have tried, in pytest's summary: a line each, or more with --attnfuzz-statistics.

The figures of a shard travel with the report of its test, so that xdist's controller has those of all workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from attnfuzz.harness.core.text import counted
from attnfuzz.harness.plugin.options import session_seed

if TYPE_CHECKING:
    from attnfuzz.harness.campaign.events import CampaignFinished
    from attnfuzz.harness.campaign.settings import Settings

__all__ = ["add_figures", "keep_figures", "show_statistics"]

_FIGURES: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
_OF_REPORT = "attnfuzz"
"""The attribute of a report that holds its figures: plain values only, which xdist can send."""
_MOST_VALUES = 8
"""Values of one kind that are shown, the most frequent first."""


def keep_figures(item: pytest.Item, finished: CampaignFinished, settings: Settings) -> None:
    """Keep the figures of a shard for the report of its test."""
    for row in finished.summaries:
        item.stash[_FIGURES] = {
            "kernel": row.kernel,
            "seed": settings.seed,
            "cases": row.cases,
            "shrink_cases": row.shrink_cases,
            "seconds": row.seconds,
            "failures": len(row.findings),
            "elsewhere": [each.identity.key for each in row.elsewhere],
            "replayed": row.replayed,
            "not_replayed": row.not_replayed,
            "outputs": {name: [each.cases, each.worst, each.failures] for name, each in row.outputs.items()},
            "drawn": row.drawn,
            "never_drawn": {name: list(values) for name, values in row.never_drawn.items()},
        }


def add_figures(item: pytest.Item, report: pytest.TestReport) -> None:
    """Add the figures of a shard to the report of its test."""
    if report.when == "call" and _FIGURES in item.stash:
        setattr(report, _OF_REPORT, item.stash[_FIGURES])


def show_statistics(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what each fuzz test of the session has tried; nothing where there is none."""
    tests: dict[str, list[dict[str, Any]]] = {}
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if (figures := getattr(report, _OF_REPORT, None)) is not None:
            tests.setdefault(report.nodeid.rsplit("[", 1)[0], []).append(figures)
    if not tests:
        return
    terminalreporter.section("attnfuzz")
    seed = session_seed(config)
    if any(each["seed"] == seed for shards in tests.values() for each in shards):
        terminalreporter.write_line(f"seed {seed}: the same cases again by --attnfuzz-seed {seed}")
    for test, shards in sorted(tests.items()):
        own = "" if shards[0]["seed"] == seed else f", seed {shards[0]['seed']}"
        title = f"{test} ({shards[0]['kernel']}{own})"
        if config.getoption("--attnfuzz-statistics"):
            terminalreporter.write_line(f"{title}:")
            for line in _lines(shards):
                terminalreporter.write_line(f"  - {line}")
        else:
            terminalreporter.write_line(f"{title}: {_line(shards)}")
    if not config.getoption("--attnfuzz-statistics"):
        terminalreporter.write_line("--attnfuzz-statistics shows more")


def _line(shards: list[dict[str, Any]]) -> str:
    """Return one line on the shards of one test."""
    output, worst = max(_worst(shards).items(), key=lambda each: each[1], default=("", 0.0))
    parts = [_counted(shards), f"worst error / budget {worst:.2f} ({_title(output)})" if output else "nothing judged"]
    return "; ".join(filter(None, [*parts, _not_replayed(shards), _never(shards)]))


def _lines(shards: list[dict[str, Any]]) -> Iterator[str]:
    """Yield all that is known of the shards of one test."""
    seconds = _sum(shards, "seconds")
    rate = f", {_sum(shards, 'cases') / seconds:.1f} cases/s" if seconds else ""
    yield f"{_counted(shards)}; {counted(len(shards), 'shard')}, {seconds:.1f} s{rate}"
    yield f"shrinking: {_sum(shards, 'shrink_cases')} cases; stored cases replayed: {_sum(shards, 'replayed')}"
    if text := _not_replayed(shards):
        yield text
    worst = [f"{_title(name)} {value:.2f}" for name, value in _worst(shards).items()]
    yield f"worst error / budget: {', '.join(worst) or 'nothing judged'}"
    drawn = _drawn(shards)
    for name in drawn:
        most = sorted(drawn[name].items(), key=lambda each: -each[1])
        more = f" and {len(most) - _MOST_VALUES} more" if len(most) > _MOST_VALUES else ""
        yield f"{name}: {', '.join(f'{value} {count}' for value, count in most[:_MOST_VALUES])}{more}"
    yield _never(shards) or "every declared value was drawn"


def _counted(shards: list[dict[str, Any]]) -> str:
    # The shard that keeps a failure says nothing of it where its process died.
    elsewhere = {each for shard in shards for each in shard["elsewhere"]}
    cases, failures = _sum(shards, "cases"), _sum(shards, "failures") or len(elsewhere)
    return f"{counted(cases, 'case')}, {counted(failures, 'failure')}"


def _sum(shards: Iterable[Mapping[str, Any]], name: str) -> Any:
    return sum(each[name] for each in shards)


def _worst(shards: list[dict[str, Any]]) -> dict[str, float]:
    """Return the worst error over its budget of each output that was judged."""
    worst: dict[str, float] = {}
    for each in shards:
        for name, (cases, value, _) in each["outputs"].items():
            if cases:
                worst[name] = max(worst.get(name, 0.0), value)
    return worst


def _title(output: str) -> str:
    from attnfuzz.harness.judge.failure import OUTPUT_TITLES

    return {str(name): title for name, title in OUTPUT_TITLES.items()}.get(output, output)


def _drawn(shards: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    drawn: dict[str, dict[str, int]] = {}
    for each in shards:
        for name, counts in each["drawn"].items():
            total = drawn.setdefault(name, {})
            for value, count in counts.items():
                total[value] = total.get(value, 0) + count
    return drawn


def _not_replayed(shards: list[dict[str, Any]]) -> str:
    """Say how many stored Cases were not replayed: each shard leaves out others."""
    count = min(each["not_replayed"] for each in shards)
    most = "at most " if len(shards) > 1 else ""
    return f"{most}{counted(count, 'stored case')} not replayed" if count else ""


def _never(shards: list[dict[str, Any]]) -> str:
    """Say what no shard has drawn; one without Cases says nothing of it."""
    from attnfuzz.harness.campaign.undrawn import in_none_of, never_drawn_line

    parts = [each["never_drawn"] for each in shards if each["cases"]]
    return never_drawn_line(in_none_of(parts)) if parts else ""
