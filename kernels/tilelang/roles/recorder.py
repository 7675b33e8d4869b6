"""Record the steps of a block's roles: warps that take the same branches are one role.

A role that computes is assumed to be synchronised within itself: TileLang adds the barriers among the threads that share a tile
operation. Nothing synchronises warps that only copy or start products: the first does that, the others are a role of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attnfuzz.kernels.tilelang.roles import regions
from attnfuzz.kernels.tilelang.roles.expressions import UnsupportedByRolesError
from attnfuzz.kernels.tilelang.roles.memory import Memory
from attnfuzz.kernels.tilelang.roles.regions import Buffer, Part
from attnfuzz.kernels.tilelang.roles.steps import BlockProgram, Effect, Kind, Mbarrier, Role, Step
from attnfuzz.kernels.tilelang.roles.translate import Translation

__all__ = ["record_block"]

WARP = 32
WHOLE_BLOCK = "sync_threads"
_OWN_SCOPES = ("local", "local.fragment", "local.var")
_REDUCTIONS: dict[str, Any] = {"max": np.fmax, "min": np.fmin, "sum": np.add}
_SHARED = (Kind.COMPUTE, Kind.WAIT, Kind.DRAIN, Kind.SYNC)
"""Steps that all warps of a role execute; others may be of a thread that stands for them."""
_Function = Callable[[Memory], Any]


def record_block(
    translation: Translation, block: tuple[int, int, int], numbers: dict[str, Any], tensors: list[Any]
) -> BlockProgram:
    """Record all roles of one block.

    Args:
        translation: the function.
        block: its indices.
        numbers: parameters that are numbers, and extents, by name.
        tensors: arrays of the parameters that are tensors, None for the others.

    Raises:
        UnsupportedByRolesError: something that the executor does not know.
    """
    own = _Block(translation, numbers, tensors)
    groups = _groups(translation, own, block, numbers)
    for number, (threads, starts) in enumerate(groups):
        recorder = Recorder(own, number, threads, alone=len(groups) == 1, starts=starts)
        translation.record(recorder, block, numbers)
        own.finish(recorder)
    roles = tuple(each for each in own.roles if each.steps)
    barriers = tuple(each for array in own.barriers.values() for each in array)
    return BlockProgram(translation.name, block, roles, barriers, tuple(own.buffers), own.tensors, _own(roles))


def _groups(
    translation: Translation, own: _Block, block: tuple[int, int, int], numbers: dict[str, Any]
) -> list[tuple[Any, bool]]:
    """Return the threads of each role, and whether it starts copies and products.

    Warps that share their computation are a role. Of warps that share all steps, without computation, the first is one, which
    starts copies and products, and the others are one that only waits for the same.
    """
    if not translation.branches:
        return [(np.arange(translation.threads), True)]
    by_steps: dict[tuple[Any, ...], list[int]] = {}
    warps = [np.arange(first, min(first + WARP, translation.threads)) for first in range(0, translation.threads, WARP)]
    for number, threads in enumerate(warps):
        scout = _Scout(own, 0, threads, alone=True)
        translation.record(scout, block, numbers)
        computes = any(kind is Kind.COMPUTE for kind, *_ in scout.seen)
        chosen = tuple(each for each in scout.seen if not computes or each[0] in _SHARED)
        by_steps.setdefault((computes, *chosen), []).append(number)
    groups: list[tuple[Any, bool]] = []
    for (computes, *_), group in by_steps.items():
        parts = [group] if computes else [group[:1], group[1:]]
        groups += [(np.concatenate([warps[number] for number in part]), part[0] == group[0]) for part in parts if part]
    return groups


@functools.lru_cache(maxsize=256)
def _axis(low: int, extent: int, axis: int, rank: int) -> Any:
    return (low + np.arange(extent)).reshape([extent if each == axis else 1 for each in range(rank)])


class _Block:
    """What the roles of a block share."""

    def __init__(self, translation: Translation, numbers: dict[str, Any], tensors: list[Any]) -> None:
        self.buffers: list[Buffer] = []
        self.tensors: dict[int, Any] = {}
        for slot, each in enumerate(translation.buffers):
            shape = tuple(int(extent) for extent in eval(each.shape, {"P": numbers, **numbers}))
            self.buffers.append(Buffer(each.name, shape, each.dtype, each.scope, slot))
            if each.parameter is not None:
                self.tensors[slot] = tensors[each.parameter]
        self.barriers = {
            slot: tuple(Mbarrier(name, index, count, len(counts) == 1, slot) for index, count in enumerate(counts))
            for slot, (name, counts) in translation.barriers.items()
        }
        self.threads = translation.threads
        self.roles: list[Role] = []
        self._private: dict[tuple[int, int], Buffer] = {}
        self.parts: dict[tuple[int, ...], tuple[Part, tuple[Any, ...]]] = {}
        """Accesses by buffer and indices, and the indices themselves: objects that live have ids of their own."""

    def buffer(self, slot: int, role: int) -> Buffer:
        """The buffer of a slot; registers are another one for each role."""
        buffer = self.buffers[slot]
        if buffer.scope not in _OWN_SCOPES or role == 0:
            return buffer
        key = (slot, role)
        if key not in self._private:
            self._private[key] = Buffer(buffer.name, buffer.shape, buffer.dtype, buffer.scope, len(self.buffers))
            self.buffers.append(self._private[key])
        return self._private[key]

    def finish(self, recorder: Recorder) -> None:
        """Keep a role's steps."""
        steps, threads = recorder.steps, recorder.threads
        kinds = {each.kind for each in steps}
        products = any(each.kind is Kind.PRODUCT and each.stream.startswith("tcgen05") for each in steps)
        waits = not recorder.starts
        what = "waiting" if waits else "MMA" if products else "DMA" if Kind.COPY in kinds else "compute"
        _number_iterations(steps)
        first, last = int(threads[0]), int(threads[-1])
        self.roles.append(Role(f"{what} threads {first}-{last}", (first, last + 1), steps))


