"""Names to kernels. Third parties join by the entry-point group `attnfuzz.kernels`, or at run time by `register`."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from importlib import metadata

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.problem import BadArgument

__all__ = ["ENTRY_POINT_GROUP", "UnknownKernel", "get", "is_local", "names", "register", "target", "unregister"]

ENTRY_POINT_GROUP = "attnfuzz.kernels"

_BUILT_IN = {
    "tilelang.mha": "attnfuzz.kernels.tilelang.dense:MHA",
    "tilelang.mha_pipelined": "attnfuzz.kernels.tilelang.dense:MHA_PIPELINED",
    "tilelang.gqa.atomic": "attnfuzz.kernels.tilelang.dense:GQA_ATOMIC",
    "tilelang.gqa.split": "attnfuzz.kernels.tilelang.dense:GQA_SPLIT",
    "tilelang.gqa_varlen.atomic": "attnfuzz.kernels.tilelang.ragged:ATOMIC",
    "tilelang.gqa_varlen.split": "attnfuzz.kernels.tilelang.ragged:SPLIT",
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
    "demo.varlen": "attnfuzz.kernels.planted:demo_kernel",
    "emulated": "attnfuzz.kernels.emulated.kernel:KERNEL",
    "emulated.prescaled": "attnfuzz.kernels.emulated.kernel:PRESCALED",
    "emulated.tf32": "attnfuzz.kernels.emulated.kernel:TF32",
    "torch.cudnn_varlen_any": "attnfuzz.kernels.torch.cudnn:ANY",
    "torch.efficient_more_queries": "attnfuzz.kernels.torch.efficient:MORE_QUERIES",
}
"""Found by name, never listed: they are there to try the harness, or known to be wrong. So are names that begin with "fault."."""
_FAULT = "fault."

_MEMBERS = ("name", "backend", "files", "capabilities", "configs", "unavailable", "supports", "compile_key", "build")

_registered: dict[str, Kernel] = {}
_loaded: dict[str, Kernel] = {}


class UnknownKernel(BadArgument):
    """No kernel of that name is installed."""


def register(kernel: Kernel) -> Kernel:
    """Make `kernel` known under its name in this process; returns it.

    Raises:
        BadArgument: it is no Kernel; the text says what it lacks.
    """
    _registered[_checked(kernel).name] = kernel
    return kernel


def unregister(name: str) -> None:
    """Forget a kernel that `register` made known."""
    _registered.pop(name, None)


def is_local(name: str) -> bool:
    """Whether only this process knows the kernel, so that a child process could not find it by name."""
    return name in _registered


def names() -> tuple[str, ...]:
    """Every listed kernel: built in, from entry points, registered."""
    found = {point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted({*_BUILT_IN, *found, *_registered}))


def target(name: str) -> str | None:
    """ "module:object" of a kernel that is built in or an entry point's, whether or not it can be imported; else None."""
    if built_in := {**_BUILT_IN, **_HIDDEN}.get(name):
        return built_in
    return next((point.value for point in metadata.entry_points(group=ENTRY_POINT_GROUP) if point.name == name), None)


def get(name: str) -> Kernel:
    """The kernel called `name`.

    Raises:
        UnknownKernel: none has that name; the text lists the nearest names.
    """
    if known := _registered.get(name) or _loaded.get(name):
        return known
    if target := {**_BUILT_IN, **_HIDDEN}.get(name):
        _loaded[name] = _load(target)
        return _loaded[name]
    if name.startswith(_FAULT) and (fault := _fault(name.removeprefix(_FAULT))) is not None:
        _loaded[name] = fault
        return fault
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            _loaded[name] = _from_entry_point(point)
            return _loaded[name]
    close = difflib.get_close_matches(name, names(), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known kernels: {', '.join(names())}"
    raise UnknownKernel(f"kernel={name!r}: no kernel of that name is installed; {hint}")


def _fault(slug: str) -> Kernel | None:
    backend, dot, rest = slug.partition(".")
    if backend == "numeric":
        return importlib.import_module("attnfuzz.kernels.emulated.kernel").fault_kernel(rest)  # type: ignore[no-any-return]
    if dot and backend == "memory":
        return importlib.import_module("attnfuzz.kernels.faults.memory").fault_kernel(rest)  # type: ignore[no-any-return]
    if dot:
        return importlib.import_module("attnfuzz.kernels.faults.device").fault_kernel(backend, rest)  # type: ignore[no-any-return]
    return importlib.import_module("attnfuzz.kernels.faults.host").fault_kernel(slug)  # type: ignore[no-any-return]


def _load(target: str) -> Kernel:
    module, _, attribute = target.partition(":")
    return _made(getattr(importlib.import_module(module), attribute))


def _from_entry_point(point: metadata.EntryPoint) -> Kernel:
    """The kernel of an entry point, which bears the entry point's name.

    Raises:
        BadArgument: it cannot be imported, is no Kernel, or calls itself otherwise.
    """
    try:
        kernel = _made(point.load())
    except BadArgument:
        raise
    except Exception as error:  # somebody else's code: its error is the reason
        raise BadArgument(
            f"kernel={point.name!r}: its entry point {point.value!r} failed with {type(error).__name__}: {error}; "
            "mend or uninstall that package"
        ) from error
    if kernel.name != point.name:
        raise BadArgument(f"kernel={point.name!r}: {point.value!r} calls itself {kernel.name!r}; give both one name")
    return kernel


def _made(found: Kernel | type[Kernel] | Callable[[], Kernel]) -> Kernel:
    """An entry point may name a kernel, or a function or class that makes one."""
    if inspect.isclass(found) or inspect.isfunction(found):
        return _checked(found())
    return _checked(found)


def _checked(kernel: object) -> Kernel:
    missing = [name for name in _MEMBERS if not hasattr(kernel, name)]
    if inspect.isclass(kernel):
        raise BadArgument(f"kernel={kernel.__name__}: it is a class; give an object of it, {kernel.__name__}(...)")
    if missing or not isinstance(kernel, Kernel):
        raise BadArgument(f"kernel={kernel!r}: it lacks {', '.join(missing)}; fulfil attnfuzz.kernels.contract.Kernel")
    return kernel
