"""Whether machine code is made of what its kernel requires: products by tcgen05, tensor memory allocated, read and freed."""

from __future__ import annotations

import re

from attnfuzz.harness.compile.figures import Figures
from attnfuzz.harness.compile.tensor_memory import tensor_memory
from attnfuzz.kernels.lowering import Operand, Required

__all__ = ["lacking"]

_PATH = "tcgen05"
_LEFT = re.compile(r"\bUTC[A-Z]*MMA\S*\s+(gdesc|tmem)\[")
_MEMORIES: dict[str, Operand] = {"gdesc": "shared", "tmem": "tensor"}
_COMPLETION = re.compile(r"\bUTCBAR\b")
_READ = re.compile(r"\bLDTM\b")


def lacking(required: Required, figures: Figures, sass: str) -> str | None:
    """Say what the code lacks, a line for each; None: nothing.

    Args:
        required: what it must have.
        figures: the code's figures.
        sass: its machine code, as `figures.disassembled` returns it.
    """
    paths, left = figures.tensor_core, {_MEMORIES[each] for each in _LEFT.findall(sass)}
    lines = []
    if paths != _PATH:
        lines.append(f"products by {paths or 'no tensor core'}, and all must be tcgen05's: one on fragments becomes mma.sync")
    elif left != required.left:
        lines.append(f"products take left operands from {_named(left)} memory, and it must be {_named(required.left)} memory")
    completions = len(_COMPLETION.findall(sass))
    if completions < required.products:
        lines.append(f"products complete on mbarriers at {completions} places, and it must be {required.products} or more")
    if figures.tensor_columns == 0:
        lines.append("no tensor memory is allocated (tcgen05.alloc)")
    if not _READ.search(sass):
        lines.append("tensor memory is never read (tcgen05.ld)")
    if tensor_memory(sass).unfreed:
        lines.append("a path from tcgen05.alloc to the end does not free all tensor memory: later blocks wait for it without end")
    return "\n".join(lines) or None


def _named(memories: set[Operand] | frozenset[Operand]) -> str:
    return " and ".join(sorted(memories)) or "no"
