"""Tensor memory in Blackwell's machine code: how many columns a block allocates, and whether every path to the end frees them.

ptxas makes of tcgen05.alloc a search for free columns, again and again until it succeeds, by the warp's elected thread, and of
tcgen05.dealloc the return of a mask of columns. Each warp's first thread is followed from the function's entry through branches
and loops: its thread index is known, and so are the branches that depend on it alone. At any other branch both ways are followed:
none that is not freed is missed, but what is freed may be reported, where a thread index goes through the stack. Behind a
guardrail's trap, which ends the kernel, nothing is followed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attnfuzz.kernels.triton.machine_code.sass import Function, Instruction, functions

__all__ = ["COLUMNS", "TensorMemory", "tensor_memory"]

COLUMNS = 512
"""Columns of a multiprocessor's tensor memory: PTX ISA, "Tensor Memory"."""
_ALLOCATION, _RELEASE = "UTCATOMSWS.FIND_AND_SET", "UTCATOMSWS.AND"
_UNIT = 32
"""Columns of one bit of an allocation's mask."""
_WARP, _WARPS = 32, 32
_TEXTS = 1 << 16
"""Instructions whose parts are kept: each is read for every warp, and again in loops."""
_MOST = 64
"""Allocations that are counted; a loop that allocates without end is not followed further."""
_WORD, _PREDICATES = 0xFFFFFFFF, 7
_GUARD = re.compile(r"@(!?)(U?P\w+)\s+(.*)")
_PLACE = re.compile(r"(U?(?:R|P)(?:\d+|Z|T))(?:\.reuse)?$")
_GROUPS = re.compile(r"\.x(\d+)$")
_COMPARISON = re.compile(r"U?ISETP\.(EQ|NE|LT|LE|GT|GE)(\.U32)?\.(AND|OR)$")
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}
_PAIRS = re.compile(r"^(F\w+2|D\w+|CS2R)\b|\.(64|WIDE|F64)\b")
"""Instructions that write two registers."""
_NOTHING = ("ST", "RED.", "UTMA", "UTCBAR", "UTCHMMA", "UTCQMMA", "ATOMS.", "SYNCS.ARRIVE", "BRA", "CALL", "NANOSLEEP")
"""Beginnings of instructions that write no register, but may name one first."""
_MOVES, _MOVES_BY_PRODUCT = ("MOV", "UMOV", "R2UR"), ("IMAD.MOV", "IMAD.MOV.U32", "IMAD.U32")
_AND, _OR = "0xc0", "0xfc"
"""Tables of LOP3.LUT."""
_Bits = tuple[int, int]
"""The bits of a value that are known, as a mask, and those bits."""
_Values = dict[str, _Bits]
"""What is known of registers and of predicates (0 or 1)."""


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """What a block does with tensor memory."""

    columns: int | None
    """Columns of all allocations of the warp that allocates most; None: some are not constant."""
    unfreed: bool
    """Whether some path from an allocation to the end of the function frees less than was allocated."""


@dataclass(slots=True)
class _State:
    """What holds at the beginning of a block, over all ways to reach it."""

    values: _Values
    held: frozenset[int]
    """Numbers of allocations that are not freed."""


@functools.lru_cache(1)
def tensor_memory(sass: str) -> TensorMemory:
    """Read from machine code (`nvdisasm -c`) what its functions do with tensor memory; the worst of them."""
    warps = [
        _followed(function, warp * _WARP)
        for function in functions(sass)
        if any(_ALLOCATION in each.text for block in function.blocks for each in block)
        for warp in range(_WARPS)
    ]
    columns = [each.columns for each in warps]
    known = [each for each in columns if each is not None]
    return TensorMemory(max(known, default=0) if known == columns else None, any(each.unfreed for each in warps))


def _followed(function: Function, thread: int) -> TensorMemory:
    """What one thread, the elected one of its warp, does."""
    begins: list[_State | None] = [None] * len(function.blocks)
    begins[0] = _State({}, frozenset({0}))
    waiting, bits, unfreed = [0], dict[int, int | None](), False
    while waiting:
        number = waiting.pop()
        begin = begins[number]
        assert begin is not None
        state = _State(dict(begin.values), begin.held)
        again = number in function.following[number]
        for each in function.blocks[number]:
            if _ALLOCATION in each.text and not again:
                bits[each.address] = _known(_operands(each.text)[-1], state.values)
            _apply(state, each, thread, again)
        last = function.blocks[number][-1].text
        unfreed |= _ends(last, state.values) and max(state.held) > 0
        for following in _reached(function, number, state.values):
            if _joined(begins, following, state) and following not in waiting:
                waiting.append(following)
    known = [each for each in bits.values() if each is not None]
    return TensorMemory(_UNIT * sum(known) if len(known) == len(bits) else None, unfreed)


