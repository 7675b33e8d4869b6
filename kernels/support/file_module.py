"""The module of a file that is named by its path: under the name that its folder gives it, and with its folder on sys.path.

The folder comes last there, so that no file beside it stands in for an installed package.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from attnfuzz.kernels.support.import_trial import located

__all__ = ["import_file", "importable_name", "module_name"]


def import_file(file: Path) -> ModuleType:
    """Import `file`, an absolute path, once in a process.

    Raises:
        ImportError: a file of a package that is found elsewhere; whatever the module itself raises.
    """
    name, root = module_name(file)
    if str(root) not in sys.path:
        sys.path.append(str(root))
        importlib.invalidate_caches()
    spec = located(name)
    if _is_of(spec, file):
        return importlib.import_module(name)
    if "." in name:
        place = "not found" if spec is None else f"found at {spec.origin}"
        raise ImportError(f"{file} is module {name} of a package, and that is {place}: put {root} first in PYTHONPATH")
    # No identifier, so that nothing can import another file by this name.
    name = f"{name}-{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    own = importlib.util.spec_from_file_location(name, file)
    if own is None or own.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(own)
    sys.modules[name] = module
    try:
        own.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def importable_name(file: Path) -> tuple[str | None, Path]:
    """Return the name by which code in the folder that is returned too can import a file; None where there is none."""
    name, folder = module_name(file)
    shadowed = not _is_of(located(name), file)
    return (None if shadowed or not all(part.isidentifier() for part in name.split(".")) else name), folder


def module_name(file: Path) -> tuple[str, Path]:
    """Return the dotted name of a file's module, and the folder that must be on sys.path: the one above its topmost package."""
    parts, folder = [re.sub(r"[.\s]", "_", file.stem)], file.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts), folder


def _is_of(spec: ModuleSpec | None, file: Path) -> bool:
    return spec is not None and spec.has_location and spec.origin is not None and Path(spec.origin).resolve() == file.resolve()
