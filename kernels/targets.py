"""Objects named as "package.module:OBJECT": imported, or told why not, in words that say what to do."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from attnfuzz.kernels.errors import BadArgument, reject

__all__ = ["found_at", "is_target", "look_in"]


def is_target(name: str) -> bool:
    """Whether `name` is one of an object in a module; no kernel's own name holds a colon."""
    return ":" in name


def look_in(folder: str | None = None) -> str | None:
    """Make modules of `folder` (default: the current one) importable, as `python -m` does; returns it.

    None where Python was told not to do so (`-P`, PYTHONSAFEPATH).
    """
    if folder is None:
        if sys.flags.safe_path:
            return None
        folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    return folder


def found_at(target: str) -> Any:
    """The object called `target`, "package.module:OBJECT" or "package.module:OBJECT.attribute".

    Raises:
        BadArgument: it is spelled otherwise, or there is no such module, or no such object in it; the module's own errors.
    """
    module, _, path = target.partition(":")
    if module.endswith(".py") or "/" in module:
        remedy = f"give {_dotted(module)}:{path or 'KERNEL'}"
        raise reject("kernel", target, "a module is named with dots, as for `python -m`", remedy)
    if not all(part.isidentifier() for part in [*module.split("."), *path.split(".")]):
        raise reject("kernel", target, "it is not of the form package.module:OBJECT", "give such as mypackage.attention:KERNEL")
    found: Any = _imported(module, target)
    for name in path.split("."):
        if not hasattr(found, name):
            raise _lacking(target, found, name)
        found = getattr(found, name)
    return found


def _dotted(path: str) -> str:
    return path.removesuffix(".py").strip("./").replace("/", ".") or "mypackage.attention"


def _imported(module: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise _failed(target, module, error) from error
        where = "neither on sys.path nor in the current directory, where PYTHONSAFEPATH or -P forbids to look"
        if not sys.flags.safe_path:
            where = f"neither in the current directory ({Path.cwd()}) nor on sys.path"
        raise reject(
            "kernel", target, f"there is no module {error.name!r} {where}", "go where it is, or install its package"
        ) from None
    except (Exception, SystemExit) as error:  # somebody else's code: its error is the reason
        raise _failed(target, module, error) from error


def _failed(target: str, module: str, error: BaseException) -> BadArgument:
    """The module's own error, with the last line at the top level of a module that led there."""
    lines = [each for each in traceback.extract_tb(error.__traceback__) if each.name == "<module>"]
    at = f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""
    text = f"{type(error).__name__}: {error}".strip(": ")
    return reject("kernel", target, f"importing {module} failed with {text}{at}", "mend that, or install what it needs")


def _lacking(target: str, holder: Any, name: str) -> BadArgument:
    names = [each for each in vars(holder) if not each.startswith("_")] if hasattr(holder, "__dict__") else []
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    values = ((each, getattr(holder, each, None)) for each in names)
    kernels = [each for each, value in values if hasattr(value, "compile_key") and not isinstance(value, type)]
    hint = f"did you mean {close[0]!r}?" if close else f"kernels there: {', '.join(kernels) or 'none'}"
    kind = "module" if isinstance(holder, ModuleType) else "class" if isinstance(holder, type) else type(holder).__name__
    what = f"{kind} {getattr(holder, '__name__', '')!r}"
    return reject("kernel", target, f"the {what} has no {name!r}", hint)
