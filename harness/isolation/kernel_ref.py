"""References to kernels for child processes: a name, "package.module:OBJECT", or a pickle if only this process knows the kernel.

A pickle comes with the files of the modules that it needs.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import itertools
import pickle
import pickletools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import BadArgument

__all__ = ["global_of", "import_from", "inherited", "packed", "shipped", "unpacked", "unpickled"]

_inherited: set[str] = set()
_packed: dict[bytes, dict[str, Any]] = {}
_unpacked: dict[str, Kernel] = {}


def shipped(name: str) -> dict[str, Any]:
    """Return what a child needs to find the kernel called `name`, as JSON values.

    Raises:
        BadArgument: a child could not find it; the text gives the reason and the remedy.
    """
    kernel = registry.get(name)
    if name in _inherited:
        return {"name": name}
    if not registry.is_local(name):
        origin = registry.origin(name)
        return {"name": name} if origin is None else {"name": name, "target": origin.target, "folder": origin.folder}
    return packed(kernel, name)


def inherited(kernel: Kernel) -> Kernel:
    """Register a kernel that child processes have from this process, of which they are forks."""
    _inherited.add(kernel.name)
    return registry.register(kernel)


def packed(kernel: Any, name: str) -> dict[str, Any]:
    """Return `kernel`, called `name`, as a pickle with the files of its modules.

    Raises:
        BadArgument: it has no pickle, or one that a child could not read.
    """
    try:
        content = pickle.dumps(kernel)
    except Exception as error:  # the object's own methods may raise anything
        if (place := global_of(kernel)) is None:
            raise BadArgument(
                f"kernel={name!r}: a child process cannot be given it ({type(error).__name__}: {error}); make it a global of "
                "a module, or its class one and without lambdas in it, or run it in this process "
                "(--in-process, in pytest --attnfuzz-in-process)"
            ) from None
        content = pickle.dumps(place)
    if content not in _packed:
        modules = _modules(content)
        if "__main__" in modules:
            raise BadArgument(
                f"kernel={name!r}: it is defined in __main__, where a child cannot import it; move it into a module"
            )
        files = {each: str(file) for each in sorted(modules) if (file := _file(each)) is not None}
        _packed[content] = {"name": name, "pickle": base64.b64encode(content).decode(), "modules": files}
    return _packed[content]


def unpacked(parcel: dict[str, Any]) -> Kernel:
    """Register the kernel that `shipped` describes in this process, and return it."""
    if "target" in parcel:
        return registry.get(parcel["target"], parcel["folder"], tried=True)
    if "pickle" not in parcel:
        return registry.get(parcel["name"], tried=True)
    key = hashlib.sha256(parcel["pickle"].encode()).hexdigest()
    if key not in _unpacked:
        _unpacked[key] = unpickled(parcel)
    return registry.register(_unpacked[key])


def unpickled(parcel: dict[str, Any]) -> Any:
    """Import the modules that the pickle of `packed` names, and return its object."""
    for name, file in parcel["modules"].items():
        import_from(name, file)
    content = pickle.loads(base64.b64decode(parcel["pickle"]))
    return getattr(sys.modules[content[0]], content[1]) if isinstance(content, tuple) else content


def global_of(kernel: Kernel) -> tuple[str, str] | None:
    """Return (module, name) of a global that is the kernel, if there is one."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is kernel and getattr(module, "__name__", None) in sys.modules:
                return module.__name__, name
    return None


def _modules(content: bytes) -> set[str]:
    """Return the modules that a pickle names: every string in it that is one."""
    strings = {argument for _, argument, _ in pickletools.genops(content) if isinstance(argument, str)}
    return {each for each in strings if each in sys.modules}


def _file(module: str) -> Path | None:
    file = getattr(sys.modules[module], "__file__", None)
    return Path(file).absolute() if file else None


def import_from(name: str, file: str) -> None:
    """Import `name` as usual, or from the parent's own file: a test module may not be on sys.path."""
    if name in sys.modules:
        return
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None and Path(spec.origin).absolute() == Path(file):
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported as {name}")
    module = importlib.util.module_from_spec(spec)
    for parent in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
        # pickle imports the packages of a module first; those of a test module may not be on sys.path either.
        sys.modules.setdefault(parent, ModuleType(parent))
    sys.modules[name] = module
    spec.loader.exec_module(module)
