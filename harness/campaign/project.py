"""Settings of a project: the table `[tool.attnfuzz]` of its pyproject.toml.

Imports neither click nor pytest, and without such a table nothing but the table of options. Reading it imports no kernel: its
kernels are imported by a command that its user runs there.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnfuzz.harness.campaign.options import OPTIONS, Option, settings_from
from attnfuzz.kernels.errors import BadArgument

__all__ = ["FILE", "KEYS", "Project", "find_project", "read_project"]

FILE = "pyproject.toml"
_TABLE = "[tool.attnfuzz]"
_LARGEST = 1 << 20
"""Bytes of a pyproject.toml."""
_LISTS = {
    "kernels": 'give a list, such as kernels = ["mypackage.attention:KERNEL"]',
    "corpus": 'give a list, such as corpus = ["tests/cases"]',
}
_OPTIONS = {option.name: option for option in OPTIONS if option.name not in ("kernel", "case", "events")}
KEYS = (*_LISTS, *_OPTIONS)
"""Keys that the table may have."""
_PATHS = ("out", "ledger", "table")
_TYPES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
_QUOTES = "\"'"
_LONGEST = 80
"""Characters of a value in a message."""


@dataclass(frozen=True, slots=True)
class Project:
    """A pyproject.toml with settings of attnfuzz.

    `values` are by `Option.key`, as the options take them; paths in them are seen from the current folder.
    """

    path: Path
    kernels: tuple[str, ...]
    values: Mapping[str, Any]

    @property
    def folder(self) -> str:
        """The folder of the file, from which its kernels are imported."""
        return str(self.path.parent)

    def blamed(self, error: BadArgument, given: frozenset[str] = frozenset()) -> BadArgument:
        """Return `error`, with the file if the value that it names comes from there; `given`: keys that the command line has."""
        key = str(error).partition("=")[0].replace("-", "_")
        if key not in self.values or key in given:
            return error
        return BadArgument(f"{error} ({key.replace('_', '-')} is set in {self.path})")


def find_project(folder: Path | None = None) -> Project | None:
    """Return the settings of the nearest pyproject.toml that has some, in `folder` (default: the current one) or a parent.

    The search ends with the root of a checkout (it has .git), and before a parent that every user can write to, such as /tmp.

    Raises:
        BadArgument: a file on the way cannot be read, or its table is wrong; the text names file, key, value and remedy.
    """
    folder = Path.cwd() if folder is None else folder.absolute()
    for each in (folder, *folder.parents):
        if each != folder and _anybodys(each):
            return None
        if os.path.lexists(each / FILE) and (project := read_project(each / FILE)) is not None:
            return project
        if (each / ".git").exists():
            return None
    return None


def read_project(path: Path) -> Project | None:
    """Return the settings in `path`; None where it has no table of attnfuzz.

    Raises:
        BadArgument: as for `find_project`.
    """
    content = _content(path)
    if b"attnfuzz" not in content:
        # Another tool's file may be wrong for all that is known here.
        return None
    try:
        data = tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        raise _wrong(path, "it is nested too deeply", "make its tables and arrays flat") from None
    except ValueError as error:  # TOML, UTF-8, or a number of thousands of digits
        raise _wrong(path, f"it is not TOML ({error})", "correct that line") from None
    for name in ("tool", "attnfuzz"):
        if isinstance(data, dict) and name not in data:
            return None
        data = data[name] if isinstance(data, dict) else data
    if not isinstance(data, dict):
        raise _wrong(path, f"tool.attnfuzz={_short(data)}: it is not a table", f"begin it with the line {_TABLE}")
    if path.parent.stat().st_mode & stat.S_IWOTH and path.stat().st_uid not in (0, os.getuid()):
        raise _wrong(path, "another user owns it, in a folder that all can write to", "remove it, or use a folder of your own")
    return Project(path, tuple(_list(path, "kernels", data)), _values(path, data))


def _values(path: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked values of all options in the table: each alone, then together."""
    values: dict[str, Any] = {}
    for key in data:
        if key not in KEYS:
            close = difflib.get_close_matches(key.replace("_", "-"), KEYS, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"use one of {', '.join(KEYS)}"
            raise _wrong(path, f"{_TABLE} {_short(key).strip(_QUOTES)}={_short(data[key])}: there is no such key", remedy)
        if option := _OPTIONS.get(key):
            values[option.key] = _value(path, option, data[key])
            _try(path, {option.key: values[option.key]})
    _try(path, values)
    values |= {key: _here(path, values[key]) for key in _PATHS if key in values}
    if "corpus" in data:
        values["corpus"] = tuple(_here(path, each) for each in _list(path, "corpus", data))
    return values


def _value(path: Path, option: Option, value: Any) -> Any:
    if option.name == "workers" and type(value) is int:
        value = str(value)
    if option.type is float and type(value) is int:
        with contextlib.suppress(OverflowError):
            value = float(value)
    if type(value) is not option.type:
        example = f", such as {option.name} = {_example(option)}"
        raise _refused(path, option.name, value, f"it is not {_TYPES[option.type]}", f"give {_TYPES[option.type]}{example}")
    if isinstance(value, str):
        _check_text(path, option.name, value, value)
    if option.name == "device" and value not in ("auto", "cpu", "cuda"):
        raise _refused(path, option.name, value, "no such device", "use auto, cpu or cuda")
    number: Any = value
    if (option.least is not None and not number >= option.least) or (option.most is not None and not number <= option.most):
        limits = f"at least {option.least:g}" + (f" and at most {option.most:g}" if option.most is not None else "")
        raise _refused(path, option.name, value, f"must be {limits}", "give a number of that range")
    return value


def _example(option: Option) -> str:
    if option.type is bool:
        return "true"
    if option.type is str:
        return f'"{option.default or (option.metavar or "").split("|")[0]}"'
    return "8"


def _list(path: Path, key: str, data: Mapping[str, Any]) -> list[str]:
    value = data.get(key, [])
    if not isinstance(value, list) or (key in data and not value):
        raise _refused(path, key, value, "it is empty" if value == [] else "it is not a list", _LISTS[key])
    for each in value:
        if type(each) is not str:
            raise _refused(path, key, each, "it is not a string", _LISTS[key])
        _check_text(path, key, each, each)
    return value


def _check_text(path: Path, key: str, text: str, value: Any) -> None:
    if not text.strip():
        raise _refused(path, key, value, "it is empty", "give a value, or leave the key out")
    if not text.isprintable():
        raise _refused(path, key, value, "it has characters that cannot be printed", "leave them out")


def _try(path: Path, values: Mapping[str, Any]) -> None:
    """Make Settings of the values, which checks them, as if they were on a command line."""
    everything = {option.key: option.default for option in OPTIONS}
    try:
        # With auto, the number of workers would be asked of the GPU's driver; a shard's seed may be on the command line.
        given = {name: value for name, value in values.items() if (name, value) != ("workers", "auto")}
        settings_from({**everything, "workers": "1", "seed": 0, **given}, "cpu")
    except BadArgument as error:
        name, equals, rest = str(error).partition("=")
        raise BadArgument(f"{path}: {_TABLE} {name.replace('_', '-')}{equals}{rest}") from None


def _here(path: Path, value: str) -> str:
    """Return a path of the file, which is relative to its folder, as seen from the current folder."""
    if Path(value).is_absolute():
        return value
    return os.path.relpath(path.parent / value)


def _content(path: Path) -> bytes:
    """Return the bytes of a regular file: reading a pipe or a device may not end."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123 - by descriptor
            kind = os.fstat(file.fileno())
            if not stat.S_ISREG(kind.st_mode):
                raise _wrong(path, "it is not a regular file", "remove it, or go elsewhere")
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise _wrong(path, f"it cannot be read ({error.strerror})", "make it readable, or remove it") from None
    if len(content) > _LARGEST:
        raise _wrong(path, f"it has more than {_LARGEST >> 20} MiB", "make it smaller")
    return content


def _anybodys(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False


def _wrong(path: Path, reason: str, remedy: str) -> BadArgument:
    return BadArgument(f"{path}: {reason}; {remedy}")


def _refused(path: Path, key: str, value: Any, reason: str, remedy: str) -> BadArgument:
    return _wrong(path, f"{_TABLE} {key}={_short(value)}: {reason}", remedy)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
