"""In the child process: compile one variant of a kernel for one architecture, function by function, each content once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from attnfuzz.harness.compile.figures import Figures, disassembled, figures_of
from attnfuzz.harness.compile.required import lacking
from attnfuzz.harness.compile.tensor_memory import COLUMNS
from attnfuzz.harness.core.text import encodable
from attnfuzz.harness.isolation.kernel_ref import unpacked
from attnfuzz.harness.trial.errors import describe_exception, mark_as_child, may_catch
from attnfuzz.kernels.contract import BuildError, Config
from attnfuzz.kernels.errors import BadArgument, NotLowered
from attnfuzz.kernels.lowering import Lowers, Requires, Unit, shared_limit
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support import cache

__all__ = ["AT", "Lowered", "cut", "lower"]

AT = "attnfuzz compiles "
"""Printed by the child before the name of the function that it compiles, so that a crash names it."""
_FORMAT = 4
"""Format of the entries in the cache."""


class Lowered(msgspec.Struct, frozen=True, kw_only=True):
    """The result of compiling one function."""

    function: str
    seconds: float
    """Duration of the compile, also if the result comes from the cache."""
    figures: Figures | None = None
    races: tuple[str, ...] | None = None
    error: str | None = None
    cached: bool = False


def lower(payload: dict[str, Any], enter: Callable[[str], None]) -> tuple[Any, bool]:
    """Compile in a child. `payload`: kernel (as shipped), problem, config, arch.

    The result is a list of Lowered, or why there is none.
    """
    mark_as_child()
    enter("compile")
    kernel = unpacked(payload["kernel"])
    assert isinstance(kernel, Lowers)
    problem, arch = msgspec.convert(payload["problem"], Problem), payload["arch"]
    try:
        units = kernel.lower(problem, Config(payload["config"]), arch)
    except BadArgument:
        raise
    except NotLowered as error:
        return {"left": cut(str(error))}, False
    except BaseException as error:  # the kernel's own code: that is the finding
        if not may_catch(error):
            raise
        text = str(error) if isinstance(error, BuildError) else describe_exception(error)
        return [msgspec.to_builtins(Lowered(function="", seconds=0.0, error=cut(text)))], False
    return [msgspec.to_builtins(_lowered(each, arch)) for each in units], False


def _lowered(unit: Unit, arch: str) -> Lowered:
    sys.stderr.write(f"{AT}{unit.function}\n")
    sys.stderr.flush()
    start = time.perf_counter()
    try:
        return _judged(_known(unit, arch), arch)
    except BadArgument:
        raise
    except BaseException as error:  # a compiler's Python side may raise anything: that is the finding
        if not may_catch(error):
            raise
        text = str(error) if isinstance(error, BuildError) else describe_exception(error)
        return Lowered(function=unit.function, seconds=time.perf_counter() - start, error=cut(text))


def _judged(lowered: Lowered, arch: str) -> Lowered:
    """Add an error to code that compiles, but needs more shared or tensor memory than a block can have."""
    limit = shared_limit(arch)
    if lowered.error is not None or lowered.figures is None:
        return lowered
    error, columns = None, lowered.figures.tensor_columns or 0
    if lowered.figures.shared > limit:
        error = f"a block needs {lowered.figures.shared} bytes of shared memory, and {arch} has {limit}: no launch is possible"
    elif columns > COLUMNS:
        error = f"a block needs {columns} columns of tensor memory, and {arch} has {COLUMNS}: it would wait for them without end"
    return lowered if error is None else msgspec.structs.replace(lowered, error=error)


def _known(unit: Unit, arch: str) -> Lowered:
    """Return the cached result of the same content, or compile it and cache the result."""
    identity = unit.identity()
    if identity is not None:
        with _entry(f"{identity}{_required(unit)}") as file:
            return _read(file, unit) or _keep(file, _compiled(unit, None))
    start = time.perf_counter()
    code = unit.compile()
    seconds = time.perf_counter() - start
    # The backend caches its compiles itself. Reading the machine code is cached here by its bytes.
    with _entry(f"{hashlib.sha256(code.cubin).hexdigest()}{arch}{_required(unit)}") as file:
        return _read(file, unit) or _keep(file, _compiled(unit, (code, seconds)))


def _compiled(unit: Unit, done: tuple[Any, float] | None) -> Lowered:
    start = time.perf_counter()
    code, seconds = done or (unit.compile(), 0.0)
    seconds = seconds or time.perf_counter() - start
    sass = disassembled(code.cubin)
    races = code.races if code.suspects is None else (*(code.races or ()), *code.suspects(sass))
    figures, error = figures_of(code, sass), code.refused
    if error is None and isinstance(unit, Requires) and unit.required is not None:
        error = lacking(unit.required, figures, sass)
    return Lowered(function=unit.function, seconds=seconds, figures=figures, races=races, error=error)


def _required(unit: Unit) -> str:
    """What the code must have, as a part of a key in the cache; empty for most."""
    if not isinstance(unit, Requires) or unit.required is None:
        return ""
    return f"\n{unit.required.products} {sorted(unit.required.left)}"


@contextmanager
def _entry(content: str) -> Iterator[Path]:
    """Yield the file for `content` in the cache, locked against other processes that compile the same."""
    key = hashlib.sha256(f"{_FORMAT}\n{content}".encode()).hexdigest()
    folder = cache.folder("compile") / key[:2]
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder / f"{key[2:]}.json"


def _read(file: Path, unit: Unit) -> Lowered | None:
    try:
        lowered = msgspec.json.decode(file.read_bytes(), type=Lowered)
    except (FileNotFoundError, msgspec.DecodeError):
        # Missing or broken: it is compiled again.
        return None
    return msgspec.structs.replace(lowered, function=unit.function, cached=True)


def _keep(file: Path, lowered: Lowered) -> Lowered:
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(lowered))
    temporary.replace(file)
    return lowered


_LINES, _WIDTH = 12, 200
_WRONG = re.compile(
    r"\berror\b\s*[:#]|\berror\s*:|ptxas\S* (error|fatal)|\bfatal\b.*:|\bnvcc ended\b|out of resource", re.IGNORECASE
)
_NOISE = re.compile(
    r"^\s*$|^\s*(File|Traceback|args=|source=)|\[TileLang:.*CRITICAL\]|^=+$|please share the reproducer|^Repro command|"
    r"detected during|instantiation of|^\d+ errors? detected in|^During handling|^Stack trace|^\s*\d+: "
)
_FOLDER = re.compile(r"(?<![\w.])/(?:[\w.+@-]+/)+(?=[\w.+-]+)")
_SOURCE = re.compile(r"^(source=|\s*// |.*#include|func\.func|module \{|// -----)")


def cut(text: str) -> str:
    """Cut `text` to a dozen lines: the first, from the harness or the exception, then those that name an error.

    If no line names an error, keep the first lines. Folders are removed from file names: they differ between machines.
    """
    lines = [line.rstrip() for line in encodable(text).splitlines()]
    quoted = next((i for i, line in enumerate(lines) if _SOURCE.match(line)), len(lines))
    message = [line for line in lines[:quoted] if not _NOISE.search(line)]
    rest = [line for line in lines[quoted:] if _WRONG.search(line)]
    if any(_WRONG.search(line) for line in message[1:]) and len(message) > _LINES:
        message = message[:1] + [line for line in message[1:] if _WRONG.search(line)]
    kept = list(dict.fromkeys((*message, *rest)))[:_LINES]
    return "\n".join(_FOLDER.sub("", line)[:_WIDTH] for line in kept) or "it gives no reason"
