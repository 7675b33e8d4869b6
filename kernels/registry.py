"""Names to kernels. Third parties add theirs by the entry-point group `attnfuzz.kernels`, by target, or by `register`.

A target, "package.module:OBJECT", is accepted wherever a kernel's name is. The kernel is then known in this process under its own
name as well, which its Cases hold; `origin` returns the target, by which other processes import it.
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
    "get",
    "is_local",
    "is_target",
    "look_in",
    "missing_members",
    "names",
    "object_at",
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
"""Available by name, never listed: kernels to test the harness, or known to be wrong. So are names that begin with "fault."."""
_FAULT = "fault."

MEMBERS = ("name", "backend", "files", "capabilities", "configs", "unavailable", "supports", "compile_key", "build")
"""The members of a Kernel, in the contract's order."""

_registered: dict[str, Kernel] = {}
_registered_at: dict[str, Origin] = {}
_loaded: dict[str, Kernel] = {}
_origins: dict[str, Origin] = {}
"""Origins of the kernels requested by target, by the kernels' own names."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A kernel's target, "package.module:OBJECT", and the folder that was put on sys.path for it, or None."""

    target: str
    folder: str | None = None


class UnknownKernel(BadArgument):
    """Error for a name that no installed kernel has."""


def register(kernel: Kernel, target: str | None = None) -> Kernel:
    """Make `kernel` known under its name in this process, and return it.

    Args:
        kernel: the kernel.
        target: "package.module:OBJECT", by which other processes import it, for the lines that run its Cases again.

    Raises:
        BadArgument: it is not a Kernel; the text says what it lacks.
    """
    name = _checked(kernel).name
    _registered[name] = kernel
    _registered_at.pop(name, None)
    if target is not None:
        _registered_at[name] = Origin(target)
    return kernel


def unregister(name: str) -> None:
    """Remove a kernel that `register` added."""
    _registered.pop(name, None)
    _registered_at.pop(name, None)


def is_local(name: str) -> bool:
    """Whether only this process knows the kernel, so that a child process cannot get it by name."""
    return name in _registered


def origin(name: str) -> Origin | None:
    """Origin of the kernel called `name`, if it was requested by target or registered with one; else None."""
    return (_registered_at if name in _registered else _origins).get(name)


def names() -> tuple[str, ...]:
    """Every listed kernel: built in, from entry points, registered, requested by target."""
    installed = {point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted({*_BUILT_IN, *installed, *_origins, *_registered}))


def target(name: str) -> str | None:
    """Target of a built-in kernel or of an entry point, whether or not it can be imported; else None."""
    if built_in := {**_BUILT_IN, **_HIDDEN}.get(name):
        return built_in
    return next((point.value for point in metadata.entry_points(group=ENTRY_POINT_GROUP) if point.name == name), None)


def missing_members(kernel: object) -> list[str]:
    """The members of a Kernel that `kernel` lacks."""
    return [name for name in MEMBERS if not hasattr(kernel, name)]


def get(name: str, folder: str | None = None) -> Kernel:
    """The kernel called `name`.

    Args:
        name: a kernel's name, or a target.
        folder: put on sys.path for a target's module; None: the current directory, as `python -m` does.

    Raises:
        UnknownKernel: no kernel has that name; the text lists the nearest names.
        BadArgument: the target cannot be imported, or is not a Kernel; the text says what it lacks.
    """
    if is_target(name):
        return _at(name, folder)
    if known := _registered.get(name) or _loaded.get(name):
        return known
    _loaded[name] = _checked(find(name))
    return _loaded[name]


