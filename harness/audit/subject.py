"""What `check` was given, as data for a process of its own: a name, a target, or an object that can be imported there."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, cast

from attnfuzz.harness.isolation.kernel_ref import import_from, packed, unpickled
from attnfuzz.harness.trial.errors import describe_exception
from attnfuzz.kernels import adapters, registry
from attnfuzz.kernels.contract import Built, Capabilities, Config, ConfigValue, Device, Kernel
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.targets import is_target, look_in

__all__ = ["LoadError", "as_kernel", "import_from_sources", "loaded", "reference", "title"]

_MAIN = "__attnfuzz_main__"
"""The name of a script's module in other processes, where `__main__` is another."""
_REMEDY = "write it into a module, or give in_process=True"


class LoadError(Exception):
    """An exception from the kernel's own module while it was imported; `where` is its file and line, if they are known."""

    def __init__(self, error: BaseException) -> None:
        self.where = _raised_at(error)
        super().__init__(describe_exception(error).splitlines()[0] + (f" ({self.where})" if self.where else ""))
        self.detail = "".join(traceback.format_exception(error))[-6000:]


def title(kernel: Any) -> str:
    """Return the name of a kernel or function for messages."""
    name = kernel if isinstance(kernel, str) else getattr(kernel, "name", None) or getattr(kernel, "__qualname__", None)
    return name if isinstance(name, str) else type(kernel).__name__


def reference(kernel: Any) -> dict[str, Any]:
    """Return what another process needs to import `kernel` as it is on disk then, as JSON values.

    Raises:
        BadArgument: it is neither text nor an object that another process can import; the text says why not.
    """
    if isinstance(kernel, str):
        return {"target": kernel} if is_target(kernel) else {"name": kernel}
    if inspect.isclass(kernel):
        raise reject("kernel", kernel.__name__, "it is a class", f"give an instance, {kernel.__name__}(...)")
    if not callable(kernel) and (missing := registry.missing_members(kernel)):
        reason = f"it is neither a kernel (it lacks {', '.join(missing)}) nor a function"
        raise reject("kernel", title(kernel), reason, "give a kernel, a function, a name or package.module:OBJECT")
    in_main = False
    for module, path in _places(kernel):
        if (file := _file(module)) is not None:
            return {"module": _name(module), "file": file, "path": path}
        in_main |= module == "__main__"
    if in_main or getattr(kernel, "__module__", None) == "__main__":
        reason = "it is defined in a session or notebook (__main__ without a file), which another process cannot import"
        raise reject("kernel", title(kernel), reason, _REMEDY)
    try:
        return packed(kernel, title(kernel))
    except BadArgument as error:
        reason = str(error).partition(": ")[2].partition(";")[0] or "another process cannot import it"
        raise reject("kernel", title(kernel), reason, _REMEDY) from None


def loaded(parcel: Mapping[str, Any]) -> Any:
    """Import the object of a `reference` in this process.

    Raises:
        BadArgument: there is no such module or object.
        LoadError: its module, or making the object, raised an exception.
    """
    target = parcel.get("target") or registry.target(parcel.get("name", ""))
    if target is not None and not target.startswith("attnfuzz."):
        look_in()
        _import(target.partition(":")[0])
    if "target" in parcel:
        return registry.object_at(parcel["target"])
    if "name" in parcel:
        return registry.get(parcel["name"])
    try:
        if "pickle" in parcel:
            return unpickled(dict(parcel))
        import_from(parcel["module"], parcel["file"])
    except BadArgument:
        raise
    except (Exception, SystemExit) as error:
        raise LoadError(error) from error
    holder = sys.modules[parcel["module"]]
    for name in parcel["path"].split("."):
        if not hasattr(holder, name):
            raise reject("kernel", parcel["path"], f"{parcel['file']} has no {name!r}", "name what is there now")
        holder = getattr(holder, name)
    return holder


