"""Parser of NVIDIA's machine code as `nvdisasm -c -g` prints it: functions, basic blocks, and their order."""

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
"""Beginning of an instruction after which the next one is not reached."""
_ANYWHERE = re.compile(r"\b(CALL|BRXU?|JMXU?|JMP)\b")


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction, such as "@P0 IADD3 R1, R2, 0x1, RZ"."""

    address: int
    text: str
    line: str | None
    """Line of the source, such as "flex_device.py:465", where the compiler kept it."""


@dataclass(slots=True)
class Function:
    """A function: its basic blocks in the order of their addresses; it starts with the first."""

    name: str
    blocks: list[list[Instruction]] = field(default_factory=list)
    following: list[list[int]] = field(default_factory=list)
    """For each block the blocks that may run next."""
    known: bool = True
    """Whether `following` is complete: no jump to a register's address, no call of another function."""


def functions(sass: str) -> Iterator[Function]:
    """Yield the functions that have instructions.

    Args:
        sass: output of `nvdisasm -c -g`; without `-g` no lines of the source are known.
    """
    listings: dict[str, list[str]] = {}
    current: list[str] = []
    for line in sass.splitlines():
        if section := _SECTION.match(line):
            current = listings.setdefault(section[1], [])
        current.append(line)
    for name, lines in listings.items():
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
