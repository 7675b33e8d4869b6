"""Tiles that are overwritten while a product still reads them, in Triton's code for Hopper.

Products of warp groups (WGMMA) and copies into shared memory (cp.async) run while the program goes on. Triton's pipeliner counts
the buffers that a tile needs by its first use: one where that is a load into registers, even if a later product, not waited for
until the next iteration of the loop, reads the tile too. The next tile is then copied into that buffer before the product is
done (observed in Triton 3.6.0 and 3.9.0).
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
    """Repeat the body of each loop: the second iteration meets what the first one started."""
    repeated: list[str] = []
    loops: list[tuple[str, int]] = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        if " scf.for " in line and line.rstrip().split(" loc(")[0].endswith("{"):
            loops.append((indent, len(repeated) + 1))
        elif loops and line.startswith(loops[-1][0] + "}"):
            repeated += repeated[loops.pop()[1] :]
        repeated.append(line)
    return repeated


def overwritten(ttgir: str) -> tuple[str, ...]:
    """Describe copies into a tile of one buffer while a product that reads it may be running, one sentence each.

    Args:
        ttgir: the kernel after Triton's passes for the GPU, as text.
    """
    lines = _twice(ttgir.splitlines())
    buffer: dict[str, str] = {}
    for line in lines:
        if match := _ONE_BUFFER.search(line):
            buffer[match[1]] = match[1]
        elif (match := _VIEW.search(line)) and match[2] in buffer:
            buffer[match[1]] = buffer[match[2]]
    sentences, read = dict[str, None](), set[str]()
    for line in lines:
        if _WAIT.search(line):
            read.clear()
        elif match := _PRODUCT.search(line):
            read |= {buffer[name] for name in _NAME.findall(match[1]) if name in buffer}
        elif (match := _COPY.search(line)) and buffer.get(match[2]) in read:
            # The names are the source's, numbered.
            name = re.sub(r"_\d+$", "", match[1].removeprefix("%"))
            sentences[f"{name}: the next tile is copied into its one buffer while a product may still read it"] = None
    return tuple(sentences)
