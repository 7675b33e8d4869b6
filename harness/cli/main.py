"""The command line. Exit codes: 0 clean, 1 failures, 2 wrong use or a broken environment, 130 interrupted with nothing found."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import click

from attnfuzz.harness.cli.check_adapter import check_adapter_command
from attnfuzz.harness.cli.compile import compile_command
from attnfuzz.harness.cli.fleet import fleet_command
from attnfuzz.harness.cli.gate import gate_command
from attnfuzz.harness.cli.list import list_command
from attnfuzz.harness.cli.merge import merge_command
from attnfuzz.harness.cli.options import CLEAN, INTERRUPTED, JSON_FORMAT, WRONG_USE
from attnfuzz.harness.cli.project import blamed, project_defaults
from attnfuzz.harness.cli.report import report_command
from attnfuzz.harness.cli.repro import repro_command
from attnfuzz.harness.cli.run import demo_command, run_command
from attnfuzz.harness.cli.selftest import selftest_group
from attnfuzz.harness.cli.show import show_command
from attnfuzz.harness.cli.streams import outlive_readers
from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.core.text import dumps, printable
from attnfuzz.kernels.problem import BadArgument

__all__ = ["main"]


class _Commands(click.Group):
    """End every command with a clear message, and exit code 2 on wrong use or a broken environment, 130 on Ctrl-C."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Run the command, and exit with its code."""
        arguments = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        _end_like_ctrl_c(signal.SIGTERM)
        outlive_readers()
        try:
            code = super().main(args=arguments, prog_name=prog_name, **extra)
        except click.Abort:
            click.echo("interrupted: nothing was found until then", err=True)
            code = INTERRUPTED
        except click.ClickException as error:
            code = _wrong_use(error.format_message(), as_json="--json" in arguments, show=error.show)
        except (BadArgument, OSError) as error:
            code = _wrong_use(_text(error), as_json="--json" in arguments)
        except Exception as error:
            if os.environ.get("ATTNFUZZ_DEBUG"):
                raise
            text = f"internal error: {type(error).__name__}: {error}".strip()
            remedy = "This is a fault of attnfuzz, not of a kernel; set ATTNFUZZ_DEBUG=1 to see where."
            code = _wrong_use(f"{text}\n{remedy}", as_json="--json" in arguments)
        code = _flushed(code if isinstance(code, int) else CLEAN)
        if args is None:
            # This process ends now: Ctrl-C while Python does that must not replace the code.
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_IGN)
        sys.exit(code)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, whose options have the project's settings as defaults."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and ctx.command is main:
            ctx.default_map = dict(project_defaults(ctx, command, rest))
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of a value that is the project's names its file."""
        try:
            return super().invoke(ctx)
        except BadArgument as error:
            raise blamed(ctx, error) from error.__cause__


def _flushed(code: int) -> int:
    """Flush stdout and return the exit code: a failed flush at exit would make Python end with its own code."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if code != WRONG_USE:
            reason = f"it cannot be written ({error.strerror}); give it another place (> FILE)"
            click.echo(f"error: stdout={getattr(sys.stdout, 'name', '')!r}: {reason}", err=True)
        code = WRONG_USE
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _end_like_ctrl_c(number: signal.Signals) -> None:
    """Treat a signal as Ctrl-C: failures until then are reported, and no child outlives the run."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL:
        signal.signal(number, interrupt)


def _text(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}; check that the path exists and can be read and written"


def _wrong_use(message: str, *, as_json: bool, show: Callable[[], None] | None = None) -> int:
    """Print what is wrong, with `as_json` as JSON too; return the exit code."""
    if as_json:
        with contextlib.suppress(OSError):  # stdout itself may be what is wrong
            click.echo(dumps({"format": JSON_FORMAT, "error": message}))
    if show is not None:
        show()
    else:
        click.echo(f"error: {printable(message)}", err=True)
    return WRONG_USE


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(versions().get("attnfuzz", "unknown"), prog_name="attnfuzz")
def main() -> None:
    """Differential correctness and fuzz testing of attention kernels against float64 oracles."""


for _command in (
    list_command,
    run_command,
    show_command,
    repro_command,
    gate_command,
    compile_command,
    check_adapter_command,
    report_command,
    merge_command,
    fleet_command,
    demo_command,
    selftest_group,
):
    main.add_command(_command)

if __name__ == "__main__":
    main()