class Recorder:
    """Called by a translated function; `threads` are those that execute the current statement.

    `starts`: they start the copies and products that one thread starts for all.
    """

    def __init__(self, block: _Block, role: int, threads: Any, *, alone: bool, starts: bool = True) -> None:
        self.loops: list[tuple[str, int]] = []
        self.threads = threads
        self.starts = starts
        self.steps: list[Step] = []
        self._own = block
        self._role = role
        self._alone = alone
        self._outer: list[Any] = []
        self._reads: list[Part] = []

    # what expressions use

    def axis(self, low: int, extent: int, axis: int, rank: int) -> Any:
        """The values of a parallel loop's variable, along its axis."""
        return _axis(int(low), int(extent), axis, rank)

    def number(self, slot: int, indices: tuple[Any, ...]) -> int:
        """An element of a global tensor of integers."""
        return int(self._own.tensors[slot][tuple(int(each) for each in indices)])

    def read(self, slot: int, indices: tuple[Any, ...], rank: int) -> Part:
        """Elements that the current statement reads."""
        part = self.at(slot, indices, rank)
        self._reads.append(part)
        return part

    def at(self, slot: int, indices: tuple[Any, ...], rank: int) -> Part:
        """Elements of a buffer."""
        # the arrays of loops are the same objects each time, so that most accesses are known already
        key = (slot, self._role, *(each if isinstance(each, int) else id(each) for each in indices))
        known = self._own.parts.get(key)
        if known is None or any(a is not b for a, b in zip(known[1], indices, strict=True) if not isinstance(b, int)):
            known = (regions.elements(self._own.buffer(slot, self._role), indices, rank), indices)
            self._own.parts[key] = known
        return known[0]

    def block(self, slot: int, starts: Sequence[int], extents: Sequence[int]) -> Part:
        """A box of a buffer."""
        return regions.block(self._own.buffer(slot, self._role), starts, extents)

    def barrier(self, slot: int, index: int) -> Mbarrier:
        """An mbarrier."""
        array = self._own.barriers[slot]
        if not 0 <= index < len(array):
            raise IndexError(f"{array[0].name}[{index}] is beyond its {len(array)} barriers")
        return array[index]

    # branches on the thread

    def enter(self, condition: Any) -> bool:
        """Narrow the threads to those for which `condition` holds; whether there are any."""
        chosen = np.broadcast_to(np.asarray(condition, dtype=bool), self.threads.shape)
        self._outer.append(self.threads)
        self.threads = self.threads[chosen]
        return bool(chosen.any())

    def leave(self) -> None:
        """Widen the threads again."""
        self.threads = self._outer.pop()

    def elected(self, extent: int) -> Any:
        """True for one thread of each `extent` threads, or of the block for 0."""
        return self.threads % (extent or self._own.threads) == 0

    # steps

    def _add(self, kind: Kind, text: str, **fields: Any) -> None:
        self.steps.append(Step(kind, text, tuple(self.loops), **fields))

    def _compute(self, text: str, reads: Sequence[Part], writes: Sequence[Part], effect: Effect) -> None:
        reads, writes = (tuple(each for each in parts if each.buffer.tracked) for parts in (reads, writes))
        if self._outer or self._alone:
            self._add(Kind.COMPUTE, text, reads=reads, writes=writes, effect=effect)
            return
        # All roles execute this together: TileLang lets all threads wait before and after.
        for part in (*reads, *writes):
            if part.buffer.scope in _OWN_SCOPES:
                raise UnsupportedByRolesError(f"{text}: {part.buffer.name} is distributed over the threads of several roles")
        self._rendezvous()
        if self._role == 0:
            self._add(Kind.COMPUTE, text, reads=reads, writes=writes, effect=effect)
        self._rendezvous()

    def _rendezvous(self) -> None:
        self.sync()

    def _taken(self) -> tuple[Part, ...]:
        reads, self._reads = tuple(self._reads), []
        return reads

    def store(self, part: Part, value: _Function, masks: tuple[_Function, ...]) -> None:
        """Store to elements, one for each iteration of the parallel loops."""
        self._compute(
            f"store to {part.text}", self._taken(), (part,), lambda memory: memory.store(part, value(memory), _all(masks, memory))
        )

    def add(self, part: Part, value: _Function, masks: tuple[_Function, ...]) -> None:
        """Add atomically to elements."""
        self._compute(
            f"add to {part.text}", self._taken(), (part,), lambda memory: memory.add(part, value(memory), _all(masks, memory))
        )

    def copy(self, source: Part, target: Part) -> None:
        """Copy a box, complete when this returns."""
        text = f"copy {source.text} to {target.text}"
        self._compute(text, (source,), (target,), lambda memory: memory.store(target, memory.load(source)))

    def fill(self, target: Part, value: Any) -> None:
        """Fill a box."""
        self._compute(f"fill {target.text}", (), (target,), lambda memory: memory.store(target, np.asarray(value)))

    def reduce(self, source: Part, target: Part, how: str, axis: int, clear: bool) -> None:
        """Reduce a box along an axis.

        Raises:
            UnsupportedByRolesError: a reduction other than max, min and sum.
        """
        if how not in _REDUCTIONS:
            raise UnsupportedByRolesError(f"tl.tileop.reduce {how}: the executor of roles knows {', '.join(_REDUCTIONS)}")
        function = _REDUCTIONS[how]

        def effect(memory: Memory) -> None:
            value = function.reduce(memory.load(source), axis=axis)
            memory.store(target, value if clear else function(memory.load(target), value))

        self._compute(f"reduce {source.text} to {target.text}", (source, *(() if clear else (target,))), (target,), effect)

    def atomic_add(self, source: Part, target: Part) -> None:
        """Add a box of on-chip memory to one of a tensor."""
        self._compute(
            f"add {source.text} to {target.text}", (source,), (target,), lambda memory: memory.add(target, memory.load(source))
        )

    def gemm(
        self, how: str, a: Part, b: Part, c: Part, a_turned: bool, b_turned: bool, clear: bool, barrier: Mbarrier | None
    ) -> None:
        """A product, added to `c` unless `clear`; the asynchronous ones have started when this returns."""

        def effect(memory: Memory) -> None:
            left, right = (np.atleast_2d(memory.load(each)) for each in (a, b))
            product = np.matmul(left.T if a_turned else left, right.T if b_turned else right)
            old = memory.load(c)
            memory.store(c, np.reshape(product, old.shape) + (0 if clear else old))

        text, reads = f"product of {a.text} and {b.text} to {c.text}", (a, b, *(() if clear else (c,)))
        if how == "gemm":
            if c.buffer.scope == "shared.tmem":
                raise UnsupportedByRolesError("tl.tileop.gemm into tensor memory: use tl.tileop.tcgen05_gemm with an mbarrier")
            self._compute(text, reads, (c,), effect)
            return
        if not self.starts:
            return
        stream = f"{'tcgen05' if how == 'tcgen05_gemm' else 'wgmma'} {self._role}"
        self._add(Kind.PRODUCT, text, reads=reads, writes=(c,), effect=effect, stream=stream, barrier=barrier)

    def tma_copy(self, source: Part, target: Part, barrier: Mbarrier, *, arrives: bool) -> None:
        """Start a copy by one thread, which expects its bytes at `barrier` before, and arrives there afterwards if `arrives`."""
        if not self.starts or (not self._outer and not self._alone and self._role != 0):
            return
        count = regions.size_of(target) * target.buffer.item_bytes
        self._add(Kind.EXPECT, f"expect {count} bytes at {barrier.text}", barrier=barrier, count=count)
        self._add(
            Kind.COPY, f"copy {source.text} to {target.text}", writes=(target,), barrier=barrier, count=count,
            effect=lambda memory: memory.store(target, memory.load(source)),
        )  # fmt: skip
        if arrives:
            self._add(Kind.ARRIVE, f"arrive at {barrier.text}", barrier=barrier, count=1)

    def wait(self, barrier: Mbarrier, parity: int) -> None:
        """Wait for a parity of an mbarrier."""
        self._add(Kind.WAIT, f"wait for parity {int(parity)} of {barrier.text}", barrier=barrier, parity=int(parity))

    def arrive(self, barrier: Mbarrier) -> None:
        """Arrive with all threads."""
        self._add(Kind.ARRIVE, f"arrive at {barrier.text}", barrier=barrier, count=len(self.threads))

    def expect(self, barrier: Mbarrier, count: int) -> None:
        """Expect bytes, announced by each thread."""
        total = int(count) * len(self.threads)
        self._add(Kind.EXPECT, f"expect {total} bytes at {barrier.text}", barrier=barrier, count=total)

    def commit(self, barrier: Mbarrier) -> None:
        """Let an mbarrier have an arrival after the products so far."""
        if not self.starts:
            return
        stream = f"tcgen05 {self._role}"
        self._add(Kind.COMMIT, f"commit products to {barrier.text}", barrier=barrier, stream=stream)

    def drain(self, count: int) -> None:
        """Wait until at most `count` of this role's warpgroup products run."""
        self._add(Kind.DRAIN, f"wait for products but {int(count)}", count=int(count), stream=f"wgmma {self._role}")

    def sync(self, barrier: int = 0, threads: int | None = None) -> None:
        """Wait for all threads of the block, or for `threads` of them at a named barrier."""
        expected = self._own.threads if threads is None else int(threads)
        name = WHOLE_BLOCK if not barrier else f"named barrier {int(barrier)}"
        self._add(Kind.SYNC, name, count=expected, threads=len(self.threads))

    def signal(self, barrier: int, threads: int) -> None:
        """Arrive at a named barrier."""
        name = WHOLE_BLOCK if not barrier else f"named barrier {int(barrier)}"
        self._add(Kind.SIGNAL, name, count=int(threads), threads=len(self.threads))

    def release(self, slot: int) -> None:
        """Free tensor memory: as a write of all of it."""
        buffer = self._own.buffer(slot, self._role)
        part = regions.block(buffer, [0] * len(buffer.shape), buffer.shape)
        self._compute(f"free {buffer.name}", (), (part,), lambda _: None)


