"""Names to kernels. Third parties join by the entry-point group `attnfuzz.kernels`, by "package.module:OBJECT", or by `register`.

"package.module:OBJECT" may stand wherever a kernel's name may. The kernel is then known in this process under its own name as
well, which is the one that its Cases hold; `target` tells where it came from, for whoever has to find it again.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import BadArgument, reject

__all__ = [
    "ENTRY_POINT_GROUP",
    "MEMBERS",
    "Origin",
    "UnknownKernel",
    "find",
    "found_at",
    "get",
    "is_local",
    "is_target",
    "look_in",
    "missing_members",
    "names",
    "origin",
    "register",
    "target",
    "unregister",
]

ENTRY_POINT_GROUP = "attnfuzz.kernels"

_BUILT_IN = {
    "tilelang.mha": "attnfuzz.kernels.tilelang.dense:MHA",
    "tilelang.mha_pipelined": "attnfuzz.kernels.tilelang.dense:MHA_PIPELINED",
    "tilelang.gqa.atomic": "attnfuzz.kernels.tilelang.dense:GQA_ATOMIC",
    "tilelang.gqa.split": "attnfuzz.kernels.tilelang.dense:GQA_SPLIT",
    "tilelang.gqa_varlen.atomic": "attnfuzz.kernels.tilelang.ragged:ATOMIC",
    "tilelang.gqa_varlen.split": "attnfuzz.kernels.tilelang.ragged:SPLIT",
    "tilelang.modified": "attnfuzz.kernels.tilelang.modified:KERNEL",
    "tilelang.varlen": "attnfuzz.kernels.tilelang.varlen:KERNEL",
    "triton.flex": "attnfuzz.kernels.triton.flex:KERNEL",
    "triton.flex.prescaled": "attnfuzz.kernels.triton.flex:PRESCALED",
    "triton.flex.tf32": "attnfuzz.kernels.triton.flex:TF32",
    "triton.varlen": "attnfuzz.kernels.triton.varlen:KERNEL",
    "torch.reference_cpu": "attnfuzz.kernels.torch.reference_cpu:KERNEL",
    "torch.cudnn": "attnfuzz.kernels.torch.cudnn:DENSE",
    "torch.cudnn_varlen": "attnfuzz.kernels.torch.cudnn:RAGGED",
    "torch.efficient": "attnfuzz.kernels.torch.efficient:KERNEL",
    "torch.flash": "attnfuzz.kernels.torch.flash:KERNEL",
    "torch.flex": "attnfuzz.kernels.torch.flex:KERNEL",
    "torch.flex_modified": "attnfuzz.kernels.torch.flex_modified:KERNEL",
    "torch.varlen_attn": "attnfuzz.kernels.torch.varlen_attn:KERNEL",
}
_HIDDEN = {
    "demo.varlen": "attnfuzz.kernels.faults.planted:demo_kernel",
    "torch.cudnn_varlen_any": "attnfuzz.kernels.torch.cudnn:ANY",
    "torch.efficient_more_queries": "attnfuzz.kernels.torch.efficient:MORE_QUERIES",
}
"""Found by name, never listed: they are there to try the harness, or known to be wrong. So are names that begin with "fault."."""
_FAULT = "fault."

MEMBERS = ("name", "backend", "files", "capabilities", "configs", "unavailable", "supports", "compile_key", "build")
"""What a Kernel has, in the contract's order."""

_registered: dict[str, Kernel] = {}
_registered_at: dict[str, Origin] = {}
_loaded: dict[str, Kernel] = {}
_origins: dict[str, Origin] = {}
"""Of each kernel that was asked for as "package.module:OBJECT", under its own name."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a kernel was found: "package.module:OBJECT", and the folder that was put on sys.path for it, if one was."""

    target: str
    folder: str | None = None


class UnknownKernel(BadArgument):
    """No kernel of that name is installed."""


def register(kernel: Kernel, target: str | None = None) -> Kernel:
    """Make `kernel` known under its name in this process; returns it.

    Args:
        kernel: the kernel.
        target: "package.module:OBJECT", where other processes find it, for the lines that run its Cases again.

    Raises:
        BadArgument: it is no Kernel; the text says what it lacks.
    """
    name = _checked(kernel).name
    _registered[name] = kernel
    _registered_at.pop(name, None)
    if target is not None:
        _registered_at[name] = Origin(target)
    return kernel


def unregister(name: str) -> None:
    """Forget a kernel that `register` made known."""
    _registered.pop(name, None)
    _registered_at.pop(name, None)


def is_local(name: str) -> bool:
    """Whether only this process knows the kernel, so that a child process could not find it by name."""
    return name in _registered


def origin(name: str) -> Origin | None:
    """Where the kernel called `name` was found, if it was asked for as "package.module:OBJECT"; else None."""
    return (_registered_at if name in _registered else _origins).get(name)


def names() -> tuple[str, ...]:
    """Every listed kernel: built in, from entry points, registered, asked for as "package.module:OBJECT"."""
    found = {point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted({*_BUILT_IN, *found, *_origins, *_registered}))


