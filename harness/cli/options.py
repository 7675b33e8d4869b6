"""Exit codes, options, the console and output files, shared by the commands."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnfuzz.harness.campaign.options import OPTIONS, Option
from attnfuzz.harness.cli.complete import complete_kernels
from attnfuzz.harness.cli.project import current_project, kernel_from_project, kernels_from_project, load_from_project
from attnfuzz.harness.cli.streams import echo, echo_before
from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.core.text import dumps
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.support.file_target import as_options, file_target, read_like

if TYPE_CHECKING:
    from rich.console import Console

    from attnfuzz.harness.report.progress import Verbosity

__all__ = [
    "CLEAN",
    "FAILURES",
    "INTERRUPTED",
    "JSON_FORMAT",
    "WRONG_USE",
    "Asked",
    "FiniteRange",
    "announce",
    "asked_for",
    "check_owner",
    "console",
    "deadline_option",
    "device_option",
    "echo_json",
    "every_kernel",
    "file_to_write",
    "gate_profile_option",
    "in_process_option",
    "json_option",
    "kernel_option",
    "kernels_option",
    "like_option",
    "no_memory_check_option",
    "out_option",
    "profile_option",
    "run_options",
    "seed_option",
    "verbosity_of",
    "verbosity_options",
    "with_like",
    "writable",
    "write_file",
    "writing",
]

JSON_FORMAT = 1
"""Version of the JSON that commands print. Keys may be added; what one means or is called changes with this number alone."""
CLEAN, FAILURES, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
_Decorator = Callable[[Any], Any]

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
_KERNEL_HELP = "A kernel by its name, or from anywhere: package.module:OBJECT or FILE.py:OBJECT, seen from the current folder."
like_option = click.option(
    "--like",
    metavar="dense|varlen|paged",
    help="How the function of a kernel FILE.py:FUNCTION is called; or with what else it can: 'dense(groups=None)'.",
)
kernels_option = click.option(
    "--kernel",
    "more_kernels",
    multiple=True,
    metavar="MODULE:OBJECT",
    shell_complete=complete_kernels,
    help=f"{_KERNEL_HELP} As KERNEL; may be repeated.",
)
kernel_option = click.option(
    "--kernel",
    "owner",
    metavar="MODULE:OBJECT",
    shell_complete=complete_kernels,
    help=f"The case's kernel, where its name alone does not find it. {_KERNEL_HELP}",
)


class FiniteRange(click.FloatRange):
    """A range of numbers, to which neither nan nor inf belongs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail as click does."""
        number = float(super().convert(value, param, ctx))
        return number if math.isfinite(number) else self.fail(f"{value} is not a finite number.", param, ctx)


def _click_option(option: Option) -> _Decorator:
    """Return the decorator that declares an option of the table."""
    more: dict[str, Any] = {"type": option.type, "show_default": option.default is not None}
    if option.type is bool:
        more = {"is_flag": True}
    elif option.least is not None:
        of_range: Any = click.IntRange if option.type is int else FiniteRange
        more["type"] = of_range(option.least, option.most)
    return click.option(f"--{option.name}", default=option.default, metavar=option.metavar, help=option.help, **more)


_RUN = {option.name: _click_option(option) for option in OPTIONS if option.only != "pytest"}
device_option, out_option, deadline_option, in_process_option, no_memory_check_option, profile_option = (
    _RUN[name] for name in ("device", "out", "deadline", "in-process", "no-memory-check", "profile")
)
gate_profile_option = _click_option(replace(next(each for each in OPTIONS if each.name == "profile"), default="gate"))
seed_option = click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Same seed, same Cases in the same order."
)


def verbosity_options(command: Any) -> Any:
    """Declare -q and -v; the command takes `quiet` and `verbose`."""
    verbose = click.option("-v", "--verbose", is_flag=True, help="Also show each replay and compile, and each kernel's start.")
    quiet = click.option("-q", "--quiet", is_flag=True, help="Show failures and the last line only.")
    return quiet(verbose(command))


def verbosity_of(*, quiet: bool, verbose: bool) -> Verbosity:
    """Return how much is shown.

    Raises:
        BadArgument: both are given.
    """
    if quiet and verbose:
        raise reject("quiet", quiet, "--verbose is given as well", "leave one of the two out")
    return "quiet" if quiet else "verbose" if verbose else "normal"


def announce(text: str, verbosity: Verbosity, *, as_json: bool) -> None:
    """Say at once what a command is about to do: what it imports after that takes seconds. Machines need not know."""
    if verbosity != "quiet" and not as_json:
        echo_before(f"attnfuzz {versions().get('attnfuzz', '')} {text} ...")


def run_options(command: Any) -> Any:
    """Declare all options of the table."""
    for decorator in reversed(_RUN.values()):
        command = decorator(command)
    return command


@dataclass(frozen=True, slots=True)
class Asked:
    """The kernels that a command is to try, and those of the default that cannot be loaded, each with the reason."""

    kernels: tuple[Kernel, ...]
    broken: tuple[tuple[str, str], ...] = ()
    named: bool = True
    """Whether they were asked for by name; else they are all that are listed."""


def with_like(names: Sequence[str], like: str | None) -> tuple[str, ...]:
    """Return the names of kernels, with `like`, the value of --like, in those that are functions of files.

    Raises:
        BadArgument: no name is of an object in a file, or `like` cannot be read.
    """
    if like is None:
        return tuple(names)
    read_like(like)
    files = {each: file for each in names if (file := file_target(each)) is not None}
    if not files:
        remedy = "name the kernel as path/to/file.py:FUNCTION, or leave --like out"
        alone = next((each for each in names if each.endswith(".py")), None)
        named = "no kernel is named as FILE.py:FUNCTION" if alone is None else f"{alone!r} names a file and no function of it"
        raise reject("like", like, f"it says how a function of a file is called, and {named}", remedy)
    return tuple(replace(files[each], like=files[each].like or like).text if each in files else each for each in names)


def asked_for(kernels: Sequence[str], more: Sequence[str] = ()) -> Asked:
    """Return the kernels named by KERNEL and --kernel, each once; by default those of the project, or all of `every_kernel`.

    A name that is only the beginning of others, up to a dot, is theirs: "released" for all that begin with "released.".

    Raises:
        BadArgument: there is no kernel of a name, or it cannot be loaded.
    """
    names = tuple(dict.fromkeys((*kernels, *more)))
    if not names:
        chosen = kernels_from_project()
        return _each_once(chosen) if chosen else every_kernel()
    names = tuple(dict.fromkeys(member for each in names for member in registry.members(each)))
    registry.try_first(names)
    return _each_once(map(registry.get, names))


def every_kernel(*, released: bool = False) -> Asked:
    """Return all kernels that are listed, those of the project among them, and why others of them cannot be loaded.

    Args:
        released: those that other packages release too, which run only if they are named.
    """
    project = current_project()
    listed = [each for each in registry.names() if released or not registry.is_released(each)]
    registry.try_first(listed)
    first = _loadable(project.kernels if project else (), load_from_project)
    # A kernel of the project is listed from then on.
    rest = _loadable(dict.fromkeys((*listed, *(each.name for each in first.kernels))), registry.get)
    return Asked(_each_once((*first.kernels, *rest.kernels)).kernels, (*first.broken, *rest.broken), named=False)


def _loadable(names: Iterable[str], load: Callable[[str], Kernel]) -> Asked:
    kernels, broken = list[Kernel](), list[tuple[str, str]]()
    for each in names:
        try:
            kernels.append(load(each))
        except BadArgument as error:
            broken.append((each, str(error)))
    return Asked(tuple(kernels), tuple(broken))


def _each_once(kernels: Iterable[Kernel]) -> Asked:
    return Asked(tuple({kernel.name: kernel for kernel in kernels}.values()))


def check_owner(owner: str | None, path: str, case_kernel: str, target: object, like: str | None = None) -> None:
    """Make the kernel of a case file known, from --kernel (and --like) where it is given, else from the project's kernels.

    Raises:
        BadArgument: --kernel names another one, or --like is given without it; or it is not installed, and the file names the
            object that it was.
    """
    if like is not None and owner is None:
        raise reject("like", like, "it says how the function that --kernel names is called", "add --kernel FILE.py:FUNCTION")
    if owner is not None:
        (owner,) = with_like([owner], like)
        if (kernel := registry.get(owner)).name != case_kernel:
            reason = f"it calls itself {kernel.name!r}, and {path} is a case of {case_kernel!r}"
            raise reject("kernel", owner, reason, "name the case's own kernel")
    elif kernel_from_project(case_kernel) is None and isinstance(target, str):
        try:
            registry.get(case_kernel)
        except registry.UnknownKernel:
            raise BadArgument(
                f"kernel={case_kernel!r}: no kernel of that name is installed; it was found at {target}: add {as_options(target)}"
            ) from None


def echo_json(content: Mapping[str, Any]) -> None:
    """Print the result of the current command as JSON: docs/reference/json.md says what is in it, by its format."""
    context, words = click.get_current_context(), list[str]()
    while context.parent is not None:
        context, words = context.parent, [context.info_name or "", *words]
    echo(dumps({"format": JSON_FORMAT, "command": " ".join(words), **content}))


def console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or 120 columns for a file or a pipe; it spells foreign text."""
    from attnfuzz.harness.report.console import SafeConsole

    terminal = SafeConsole(stderr=stderr)
    if not terminal.is_terminal and "COLUMNS" not in os.environ:
        terminal.width = 120
    return terminal


