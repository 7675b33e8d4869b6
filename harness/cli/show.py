"""`attnfuzz show`: one case file."""

from __future__ import annotations

import click

from attnfuzz.harness.cli.complete import complete_cases
from attnfuzz.harness.cli.options import check_owner, console, echo_json, json_option, kernel_option, like_option

__all__ = ["show_command"]


@click.command("show")
@click.argument("case", metavar="CASE", shell_complete=complete_cases)
@kernel_option
@like_option
@json_option
def show_command(case: str, owner: str | None, like: str | None, as_json: bool) -> None:
    """Show a case file, or the blob of one: the Problem, the values, the Config, and the failure."""
    from attnfuzz.harness.campaign.blob import stored_case
    from attnfuzz.harness.report.terminal import show_stored

    stored = stored_case(case)
    if owner is not None or like is not None:
        check_owner(owner, case, stored.case.kernel, None, like)
    if as_json:
        echo_json({"case": stored.case.to_object(), "found": stored.finding.to_object(), "path": str(stored.path)})
    else:
        show_stored(console(), stored)