def target(name: str) -> str | None:
    """ "module:object" of a kernel that is built in or an entry point's, whether or not it can be imported; else None."""
    if built_in := {**_BUILT_IN, **_HIDDEN}.get(name):
        return built_in
    return next((point.value for point in metadata.entry_points(group=ENTRY_POINT_GROUP) if point.name == name), None)


def get(name: str, folder: str | None = None) -> Kernel:
    """The kernel called `name`, or found at `name`, "package.module:OBJECT".

    Args:
        name: either.
        folder: where modules are looked for besides sys.path; None: in the current directory, as `python -m` does.

    Raises:
        UnknownKernel: none has that name; the text lists the nearest names.
        BadArgument: nothing can be imported from there, or it is no Kernel; the text says what it lacks.
    """
    if is_target(name):
        return _at(name, folder)
    if known := _registered.get(name) or _loaded.get(name):
        return known
    _loaded[name] = _checked(find(name))
    return _loaded[name]


def find(name: str) -> Any:
    """What is called `name`, or found there, whether it fulfils the contract or not.

    Raises:
        UnknownKernel, BadArgument: as for `get`, but for what the object itself is.
    """
    if is_target(name):
        look_in()
        return _made_by_others(found_at(name), name)
    if known := _registered.get(name) or _loaded.get(name):
        return known
    if target := {**_BUILT_IN, **_HIDDEN}.get(name):
        module, _, attribute = target.partition(":")
        return _made(getattr(importlib.import_module(module), attribute), name)
    if name in _origins:
        return _made_by_others(found_at(_origins[name].target), name)
    if name.startswith(_FAULT) and (fault := _fault(name.removeprefix(_FAULT))) is not None:
        return fault
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return _from_entry_point(point)
    close = difflib.get_close_matches(name, names(), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known kernels: {', '.join(names())}"
    raise UnknownKernel(f"kernel={name!r}: no kernel of that name is installed; {hint}")


def missing_members(kernel: object) -> list[str]:
    """What `kernel` lacks of a Kernel."""
    return [name for name in MEMBERS if not hasattr(kernel, name)]


def _at(target: str, folder: str | None) -> Kernel:
    folder = look_in(folder)
    known = next((name for name, each in _origins.items() if each.target == target and name in _loaded), None)
    if known is not None:
        return _loaded[known]
    kernel = _checked(_made_by_others(found_at(target), target))
    name = kernel.name
    # An entry point of the same name is most likely the same kernel, as installed; what is named here and now goes before it.
    other = _loaded.get(name) if name in _origins else None if name not in {**_BUILT_IN, **_HIDDEN} else get(name)
    if other is not None and other is not kernel:
        where = _origins[name].target if name in _origins else "attnfuzz itself"
        raise reject("kernel", target, f"it calls itself {name!r}, as another kernel does ({where})", "give it a name of its own")
    _loaded[name], _origins[name] = kernel, Origin(target, folder)
    return kernel


def _fault(slug: str) -> Kernel | None:
    backend, dot, rest = slug.partition(".")
    if dot and backend == "memory":
        return importlib.import_module("attnfuzz.kernels.faults.memory").fault_kernel(rest)  # type: ignore[no-any-return]
    if dot:
        return importlib.import_module("attnfuzz.kernels.faults.device").fault_kernel(backend, rest)  # type: ignore[no-any-return]
    return importlib.import_module("attnfuzz.kernels.faults.host").fault_kernel(slug)  # type: ignore[no-any-return]


def _from_entry_point(point: metadata.EntryPoint) -> Any:
    """The kernel of an entry point, which bears the entry point's name.

    Raises:
        BadArgument: it cannot be imported, or calls itself otherwise.
    """
    try:
        found = _made(point.load(), point.name)
    except BadArgument:
        raise
    except Exception as error:  # somebody else's code: its error is the reason
        raise BadArgument(
            f"kernel={point.name!r}: its entry point {point.value!r} failed with {type(error).__name__}: {error}; "
            "mend or uninstall that package"
        ) from error
    if getattr(found, "name", point.name) != point.name:
        raise BadArgument(f"kernel={point.name!r}: {point.value!r} calls itself {found.name!r}; give both one name")
    return found


def _made(found: Any, called: str) -> Any:
    """What `found` is, or makes: an entry point or a target may name a kernel, or a function or class that makes one."""
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return found
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # a class of an extension module
        return found()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]:
        raise reject(
            "kernel",
            called,
            f"{found.__name__}({', '.join(needed)}, ...) is no kernel, and makes none without arguments",
            "an attention function becomes one by attnfuzz.kernels.adapters.dense or varlen; name the object that they give",
        )
    return found()


def _made_by_others(found: Any, called: str) -> Any:
    try:
        return _made(found, called)
    except BadArgument:
        raise
    except Exception as error:  # somebody else's code: its error is the reason
        raise reject("kernel", called, f"making it failed with {type(error).__name__}: {error}", "mend that") from error


def _checked(kernel: Any) -> Kernel:
    if inspect.isclass(kernel):
        raise BadArgument(f"kernel={kernel.__name__}: it is a class; give an object of it, {kernel.__name__}(...)")
    missing = missing_members(kernel)
    if missing or not isinstance(kernel, Kernel):
        raise BadArgument(f"kernel={kernel!r}: it lacks {', '.join(missing)}; fulfil attnfuzz.kernels.contract.Kernel")
    return kernel


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
