"""`attnfuzz report`: the runs of a folder as one HTML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnfuzz.harness.cli.options import CLEAN, console, echo_json, json_option, writable, write_file
from attnfuzz.harness.cli.streams import echo
from attnfuzz.harness.core.text import counted
from attnfuzz.kernels.errors import BadArgument, reject

if TYPE_CHECKING:
    from attnfuzz.harness.report.runfile import Broken

__all__ = ["report_command"]


@click.command("report")
@click.argument("folder", metavar="DIR", default=".attnfuzz")
@click.option("--output", metavar="FILE.html", help="The page [default: DIR/report.html].")
@click.option("--all", "every", is_flag=True, help="All runs of DIR, not just those of the latest session.")
@click.option(
    "--pictures", type=click.IntRange(min=0), default=50, show_default=True, metavar="N", help="Error maps drawn at most."
)
@json_option
def report_command(folder: str, output: str | None, every: bool, pictures: int, as_json: bool) -> None:
    """Write one self-contained HTML page about the runs in DIR (default: .attnfuzz)."""
    from attnfuzz.harness.report.html import page
    from attnfuzz.harness.report.merge import merge_runs, select_runs
    from attnfuzz.harness.report.progress import progress_on
    from attnfuzz.harness.report.runfile import Broken, runs_of

    records = list(runs_of(_existing(folder)))
    broken = [each for each in records if isinstance(each, Broken)]
    readable = [each for each in records if not isinstance(each, Broken)]
    if not readable:
        raise _nothing(folder, broken)
    runs = select_runs(readable, every=every)
    merged = merge_runs(runs, broken)
    target = _own_page(folder) if output is None else writable(output, "output")
    with progress_on(console(stderr=True), bar=True, count=True) as progress:
        task = progress.add_task("drawing", total=len(merged.failures))
        content = page(merged, Path(folder), pictures=pictures, step=lambda: progress.advance(task))
    write_file(target, content.text, "output")
    for each in broken:
        echo(f"warning: left out: {each.error}", err=True)
    if as_json:
        result = {
            "output": str(target),
            "runs": [run.stamp for run in runs],
            "broken": [{"path": each.path, "error": each.error} for each in broken],
            "kernels": len(merged.kernels),
            "cases": merged.cases,
            "failures": len(merged.failures) + merged.more_failures,
            "pictures": content.pictures,
            "without_picture": list(content.without),
            "bytes": len(content.text.encode()),
        }
        echo_json(result)
    else:
        tried = f"{counted(merged.cases, 'case')} of {counted(len(merged.kernels), 'kernel')}"
        drawn = counted(content.pictures, "picture")
        echo(f"{target}: {counted(len(merged.failures), 'failure')} in {tried}, {drawn}")
        for reason in content.without:
            echo(f"no picture: {reason}")
    click.get_current_context().exit(CLEAN)


def _own_page(folder: str) -> Path:
    """Return DIR/report.html.

    Raises:
        BadArgument: it cannot be written; or it is a link, which a folder from elsewhere may hold and which leads out of it.
    """
    page = Path(folder) / "report.html"
    if os.path.lexists(page) and (page.is_symlink() or not page.is_file()):
        raise reject("output", str(page), "it is a link, or is not a regular file", "remove it, or give --output FILE.html")
    return writable(str(page), "output")


def _existing(folder: str) -> Path:
    path = Path(folder)
    if not path.is_dir():
        reason = "it is not a folder" if path.exists() else "no such folder"
        raise reject("report", folder, reason, "give the folder that `attnfuzz run --out DIR` wrote to")
    return path


def _nothing(folder: str, broken: list[Broken]) -> BadArgument:
    if not broken:
        return reject("report", folder, "no run is recorded there", "run `attnfuzz run --out DIR` first, or give its DIR")
    return BadArgument("\n".join(each.error for each in broken))
