"""The environment: devices, versions, and the settings a process needs before it imports a backend."""

from __future__ import annotations

import functools
import os
import platform
import sys
from importlib import metadata
from typing import Any

from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.released import DISTRIBUTIONS
from attnfuzz.kernels.support import driver, memory
from attnfuzz.kernels.support.installed_torch import sees_cuda

__all__ = [
    "alive",
    "compiler_variables",
    "describe",
    "device_name",
    "has_cuda",
    "prepare",
    "resolve_device",
    "synchronise",
    "versions",
]

_PACKAGES = ("attnfuzz", "torch", "triton", "tilelang", "hypothesis", "numpy")
_COMPILERS = (
    "CC",
    "CUDA_HOME",
    "CUDA_PATH",
    "CXX",
    "DISABLE_LLVM_OPT",
    "DISABLE_MMA_V3",
    "DISABLE_MMA_V5",
    "DISABLE_PTXAS_OPT",
    "HOME",
    "LLVM_PASS_PLUGIN_PATH",
    "PTXAS_OPTIONS",
    "TILELANG_CACHE_DIR",
    "TILELANG_DEFAULT_TARGET",
    "TILELANG_EXECUTION_BACKEND",
    "XDG_CACHE_HOME",
)
_TRITON = "TRITON_"
_MODE = "TRITON_INTERPRET"


def resolve_device(name: str) -> Device:
    """Return the device of that name; "auto" is "cuda" if there is a CUDA device, else "cpu".

    Raises:
        BadArgument: an unknown device, or CUDA without a CUDA device.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise reject("device", name, "no such device", "use auto, cpu or cuda")
    if name == "cpu":
        return "cpu"
    if has_cuda():
        return "cuda"
    if name == "cuda":
        raise reject(
            "device", name, "torch sees no CUDA device", "use --device cpu, or a machine with a GPU and a CUDA build of torch"
        )
    return "cpu"


def has_cuda() -> bool:
    """Whether torch sees a CUDA device; it is imported only where its files and the driver do not say.

    Raises:
        BadArgument: torch is not installed.
    """
    try:
        return sees_cuda()
    except ImportError:
        raise BadArgument("torch: it is not installed; install it, for a CPU by `pip install 'attnfuzz[cpu]'`") from None


@functools.cache
def device_name(device: Device) -> str:
    """Return the name of the GPU, or "cpu" with the machine type."""
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    return f"cpu ({platform.machine()})"


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of all installed packages that a verdict depends on, those of released kernels last."""
    installed = {"python": platform.python_version()}
    for package in (*_PACKAGES, *DISTRIBUTIONS):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def compiler_variables() -> dict[str, str]:
    """Return the variables of the environment that say which compiler makes which code, and where it is kept.

    Triton's are all of its own but its mode, which processes set themselves; TileLang sets others as it is imported. Another
    compiler that only PATH selects, or that replaces one at its path, does not show.
    """
    mine = (name for name in sorted(os.environ) if name in _COMPILERS or (name.startswith(_TRITON) and name != _MODE))
    return {name: os.environ[name] for name in mine}


def describe(device: Device) -> dict[str, Any]:
    """Return the facts of the run header; `unchecked` is the reason if memory of interpreted launches cannot be checked."""
    unchecked = memory.why_unchecked()
    return {
        "device": device_name(device),
        "versions": {name: version for name, version in versions().items() if name not in DISTRIBUTIONS},
        "cores": len(os.sched_getaffinity(0)),
        "executable": sys.executable,
        **({"unchecked": unchecked} if unchecked else {}),
    }


@functools.cache
def prepare(device: Device) -> None:
    """Prepare this process; call it before the first kernel is imported.

    Use one thread: Cases are small, processes many. On the CPU also Triton's interpreter: Triton has one mode per process,
    fixed at its first import, and TileLang imports it too. On a GPU, which many processes share, sleep while waiting for it.
    """
    if device == "cpu" and "triton" not in sys.modules:
        os.environ[_MODE] = "1"
    import torch

    torch.set_num_threads(1)
    if device != "cpu":
        driver.sleep_while_waiting()


def synchronise(device: Device) -> None:
    """Wait for the device, so that its errors are raised here."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def alive(device: Device) -> bool:
    """Whether the device still works for this process; after an illegal access it never does."""
    try:
        synchronise(device)
    except RuntimeError:
        return False
    return True