def _apply(state: _State, instruction: Instruction, thread: int, again: bool) -> None:
    guard, text = _guarded(instruction.text)
    runs = None if guard is None else _truth(guard, state.values)
    if runs is False:
        return
    if text.startswith((_ALLOCATION, _RELEASE)):
        # The first try counts, whether it succeeds or is made again.
        change = -1 if text.startswith(_RELEASE) else 0 if again else 1
        held = frozenset(max(-_MOST, min(_MOST, each + change)) for each in state.held)
        state.held = held if guard is None or runs else held | state.held
    value = _value(text, state.values, thread)
    before = {} if value is None else {value[0]: state.values.get(value[0], (0, 0))}
    for place in _written(text):
        state.values.pop(place, None)
    if value is not None:
        place, bits = value
        after = bits if guard is None or runs else _agreeing(bits, before[place])
        if after[0]:
            state.values[place] = after


def _value(text: str, values: _Values, thread: int) -> tuple[str, _Bits] | None:
    """(place, value) that an instruction writes, where some of it is known."""
    name, operands = text.split(" ", 1)[0], _operands(text)
    if name in ("LOP3.LUT", "ULOP3.LUT"):
        return _logical(operands, values)
    whole = _whole(name, operands, values, thread)
    return None if whole is None else (whole[0], (_WORD, whole[1]))


def _logical(operands: list[str], values: _Values) -> tuple[str, _Bits] | None:
    """The `and` or `or` of two operands. ptxas keeps predicates as bits of a register with others that are not known."""
    tested = re.fullmatch(r"U?P\d", operands[0]) is not None
    arguments = operands[2:] if tested else operands[1:]
    if len(arguments) < 4 or arguments[3] not in (_AND, _OR):
        return None
    (mask_a, a), (mask_b, b) = (_bits(each, values) for each in arguments[:2])
    if arguments[3] == _AND:
        # a bit that is 0 on one side is 0
        mask, bits = mask_a & mask_b | mask_a & ~a | mask_b & ~b, a & b
    else:
        mask, bits = mask_a & mask_b | a | b, a | b
    mask &= _WORD
    if not tested:
        return (operands[0], (mask, bits & mask)) if mask else None
    return (operands[0], (_WORD, int(bits & mask != 0))) if bits & mask or mask == _WORD else None


def _whole(name: str, operands: list[str], values: _Values, thread: int) -> tuple[str, int] | None:
    """(place, value) that an instruction writes, where all of it is known."""
    if not operands:
        return None
    known = [_known(each, values) for each in operands]
    target = operands[0]
    if name in ("S2R", "S2UR") and operands[1] == "SR_TID.X":
        return target, thread
    if name == "ELECT" or (name.startswith("VOTE") and ".ANY" in name and _truth(operands[-1], values)):
        # the thread that is followed is the elected one, and one of any
        return (target, 1) if re.fullmatch(r"U?P\d", target) else None
    if name in _MOVES or (name in _MOVES_BY_PRODUCT and operands[1] == operands[2] == "RZ"):
        return None if known[-1] is None else (target, known[-1])
    if name == "SHFL.IDX" and len(operands) > 3 and known[3] == 0:
        # of the warp's first thread, which is the one followed
        return None if known[2] is None else (operands[1], known[2])
    if name in ("SHF.R.U32.HI", "USHF.R.U32.HI") and operands[1] in ("RZ", "URZ"):
        shift, shifted = known[2], known[3]
        return None if shift is None or shifted is None else (target, shifted >> shift)
    if name == "P2R" and operands[1] == "PR" and known[3] is not None:
        kept = {i: _truth(f"P{i}", values) for i in range(_PREDICATES) if known[3] >> i & 1}
        return None if None in kept.values() else (target, sum((bit or 0) << i for i, bit in kept.items()))
    return _compared(name, operands, known, values)


def _compared(name: str, operands: list[str], known: list[int | None], values: _Values) -> tuple[str, int] | None:
    """The predicate of a comparison: `ISETP.GT.U32.AND P0, PT, R1, 0x1f, PT`."""
    comparison = _COMPARISON.match(name)
    if comparison is None or len(operands) < 5 or known[2] is None or known[3] is None:
        return None
    a, b = (x if comparison[2] else x - (x >> 31 << 32) for x in (known[2], known[3]))
    result = _COMPARED[comparison[1]](a, b)
    other = _truth(operands[4], values)
    if other is None:
        # false and anything is false, true or anything is true
        return (operands[0], int(result)) if result == (comparison[3] == "OR") else None
    return operands[0], int((result and other) if comparison[3] == "AND" else (result or other))


