"""Products of a Triton kernel that read the wrong shared memory: their descriptors, followed through the machine code.

A product of warp groups (WGMMA) finds its tile in shared memory by a descriptor of 64 bits (PTX ISA, "Matrix descriptor"): an
address and an offset in its lower half, an offset and the swizzling in its upper half. Triton computes the upper half from
constants only, and the lower half from nothing that it loads from memory (other compilers may not). ptxas 12.8 sometimes loses
the copy from which both halves are computed: the registers then hold earlier values (bfloat16 values, in the case observed), and
the product reads another tile, or beyond shared memory. A wrong register that also holds an address is not detected.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnfuzz.kernels.triton.machine_code.effects import Effect, descriptors_of, effect_of, swaps
from attnfuzz.kernels.triton.machine_code.sass import Function, Instruction, functions

__all__ = ["astray"]

_Origins = frozenset[tuple[str, int]]
"""Origins of a value: ("loaded" | "run" | "undefined", the first such instruction's address); empty: constants only."""
_UNDEFINED: _Origins = frozenset({("undefined", 0)})
_WORDS = {"loaded": "was loaded{at}", "run": "is no constant", "undefined": "nothing has set"}
_State = dict[str, _Origins]
_Step = tuple[Instruction, Effect | None]


def astray(sass: str) -> tuple[str, ...]:
    """Describe products that read shared memory by registers without a descriptor: one sentence per line of source.

    Sentences do not name registers and addresses: another compile would choose others, and a known finding would look new.

    Args:
        sass: machine code of one architecture, as `nvdisasm -c -g` prints it.
    """
    sentences = dict[str, None]()
    for function in functions(sass):
        if function.known and any(descriptors_of(each) for block in function.blocks for each in block):
            sentences |= dict.fromkeys(_sentence(function, each, origins) for each, origins in _wrong_products(function))
    return tuple(sentences)


def _sentence(function: Function, instruction: Instruction, origins: _Origins) -> str:
    kinds = dict(sorted(origins, reverse=True))
    kind = next(each for each in _WORDS if each in kinds)
    line = next((x.line for block in function.blocks for x in block if x.address == kinds[kind] and x.line), None)
    what = _WORDS[kind].format(at=f" at {line}" if line else "")
    where = instruction.line or function.name
    return f"{where}: a product's shared memory descriptor is made of a register that {what}: wrong code of ptxas"


def _wrong_products(function: Function) -> Iterator[tuple[Instruction, _Origins]]:
    """Yield the first such product of each line, in order, and the origins of the value that it takes for a descriptor."""
    reported = set[str | int]()
    steps = [list(_steps(block)) for block in function.blocks]
    for begin, block in zip(_settled(function, steps), steps, strict=True):
        if begin is None:
            continue
        state = dict(begin)
        for instruction, effect in block:
            for lower, upper in descriptors_of(instruction):
                low = frozenset(each for each in _held(state, lower) if each[0] != "run")
                if (wrong := low or _held(state, upper)) and (place := instruction.line or instruction.address) not in reported:
                    reported.add(place)
                    yield instruction, wrong
            _apply(state, instruction, effect)


def _steps(block: list[Instruction]) -> Iterator[_Step]:
    exchanged = swaps(block)
    for each in block:
        if each.address in exchanged:
            pair = exchanged[each.address]
            yield each, None if pair is None else Effect(pair, ((pair[1],), (pair[0],)))
        else:
            yield each, effect_of(each)


def _settled(function: Function, steps: list[list[_Step]]) -> list[_State | None]:
    """The state at the beginning of each block, over all ways to reach it; None: it is never reached."""
    begins: list[_State | None] = [None] * len(steps)
    begins[0] = {}
    waiting = [0]
    while waiting:
        number = waiting.pop()
        state = dict(begins[number] or {})
        for instruction, effect in steps[number]:
            _apply(state, instruction, effect)
        for following in function.following[number]:
            if _joined(begins, following, state) and following not in waiting:
                waiting.append(following)
    return begins


def _joined(begins: list[_State | None], number: int, state: _State) -> bool:
    """Add `state` to the beginning of block `number`; returns whether anything was new."""
    known = begins[number]
    if known is None:
        begins[number] = dict(state)
        return True
    more = False
    for place in known.keys() | state.keys():
        before = _held(known, place)
        after = _first_of_each(before | _held(state, place))
        if after != before:
            known[place] = after
            more = True
    return more


def _apply(state: _State, instruction: Instruction, effect: Effect | None) -> None:
    if effect is None:
        return
    own: _Origins = frozenset({(effect.origin, instruction.address)}) if effect.origin else frozenset()
    origins_of = [_first_of_each(own.union(*(_held(state, each) for each in sources))) for sources in effect.sources]
    for target, origins in zip(effect.targets, origins_of, strict=True):
        # A predicate that guards this write guards its readers as well: the target does not become undefined.
        state[target] = _first_of_each(origins | state[target]) if effect.maybe and target in state else origins


def _held(state: _State, place: str) -> _Origins:
    return state.get(place, _UNDEFINED)


def _first_of_each(origins: _Origins) -> _Origins:
    """The first origin of each kind: sets that grow without end would never settle."""
    if len(origins) < 2:
        return origins
    first = dict(sorted(origins, reverse=True))
    return frozenset(first.items())
