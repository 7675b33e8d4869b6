"""Figures of machine code: registers, spills, shared memory, and the path to the tensor cores."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from attnfuzz.harness.compile.tensor_memory import tensor_memory
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.lowering import MachineCode

__all__ = ["PATHS", "Figures", "disassembled", "disassembler", "figures_of", "rank"]

PATHS = ("mma", "wgmma", "tcgen05")
"""Paths of a product to the tensor cores, the slowest first."""
_INSTRUCTIONS = {
    "tcgen05": re.compile(r"\bUTC[A-Z]*MMA\b"),
    "wgmma": re.compile(r"\b[HIQB]GMMA\b"),
    "mma": re.compile(r"\b[HIDBQO]MMA\b"),
}
"""The instructions in SASS."""
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s", re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_USED = re.compile(r"Used (\d+) registers(.*)")
_STATIC = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one function of a kernel; of several entry functions, the largest."""

    registers: int
    """Registers of a thread."""
    spills: int
    """Bytes that a thread stores because it lacks registers, plus bytes that it loads again: ptxas' two figures."""
    shared: int
    """Bytes of shared memory of a block, static and dynamic."""
    tensor_core: str | None
    """ "wgmma", "mma", ...; several joined by +; None: none."""
    tensor_columns: int | None
    """Columns of tensor memory that a block allocates; None: the machine code does not show how many."""
    instructions: int
    """Instructions of the machine code, of all functions."""


def figures_of(code: MachineCode, sass: str) -> Figures:
    """Read figures from machine code, from its `sass` (see `disassembled`) and from the output of ptxas.

    Raises:
        BadArgument: the output of ptxas lacks the figures.
    """
    log = code.log()
    entries = tuple(_entries(log))
    if not entries:
        raise BadArgument(f"ptxas: its output has no registers ({log[:200]!r}); report this with the compilers' versions")
    return Figures(
        registers=max(registers for _, registers, _ in entries),
        spills=sum(int(stores) + int(loads) for stores, loads in _SPILLS.findall(log)),
        shared=max(static + code.dynamic_shared.get(name, 0) for name, _, static in entries),
        tensor_core=_path(sass),
        tensor_columns=tensor_memory(sass).columns,
        instructions=len(_INSTRUCTION.findall(sass)),
    )


def disassembled(cubin: bytes) -> str:
    """Disassemble machine code, with lines of the source if the compiler kept them.

    Raises:
        BadArgument: there is no disassembler, or it cannot read the code.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code.cubin"
        file.write_bytes(cubin)
        done = subprocess.run(
            [disassembler(), "-c", "-g", str(file)], capture_output=True, text=True, errors="replace", check=False
        )
    if done.returncode:
        raise BadArgument(f"nvdisasm: it cannot read the compiler's output ({done.stderr.strip()[:300]}); install a newer one")
    return done.stdout


def rank(tensor_core: str | None) -> int:
    """Return the rank of a function's best path: 0 for none, higher is faster."""
    return max((PATHS.index(each) + 1 for each in (tensor_core or "").split("+") if each in PATHS), default=0)


def _entries(log: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, registers, static shared memory) of each entry function."""
    name = None
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
        elif (used := _USED.search(line)) and name is not None:
            static = _STATIC.search(used[2])
            yield name, int(used[1]), int(static[1]) if static else 0
            name = None


def _path(sass: str) -> str | None:
    return "+".join(name for name, instruction in _INSTRUCTIONS.items() if instruction.search(sass)) or None


@functools.cache
def disassembler() -> str:
    """Return the path of nvdisasm, which Triton and CUDA toolkits include.

    Raises:
        BadArgument: it is not installed.
    """
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "backends" / "nvidia" / "bin" / "nvdisasm"
        if bundled.is_file():
            return str(bundled)
    path = shutil.which("nvdisasm")
    if path is None:
        raise BadArgument(
            "nvdisasm: it is not on this machine; pip install triton, which has it, or put a CUDA toolkit's on PATH"
        )
    return path
