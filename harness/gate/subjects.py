"""The kernels that a gate is asked for, the files that each is made of, and whether any of those changed."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import operator
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.problem import BadArgument, reject
from attnfuzz.kernels.registry import is_target, look_in

__all__ = ["Subject", "files_of", "fingerprint", "importing_from", "load_kernel", "named", "why_absent", "within"]


@contextmanager
def importing_from(folder: Path, asked: Iterable[str]) -> Iterator[None]:
    """Where `asked` has a "package.module:OBJECT": modules of `folder` can be imported as by `python -m`, in child processes too.

    Not where Python was told not to do so (`-P`, PYTHONSAFEPATH).
    """
    if sys.flags.safe_path or not any(map(is_target, asked)):
        yield
        return
    places, before = list(sys.path), os.environ.get("PYTHONPATH")
    look_in(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
    try:
        yield
    finally:
        sys.path[:] = places
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel as it was asked for ("triton.varlen", "package.module:OBJECT"), and what that is here."""

    asked: str
    kernel: Kernel

    @property
    def name(self) -> str:
        """The kernel's own name."""
        return self.kernel.name


def load_kernel(asked: str) -> Kernel:
    """The kernel of a name, or of "package.module:OBJECT", known under its name from then on.

    Raises:
        BadArgument: there is none, or it is no kernel.
        Exception: whatever importing its module raises.
    """
    if ":" not in asked:
        return registry.get(asked)
    module, _, name = asked.partition(":")
    if not module or not name:
        raise reject("kernel", asked, "it names no object of a module", "write package.module:OBJECT")
    found: Any = operator.attrgetter(name)(importlib.import_module(module))
    made = found
    if inspect.isclass(found) or inspect.isfunction(found):
        made = found()
    return registry.register(made, asked)


def why_absent(asked: str, error: BaseException) -> str | None:
    """Why there is no such kernel, where `error`, of loading it, says just that; None where it is there and broken."""
    if isinstance(error, registry.UnknownKernel):
        return "no kernel of that name is known"
    cause = error.__cause__ if isinstance(error, BadArgument) and error.__cause__ is not None else error
    module = asked.partition(":")[0] if ":" in asked else _module_of(asked)
    if isinstance(cause, ModuleNotFoundError) and cause.name and module is not None:
        missing = cause.name
        return f"there is no module {missing}" if f"{module}.".startswith(f"{missing}.") else None
    if isinstance(cause, AttributeError) and module is not None and cause.obj is not None:
        here = getattr(cause.obj, "__name__", None) == module
        return f"module {module} has no {cause.name}" if here else None
    return None


def _module_of(name: str) -> str | None:
    target = registry.target(name)
    return target.partition(":")[0] if target else None


def named(asked: Iterable[str], root: Path | None) -> tuple[list[Subject], dict[str, Exception]]:
    """The kernels of `asked` (none: all whose files lie in `root`), and those that cannot be loaded, with the reason."""
    chosen = list(dict.fromkeys(asked))
    found: list[Subject] = []
    broken: dict[str, Exception] = {}
    for each in chosen or registry.names():
        try:
            subject = Subject(each, load_kernel(each))
        except Exception as error:  # somebody else's module: its error is the reason
            if chosen or (root is not None and _lies_in(each, root)):
                broken[each] = error
            continue
        if subject.name not in {other.name for other in found} and (chosen or root is None or within(subject.kernel, root)):
            found.append(subject)
    return found, broken


def _lies_in(asked: str, root: Path) -> bool:
    module = _module_of(asked)
    origin = None if module is None else _origin(module)
    return origin is not None and origin.is_relative_to(root)


def within(kernel: Kernel, root: Path) -> bool:
    """Whether a file that the kernel declares lies in `root`."""
    return any(Path(each).resolve().is_relative_to(root) for each in kernel.files)


def files_of(kernel: Kernel, root: Path | None) -> tuple[Path, ...]:
    """The files that the kernel declares, in order, then those that they import of their own package, and so on.

    "Of their own package": below `root`; without one, below the topmost package of a declared file.
    """
    declared = [Path(each).resolve() for each in kernel.files]
    roots = [root] if root is not None else sorted({_topmost(each) for each in declared})
    found, queue = dict.fromkeys(declared), list(declared)
    while queue:
        for each in _imported(queue.pop(), roots):
            if each not in found and any(each.is_relative_to(top) for top in roots):
                found[each] = None
                queue.append(each)
    return tuple(found)


def fingerprint(kernel: Kernel) -> str:
    """SHA-256 of the contents of all files that the kernel is made of, wherever they lie.

    Raises:
        OSError: one cannot be read.
    """
    digests = sorted(f"{each.name} {hashlib.sha256(each.read_bytes()).hexdigest()}" for each in files_of(kernel, None))
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _topmost(file: Path) -> Path:
    folder = file.parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    return folder


def _imported(file: Path, roots: list[Path]) -> Iterator[Path]:
    """Files that a Python source imports, at its top or anywhere in it, of packages that may have some in `roots`."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        # It is looked at when it is imported: here it is just a file without imports.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _may_lie_in(alias.name, roots):
                    yield from _files_on_the_way(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.level:
            folder = file.parents[node.level - 1] if node.level <= len(file.parents) else file.parent
            yield from _files_beside(folder, node.module, [alias.name for alias in node.names])
        elif isinstance(node, ast.ImportFrom) and node.module and _may_lie_in(node.module, roots):
            yield from _files_on_the_way(node.module)
            for alias in node.names:
                yield from _file_of(f"{node.module}.{alias.name}")


def _may_lie_in(module: str, roots: list[Path]) -> bool:
    """By its topmost package alone: to look further would import it, and that may be torch."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except Exception:  # a module without a spec, such as __main__
        return False
    if spec is None or not spec.has_location or spec.origin is None:
        return spec is not None and spec.submodule_search_locations is not None
    return any(Path(spec.origin).resolve().is_relative_to(root) for root in roots)


def _files_on_the_way(module: str) -> Iterator[Path]:
    """The module's file, and those of the packages that it lies in: importing it runs them all."""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        yield from _file_of(".".join(parts[:length]))


def _file_of(module: str) -> Iterator[Path]:
    origin = _origin(module)
    if origin is not None:
        yield origin


def _origin(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # a package on the way that cannot be imported, or is none
        return None
    return Path(spec.origin).resolve() if spec is not None and spec.has_location and spec.origin else None


def _files_beside(folder: Path, module: str | None, names: list[str]) -> Iterator[Path]:
    base = folder.joinpath(*module.split(".")) if module else folder
    for each in (base, *(base / name for name in names)):
        for file in (each.with_name(f"{each.name}.py"), each / "__init__.py"):
            if file.is_file():
                yield file.resolve()
