"""Runs generated kernels on the CPU: the C that a GPU would get, compiled by g++, in place of the plain functions."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

_HEAD = """#include <cmath>
#include <cstring>
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline long long __double_as_longlong(double x) { long long y; std::memcpy(&y, &x, 8); return y; }
static inline double __longlong_as_double(long long x) { double y; std::memcpy(&y, &x, 8); return y; }
"""


class Compiled:
    """Compiles generated C for tensors of the CPU; `calls`: the launches of each function; `sources`: compiled code."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.alone = True
        """Whether no other process compiles."""
        self.calls: dict[str, int] = {}
        self.sources: dict[tuple[str, int], ctypes.CDLL] = {}

    def takes(self, x: torch.Tensor) -> bool:
        return True

    def compiled(self, code: str, outputs: int, scalars: Sequence[str]) -> Callable[..., Any]:
        name, arguments = re.match(r"template <typename T> void (\w+)\((.*?)\)", code, re.DOTALL).groups()  # type: ignore[union-attr]
        inputs = len(re.findall(r"\bT x\d+", arguments)) - len(scalars)
        if (key := (code, inputs)) not in self.sources:
            self.sources[key] = self._built(code, name, inputs, len(scalars), outputs)
        library = self.sources[key]

        def run(*tensors: torch.Tensor, **given: float) -> Any:
            assert len(tensors) == inputs <= 8
            assert outputs <= 8
            assert list(given) == list(scalars)
            assert len({each.dtype for each in tensors} | {torch.float64, torch.bool}) == 2
            self.calls[name] = self.calls.get(name, 0) + 1
            shape = torch.broadcast_shapes(*(each.shape for each in tensors))
            read = [each.to(torch.float64).expand(shape).contiguous() for each in tensors]
            written = [torch.empty(shape, dtype=torch.float64) for _ in range(outputs)]
            numbers = (ctypes.c_double * max(1, len(scalars)))(*given.values())
            pointers = [(ctypes.c_void_p * len(group))(*(each.data_ptr() for each in group)) for group in (read, written)]
            library.run(ctypes.c_long(written[0].numel()), pointers[0], numbers, pointers[1])
            return written if outputs > 1 else written[0]

        return run

    def claim(self, code: str) -> AbstractContextManager[None] | None:
        return nullcontext() if self.alone else None

    def _built(self, code: str, name: str, inputs: int, scalars: int, outputs: int) -> ctypes.CDLL:
        given = [f"in[{at}][i]" for at in range(inputs)] + [f"scalars[{at}]" for at in range(scalars)]
        taken = [f"out[{at}][i]" for at in range(outputs)]
        loop = f"for (long i = 0; i < n; ++i) {name}<double>({', '.join(given + taken)});"
        run = f'extern "C" void run(long n, const double** in, const double* scalars, double** out) {{ {loop} }}'
        source = self._folder / f"{name}_{len(list(self._folder.glob('*.cpp')))}.cpp"
        source.write_text(f"{_HEAD}{code}\n{run}\n")
        built = source.with_suffix(".so")
        subprocess.run(
            ["g++", "-O1", "-ffp-contract=off", "-fno-builtin", "-shared", "-fPIC", "-o", str(built), str(source)], check=True
        )
        return ctypes.CDLL(str(built))
