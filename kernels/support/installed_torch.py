"""What the installed torch can do; torch, whose import takes more than a second, is imported only where its files do not say."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

from attnfuzz.kernels.support.driver import driver

__all__ = ["built_with", "gpu_capability", "has_op", "sees_cuda"]


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