def as_kernel(
    thing: Any, device: Device, configs: Sequence[Mapping[str, ConfigValue]] | None, declared: Mapping[str, Any]
) -> Kernel:
    """Return the kernel that `thing` is, makes without arguments, or becomes by an adapter.

    Args:
        thing: a Kernel, or a function with flash-attention's signature: varlen if it has cu_seqlens_q, else dense.
        device: where it is to run.
        configs: the Configs that are tried; None: the kernel's own.
        declared: arguments of the adapter.

    Raises:
        BadArgument: it is neither, or the arguments do not fit.
    """
    if callable(thing) and registry.missing_members(thing):
        parameters = inspect.signature(thing).parameters if not inspect.isclass(thing) else {}
        if len(parameters) >= 3:
            return _adapted(thing, device, configs, declared)
        try:
            thing = thing()
        except Exception as error:
            raise LoadError(error) from error
    if missing := registry.missing_members(thing):
        raise reject("kernel", title(thing), f"it lacks {', '.join(missing)}", "fulfil attnfuzz.kernels.contract.Kernel")
    if declared:
        reason = f"{title(thing)} is a kernel, which declares its capabilities itself"
        raise reject(next(iter(declared)), next(iter(declared.values())), reason, "leave it out, or give a function")
    kernel = cast("Kernel", thing)
    return kernel if configs is None else _Limited(kernel, tuple(Config(dict(each)) for each in configs))


def _adapted(
    function: Any, device: Device, configs: Sequence[Mapping[str, ConfigValue]] | None, declared: Mapping[str, Any]
) -> Kernel:
    varlen = "cu_seqlens_q" in inspect.signature(function).parameters
    more = {"devices": (device,), "configs": ({},) if configs is None else tuple(configs), **declared}
    if not adapters.signature.source_files(function):
        # Of a session; the gate alone needs its files.
        more.setdefault("files", (os.devnull,))
    try:
        return adapters.varlen(function, **more) if varlen else adapters.dense(function, **more)
    except (TypeError, ValueError) as error:
        if isinstance(error, BadArgument):
            raise
        raise reject("declared", sorted(declared), describe_exception(error), "see attnfuzz.kernels.dense and varlen") from None


@dataclass(frozen=True, slots=True)
class _Limited:
    """A kernel of which only some Configs are tried."""

    inner: Kernel
    choices: tuple[Config, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise reject("configs", self.choices, "nothing would be tried", "leave it out, or give some")

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def backend(self) -> str:
        return self.inner.backend

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self.inner.files)

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """Those of the kernel's Configs that are wanted, in the order of the kernel."""
        return tuple(each for each in self.inner.configs(problem) if each in self.choices)

    def unavailable(self, device: Device) -> str | None:
        return self.inner.unavailable(device)

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        return self.inner.supports(problem, config, device)

    def compile_key(self, problem: Problem, config: Config) -> str:
        return self.inner.compile_key(problem, config)

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        return self.inner.build(problem, config, device)


def import_from_sources() -> None:
    """Read modules that are imported from now on from their sources, but for installed ones.

    Bytecode counts as current if the source has the same size and the same second: a program may edit faster than that.
    """
    before = SourceFileLoader.get_code
    installed = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")})

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if path.startswith(installed):
            return before(self, fullname)
        return self.source_to_code(self.get_data(path), path)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise LoadError(error) from error
        # Said by the registry.
    except BadArgument:
        raise
    except (Exception, SystemExit) as error:
        raise LoadError(error) from error


def _places(kernel: Any) -> Iterator[tuple[str, str]]:
    """Yield (module, qualified name) of globals that are the object: its own first, those of `__main__` last."""
    module, path = getattr(kernel, "__module__", None), getattr(kernel, "__qualname__", None)
    if isinstance(module, str) and isinstance(path, str) and module in sys.modules and module != "__main__":
        holder: Any = sys.modules[module]
        for name in path.split("."):
            holder = getattr(holder, name, None)
        if holder is kernel:
            yield module, path
    main = sys.modules["__main__"]
    for name, each in sorted(sys.modules.items(), key=lambda item: item[0] == "__main__"):
        if each is main and name != "__main__":
            # Its second name, which multiprocessing gives it (`__mp_main__`), is that of another module in other processes.
            continue
        for attribute, value in list(getattr(each, "__dict__", {}).items()):
            if value is kernel and not attribute.startswith("__"):
                yield name, attribute


def _name(module: str) -> str:
    """Return the name by which another process imports a module."""
    if module != "__main__":
        return module
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else _MAIN


def _file(module: str) -> str | None:
    file = getattr(sys.modules[module], "__file__", None)
    return str(Path(file).absolute()) if file and Path(file).is_file() else None


def _raised_at(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    lines = [each for each in traceback.extract_tb(error.__traceback__) if each.name == "<module>"]
    return f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else ""
