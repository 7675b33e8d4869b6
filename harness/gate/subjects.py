"""The kernels that are gated, and the files that each consists of."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.support.file_target import file_target
from attnfuzz.kernels.support.import_trial import located
from attnfuzz.kernels.support.third_party import ThirdPartyError, guarded
from attnfuzz.kernels.targets import MissingObject, is_target, look_in

__all__ = ["Subject", "files_of", "fingerprint", "importing_from", "named", "why_absent", "within"]


@contextmanager
def importing_from(folder: Path, targets: Iterable[str]) -> Iterator[None]:
    """Make modules of `folder` importable if a target is "package.module:OBJECT", as `python -m` does, also in child processes.

    Python's safe path (`-P`, PYTHONSAFEPATH) turns this off.
    """
    if sys.flags.safe_path or not any(map(is_target, targets)):
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
    """A kernel and how it was named: "triton.varlen" or "package.module:OBJECT"."""

    target: str
    kernel: Kernel

    @property
    def name(self) -> str:
        """The kernel's own name."""
        return self.kernel.name


def why_absent(error: BaseException) -> str | None:
    """Say why there is no such kernel, from the `error` of loading it; None: the kernel is there, but broken."""
    if isinstance(error, registry.UnknownKernel):
        return "no kernel of that name is known"
    return error.missing if isinstance(error, MissingObject) else None


def _module_of(name: str) -> str | None:
    target = registry.target(name)
    return target.partition(":")[0] if target else None


def named(targets: Sequence[str], root: Path | None) -> tuple[list[Subject], dict[str, BadArgument]]:
    """Load the kernels of `targets` (none: all with a file in `root`); return them, and the errors of those that do not load.

    Kernels that other packages release are among them only by name.

    Raises:
        BadArgument: a target is an object of a file.
    """
    for each in targets:
        if file_target(each) is not None:
            reason = "a gate imports the kernel's module from two commits, and a file has no name to import it by"
            raise reject("kernel", each, reason, "give package.module:OBJECT of an adapter module (attnfuzz run prints one)")
    chosen = list(dict.fromkeys(member for each in targets for member in registry.members(each)))
    asked = chosen or [each for each in registry.names() if not registry.is_released(each)]
    subjects: list[Subject] = []
    broken: dict[str, BadArgument] = {}
    registry.try_first(asked)
    for each in asked:
        try:
            subject = Subject(each, registry.get(each))
        except BadArgument as error:
            if chosen or (root is not None and _lies_in(each, root)):
                broken[each] = error
            continue
        if subject.name in {other.name for other in subjects}:
            continue
        try:
            if chosen or root is None or guarded(partial(within, subject.kernel, root)):
                subjects.append(subject)
        except ThirdPartyError as error:
            broken[each] = reject("kernel", each, f"asking for its files failed with {error}", "fix that")
    return subjects, broken


def _lies_in(target: str, root: Path) -> bool:
    module = _module_of(target)
    origin = None if module is None else _origin(module)
    return origin is not None and origin.is_relative_to(root)


def within(kernel: Kernel, root: Path) -> bool:
    """Whether a file that the kernel declares lies in `root`."""
    return any(Path(each).resolve().is_relative_to(root) for each in kernel.files)


def files_of(kernel: Kernel, root: Path | None) -> tuple[Path, ...]:
    """Return the files that the kernel declares, in order, then those that they import of their own package, and so on.

    Their own package is everything below `root`; without a root, below the topmost package of a declared file.
    """
    declared = [Path(each).resolve() for each in kernel.files]
    roots = [root] if root is not None else sorted({_topmost(each) for each in declared})
    files, queue = dict.fromkeys(declared), list(declared)
    while queue:
        for each in _imported(queue.pop(), roots):
            if each not in files and any(each.is_relative_to(top) for top in roots):
                files[each] = None
                queue.append(each)
    return tuple(files)


def fingerprint(kernel: Kernel) -> str:
    """SHA-256 of the contents of all files that the kernel consists of, in any folder.

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
    """Return the files that a Python source imports, anywhere in it, from packages that may lie in `roots`."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        # Importing it will report the error; here it is a file without imports.
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
    """Decide by the topmost package alone: to look further would import it, and that may be torch."""
    spec = located(module.partition(".")[0])
    if spec is None or not spec.has_location or spec.origin is None:
        return spec is not None and spec.submodule_search_locations is not None
    return any(Path(spec.origin).resolve().is_relative_to(root) for root in roots)


def _files_on_the_way(module: str) -> Iterator[Path]:
    """Return the files of the module and of its packages: importing it runs them all."""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        yield from _file_of(".".join(parts[:length]))


def _file_of(module: str) -> Iterator[Path]:
    origin = _origin(module)
    if origin is not None:
        yield origin


def _origin(module: str) -> Path | None:
    # Without importing its packages, which may end this process.
    spec = located(module)
    return Path(spec.origin).resolve() if spec is not None and spec.has_location and spec.origin else None


def _files_beside(folder: Path, module: str | None, names: list[str]) -> Iterator[Path]:
    base = folder.joinpath(*module.split(".")) if module else folder
    for each in (base, *(base / name for name in names)):
        for file in (each.with_name(f"{each.name}.py"), each / "__init__.py"):
            if file.is_file():
                yield file.resolve()
