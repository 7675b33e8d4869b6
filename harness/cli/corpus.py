"""`attnfuzz corpus`: list the case files of a folder, prune them, minimise them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnfuzz.harness.cli.complete import complete_kernels
from attnfuzz.harness.cli.options import (
    CLEAN,
    INTERRUPTED,
    console,
    deadline_option,
    device_option,
    echo_json,
    in_process_option,
    json_option,
    kernels_option,
    no_memory_check_option,
    out_option,
)
from attnfuzz.harness.cli.streams import echo
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import reject

if TYPE_CHECKING:
    from attnfuzz.harness.repro.reproduce import Where
    from attnfuzz.harness.repro.stored import Listing, Removal

__all__ = ["corpus_group"]

_kernels = click.argument("kernels", nargs=-1, metavar="[KERNEL]...", shell_complete=complete_kernels)
_yes = click.option("--yes", is_flag=True, help="Remove without asking.")
_dry_run = click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")


@click.group("corpus")
def corpus_group() -> None:
    """List, prune or minimise the case files of a folder (DIR/cases)."""


@corpus_group.command("list")
@_kernels
@out_option
@json_option
def list_cases(kernels: tuple[str, ...], out: str, as_json: bool) -> None:
    """List the case files (of KERNEL): kernel, output, kind, size of the case, age, file. No kernel is loaded."""
    from attnfuzz.harness.repro.stored import listed
    from attnfuzz.harness.repro.stored_report import listing_object, show_listing

    listing = listed(out, kernels)
    if as_json:
        echo_json(listing_object(listing))
    else:
        show_listing(console(), listing)


@corpus_group.command("prune")
@_kernels
@kernels_option
@device_option
@deadline_option
@in_process_option
@no_memory_check_option
@_yes
@_dry_run
@out_option
@json_option
def prune_cases(kernels: tuple[str, ...], more_kernels: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Run each case, and remove those that pass, whose kernel is gone, or that fail as a simpler one does."""
    from attnfuzz.harness.repro.stored import prune

    _check_answer(options, as_json=as_json)
    listing = _listed(kernels, more_kernels, options["out"])
    done = prune(listing, _where(options), _note)
    removed, left = _removed(done.removals, options, as_json=as_json)
    kept = len(listing.entries) - len(removed)
    _finish(removed, [*listing.unreadable, *done.left, *left], kept, options, as_json=as_json, interrupted=done.interrupted)


@corpus_group.command("minimise")
@_kernels
@kernels_option
@device_option
@deadline_option
@in_process_option
@no_memory_check_option
@click.option("--budget", default="60s", show_default=True, metavar="60s", help="Time for all cases together.")
@_yes
@out_option
@json_option
def minimise_cases(kernels: tuple[str, ...], more_kernels: tuple[str, ...], budget: str, as_json: bool, **options: Any) -> None:
    """Shrink the simplest case of each failure further, and keep only that one."""
    from attnfuzz.harness.campaign.settings import duration
    from attnfuzz.harness.repro.stored import minimise

    options["dry_run"] = False
    seconds = duration(budget)
    _check_answer(options, as_json=as_json)
    listing = _listed(kernels, more_kernels, options["out"])
    done = minimise(listing, seconds, _where(options), _note)
    removed, left = _removed(done.removals, options, as_json=as_json)
    kept = len(listing.entries) + len(done.smaller) - len(removed)
    _finish(removed, [*listing.unreadable, *done.left, *left], kept, options, as_json=as_json, interrupted=done.interrupted)


def _check_answer(options: dict[str, Any], *, as_json: bool) -> None:
    """Find out before the first run whether files may be removed.

    Raises:
        BadArgument: a question would be asked, and there is no terminal for the answer.
    """
    if options["yes"] and options["dry_run"]:
        raise reject("dry-run", True, "--yes removes, and --dry-run removes nothing", "leave one of them out")
    asks = not (options["yes"] or options["dry_run"])
    if asks and (as_json or not _on_terminal()):
        reason = "files are removed after a question, and there is no terminal for it" if not as_json else "--json asks nothing"
        raise reject("yes", False, reason, "add --yes, or --dry-run to see what would be removed")


def _on_terminal() -> bool:
    stdin: Any = sys.stdin
    return stdin is not None and bool(stdin.isatty())


def _listed(kernels: Sequence[str], targets: Sequence[str], out: str) -> Listing:
    from attnfuzz.harness.repro.stored import listed

    named = [registry.get(each).name for each in targets]
    return listed(out, list(dict.fromkeys([*kernels, *(named if not kernels else [])])))


def _where(options: dict[str, Any]) -> Where:
    from attnfuzz.harness.campaign.settings import duration
    from attnfuzz.harness.core.environment import prepare, resolve_device
    from attnfuzz.harness.repro.reproduce import Where

    deadline = options["deadline"]
    if options["in_process"]:
        prepare(resolve_device(options["device"]))
    return Where(
        device=options["device"],
        in_process=options["in_process"],
        deadline=None if deadline is None else duration(deadline, "deadline"),
        memory_check=not options["no_memory_check"],
    )


def _note(name: str) -> None:
    echo(f"running {name}", err=True)


def _removed(
    removals: Sequence[Removal], options: dict[str, Any], *, as_json: bool
) -> tuple[list[Removal], list[tuple[Path, str]]]:
    """Ask, and remove; return what was removed (for a dry run: would be), and what is left with the reason."""
    from attnfuzz.harness.repro.stored import remove
    from attnfuzz.harness.repro.stored_report import show_removals

    if options["dry_run"]:
        if not as_json:
            show_removals(console(), removals, "would remove")
        return list(removals), []
    if removals and not options["yes"]:
        show_removals(console(), removals, "to remove:")
        question = f"Remove {len(removals)} {'file' if len(removals) == 1 else 'files'}?"
        if not click.confirm(question):
            return [], [(each.entry.stored.path, "not removed: you said no") for each in removals]
    removed: list[Removal] = []
    left = []
    for each, reason in remove(removals):
        if reason is None:
            removed.append(each)
        else:
            left.append((each.entry.stored.path, reason.removeprefix("left: ")))
    if not as_json:
        show_removals(console(), removed, "removed")
    return removed, left


def _finish(
    removed: Sequence[Removal], left: Sequence[tuple[Path, str]], kept: int, options: dict[str, Any], *, as_json: bool,
    interrupted: bool,
) -> None:  # fmt: skip
    from attnfuzz.harness.repro.stored_report import removal_object, show_left

    if as_json:
        echo_json(removal_object(removed, left, kept, dry_run=options["dry_run"], interrupted=interrupted))
    else:
        show_left(console(), left)
        verb = "would be removed" if options["dry_run"] else "removed"
        echo(f"{len(removed)} {verb}, {kept} kept{', interrupted: not all were run' if interrupted else ''}")
    click.get_current_context().exit(INTERRUPTED if interrupted else CLEAN)