class _Scout(Recorder):
    """Notes which steps there are, without what they read and write."""

    def __init__(self, block: _Block, role: int, threads: Any, *, alone: bool) -> None:
        super().__init__(block, role, threads, alone=alone)
        self.seen: list[tuple[Any, ...]] = []

    def axis(self, low: int, extent: int, axis: int, rank: int) -> Any:
        """One value instead of all."""
        return super().axis(low, min(extent, 1), axis, rank)

    def at(self, slot: int, indices: tuple[Any, ...], rank: int) -> Part:  # noqa: ARG002
        """Stand for an access by its buffer."""
        return self._stand_in(slot)

    def block(self, slot: int, starts: Sequence[int], extents: Sequence[int]) -> Part:  # noqa: ARG002
        """Stand for an access by its buffer."""
        return self._stand_in(slot)

    def _stand_in(self, slot: int) -> Part:
        return Part(self._own.buffers[slot], (), (), (), None)

    def _add(self, kind: Kind, text: str, **fields: Any) -> None:
        self.seen.append((kind, text, tuple(self.loops), fields.get("threads"), fields.get("parity")))


def _own(roles: Sequence[Role]) -> frozenset[int]:
    """Return the slots that one role alone uses, and by computation alone."""
    users: dict[int, set[tuple[int, bool]]] = {}
    for number, role in enumerate(roles):
        for step in role.steps:
            for part in (*step.reads, *step.writes):
                users.setdefault(part.buffer.slot, set()).add((number, step.kind is Kind.COMPUTE))
    return frozenset(slot for slot, each in users.items() if len(each) == 1 and all(computes for _, computes in each))


def _number_iterations(steps: list[Step]) -> None:
    """Give each step the iteration of its role's pipeline: of the outermost loop that waits, and behind it the last one.

    A role that never waits in a loop may have one that only starts or signals.
    """
    waiting = {step.loops[0][0] for step in steps if step.loops and step.kind is Kind.WAIT}
    waiting = waiting or {step.loops[0][0] for step in steps if step.loops and step.kind is not Kind.COMPUTE}
    iteration = 0
    for step in steps:
        if step.loops and step.loops[0][0] in waiting:
            iteration = step.loops[0][1]
        step.iteration = iteration


def _all(masks: tuple[_Function, ...], memory: Memory) -> Any:
    if not masks:
        return None
    mask = masks[0](memory)
    for each in masks[1:]:
        mask = np.logical_and(mask, each(memory))
    return mask
