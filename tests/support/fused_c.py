"""Runs generated kernels on the CPU: the source that a GPU would get, compiled by g++, in place of the plain functions."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from attnfuzz.oracles.fused.launch import Code

launch = importlib.import_module("attnfuzz.oracles.fused.launch")

# Declared here: to read <cmath> takes g++ twice as long as all the rest, for each of 200 kernels.
_HEAD = """extern "C" {
double fabs(double), sqrt(double), exp(double), expm1(double), log(double), log1p(double), log2(double);
double rint(double), ceil(double), floor(double), hypot(double, double);
}
#define __device__
#define __global__
#define __align__(n) alignas(n)
struct place { unsigned x; };
static const place blockIdx = {0}, threadIdx = {0}, blockDim = {1}, gridDim = {1};
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline long long __double_as_longlong(double x) { long long y; __builtin_memcpy(&y, &x, 8); return y; }
static inline double __longlong_as_double(long long x) { double y; __builtin_memcpy(&y, &x, 8); return y; }
"""
_OPTIONS = ("-O1", "-ffp-contract=off", "-fno-builtin", "-shared", "-fPIC")


class Compiled:
    """Compiles sources for tensors of the CPU. `calls`: the launches of each kernel; `sources`: compiled code."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.calls: dict[str, int] = {}
        self.sources: dict[str, ctypes.CDLL] = {}

    def takes(self, device: torch.device) -> bool:
        return True

    def kernel(self, source: Code) -> Callable[[bytes, int, int], None]:
        if source.text not in self.sources:
            self.sources[source.text] = self._built(source)
        library = self.sources[source.text]

        def run(argument: bytes, count: int, device: int) -> None:
            assert len(argument) == library.size()
            assert count > 0
            self.calls[source.entry] = self.calls.get(source.entry, 0) + 1
            library.call(argument)

        return run

    def _built(self, source: Code) -> ctypes.CDLL:
        path = self._folder / f"{source.entry}_{len(self.sources)}.cpp"
        call = f"void call(const char* at) {{ arguments a; __builtin_memcpy(&a, at, sizeof a); {source.entry}(a); }}"
        path.write_text(f'{_HEAD}{source.text}\nextern "C" {{ {call}\nint size() {{ return sizeof(arguments); }} }}\n')
        built = path.with_suffix(".so")
        subprocess.run(["g++", *_OPTIONS, "-o", str(built), str(path)], check=True)
        return ctypes.CDLL(str(built))


@contextmanager
def generated(backend: Compiled) -> Iterator[None]:
    """Run generated code. What was compiled for a GPU of this process would be launched with addresses of the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "BACKEND", backend)
        for each in launch.FUNCTIONS:
            each.forget()
        try:
            yield
        finally:
            for each in launch.FUNCTIONS:
                each.forget()
