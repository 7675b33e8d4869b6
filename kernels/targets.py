"""Kernels of third parties, by "package.module:OBJECT" or by a file: the one way in which their code comes into this process.

Its module is imported in a child process first, what it prints goes to stderr, and whatever it does but make a kernel (an error,
an exit, a signal, no end) is a BadArgument with the reason. Only the user's Ctrl-C stays what it is.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.support.capability_values import impossible
from attnfuzz.kernels.support.file_module import import_file
from attnfuzz.kernels.support.file_target import FileTarget, file_target, is_readable, read_like
from attnfuzz.kernels.support.import_trial import why_fatal
from attnfuzz.kernels.support.third_party import ThirdPartyError, described, guarded

__all__ = [
    "MEMBERS",
    "LeavesProcess",
    "MissingObject",
    "checked_name",
    "instance",
    "is_target",
    "is_well_formed",
    "load",
    "load_here",
    "look_in",
    "missing_members",
    "object_at",
    "third_party_frame",
    "why_not_on",
]

_packages: set[str] = set()
"""Top packages of the modules that `load` has imported."""

_MOST_NAMES = 10
"""Functions that a message lists."""
MEMBERS = ("name", "backend", "files", "capabilities", "configs", "unavailable", "supports", "compile_key", "build")
"""The members of a Kernel, in the contract's order."""


class MissingObject(BadArgument):
    """Error for a target whose module does not exist, or has no such object; `missing` says which (default: the whole text)."""

    def __init__(self, text: str, missing: str | None = None) -> None:
        super().__init__(text)
        self.missing = text if missing is None else missing


class LeavesProcess(BadArgument):
    """Error for a kernel whose code ends the process that imports it, asks it to end (SystemExit), or never returns."""


class _Unusable(Exception):
    """Why there is no kernel at a target, and the remedy. `missing`: the module or object that does not exist."""

    def __init__(self, reason: str, remedy: str, missing: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.remedy, self.missing = reason, remedy, missing


def is_target(name: str) -> bool:
    """Whether `name` is a target: no kernel's own name holds a colon."""
    return ":" in name


def is_well_formed(target: str) -> bool:
    """Whether `target` is "package.module:OBJECT", of identifiers, or names an object in a file."""
    if (file := file_target(target)) is not None:
        return is_readable(file)
    module, colon, path = target.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *path.split(".")])


def look_in(folder: str | None = None) -> str | None:
    """Put `folder` (default: the current one) on sys.path, as `python -m` does, and return it.

    Returns None for the default where Python forbids it (`-P`, PYTHONSAFEPATH).
    """
    if folder is None:
        if sys.flags.safe_path:
            return None
        folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    return folder


def load(called: str, target: str, *, tried: bool = False) -> Any:
    """Return the object at `target`, or what it makes if it is a function or a class.

    Args:
        called: how the kernel was named: by `target`, or by the name of an entry point.
        target: "package.module:OBJECT", or as `file_target` reads it.
        tried: its module need not be imported in a child process first: this process is one.

    Raises:
        BadArgument: there is none; LeavesProcess, MissingObject: of these kinds.
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    return _run(called, target, load_here, tried=tried)


def object_at(target: str) -> Any:
    """Return the object at `target`, "package.module:OBJECT" or "package.module:OBJECT.attribute", or in a file.

    Raises:
        BadArgument: `target` has another form, there is no such module or object, or importing the module failed.
    """
    return _run(target, target, _object, tried=False)


def load_here(target: str) -> Any:
    """Do the work of `load`, unguarded: in a child that may end.

    Raises:
        BaseException: anything.
    """
    thing, file = _object(target), file_target(target)
    kernel = instance(thing) if file is None or file.like is not None else _in_file(file, thing)
    _ = [missing_members(kernel), getattr(kernel, "name", None)]
    return kernel


def missing_members(kernel: object) -> list[str]:
    """The members of a Kernel that `kernel` lacks."""
    return [name for name in MEMBERS if not hasattr(kernel, name)]


def instance(maker: Any) -> Any:
    """Return `maker` itself, or what it returns if it is a function or a class: an entry point or a target may name either."""
    if not (inspect.isclass(maker) or inspect.isfunction(maker)):
        return maker
    try:
        parameters = inspect.signature(maker).parameters.values()
    except ValueError:  # a class of an extension module
        return maker()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]:
        raise _Unusable(
            f"{maker.__name__}({', '.join(needed)}, ...) is not a kernel, and needs arguments to make one",
            "an attention function becomes one by attnfuzz.kernels.adapters.dense or varlen; name the object that they return",
        )
    return maker()


def checked_name(kernel: Any) -> str:
    """Return the name of what must be a kernel.

    Raises:
        BadArgument: it is not one; the text says what it lacks.
    """
    try:
        return guarded(lambda: _checked(kernel))
    except ThirdPartyError as raised:
        error = raised.error
    if isinstance(error, BadArgument):
        raise error
    reason = f"asking for its members failed with {described(error)}"
    raise _kind(error)(f"kernel={_shown(kernel)}: {reason}; fix that") from error


def why_not_on(kernel: Kernel, device: Device) -> str | None:
    """Say why the kernel cannot run on `device` of this machine; None: it can.

    Raises:
        BadArgument: the kernel's own code failed, or its capabilities have values that no kernel can have.
    """

    def asked() -> tuple[list[str], str | None]:
        if wrong := list(impossible(kernel.capabilities)):
            return wrong, None
        declared = kernel.capabilities.devices
        return [], kernel.unavailable(device) if device in declared else f"it is declared for {', '.join(declared)} only"

    try:
        wrong, reason = guarded(asked)
    except ThirdPartyError as raised:
        why = f"asking whether it runs on {device} failed with {described(raised.error)}"
        raise _kind(raised.error)(str(reject("kernel", checked_name(kernel), why, "fix its `unavailable`"))) from raised.error
    if wrong:
        raise _impossible(kernel.name, wrong)
    return reason


def third_party_frame(error: BaseException) -> str | None:
    """Return "file:line" of the innermost frame of a third party's kernel in an error's traceback; None: there is none."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _packages:
            return f"{Path(frame.f_code.co_filename).name}:{line}"
    return None


