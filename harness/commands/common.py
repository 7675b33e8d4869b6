"""What the commands share: exit codes, options, the console."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.console import Console

from attnfuzz.kernels.problem import reject

__all__ = [
    "CLEAN",
    "FAILURES",
    "INTERRUPTED",
    "WRONG_USE",
    "console",
    "deadline_option",
    "device_option",
    "in_process_option",
    "json_option",
    "no_memory_check_option",
    "out_option",
    "seed_option",
    "writable",
]

CLEAN, FAILURES, WRONG_USE, INTERRUPTED = 0, 1, 2, 130

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
device_option = click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda",
    help="Where the kernels run; auto takes CUDA if there is one.",
)
out_option = click.option("--out", default=".attnfuzz", show_default=True, metavar="DIR", help="Folder of case files.")
in_process_option = click.option(
    "--in-process", is_flag=True, help="No child processes, for a debugger: a kernel that crashes or hangs takes attnfuzz along."
)
deadline_option = click.option(
    "--deadline", metavar="60s", help="Time that a stage of a trial may take before it hangs [default: 60s]."
)
no_memory_check_option = click.option(
    "--no-memory-check", is_flag=True, help="Do not check every access to memory of interpreted kernels (Triton on the CPU)."
)
seed_option = click.option(
    "--seed", default=0, show_default=True, metavar="N", type=int, help="Same seed, same Cases in the same order."
)


def console(*, stderr: bool = False) -> Console:
    """The terminal's own width; wide enough for every table where the output is a file or a pipe."""
    made = Console(stderr=stderr)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 120
    return made


def writable(path: str, name: str = "write") -> Path:
    """Known before the run, which takes long, that its result can be kept; `name` is the option's."""
    file = Path(path)
    if file.is_dir():
        raise reject(name, path, "it is a folder", "give a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8"):
            return file
    except OSError as error:
        raise reject(name, path, f"it cannot be written ({error.strerror})", "give a file that can be written") from None
