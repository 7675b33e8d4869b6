"""What the installed torch can do; torch, whose import takes more than a second, is imported only where its files do not say."""

from __future__ import annotations

import ctypes
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

__all__ = ["built_with", "has_op", "sees_cuda"]


def built_with() -> tuple[str, str | None]:
    """Return the version of torch, and the version of CUDA that it was built with or None.

    Raises:
        ImportError: torch is not installed.
    """
    version = _version()
    return str(version["__version__"]), version["cuda"]


def sees_cuda() -> bool:
    """Return `torch.cuda.is_available()`.

    Raises:
        ImportError: torch is not installed.
    """
    if _folder() is not None and not _can_see_cuda():
        return False
    import torch

    return bool(torch.cuda.is_available())


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


def _can_see_cuda() -> bool:
    """Return whether torch was built for a GPU and, if for CUDA, the driver's library is there, which CUDA's runtime loads."""
    version = _version()
    if version["cuda"] is None:
        return version.get("hip") is not None
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


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
