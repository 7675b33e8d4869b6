"""Effects of one instruction of NVIDIA's machine code (Hopper's) on registers, as far as origins of values matter.

A place is a register "R12", a uniform one "UR4", or four bytes of a thread's own stack, "S264".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from attnfuzz.kernels.triton.machine_code.sass import Instruction

__all__ = ["Effect", "descriptors_of", "effect_of", "swaps"]

_PREDICATE = re.compile(r"@!?U?P\w+\s+")
_PREDICATE_OPERAND = re.compile(r"!?U?P(\d|T)$")
_REGISTER = re.compile(r"\b(U?R)(\d+)(\.64)?")
_TARGET = re.compile(r"(U?R)(\d+)\b")
_NOTHING = ("STG", "STS", "ST.", "RED.", "BAR", "SYNCS", "UTMA", "UBLK", "LDGSTS", "LDGDEPBAR", "WARPSYNC", "NANOSLEEP")
_LOADS = ("LDG", "LDS", "LD.", "ATOM")
_RUN = ("S2R", "S2UR", "CS2R", "LDC", "ULDC", "SHFL", "VOTE", "B2R", "LEPC")
_WIDE = ("CS2R", "IMAD.WIDE", "UIMAD.WIDE", "UIADD3.64")
_STACK = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
_PRODUCT = re.compile(r"\b[HIQB]GMMA\b.*?\bgdesc\[UR(\d+)\]")
_ACCUMULATORS = re.compile(r"[HIQB]GMMA\.64x(\d+)x\d+\.(F16)?|[A-Z]MMA\.\w+\.(F16)?")
_XOR = re.compile(r"U?LOP3\.LUT (U?R\d+), (U?R\d+)(?:\.reuse)?, (U?R\d+)(?:\.reuse)?, U?RZ, 0x3c\b")


@dataclass(frozen=True, slots=True)
class Effect:
    """Each target takes the origins of its sources, and `origin` in addition."""

    targets: tuple[str, ...]
    sources: tuple[tuple[str, ...], ...]
    """The sources of each target; empty: a constant."""
    origin: str | None = None
    """ "loaded" from memory, or "run": known only while the kernel runs."""
    maybe: bool = False
    """Whether it depends on a predicate."""


def descriptors_of(instruction: Instruction) -> tuple[tuple[str, str], ...]:
    """(lower, upper) register of each shared memory descriptor that a product of warp groups (WGMMA) reads.

    gdesc[UR8] stands for four registers: of A in UR8 and UR9, where A is in shared memory, and of B in UR10 and UR11.
    """
    product = _PRODUCT.search(instruction.text)
    if not product:
        return ()
    first = int(product[1])
    operands = _operands(instruction.text)
    a_in_registers = len(operands) > 1 and _TARGET.match(operands[1]) is not None
    return tuple((f"UR{at}", f"UR{at + 1}") for at in ((first + 2,) if a_in_registers else (first, first + 2)))


def effect_of(instruction: Instruction) -> Effect | None:
    """The effect of an instruction; None: none that matters here."""
    text = _PREDICATE.sub("", instruction.text, count=1) if instruction.text.startswith("@") else instruction.text
    maybe = text != instruction.text
    name, operands = text.split(" ", 1)[0], _operands(text)
    if not operands or name.startswith(_NOTHING):
        return None
    if name.startswith("STL"):
        return _stored(name, operands, maybe)
    if _PREDICATE_OPERAND.match(operands[0]) and len(operands) > 1:
        operands = operands[1:]
    target = _TARGET.match(operands[0])
    if not target:
        return None
    count = _count(name)
    targets = tuple(f"{target[1]}{int(target[2]) + i}" for i in range(count))
    if _ACCUMULATORS.match(name):
        return Effect(targets, ((),) * count, "run", maybe)
    if name.startswith("LDL"):
        places = _places(operands[1], count)
        return Effect(targets, places, None if places[0] else "run", maybe)
    none = ((),) * count
    if name.startswith(_LOADS):
        return Effect(targets, none, "loaded", maybe)
    if name.startswith(_RUN):
        return Effect(targets, none, None if "SRZ" in operands[-1] else "run", maybe)
    if name == "UIADD3.64":
        pairs = [match for each in operands[1:] if (match := _TARGET.match(each))]
        return Effect(targets, tuple(tuple(f"{x[1]}{int(x[2]) + i}" for x in pairs) for i in range(2)), None, maybe)
    read = tuple(register for each in operands[1:] if "c[" not in each for register in _registers(each))
    if "WIDE" in name and (last := _TARGET.match(operands[-1])):
        read += (f"{last[1]}{int(last[2]) + 1}",)
    return Effect(targets, (read,) * count, "run" if any("c[" in each for each in operands) else None, maybe)


def swaps(block: list[Instruction]) -> dict[int, tuple[str, str] | None]:
    """Addresses of each three exclusive ors that exchange two registers: the registers at the last one, None at the others."""
    effects = ((each, effect_of(each)) for each in block)
    writes = [(each.address, target, _XOR.match(each.text)) for each, effect in effects if effect for target in effect.targets]
    exchanged: dict[int, tuple[str, str] | None] = {}
    for number, (address, target, xor) in enumerate(writes):
        if xor is None or address in exchanged or target not in (pair := {xor[2], xor[3]}) or len(pair) != 2:
            continue
        (other,) = pair - {target}
        # The next two writes to either register: the same exclusive or, to the other one and to this one again.
        rest = [each for each in writes[number + 1 :] if each[1] in pair][:2]
        if [each[1] for each in rest if each[2] and {each[2][2], each[2][3]} == pair] == [other, target]:
            exchanged |= {address: None, rest[0][0]: None, rest[1][0]: (target, other)}
    return exchanged


def _operands(text: str) -> list[str]:
    text = _PREDICATE.sub("", text, count=1) if text.startswith("@") else text
    return [each.strip() for each in text.partition(" ")[2].split(",") if each.strip()]


def _stored(name: str, operands: list[str], maybe: bool) -> Effect | None:
    source = re.match(r"R(\d+|Z)", operands[-1])
    places = _places(operands[0], _count(name))
    if not source or not places[0]:
        return None
    held = tuple(() if source[1] == "Z" else (f"R{int(source[1]) + i}",) for i in range(len(places)))
    return Effect(tuple(each[0] for each in places), held, None, maybe)


def _places(operand: str, count: int) -> tuple[tuple[str, ...], ...]:
    """The places on the stack; empty where a register decides."""
    match = _STACK.match(operand)
    base = int(match[1] or "0", 16) if match else 0
    return tuple((f"S{base + 4 * i}",) if match else () for i in range(count))


def _count(name: str) -> int:
    """Number of registers that it writes. Accumulators of 64 x N scores lie in 128 threads, those of HMMA's 16 x 8 in 32."""
    if product := _ACCUMULATORS.match(name):
        return int(product[1] or 8) // (4 if product[2] or product[3] else 2)
    if name.startswith("LDSM"):
        return int(match[1]) if (match := re.search(r"\.([124])$", name)) else 1
    if ".128" in name:
        return 4
    return 2 if re.search(r"\.64\b", name) or (name.startswith(_WIDE) and not name.startswith("CS2R.32")) else 1


def _registers(operand: str) -> list[str]:
    return [f"{kind}{int(number) + i}" for kind, number, wide in _REGISTER.findall(operand) for i in range(2 if wide else 1)]