def _run(called: str, target: str, make: Callable[[str], Any], *, tried: bool) -> Any:
    where = "" if called == target or file_target(called) is not None else f"its entry point {target!r}: "
    _check_form(called, target)
    if not tried and (reason := why_fatal([target]).get(target)):
        text = f"{where}importing {_module_of(target)} failed: {reason}"
        raise LeavesProcess(str(reject("kernel", called, text, "fix that")))
    if file_target(target) is None:
        _packages.update({re.split("[.:]", target)[0]} - {"attnfuzz"})
    try:
        return guarded(lambda: make(target))
    except ThirdPartyError as raised:
        error = raised.error
    if isinstance(error, BadArgument):
        raise error
    if not isinstance(error, _Unusable):
        raise _kind(error)(
            str(reject("kernel", called, f"{where}making it failed with {described(error)}", "fix that"))
        ) from error
    text = str(reject("kernel", called, f"{where}{error.reason}", error.remedy))
    if error.missing is not None:
        raise MissingObject(text, error.missing) from None
    cause = error.__cause__
    raise (BadArgument if cause is None else _kind(cause))(text) from cause


def _kind(error: BaseException) -> type[BadArgument]:
    return BadArgument if isinstance(error, Exception) else LeavesProcess


def _module_of(target: str) -> str:
    file = file_target(target)
    return target.partition(":")[0] if file is None else file.file


def _check_form(called: str, target: str) -> None:
    if (file := file_target(target)) is not None:
        _check_file(called, file)
        return
    module, _, path = target.partition(":")
    if "/" in module:
        remedy = f"give {_dotted(module)}:{path or 'KERNEL'}"
        raise reject("kernel", called, "a module is named with dots, as for `python -m`", remedy)
    if not is_well_formed(target):
        at = "it" if called == target else f"its entry point {target!r}"
        raise reject(
            "kernel", called, f"{at} is not of the form package.module:OBJECT", "give such as mypackage.attention:KERNEL"
        )


def _check_file(called: str, file: FileTarget) -> None:
    spelled = (file_target(called) or file).file
    if not file.path:
        raise reject("kernel", called, "it names no object of the file", f"give {spelled}:FUNCTION --like dense")
    if not all(part.isidentifier() for part in file.path.split(".")):
        raise reject("kernel", called, f"{file.path!r} is no name", f"give {spelled}:FUNCTION")
    if file.like is not None:
        read_like(file.like)
    path = Path(file.file)
    if not path.is_file():
        reason = f"{path.absolute()} is {'a folder' if path.is_dir() else 'not there'}"
        text = str(reject("kernel", called, reason, "give the path of a Python file"))
        raise MissingObject(text, f"there is no file {file.file}")


def _dotted(path: str) -> str:
    return path.removesuffix(".py").strip("./").replace("/", ".") or "mypackage.attention"


