"""Tiles that are overwritten while a product still reads them, in what Triton makes for Hopper.

Products of warp groups (WGMMA) read shared memory while the program goes on, and copies into it (cp.async) do as well. Triton's
pipeliner counts the buffers that a tile needs by its first use: one where that is a load into registers, though a later
product, not waited for until the next turn of the loop, reads the tile too. The next tile is then copied into that buffer
before the product is done (seen in Triton 3.6.0 and 3.9.0).
"""

from __future__ import annotations

import re

__all__ = ["overwritten"]

_ONE_BUFFER = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<1x")
_VIEW = re.compile(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)")
_COPY = re.compile(r"ttg\.async_copy_global_to_local (%\w+), (%\w+)")
_PRODUCT = re.compile(r"ttng\.warp_group_dot (.*?) \{isAsync = true")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = 0")
_NAME = re.compile(r"%\w+")


def _twice(lines: list[str]) -> list[str]:
    """The body of each loop two times: what a turn begins, the next one meets."""
    found: list[str] = []
    loops: list[tuple[str, int]] = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        if " scf.for " in line and line.rstrip().split(" loc(")[0].endswith("{"):
            loops.append((indent, len(found) + 1))
        elif loops and line.startswith(loops[-1][0] + "}"):
            found += found[loops.pop()[1] :]
        found.append(line)
    return found


def overwritten(ttgir: str) -> tuple[str, ...]:
    """What is copied into a tile of one buffer while a product that reads it may be under way, each in a sentence.

    Args:
        ttgir: the kernel after Triton's passes for the GPU, as text.
    """
    lines = _twice(ttgir.splitlines())
    buffer: dict[str, str] = {}
    for line in lines:
        if found := _ONE_BUFFER.search(line):
            buffer[found[1]] = found[1]
        elif (found := _VIEW.search(line)) and found[2] in buffer:
            buffer[found[1]] = buffer[found[2]]
    told, read = dict[str, None](), set[str]()
    for line in lines:
        if _WAIT.search(line):
            read.clear()
        elif found := _PRODUCT.search(line):
            read |= {buffer[name] for name in _NAME.findall(found[1]) if name in buffer}
        elif (found := _COPY.search(line)) and buffer.get(found[2]) in read:
            # The names are the source's, numbered.
            name = re.sub(r"_\d+$", "", found[1].removeprefix("%"))
            told[f"{name}: the next tile is copied into its one buffer while a product may still read it"] = None
    return tuple(told)
