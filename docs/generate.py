"""Write cli.md, api.md and attnfuzz.schema.json in docs/reference/ from the code: `python docs/generate.py`.

With `--check`, only compare.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

FOLDER = Path(__file__).parent / "reference"
MODULES = ("attnfuzz.harness", "attnfuzz.kernels", "attnfuzz.kernels.expressions")
"""What others may build on; tests/test_public.py holds documentation and examples to it."""
EXIT_CODES = """\
| exit code | of all commands | in addition |
|---|---|---|
| 0 | clean: all was tried | `repro`: FIXED; `gate`: passed, or let through by the ledger; `selftest`: all as it should be |
| 1 | failures were found | `repro`: FAILED; `check-adapter`: the contract is not fulfilled |
| 2 | wrong use, a broken file or environment, a kernel that could not be tried, a case not written | `repro`: ERROR, UNJUDGED |
| 130 | interrupted, with nothing found | |
"""
NOTE = "<!-- Written by docs/generate.py from the code; a test compares. -->\n"


def cli_page() -> str:
    """Return the page of every command with its arguments and options."""
    from attnfuzz.harness.cli.main import main

    parts = [f"# Command line\n\n{NOTE}\n{EXIT_CODES}"]
    for path, command in commands("attnfuzz", main):
        context = click.Context(command, info_name=path)
        usage = " ".join(command.collect_usage_pieces(context))
        parts.append(f"## `{path}`\n\n```text\n{path} {usage}\n```\n\n{paragraphs(command.help or '')}\n")
        options = [each.get_help_record(context) for each in command.params]
        rows = [f"| `{cell(name)}` | {cell(text)} |" for name, text in filter(None, options)]
        parts += table(rows)
    return "\n".join([*parts, *pytest_options()])


def table(rows: list[str]) -> list[str]:
    """Return the rows as a Markdown table, or nothing without rows."""
    return ["\n".join(["| option | |", "|---|---|", *rows]) + "\n"] if rows else []


class Options:
    """Stand-in for pytest's parser that keeps its options."""

    def __init__(self) -> None:
        """Start without options."""
        self.rows: list[str] = []

    def getgroup(self, *_: str) -> Options:
        """Return this object: groups are not distinguished."""
        return self

    def addoption(self, name: str, **more: Any) -> None:
        """Keep an option as a row."""
        self.rows.append(f"| `{cell(name + ' ' + more.get('metavar', ''))}` | {cell(more['help'])} |")


def pytest_options() -> list[str]:
    """Return the section about the plugin's options."""
    from attnfuzz.harness.plugin.options import pytest_addoption

    options: Any = Options()
    pytest_addoption(options)
    return ["## pytest\n\nFor tests made by `fuzz(...)`.\n", *table(options.rows)]


def commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield the command and its subcommands by name, groups left out."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name in sorted(command.commands):
        yield from commands(f"{path} {name}", command.commands[name])


def cell(text: str) -> str:
    """Escape `text` for a Markdown table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def paragraphs(text: str) -> str:
    """Join the lines of each paragraph of click's help."""
    return "\n\n".join(re.sub(r"\s+", " ", each).strip() for each in inspect.cleandoc(text).split("\n\n"))


def api_page() -> str:
    """Return the page of every public name of `MODULES`."""
    parts = [f"# API\n\n{NOTE}\nThe public names. Everything else may change without notice.\n"]
    for name in MODULES:
        module = importlib.import_module(name)
        parts.append(f"## `{name}`\n\n{inspect.cleandoc(module.__doc__ or '')}\n")
        parts += [entry(public, getattr(module, public)) for public in module.__all__]
    return "\n".join(parts)


def entry(name: str, value: Any) -> str:
    """Return the section of one public name: its signature and docstring."""
    own = inspect.isclass(value) or inspect.isfunction(value)
    title = f"### `{name}{signature(value) if own else ''}`\n"
    text = inspect.cleandoc(value.__doc__ or "") if own else f"`{type(value).__name__}`"
    return f"{title}\n```text\n{text}\n```\n" if own and text else f"{title}\n{text}\n"


def signature(value: Any) -> str:
    """Return the parameters as written; an empty text for a class without a signature."""
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    # Addresses and long defaults say nothing.
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return text if len(text) <= 300 else "(...)"


def schema_file() -> str:
    """Return the JSON Schema of what commands print."""
    from attnfuzz.harness.cli.schema import json_schema

    return json.dumps(json_schema(), indent=1, sort_keys=True) + "\n"


def main(arguments: list[str]) -> int:
    """Write the pages; with --check, name those that are stale."""
    pages = {FOLDER / "cli.md": cli_page(), FOLDER / "api.md": api_page(), FOLDER / "attnfuzz.schema.json": schema_file()}
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.name} is stale; run python docs/generate.py")
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")
    print(f"{len(stale)} of {len(pages)} pages written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