def _known(operand: str, values: _Values) -> int | None:
    if re.fullmatch(r"-?0x[0-9a-f]+", operand):
        return int(operand, 16) & _WORD
    place = _PLACE.match(operand)
    if place is None:
        return None
    mask, bits = (_WORD, 0) if place[1] in ("RZ", "URZ") else values.get(place[1], (0, 0))
    return bits if mask == _WORD else None


def _bits(operand: str, values: _Values) -> _Bits:
    known = _known(operand, values)
    return values.get(operand, (0, 0)) if known is None else (_WORD, known)


def _agreeing(one: _Bits, other: _Bits) -> _Bits:
    """The bits that are known on both sides, and the same."""
    mask = one[0] & other[0] & ~(one[1] ^ other[1])
    return mask, one[1] & mask


def _truth(predicate: str, values: _Values) -> bool | None:
    name = predicate.removeprefix("!")
    held = 1 if name in ("PT", "UPT") else _known(name, values)
    return None if held is None else bool(held) != predicate.startswith("!")


@functools.lru_cache(_TEXTS)
def _written(text: str) -> tuple[str, ...]:
    return tuple(_places(text))


def _places(text: str) -> Iterator[str]:
    """Places that an instruction writes: registers behind the predicates that some write as well."""
    name, operands = text.split(" ", 1)[0], _operands(text)
    if name.startswith("R2P"):
        yield from (f"P{i}" for i in range(_PREDICATES))
    yield from (each for each in operands[:4] if re.fullmatch(r"U?P\d", each))
    if "SETP" in name or name.startswith(_NOTHING):
        return
    registers = [each for each in operands if not re.fullmatch(r"!?U?P[\dT]", each)]
    # a load of 256 bits names two groups of four
    for target in registers[: 2 if ".256" in name else 1]:
        if register := re.fullmatch(r"(U?R)(\d+)", target):
            yield from (f"{register[1]}{int(register[2]) + i}" for i in range(_count(name)))


def _count(name: str) -> int:
    """Number of registers that it writes."""
    if many := _GROUPS.search(name):
        return int(many[1])
    if name.startswith(("HMMA", "IMMA", "LDSM")) or ".128" in name or ".256" in name:
        return 4
    return 2 if _PAIRS.search(name) else 1


def _ends(last: str, values: _Values) -> bool:
    """Whether the function may end with a block's last instruction."""
    guard, text = _guarded(last)
    return text.startswith("EXIT") and (guard is None or _truth(guard, values) is not False)


def _reached(function: Function, number: int, values: _Values) -> list[int]:
    """The blocks that may follow."""
    guard, text = _guarded(function.blocks[number][-1].text)
    following = function.following[number]
    if "guardrail_trap" in text:
        return []
    uniform = re.match(r"BRA\.U\s+(!?UP\w+)", text)
    condition = uniform[1] if uniform else guard
    taken = None if condition is None else _truth(condition, values)
    if taken is None or not text.startswith(("BRA", "EXIT")):
        return following
    targets = [each for each in following if each != number + 1]
    if taken:
        return targets if targets or text.startswith("EXIT") else following
    return [each for each in following if each == number + 1]


def _joined(begins: list[_State | None], number: int, state: _State) -> bool:
    """Add `state` to the beginning of block `number`; returns whether anything was new."""
    known = begins[number]
    if known is None:
        begins[number] = _State(dict(state.values), state.held)
        return True
    values = _Values()
    for place, bits in known.values.items():
        if (both := _agreeing(bits, state.values.get(place, (0, 0))))[0]:
            values[place] = both
    held = known.held | state.held
    new = values != known.values or held != known.held
    begins[number] = _State(values, held)
    return new


@functools.lru_cache(_TEXTS)
def _guarded(text: str) -> tuple[str | None, str]:
    """(the predicate that guards an instruction, or None; the instruction without it)."""
    guard = _GUARD.match(text)
    return (None, text) if guard is None else (guard[1] + guard[2], guard[3])


@functools.lru_cache(_TEXTS)
def _operands(text: str) -> list[str]:
    return [each.strip().removesuffix(".reuse") for each in _guarded(text)[1].partition(" ")[2].split(",") if each.strip()]
