"""The command line. Exit codes: 0 clean, 1 failures, 2 wrong use or a broken environment, 130 interrupted with nothing found."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from io import StringIO
from typing import Any

import click

from attnfuzz.harness.cli.check_adapter import check_adapter_command
from attnfuzz.harness.cli.compile import compile_command
from attnfuzz.harness.cli.corpus import corpus_group
from attnfuzz.harness.cli.coverage import coverage_command
from attnfuzz.harness.cli.fleet import fleet_command
from attnfuzz.harness.cli.gate import gate_command
from attnfuzz.harness.cli.list import list_command
from attnfuzz.harness.cli.merge import merge_command
from attnfuzz.harness.cli.mutants import mutants_command
from attnfuzz.harness.cli.options import CLEAN, FAILURES, INTERRUPTED, JSON_FORMAT, WRONG_USE
from attnfuzz.harness.cli.project import blamed, project_defaults
from attnfuzz.harness.cli.report import report_command
from attnfuzz.harness.cli.repro import repro_command
from attnfuzz.harness.cli.run import demo_command, run_command
from attnfuzz.harness.cli.selftest import selftest_group
from attnfuzz.harness.cli.show import show_command
from attnfuzz.harness.cli.streams import echo, outlive_readers, watched_stdout
from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.core.signals import ending, interrupted_once
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.report import interim
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.support.third_party import described
from attnfuzz.kernels.targets import third_party_frame

__all__ = ["main"]


_exit = os._exit
"""As it is before a kernel's module is imported."""
_COMPLETION = "_ATTNFUZZ_COMPLETE"
"""Set where a shell asks for completions, for which click exits by itself."""
_MOST_LETTERS = 8000
"""Of a message."""
_SILENT = "the command ended without a result: code that it called ended it; nothing counts as tried"


class _Commands(click.Group):
    """End every command with a clear message, and exit code 2 on wrong use or a broken environment, 130 on Ctrl-C."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Run the command, and exit with its code."""
        arguments = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        interim.forget()
        _end_like_ctrl_c(signal.SIGTERM)
        outlive_readers()
        with interrupted_once():
            code = self._ended(arguments, prog_name, extra)
            if args is None:
                # This process ends now: neither Ctrl-C nor what a kernel's module has left (atexit, threads) may change the code.
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.flush()
                _exit(code)
        sys.exit(code)

    def _ended(self, arguments: list[str], prog_name: str | None, extra: dict[str, Any]) -> int:
        """Run the command; return its exit code, which is 0 only where the command has printed its result."""
        as_json = "--json" in arguments
        try:
            with watched_stdout() as has_written:
                code = super().main(args=arguments, prog_name=prog_name, **extra)
                ending()
                code = code if isinstance(code, int) else CLEAN
                if code == CLEAN and not has_written():
                    code = _wrong_use(_SILENT, as_json=as_json)
        except click.Abort:
            ending()
            code = _interrupted()
        except click.ClickException as error:
            code = _wrong_use(error.format_message(), as_json=as_json, text=_shown_by_click(error))
        except (BadArgument, OSError) as error:
            code = _wrong_use(_text(error), as_json=as_json)
        except BaseException as error:
            if os.environ.get("ATTNFUZZ_DEBUG") or (isinstance(error, SystemExit) and _COMPLETION in os.environ):
                raise
            code = _wrong_use(_unexpected(error), as_json=as_json)
        return _flushed(code)

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


def _interrupted() -> int:
    """Print what the command has found until Ctrl-C, where it could not do so itself; return the exit code."""
    if failures := interim.so_far():
        echo("\n".join(["interrupted; failures until then:", *failures]), err=True)
        return FAILURES
    echo("interrupted: nothing was found until then", err=True)
    return INTERRUPTED


def _flushed(code: int) -> int:
    """Flush stdout and return the exit code: what cannot be written must not be exit code 0."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if code != WRONG_USE:
            reason = f"it cannot be written ({error.strerror}); give it another place (> FILE)"
            echo(f"error: stdout={getattr(sys.stdout, 'name', '')!r}: {reason}", err=True)
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


def _unexpected(error: BaseException) -> str:
    """Say what ended a command that neither wrong use nor the user has: no exit code but attnfuzz's own is one."""
    text = described(error)
    if (where := third_party_frame(error)) is not None:
        return f"a kernel's own code failed with {text} ({where}); nothing counts as tried; fix that"
    if not isinstance(error, Exception):
        return f"the command was ended by {text}, which code that it called has raised; nothing counts as tried"
    remedy = "This is a fault of attnfuzz, not of a kernel; set ATTNFUZZ_DEBUG=1 to see where."
    return f"internal error: {text}\n{remedy}"


def _text(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}; check that the path exists and can be read and written"


def _shown_by_click(error: click.ClickException) -> str:
    """Return what click prints of its own errors: the usage of the command, and what is wrong."""
    text = StringIO()
    error.show(text)
    return text.getvalue().rstrip("\n")


def _wrong_use(message: str, *, as_json: bool, text: str = "") -> int:
    """Print what is wrong, by default after "error:", with `as_json` as JSON too; return the exit code.

    A case file may have put any length into a message: a long one is printed without its middle.
    """
    if len(message) > _MOST_LETTERS:
        message = f"{message[: _MOST_LETTERS // 2]} ... {message[-_MOST_LETTERS // 4 :]} ({len(message)} letters)"
    if as_json:
        with contextlib.suppress(OSError):  # stdout itself may be what is wrong
            echo(dumps({"format": JSON_FORMAT, "error": message}))
    echo(text or f"error: {message}", err=True)
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
    corpus_group,
    gate_command,
    compile_command,
    check_adapter_command,
    coverage_command,
    report_command,
    merge_command,
    fleet_command,
    demo_command,
    selftest_group,
    mutants_command,
):
    main.add_command(_command)

if __name__ == "__main__":
    main()
