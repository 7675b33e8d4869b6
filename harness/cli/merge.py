"""`attnfuzz merge`: the folders of shards as one."""

from __future__ import annotations

from pathlib import Path

import click
from rich.markup import escape

from attnfuzz.harness.cli.options import CLEAN, FAILURES, INTERRUPTED, WRONG_USE, console, echo_json, json_option
from attnfuzz.harness.cli.streams import echo
from attnfuzz.harness.core.text import counted
from attnfuzz.kernels.errors import reject

__all__ = ["merge_command"]


@click.command("merge")
@click.argument("out", metavar="OUT")
@click.argument("folders", metavar="DIR...", nargs=-1, required=True)
@json_option
def merge_command(out: str, folders: tuple[str, ...], as_json: bool) -> None:
    """Put the folders DIR... of `attnfuzz run --shard` together in the folder OUT, and print their table.

    Of the cases of one failure the smallest is kept. Exit codes are those of `run`; a run that did not finish and a shard that is
    in no folder count as a broken environment.
    """
    from attnfuzz.harness.report import machine
    from attnfuzz.harness.report.folders import merge_folders
    from attnfuzz.harness.report.terminal import Terminal

    if "" in (out, *folders):  # an unset variable of a shell, which Path takes for the current folder
        raise reject("merge", "", "it is empty", "give folders")
    merged = merge_folders(Path(out), [Path(each) for each in folders])
    finished = merged.finished
    if as_json:
        more = {
            "out": out,
            "runs": [run.stamp for run in merged.runs],
            "case_files": merged.case_files,
            "in_flight": merged.in_flight,
            "incomplete": list(merged.incomplete),
            "without_case": list(merged.without_case),
            "left_out": list(merged.left_out),
        }
        echo_json({**machine.campaign_object(finished), **more})
    else:
        terminal = console()
        Terminal(terminal, live=False)(finished)
        for each in merged.without_case:
            terminal.print(f"[red]its case is in no file: {escape(each)}[/]", highlight=False, soft_wrap=True)
        for each in merged.incomplete:
            terminal.print(f"[yellow]{escape(each)}[/]", highlight=False, soft_wrap=True)
        for each in merged.left_out:
            terminal.print(f"[yellow]left out: {escape(each)}[/]", highlight=False, soft_wrap=True)
        if merged.in_flight:
            terminal.print(
                f"in flight when a run died: {counted(merged.in_flight, 'case')}, tried first by the next run", highlight=False
            )
        terminal.print(
            f"{out}: {counted(merged.case_files, 'case file')}, {counted(len(merged.runs), 'run')}", highlight=False, markup=False
        )
    for kernel, reason in finished.untried:
        echo(f"error: kernel={kernel!r}: {reason}", err=True)
    if finished.findings or finished.lost or merged.without_case:
        code = FAILURES
    elif finished.broken or merged.incomplete or finished.untried:
        code = WRONG_USE
    else:
        code = INTERRUPTED if finished.interrupted else CLEAN
    click.get_current_context().exit(code)
