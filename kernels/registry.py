"""Names to kernels. Third parties add theirs by the entry-point group `attnfuzz.kernels`, by target, or by `register`.

A target, "package.module:OBJECT" or "path/to/file.py:OBJECT" (`support/file_target.py`), is accepted wherever a kernel's name is.
The kernel is then known in this process under its own name as well, which its Cases hold; `origin` returns the target, by which
other processes import it.

Every kernel of a third party comes by `targets.load`: its module is imported in a child process first, what it prints goes to
stderr, and whatever ends that import or makes no kernel is a BadArgument with the reason.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.support.file_target import file_target
from attnfuzz.kernels.support.import_trial import why_fatal
from attnfuzz.kernels.targets import (
    MEMBERS,
    checked_name,
    instance,
    is_target,
    is_well_formed,
    load,
    look_in,
    missing_members,
    object_at,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "MEMBERS",
    "Origin",
    "UnknownKernel",
    "built_in_names",
    "find",
    "get",
    "is_local",
    "is_released",
    "members",
    "missing_members",
    "names",
    "object_at",
    "origin",
    "register",
    "target",
    "try_first",
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
    "tilelang.sm100.ss": "attnfuzz.kernels.tilelang.sm100:SS",
    "tilelang.sm100.ts": "attnfuzz.kernels.tilelang.sm100:TS",
    "tilelang.sm100.wasp": "attnfuzz.kernels.tilelang.sm100:WASP",
    "tilelang.varlen": "attnfuzz.kernels.tilelang.varlen:KERNEL",
    "triton.flex": "attnfuzz.kernels.triton.flex:KERNEL",
    "triton.flex.prescaled": "attnfuzz.kernels.triton.flex:PRESCALED",
    "triton.flex.tf32": "attnfuzz.kernels.triton.flex:TF32",
    "triton.paged": "attnfuzz.kernels.triton.paged:KERNEL",
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
_RELEASED = {
    "released.conch.varlen": "attnfuzz.kernels.released.conch:VARLEN",
    "released.flag_gems.sdpa": "attnfuzz.kernels.released.flag_gems:SDPA",
    "released.flag_gems.flash": "attnfuzz.kernels.released.flag_gems:FLASH",
    "released.flag_gems.varlen": "attnfuzz.kernels.released.flag_gems:VARLEN",
    "released.aule.flash": "attnfuzz.kernels.released.aule:FLASH",
    "released.fasterkernels.fa2": "attnfuzz.kernels.released.fasterkernels:FA2",
    "released.flash_attention_triton.v2": "attnfuzz.kernels.released.flash_attention_triton:V2",
    "released.liger.neighborhood": "attnfuzz.kernels.released.liger:NEIGHBORHOOD",
    "released.lightllm.context": "attnfuzz.kernels.released.lightllm:CONTEXT",
    "released.lightllm.no_cache": "attnfuzz.kernels.released.lightllm:NO_CACHE",
    "released.lightllm.sliding_window": "attnfuzz.kernels.released.lightllm:SLIDING_WINDOW",
    "released.flash_attn.dense": "attnfuzz.kernels.released.flash_attn:DENSE",
    "released.flash_attn.varlen": "attnfuzz.kernels.released.flash_attn:VARLEN",
    "released.flashinfer.single_prefill": "attnfuzz.kernels.released.flashinfer:SINGLE_PREFILL",
    "released.flashinfer.ragged_prefill": "attnfuzz.kernels.released.flashinfer:RAGGED_PREFILL",
    "released.flashinfer.paged_prefill": "attnfuzz.kernels.released.flashinfer:PAGED_PREFILL",
    "released.flashinfer.decode": "attnfuzz.kernels.released.flashinfer:DECODE",
    "released.xformers.dense": "attnfuzz.kernels.released.xformers:DENSE",
    "released.xformers.varlen": "attnfuzz.kernels.released.xformers:VARLEN",
    "released.trinix.attention": "attnfuzz.kernels.released.trinix:ATTENTION",
    "released.fla.parallel": "attnfuzz.kernels.released.fla:PARALLEL",
    "released.fla.parallel_varlen": "attnfuzz.kernels.released.fla:PARALLEL_VARLEN",
}
"""Kernels of other packages: listed, and left out of runs that name no kernel."""
_HIDDEN = {
    "released.sageattention.dense_all": "attnfuzz.kernels.released.sage:ALL",
    "demo.varlen": "attnfuzz.kernels.faults.planted:demo_kernel",
    "released.conch.varlen_all": "attnfuzz.kernels.released.conch:ALL",
    "released.conch.decode_all": "attnfuzz.kernels.released.conch:DECODE_ALL",
    "released.aule.flash_all": "attnfuzz.kernels.released.aule:ALL",
    "released.flag_gems.flash_all": "attnfuzz.kernels.released.flag_gems:FLASH_ALL",
    "released.flag_gems.varlen_all": "attnfuzz.kernels.released.flag_gems:VARLEN_ALL",
    "released.flag_gems.sdpa_all": "attnfuzz.kernels.released.flag_gems:SDPA_ALL",
    "torch.cudnn_varlen_any": "attnfuzz.kernels.torch.cudnn:ANY",
    "torch.efficient_more_queries": "attnfuzz.kernels.torch.efficient:MORE_QUERIES",
}
"""Available by name, never listed: kernels to test the harness, or known to be wrong. So are names that begin with "fault."."""
_FAULT = "fault."
_OWN: dict[str, str] = {**_BUILT_IN, **_RELEASED, **_HIDDEN}
"""Targets of all kernels that are part of attnfuzz."""

_registered: dict[str, Kernel] = {}
_registered_at: dict[str, Origin] = {}
_loaded: dict[str, Kernel] = {}
_origins: dict[str, Origin] = {}
"""Origins of the kernels requested by target, by the kernels' own names."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A kernel's target, "package.module:OBJECT", and the folder that was put on sys.path for it, or None.

    Of a target in a file, which may be relative: the folder in which its path begins.
    """

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
    name = checked_name(kernel)
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
    installed = {point.name for point in _entry_points()}
    return tuple(sorted({*_BUILT_IN, *_RELEASED, *installed, *_origins, *_registered}))


def is_released(name: str) -> bool:
    """Whether `name` is that of a kernel that another package releases, which runs only if it is named."""
    return name in _RELEASED


def members(name: str) -> tuple[str, ...]:
    """Listed kernels whose names begin with `name` and a dot; `name` alone where that is a kernel's, or begins no kernel's."""
    known = names()
    if name in known or is_target(name):
        return (name,)
    return tuple(each for each in known if each.startswith(f"{name}.")) or (name,)


def built_in_names() -> tuple[str, ...]:
    """Every listed kernel whose code is part of attnfuzz."""
    return tuple(sorted(_BUILT_IN))


def target(name: str) -> str | None:
    """Target of a built-in kernel or of an entry point, whether or not it can be imported; else None."""
    if built_in := _OWN.get(name):
        return built_in
    return next((point.value for point in _entry_points() if point.name == name), None)


def get(name: str, folder: str | None = None, *, tried: bool = False) -> Kernel:
    """The kernel called `name`.

    Args:
        name: a kernel's name, or a target.
        folder: put on sys.path for a target's module; None: the current directory, as `python -m` does. Of a target in a file:
            where its path begins.
        tried: its module need not be imported in a child process first: this process is one.

    Raises:
        UnknownKernel: no kernel has that name; the text lists the nearest names.
        BadArgument: the target cannot be imported, or is not a Kernel; the text says what it lacks.
    """
    if is_target(name):
        return _at(name, folder, tried=tried)
    if known := _registered.get(name) or _loaded.get(name):
        return known
    kernel: Kernel = find(name, tried=tried)
    if (own := checked_name(kernel)) != name:
        raise BadArgument(f"kernel={name!r}: {target(name)!r} calls itself {own!r}; give both the same name")
    _loaded[name] = kernel
    return kernel


def find(name: str, *, tried: bool = False) -> Any:
    """The object called `name`, a kernel's name or a target, whether or not it fulfils the contract.

    Raises:
        UnknownKernel, BadArgument: as for `get`, except that the object itself is not checked.
    """
    if is_target(name):
        if file_target(name) is None:
            look_in()
        return load(name, _absolute(name), tried=tried)
    if known := _registered.get(name) or _loaded.get(name):
        return known
    if target := _OWN.get(name):
        module, _, attribute = target.partition(":")
        return instance(getattr(importlib.import_module(module), attribute))
    if name in _origins:
        return load(name, _absolute(_origins[name].target, _origins[name].folder), tried=tried)
    if name.startswith(_FAULT) and (fault := _fault(name.removeprefix(_FAULT))) is not None:
        return fault
    for point in _entry_points():
        if point.name == name:
            return load(name, _target_of(point), tried=tried)
    if name.endswith(".py"):
        raise UnknownKernel(f"kernel={name!r}: it names a file; give a function of it, {name}:FUNCTION --like dense")
    if (group := members(name)) != (name,):
        text = f"it is no kernel, but the beginning of {len(group)} kernels' names, which `attnfuzz run` and `gate` take together"
        raise UnknownKernel(f"kernel={name!r}: {text}; give one of {', '.join(group)}")
    close = difflib.get_close_matches(name, names(), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known kernels: {', '.join(names())}"
    module, _, attribute = name.rpartition(".")
    if not close and is_well_formed(f"{module}:{attribute}"):
        hint += f"; an object of a module is {module}:{attribute}"
    raise UnknownKernel(f"kernel={name!r}: no kernel of that name is installed; {hint}")


def try_first(names: Iterable[str]) -> None:
    """Import the modules of all third parties among `names` in one child process, before `get` does it one by one.

    Raises:
        BadArgument: the variable ATTNFUZZ_IMPORT_SECONDS is not a number.
    """
    known = {*_OWN, *_registered, *_loaded}
    asked = [each for each in names if each not in known]
    points = {point.name: _target_of(point) for point in _entry_points()} if asked else {}
    targets = [each if is_target(each) else points.get(each) for each in asked]
    if any(is_target(each) and file_target(each) is None for each in asked):
        look_in()
    why_fatal([_absolute(each) for each in targets if each is not None and is_well_formed(each)])


def _at(target: str, folder: str | None, *, tried: bool = False) -> Kernel:
    # Only a module needs a folder on sys.path; that of a file is put there when the file is imported.
    folder = look_in(folder) if file_target(target) is None else folder or str(Path.cwd())
    place = _absolute(target, folder)
    for name, each in _origins.items():
        if name in _loaded and place == _absolute(each.target, each.folder):
            return _loaded[name]
    kernel: Kernel = load(target, place, tried=tried)
    name = checked_name(kernel)
    # An entry point of the same name is most likely the same kernel, as installed: the target takes precedence.
    other = _loaded.get(name) if name in _origins else None if name not in _OWN else get(name)
    if other is not None and other is not kernel:
        where = _origins[name].target if name in _origins else "attnfuzz itself"
        raise reject("kernel", target, f"it calls itself {name!r}, as another kernel does ({where})", "give it another name")
    _loaded[name], _origins[name] = kernel, Origin(target, folder)
    return kernel


def _absolute(target: str, folder: str | None = None) -> str:
    """Return a target in a file with its absolute path, any other as it is."""
    file = file_target(target)
    return target if file is None else file.seen_from(folder or str(Path.cwd())).text


def _fault(slug: str) -> Kernel | None:
    backend, dot, rest = slug.partition(".")
    if dot and backend == "memory":
        return importlib.import_module("attnfuzz.kernels.faults.memory").fault_kernel(rest)  # type: ignore[no-any-return]
    if dot:
        return importlib.import_module("attnfuzz.kernels.faults.device").fault_kernel(backend, rest)  # type: ignore[no-any-return]
    return importlib.import_module("attnfuzz.kernels.faults.host").fault_kernel(slug)  # type: ignore[no-any-return]


def _entry_points() -> Iterable[metadata.EntryPoint]:
    return metadata.entry_points(group=ENTRY_POINT_GROUP)


def _target_of(point: metadata.EntryPoint) -> str:
    """Return the value of an entry point without its extras."""
    return point.value.partition("[")[0].strip()