def writable(path: str, name: str = "write") -> Path:
    """Check before a long run that its result can be written; `name` is the option's. A file that is not there stays so.

    Raises:
        BadArgument: it cannot.
    """
    file = Path(path)
    try:
        if file.is_dir():
            raise reject(name, path, "it is a folder", "give a file")
        file.parent.mkdir(parents=True, exist_ok=True)
        new = not os.path.lexists(file)
        with file.open("a", encoding="utf-8"):
            pass
        if new:
            file.unlink()
    except FileExistsError:  # from mkdir: the parent is a file
        raise reject(
            name, path, f"it cannot be written ({file.parent} is not a folder)", "give a file that can be written"
        ) from None
    except OSError as error:
        raise reject(name, path, f"it cannot be written ({error.strerror})", "give a file that can be written") from None
    return file


def file_to_write(_: click.Context, option: click.Parameter, path: str | None) -> Path | None:
    """Check an option that names a file to write, before what takes minutes: the callback of such an option.

    Raises:
        click.UsageError: it cannot be written.
    """
    try:
        return None if path is None else writable(path, option.opts[-1].lstrip("-"))
    except BadArgument as error:
        raise click.UsageError(str(error)) from None


@contextlib.contextmanager
def writing(file: Path, name: str) -> Iterator[None]:
    """Context of a write to the file of the option `name`.

    Raises:
        BadArgument: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise reject(name, str(file), f"it cannot be written ({error.strerror})", "give a file elsewhere") from None


def write_file(file: Path, text: str, name: str) -> None:
    """Write the file of the option `name`, whole or not at all.

    Raises:
        BadArgument: it cannot be written; what it held before is kept.
    """
    from attnfuzz.harness.core.files import write_whole

    with writing(file, name):
        if file.exists() and not file.is_file():  # a device, a pipe
            file.write_text(text, encoding="utf-8")
        else:
            write_whole(file.resolve(), text)
