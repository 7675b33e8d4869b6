"""What a shell completes: names of kernels, and case files. No kernel and no backend is imported for it."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from attnfuzz.kernels import registry

__all__ = ["complete_cases", "complete_kernels"]

_CASES = Path(".attnfuzz", "cases")
"""Where a run keeps its case files by default."""
_MOST = 500


def complete_kernels(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the listed kernels that begin with `incomplete` and are not yet on the line."""
    given = context.params.get(parameter.name or "") or ()
    # A shell reads one word a line.
    names = (name for name in registry.names() if name.isprintable() and name not in given)
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def complete_cases(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Return the case files of the default folder and the JSON files of this one; else let the shell complete a path."""
    paths = (str(path) for folder in (_CASES, Path()) for path in sorted(folder.glob("*.json")))
    matching = [each for each in paths if each.isprintable() and each.startswith(incomplete)]
    return [CompletionItem(each) for each in matching[:_MOST]] or [CompletionItem(incomplete, type="file")]
