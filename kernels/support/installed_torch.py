"""What the installed torch can do; torch, whose import takes more than a second, is imported only where its files do not say."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import inspect
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnfuzz.kernels.support.driver import driver

__all__ = [
    "Arguments",
    "built_with",
    "cudnn_version",
    "gpu_capability",
    "has_cudnn",
    "has_name",
    "has_op",
    "op_arguments",
    "parameters",
    "sees_cuda",
]

_SCHEMA = re.compile(r'overload_name = "";\s*static constexpr const char\* schema_str = "[^("]*\((.*?)\) -> ')
_CUDNN = re.compile(r"(nvidia-cudnn-cu\d+)")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Names of an op's arguments: positional ones, and those that are given by keyword alone."""

    positional: tuple[str, ...]
    keyword: tuple[str, ...]


def built_with() -> tuple[str, str | None]:
    """Return the version of torch, and the version of CUDA that it was built with or None.

    Raises:
        ImportError: torch is not installed.
    """
    version = _version()
    return str(version["__version__"]), version["cuda"]


def sees_cuda() -> bool:
    """Return whether torch can use a CUDA device: `torch.cuda.is_available()` where torch is imported, else what the driver says.

    Raises:
        ImportError: torch is not installed.
    """
    if _folder() is not None and (said := _by_its_files()) is not None:
        return said
    import torch

    return bool(torch.cuda.is_available())


def gpu_capability() -> tuple[int, int]:
    """Return the compute capability of the current GPU, such as (9, 0), without importing torch where the driver says.

    Raises:
        RuntimeError: torch sees no CUDA device.
    """
    if "torch" not in sys.modules and (cuda := driver()) is not None and cuda.gpus:
        return cuda.gpus[0]
    import torch

    major, minor = torch.cuda.get_device_capability()
    return int(major), int(minor)


def has_op(name: str) -> bool:
    """Return whether `torch.ops.aten` has the op, whose headers torch's packages hold.

    Raises:
        ImportError: torch is not installed.
    """
    folder = _folder()
    if folder is not None and (folder / "include" / "ATen" / "ops" / f"{name}.h").is_file():
        return True
    import torch

    return hasattr(torch.ops.aten, name)


@functools.cache
def op_arguments(name: str) -> Arguments | None:
    """Return the arguments of `torch.ops.aten.NAME.default`, by the schema in torch's headers; None: there is no such op.

    Raises:
        ImportError: torch is not installed.
    """
    if (folder := _folder()) is not None:
        text = _text(folder / "include" / "ATen" / "ops" / f"{name}_ops.h")
        if text is not None and (schema := _SCHEMA.search(text)) is not None:
            positional, _, keyword = schema[1].partition("*, ")
            return Arguments(_names(positional), _names(keyword))
    import torch

    packet = getattr(torch.ops.aten, name, None)
    if packet is None or "default" not in packet.overloads():
        return None
    every = packet.default._schema.arguments
    return Arguments(tuple(x.name for x in every if not x.kwarg_only), tuple(x.name for x in every if x.kwarg_only))


@functools.cache
def parameters(module: str, name: str) -> frozenset[str] | None:
    """Return the names of the parameters of a function of a module of torch, such as "torch.nn.attention.varlen", by its source.

    None: there is no such module or function.

    Raises:
        ImportError: torch is not installed.
    """
    defined = _defined(module, name)
    if isinstance(defined, ast.FunctionDef):
        each = defined.args
        return frozenset(x.arg for x in (*each.posonlyargs, *each.args, *each.kwonlyargs))
    if (function := _imported(module, name)) is None:
        return None
    return frozenset(inspect.signature(function).parameters)


def has_name(module: str, name: str) -> bool:
    """Return whether a module of torch has a function or class of that name, by its source.

    Raises:
        ImportError: torch is not installed.
    """
    return _defined(module, name) is not None or _imported(module, name) is not None


def has_cudnn() -> bool:
    """Return whether torch finds a cuDNN, as the package that it requires says, where that is installed.

    Raises:
        ImportError: torch is not installed.
    """
    if _folder() is not None and _required_cudnn() is not None:
        return True
    import torch

    return bool(torch.backends.cudnn.is_available())


def cudnn_version() -> int | None:
    """Return the version of torch's cuDNN, such as 91501 for 9.15.1, as the package that it requires says; None: it has none.

    Where LD_LIBRARY_PATH has another one, a process that has imported torch may say otherwise.

    Raises:
        ImportError: torch is not installed.
    """
    if _folder() is not None and (version := _required_cudnn()) is not None:
        return version
    import torch

    number: int | None = torch.backends.cudnn.version()
    return number


@functools.cache
def _required_cudnn() -> int | None:
    """Return the version of the cuDNN package that torch's own package requires, where that is installed."""
    try:
        required = [name[1] for each in importlib.metadata.requires("torch") or () if (name := _CUDNN.match(each))]
        major, minor, patch = importlib.metadata.version(required[0]).split(".")[:3] if required else ("", "", "")
        return int(major) * 10000 + int(minor) * 100 + int(patch)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _names(arguments: str) -> tuple[str, ...]:
    """Return the names in "Tensor query, SymInt? max_q=None": the last word of each, without its default."""
    return tuple(each.partition("=")[0].split()[-1] for each in arguments.split(", ") if each.strip())


def _defined(module: str, name: str) -> ast.stmt | None:
    """Return the last definition of a function or class at the top of a module's source; None: it must be imported to know.

    What `torch` itself has of its own library is declared in a stub.
    """
    if (folder := _folder()) is None:
        return None
    parts = module.split(".")[1:]
    text = _text(folder.joinpath(*parts).with_suffix(".py") if parts else folder / "_C" / "__init__.pyi")
    try:
        body = ast.parse(text or "").body
    except SyntaxError:
        return None
    definitions = [each for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == name]
    return definitions[-1] if definitions else None


def _imported(module: str, name: str) -> Any:
    import torch  # noqa: F401 - its absence is an error, that of one of its modules is not

    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _by_its_files() -> bool | None:
    """Return whether torch was built for CUDA of a version that the driver supports, and there is a GPU; None: it must be asked.

    A driver supports all versions of CUDA with its own major number, and older ones (CUDA compatibility guide).
    """
    version = _version()
    if version["cuda"] is None:
        return None if version.get("hip") is not None else False
    cuda = driver()
    return cuda is not None and bool(cuda.gpus) and cuda.version[0] >= int(str(version["cuda"]).partition(".")[0])


def _version() -> dict[str, Any]:
    """Return the variables of torch.version, a file that imports nothing of torch."""
    if (folder := _folder()) is not None:
        return runpy.run_path(str(folder / "version.py"))
    import torch

    return dict(vars(torch.version))


def _folder() -> Path | None:
    """Return torch's folder, or None where torch is imported and can itself be asked, or is no package with a version.py."""
    if "torch" in sys.modules:
        return None
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    return folder if folder and (folder / "version.py").is_file() else None
