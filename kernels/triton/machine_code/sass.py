"""NVIDIA's machine code as nvdisasm prints it (`nvdisasm -c -g`): functions, basic blocks, and what leads where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

__all__ = ["Function", "Instruction", "functions"]

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
_LABEL = re.compile(r"^(\.L_\w+):")
_LINE = re.compile(r'^\s*//## File "([^"]*)", line (\d+)$')
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_LEAVES = re.compile(r"\b(BRA|EXIT|RET|CALL|BRXU?|JMXU?|JMP)\b")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_NEVER_PAST = re.compile(r"(BRA\s+`|EXIT\b|RET\b)")
"""At the beginning of an instruction after which the next one is not reached."""
_ANYWHERE = re.compile(r"\b(CALL|BRXU?|JMXU?|JMP)\b")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One of them: "@P0 IADD3 R1, R2, 0x1, RZ"."""

    address: int
    text: str
    line: str | None
    """Of the source, "flex_device.py:465", where the compiler kept it."""


@dataclass(slots=True)
class Function:
    """Its basic blocks in the order of their addresses, the first one entered first."""

    name: str
    blocks: list[list[Instruction]] = field(default_factory=list)
    following: list[list[int]] = field(default_factory=list)
    """Of each block those that may run next."""
    known: bool = True
    """Whether that is so: not where a register says where to go on, nor where another function is called."""


def functions(sass: str) -> Iterator[Function]:
    """Those with instructions.

    Args:
        sass: what `nvdisasm -c -g` prints; without `-g` no lines of the source are known.
    """
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in sass.splitlines():
        if section := _SECTION.match(line):
            current = found.setdefault(section[1], [])
        current.append(line)
    for name, lines in found.items():
        function = _function(name, lines)
        if function.blocks:
            yield function


def _function(name: str, lines: list[str]) -> Function:
    function, labels, current, place = Function(name), dict[str, int](), list[Instruction](), None
    for line in lines:
        if label := _LABEL.match(line):
            if current:
                function.blocks.append(current)
                current = []
            labels[label[1]] = len(function.blocks)
        elif source := _LINE.match(line):
            place = f"{PurePath(source[1]).name}:{source[2]}"
        elif instruction := _INSTRUCTION.match(line):
            current.append(Instruction(int(instruction[1], 16), instruction[2], place))
            if _LEAVES.search(instruction[2]):
                function.blocks.append(current)
                current = []
    if current:
        function.blocks.append(current)
    for number, block in enumerate(function.blocks):
        last = block[-1].text
        function.known &= not _ANYWHERE.search(last)
        next_ones = [labels[each] for each in _TARGET.findall(last) if each in labels] if _LEAVES.search(last) else []
        if not _NEVER_PAST.match(last):
            next_ones.append(number + 1)
        function.following.append([each for each in dict.fromkeys(next_ones) if each < len(function.blocks)])
    return function