def find(name: str) -> Any:
    """The object called `name`, a kernel's name or a target, whether or not it fulfils the contract.

    Raises:
        UnknownKernel, BadArgument: as for `get`, except that the object itself is not checked.
    """
    if is_target(name):
        look_in()
        return _instance_of_others(object_at(name), name)
    if known := _registered.get(name) or _loaded.get(name):
        return known
    if target := {**_BUILT_IN, **_HIDDEN}.get(name):
        module, _, attribute = target.partition(":")
        return _instance(getattr(importlib.import_module(module), attribute), name)
    if name in _origins:
        return _instance_of_others(object_at(_origins[name].target), name)
    if name.startswith(_FAULT) and (fault := _fault(name.removeprefix(_FAULT))) is not None:
        return fault
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return _from_entry_point(point)
    close = difflib.get_close_matches(name, names(), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known kernels: {', '.join(names())}"
    raise UnknownKernel(f"kernel={name!r}: no kernel of that name is installed; {hint}")


def is_target(name: str) -> bool:
    """Whether `name` is a target: no kernel's own name holds a colon."""
    return ":" in name


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


def object_at(target: str) -> Any:
    """Import the object at `target`, "package.module:OBJECT" or "package.module:OBJECT.attribute".

    Raises:
        BadArgument: `target` has another form, there is no such module or object, or importing the module failed.
    """
    module, _, path = target.partition(":")
    if module.endswith(".py") or "/" in module:
        remedy = f"give {_dotted(module)}:{path or 'KERNEL'}"
        raise reject("kernel", target, "a module is named with dots, as for `python -m`", remedy)
    if not all(part.isidentifier() for part in [*module.split("."), *path.split(".")]):
        raise reject("kernel", target, "it is not of the form package.module:OBJECT", "give such as mypackage.attention:KERNEL")
    holder: Any = _imported(module, target)
    for name in path.split("."):
        if not hasattr(holder, name):
            raise _lacking(target, holder, name)
        holder = getattr(holder, name)
    return holder


def _at(target: str, folder: str | None) -> Kernel:
    folder = look_in(folder)
    known = next((name for name, each in _origins.items() if each.target == target and name in _loaded), None)
    if known is not None:
        return _loaded[known]
    kernel = _checked(_instance_of_others(object_at(target), target))
    name = kernel.name
    # An entry point of the same name is most likely the same kernel, as installed: the target takes precedence.
    other = _loaded.get(name) if name in _origins else None if name not in {**_BUILT_IN, **_HIDDEN} else get(name)
    if other is not None and other is not kernel:
        where = _origins[name].target if name in _origins else "attnfuzz itself"
        raise reject("kernel", target, f"it calls itself {name!r}, as another kernel does ({where})", "give it another name")
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
    """The kernel of an entry point.

    Raises:
        BadArgument: it cannot be imported, or its name is not the entry point's.
    """
    try:
        kernel = _instance(point.load(), point.name)
    except BadArgument:
        raise
    except Exception as error:  # another package's code: its error is the reason
        raise BadArgument(
            f"kernel={point.name!r}: its entry point {point.value!r} failed with {type(error).__name__}: {error}; "
            "fix or uninstall that package"
        ) from error
    if getattr(kernel, "name", point.name) != point.name:
        raise BadArgument(f"kernel={point.name!r}: {point.value!r} calls itself {kernel.name!r}; give both the same name")
    return kernel


def _instance(maker: Any, called: str) -> Any:
    """`maker` itself, or what it returns if it is a function or a class: an entry point or a target may name either."""
    if not (inspect.isclass(maker) or inspect.isfunction(maker)):
        return maker
    try:
        parameters = inspect.signature(maker).parameters.values()
    except ValueError:  # a class of an extension module
        return maker()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]:
        raise reject(
            "kernel",
            called,
            f"{maker.__name__}({', '.join(needed)}, ...) is not a kernel, and needs arguments to make one",
            "an attention function becomes one by attnfuzz.kernels.adapters.dense or varlen; name the object that they return",
        )
    return maker()


def _instance_of_others(maker: Any, called: str) -> Any:
    try:
        return _instance(maker, called)
    except BadArgument:
        raise
    except Exception as error:  # another package's code: its error is the reason
        raise reject("kernel", called, f"making it failed with {type(error).__name__}: {error}", "fix that") from error


def _checked(kernel: Any) -> Kernel:
    if inspect.isclass(kernel):
        raise BadArgument(f"kernel={kernel.__name__}: it is a class; give an instance, {kernel.__name__}(...)")
    missing = missing_members(kernel)
    if missing or not isinstance(kernel, Kernel):
        raise BadArgument(f"kernel={kernel!r}: it lacks {', '.join(missing)}; fulfil attnfuzz.kernels.contract.Kernel")
    return kernel


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
        raise reject("kernel", target, f"module {error.name!r} is {where}", "go where it is, or install its package") from None
    except (Exception, SystemExit) as error:  # another package's code: its error is the reason
        raise _failed(target, module, error) from error


def _failed(target: str, module: str, error: BaseException) -> BadArgument:
    """The module's own error, with the last module-level line of its traceback."""
    lines = [each for each in traceback.extract_tb(error.__traceback__) if each.name == "<module>"]
    at = f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""
    text = f"{type(error).__name__}: {error}".strip(": ")
    return reject("kernel", target, f"importing {module} failed with {text}{at}", "fix that, or install what it needs")


def _lacking(target: str, holder: Any, name: str) -> BadArgument:
    names = [each for each in vars(holder) if not each.startswith("_")] if hasattr(holder, "__dict__") else []
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    values = ((each, getattr(holder, each, None)) for each in names)
    kernels = [each for each, value in values if hasattr(value, "compile_key") and not isinstance(value, type)]
    hint = f"did you mean {close[0]!r}?" if close else f"kernels there: {', '.join(kernels) or 'none'}"
    kind = "module" if isinstance(holder, ModuleType) else "class" if isinstance(holder, type) else type(holder).__name__
    what = f"{kind} {getattr(holder, '__name__', '')!r}"
    return reject("kernel", target, f"the {what} has no {name!r}", hint)
