"""What this machine is: devices, versions, and the settings a process needs before it imports a backend."""

from __future__ import annotations

import functools
import os
import platform
import sys
from importlib import metadata
from typing import Any

from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import BadArgument, reject
from attnfuzz.kernels.support import memory

__all__ = ["alive", "describe", "device_name", "has_cuda", "prepare", "resolve_device", "synchronise", "versions"]

_PACKAGES = ("attnfuzz", "torch", "triton", "tilelang", "hypothesis", "numpy")


def resolve_device(name: str) -> Device:
    """ "auto" -> "cuda" where there is a CUDA device, else "cpu".

    Raises:
        BadArgument: an unknown device, or CUDA where there is none.
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
    """Whether torch sees a CUDA device.

    Raises:
        BadArgument: torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise BadArgument("torch: it is not installed; install it, for a CPU by `pip install 'attnfuzz[cpu]'`") from None
    return bool(torch.cuda.is_available())


@functools.cache
def device_name(device: Device) -> str:
    """The GPU's or the processor's name."""
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    return f"cpu ({platform.machine()})"


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of every package that a verdict depends on, where installed."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def describe(device: Device) -> dict[str, Any]:
    """The run header's facts; `unchecked` says why interpreted launches are not, where they cannot be checked."""
    unchecked = memory.why_unchecked()
    return {
        "device": device_name(device),
        "versions": versions(),
        "cores": len(os.sched_getaffinity(0)),
        "executable": sys.executable,
        **({"unchecked": unchecked} if unchecked else {}),
    }


@functools.cache
def prepare(device: Device) -> None:
    """What a process needs before its first kernel is imported.

    On the CPU, one thread (cases are small, processes many), and Triton's interpreter: Triton has one mode per process,
    fixed at its first import, and TileLang imports it too.
    """
    if device == "cpu":
        if "triton" not in sys.modules:
            os.environ["TRITON_INTERPRET"] = "1"
        import torch

        torch.set_num_threads(1)


def synchronise(device: Device) -> None:
    """Wait for the device, so that its errors show here."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def alive(device: Device) -> bool:
    """Whether the device still answers this process; an illegal access ends that for good."""
    try:
        synchronise(device)
    except RuntimeError:
        return False
    return True
