"""Files: written whole or not at all; foreign ones read with a limit, and their JSON or TOML decoded, with errors in words."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeVar, overload

import msgspec

from attnfuzz.kernels.errors import BadArgument, reject

__all__ = ["DEEPEST", "Unreadable", "decoded", "decoded_toml", "exists", "opened", "read_at_most", "read_file", "write_whole"]

DEEPEST: Final = 200
"""Levels of nested arrays and objects: what is deeper would exhaust the stack of those who walk through it."""
_CHUNK: Final = 1 << 20
_T = TypeVar("_T")


class Unreadable(Exception):
    """Error for a file or a text that cannot be used; the text is the reason, in words."""


def exists(path: Path | str) -> bool:
    """Whether `path` is there; False for any text that cannot be a path."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises for a name that is too long


@contextlib.contextmanager
def opened(path: Path | str) -> Iterator[int]:
    """Open a regular file for reading; yields its descriptor. Nothing else is opened, and nothing is waited for.

    Raises:
        Unreadable: it is missing, is not a regular file, or may not be read.
    """
    descriptor = -1
    try:
        # Before it is opened: to open a device may already do something.
        _check_regular(Path(path).stat())
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        # Another file may have taken its place.
        _check_regular(os.fstat(descriptor))
    except (OSError, ValueError, Unreadable) as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise error if isinstance(error, Unreadable) else _unread(error) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise Unreadable("it cannot be read (Is a directory)")
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable("it is not a regular file")


def _unread(error: OSError | ValueError) -> Unreadable:
    """Return the error for what the system refuses; a ValueError is of a NUL in the path."""
    return Unreadable(f"it cannot be read ({getattr(error, 'strerror', None) or error})")


def read_at_most(descriptor: int, most: int) -> bytes:
    """Return the content of an open file, whatever size the system says it has.

    Raises:
        Unreadable: it has more than `most` bytes, or cannot be read.
    """
    content = bytearray()
    try:
        if os.fstat(descriptor).st_size > most:
            raise Unreadable(_too_large(most))
        while part := os.read(descriptor, min(_CHUNK, most + 1 - len(content))):
            content += part
            if len(content) > most:
                raise Unreadable(_too_large(most))
    except OSError as error:
        raise _unread(error) from None
    return bytes(content)


def _too_large(most: int) -> str:
    size = f"{most >> 20} MiB" if most >> 20 else f"{most} bytes"
    return f"it is too large (more than {size})"


def read_file(path: Path | str, most: int, *, argument: str, remedy: str) -> bytes:
    """Return the content of a regular file of at most `most` bytes, as all files from outside are read.

    Args:
        path: the file, or a link to one.
        most: bytes.
        argument: what the file was given as, for the error.
        remedy: what to do about it, for the error.

    Raises:
        BadArgument: it is missing, is not a regular file, may not be read, or is larger.
    """
    try:
        with opened(path) as descriptor:
            return read_at_most(descriptor, most)
    except Unreadable as error:
        raise reject(argument, str(path), str(error), remedy) from None


@overload
def decoded(content: bytes | str) -> Any: ...


@overload
def decoded(content: bytes | str, kind: type[_T]) -> _T: ...


def decoded(content: bytes | str, kind: Any = Any) -> Any:
    """Return foreign JSON as builtins nested at most DEEPEST deep, or as `kind`.

    Raises:
        Unreadable: it is not JSON, is nested too deeply, has a number that nothing can hold, or is not of `kind`.
    """
    try:
        data = msgspec.json.decode(content)
        # Almost every file has fewer brackets than levels are allowed.
        if _brackets(content) > DEEPEST and _is_deeper(data, DEEPEST):
            raise Unreadable(f"it is nested too deeply (more than {DEEPEST} levels)")
        return data if kind is Any else msgspec.convert(data, kind)
    except RecursionError:
        raise Unreadable(f"it is nested too deeply (more than {DEEPEST} levels)") from None
    except BadArgument as error:
        raise Unreadable(str(error)) from None
    except msgspec.ValidationError as error:
        # Decoding without a type is only invalid for numbers.
        raise Unreadable(str(error)) from None
    except ValueError as error:  # DecodeError and UnicodeDecodeError are such
        raise Unreadable(f"not JSON ({error})") from None


def decoded_toml(content: bytes) -> dict[str, Any]:
    """Return foreign TOML as builtins nested at most DEEPEST deep.

    Raises:
        Unreadable: it is not UTF-8 or TOML, is nested too deeply, or has a number that nothing can hold.
    """
    try:
        data = tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not UTF-8 ({error.reason} at byte {error.start})") from None
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError is one, and so is the error of a number with thousands of digits
        raise Unreadable(f"it is not TOML: {error}") from None
    if _is_deeper(data, DEEPEST):
        raise Unreadable(f"it is nested too deeply (more than {DEEPEST} levels)")
    return data


def _brackets(content: bytes | str) -> int:
    """Return how many arrays and objects JSON has at most."""
    if isinstance(content, str):
        return content.count("[") + content.count("{")
    return content.count(b"[") + content.count(b"{")


def _is_deeper(data: Any, most: int) -> bool:
    """Return whether lists and dicts are nested deeper than `most`, without recursion."""
    level = [data] if type(data) in (dict, list) else []
    for _ in range(most):
        level = [
            inner for each in level for inner in (each.values() if type(each) is dict else each) if type(inner) in (dict, list)
        ]
        if not level:
            return False
    return True


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: after a crash it has the old or the new content.

    Raises:
        OSError: it cannot be written; it names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile: only their owner can read its files, and case files are shared.
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
