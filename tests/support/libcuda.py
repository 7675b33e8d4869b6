"""A driver of CUDA that a test makes up: a library with the functions that are called, compiled by g++."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["library"]

_SOURCE = """
static int capabilities[][2] = {%s};
extern "C" {
static int ready = 0;
int cuInit(unsigned flags) { ready = %d == 0; return %d; }
int cuDriverGetVersion(int *version) { *version = %d; return 0; }
int cuDeviceGetCount(int *count) { *count = %d; return ready ? 0 : 3; }
int cuDeviceGet(int *device, int index) { *device = index + 7; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute != 75 && attribute != 76) return 1;
    *value = capabilities[device - 7][attribute - 75];
    return 0;
}
}
"""


def library(folder: Path, gpus: Sequence[tuple[int, int]] = ((9, 0),), version: int = 13000, error: int = 0) -> Path:
    """Return the library of a driver: the compute capabilities of its GPUs, its version, and what cuInit returns."""
    pairs = ", ".join(f"{{{major}, {minor}}}" for major, minor in (*gpus, (0, 0)))
    source, made = folder / "cuda.cpp", folder / "libcuda.so.1"
    source.write_text(_SOURCE % (pairs, error, error, version, len(gpus)))
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(made)], check=True, capture_output=True)
    return made
