"""Targets of objects in files: "path/to/file.py:OBJECT", and "path/to/file.py:FUNCTION:LIKE" of a function that an adapter takes.

LIKE is an adapter's name ("dense", "varlen", "paged") or a call of it with the keywords that it is to have, literals all:
"dense(groups=None, gradients=False)". On a command line it is an option of its own, `--like`.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from attnfuzz.kernels.errors import BadArgument, reject

__all__ = ["AdapterName", "FileTarget", "Like", "as_options", "file_target", "is_readable", "read_like"]

AdapterName = Literal["dense", "varlen", "paged"]
_TARGET = re.compile(r"(?P<file>.+?\.py):(?P<path>[^:]*)(?::(?P<like>.*))?", re.DOTALL)
_REMEDY = "give dense, varlen or paged, or a call of it with keywords, such as 'dense(groups=None)'"


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A file, the dotted name of an object in it, and how a function is adapted (`like`, as text; None: it is a kernel)."""

    file: str
    path: str
    like: str | None = None

    @property
    def text(self) -> str:
        """The target."""
        return f"{self.file}:{self.path}" + ("" if self.like is None else f":{self.like}")

    @property
    def name(self) -> str:
        """The name of the kernel that an adapter makes: the file's stem and the function's name."""
        stem = "".join(each if each.isprintable() and not each.isspace() and each not in ":/" else "_" for each in self.stem)
        return f"{stem}.{self.path}"

    @property
    def stem(self) -> str:
        """The file's name without its suffix."""
        return Path(self.file).stem

    def seen_from(self, folder: str) -> FileTarget:
        """The same target with an absolute path; a relative one begins in `folder`."""
        return replace(self, file=str(Path(folder, self.file)))


@dataclass(frozen=True, slots=True)
class Like:
    """An adapter and its keywords."""

    adapter: AdapterName
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The adapter's name, or the call."""
        if not self.keywords:
            return self.adapter
        return f"{self.adapter}({', '.join(f'{name}={value!r}' for name, value in self.keywords.items())})"


def file_target(text: str) -> FileTarget | None:
    """Split a target in a file; None for what is none, such as "package.module:OBJECT"."""
    parts = _TARGET.fullmatch(text)
    return None if parts is None else FileTarget(parts["file"], parts["path"], parts["like"])


def read_like(text: str) -> Like:
    """Read LIKE.

    Raises:
        BadArgument: it names no adapter, or an argument is no keyword with a literal.
    """
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise reject("like", text, "it is neither the name of an adapter nor a call of one", _REMEDY) from None
    name, arguments = (node.func, node.args) if isinstance(node, ast.Call) else (node, [])
    if not isinstance(name, ast.Name) or name.id not in get_args(AdapterName):
        raise reject("like", text, "no adapter has that name", _REMEDY)
    keywords: dict[str, Any] = {}
    for each in node.keywords if isinstance(node, ast.Call) else ():
        try:
            keywords[str(each.arg)] = ast.literal_eval(each.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            reason = f"{each.arg or '**'} is not given as a literal"
            raise reject("like", text, reason, "write an adapter in a module for that (docs/plug-in.md)") from None
        if each.arg is None:
            arguments = [each.value]
    if arguments:
        raise reject("like", text, "an adapter's arguments are keywords here", _REMEDY)
    return Like(cast("AdapterName", name.id), keywords)


def as_options(target: str, option: str = "--kernel") -> str:
    """Return the options of a command that name the kernel at `target`, quoted for a shell."""
    file = file_target(target)
    if file is None or file.like is None:
        return f"{option} {shlex.quote(target)}"
    return f"{option} {shlex.quote(replace(file, like=None).text)} --like {shlex.quote(file.like)}"


def is_readable(target: FileTarget) -> bool:
    """Whether its parts are of the form that they must have."""
    if not all(part.isidentifier() for part in target.path.split(".")):
        return False
    try:
        return target.like is None or bool(read_like(target.like))
    except BadArgument:
        return False