def _object(target: str) -> Any:
    file = file_target(target)
    module, _, path = target.partition(":")
    holder: Any = _imported(module) if file is None else _imported_file(Path(file.file).absolute())
    for name in (path if file is None else file.path).split("."):
        if not hasattr(holder, name):
            raise _lacking(holder, name, functions=file is not None and file.like is not None)
        holder = getattr(holder, name)
    return holder if file is None or file.like is None else _adapted(file, holder)


def _adapted(file: FileTarget, value: Any) -> Any:
    """Return the kernel that an adapter makes of what is no kernel yet."""
    from attnfuzz.kernels.adapters import like

    if not inspect.isclass(value) and not missing_members(value):
        raise _Unusable(f"{file.path} is a kernel already", "leave --like out")
    return like.adapt(value, file)


def _in_file(file: FileTarget, value: Any) -> Any:
    """Return the kernel that an object of a file is, or makes.

    Raises:
        _Unusable: it is a function of tensors, of which an adapter must be named.
    """
    from attnfuzz.kernels.adapters import like

    if inspect.isclass(value) or not missing_members(value) or (adapter := like.likely(value)) is None:
        return instance(value)
    raise _Unusable(f"{file.path} is a function, not a kernel", f"say how it is called: add --like {adapter}")


def _imported_file(file: Path) -> ModuleType:
    try:
        module = import_file(file)
    except BaseException as error:  # the file's own code: its error is the reason
        raise _failed(str(file), error) from error
    _packages.update({module.__name__.partition(".")[0]} - {"attnfuzz"})
    return module


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise _failed(module, error) from error
        where = "neither on sys.path nor in the current directory, where PYTHONSAFEPATH or -P forbids to look"
        if not sys.flags.safe_path or str(Path.cwd()) in sys.path:
            where = f"neither in the current directory ({Path.cwd()}) nor on sys.path"
        reason, missing = f"module {error.name!r} is {where}", f"there is no module {error.name}"
        raise _Unusable(reason, "go where it is, or install its package", missing) from None
    except BaseException as error:  # another package's code: its error is the reason
        raise _failed(module, error) from error


def _failed(module: str, error: BaseException) -> _Unusable:
    """The module's own error, with the last module-level line of its traceback."""
    lines = [each for each in traceback.extract_tb(error.__traceback__) if each.name == "<module>"]
    at = f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""
    return _Unusable(f"importing {module} failed with {described(error)}{at}", "fix that, or install what it needs")


def _lacking(holder: Any, name: str, *, functions: bool) -> _Unusable:
    """The error for an object without an attribute; it lists the kernels that there are, or the functions."""
    names = [each for each in vars(holder) if not each.startswith("_")] if hasattr(holder, "__dict__") else []
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    values = [(each, getattr(holder, each, None)) for each in names]
    kernels = [each for each, value in values if hasattr(value, "compile_key") and not isinstance(value, type)]
    there = f"kernels there: {', '.join(kernels) or 'none'}"
    if isinstance(holder, ModuleType) and (functions or not kernels):
        own = [each for each, value in values if inspect.isfunction(value) and value.__module__ == holder.__name__]
        of_functions = f"functions there: {', '.join(own[:_MOST_NAMES]) or 'none'}"
        there = of_functions if functions else f"{there}; {of_functions}" if own else there
    hint = f"did you mean {close[0]!r}?" if close else there
    kind = "module" if isinstance(holder, ModuleType) else "class" if isinstance(holder, type) else type(holder).__name__
    called = getattr(holder, "__name__", "")
    missing = f"module {called} has no {name}" if isinstance(holder, ModuleType) else None
    return _Unusable(f"the {kind} {called!r} has no {name!r}", hint, missing)


def _checked(kernel: Any) -> str:
    if inspect.isclass(kernel):
        raise BadArgument(f"kernel={kernel.__name__}: it is a class; give an instance, {kernel.__name__}(...)")
    if missing := missing_members(kernel):
        raise BadArgument(f"kernel={_shown(kernel)}: it lacks {', '.join(missing)}; fulfil attnfuzz.kernels.contract.Kernel")
    name: object = kernel.name
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise BadArgument(f"kernel={_shown(kernel)}: its name is {name!a}; must be printable text, such as 'mine.attention'")
    if wrong := list(impossible(kernel.capabilities)):
        raise _impossible(name, wrong)
    return str(name)


def _impossible(name: str, wrong: list[str]) -> BadArgument:
    remedy = "declare what the kernel can do; attnfuzz check-adapter says what else is wrong"
    return reject("kernel", name, f"its capabilities cannot be ({'; '.join(wrong[:_MOST_NAMES])})", remedy)


def _shown(kernel: Any) -> str:
    try:
        return guarded(lambda: repr(kernel))
    except ThirdPartyError:  # its own __repr__
        return f"<{type(kernel).__name__}>"
