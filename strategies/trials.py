"""The strategy of all Cases of a campaign: mostly one call against the oracle, then sequences of calls, and relations."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Sequence

from hypothesis import strategies as st
from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Config, Device, Kernel, protocol_of
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import CALLS, DEFAULT_TILE, Case, Check
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.earlier_calls import other_problems, takes_call
from attnfuzz.strategies.models import model_cases
from attnfuzz.strategies.relations import RELATION_LIMITS, relation_cases, relations_of
from attnfuzz.strategies.schedules import SCHEDULES
from attnfuzz.strategies.stream_checks import stream_checks
from attnfuzz.strategies.variants import Variant, all_variants

__all__ = ["call_checks", "trial_cases"]

_OUT_OF = 16
_RELATIONS: dict[Device, int] = {"cpu": 2, "cuda": 1}
"""Number of Cases in 16 that are relations: each is several launches, and takes a GPU's child as long as five others."""
_CALLS = 3
"""Number of Cases in 16 that draw a check with or without earlier calls (`call_checks`)."""
_PLAIN: tuple[Check, ...] = ("oracle",) * 4
"""Of these and STREAMS one is drawn where no earlier call is. A Case of STREAMS waits several times for the device, which other
processes have meanwhile: beside eight on one H100 it took 6 to 23 ms in a batch of triton.varlen, a plain one 3 to 4."""

_Of = tuple[Capabilities, Device, Limits | None, tuple[Variant, ...], bool]
_KIND = st.integers(0, _OUT_OF - 1)
_SHARES = 64
_SHARE = st.integers(0, _SHARES - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Size:
    """Most tokens of a sequence and most tiles of Cases; how many in 64 have it, with the oracle and of relations."""

    length: int
    tiles: int
    oracle: int
    relations: int


_SIZES: dict[Device, tuple[_Size, ...]] = {
    "cpu": (_Size(300, 4, 48, 48),),
    "cuda": (_Size(2048, 12, 44, 44), _Size(2048, 96, 18, 19)),
}
"""The others are as large as the limits allow. On one H100 a Case with room for 12 tiles took 0.3 ms of the GPU, one with 96 took
1 ms, and the largest 2.6 ms (triton.varlen); a run had no more Cases where 52 in 64 were of the first kind. Relations have no
oracle, so that their largest are larger still.
"""
_GRADIENTS, _TERMS = {"dq", "dk", "dv"}, 3
_SMALL_TILE = 1 << 13
"""Scores of a tile up to which most Cases of a CPU have it: those of larger tiles cost as much as a large Case."""
_LAST: deque[tuple[Kernel, _Of, st.SearchStrategy[Case]]] = deque(maxlen=32)
"""The strategies built last: to build one may cost as much as to draw 100 Cases from it, and a campaign asks in each round."""


def trial_cases(
    kernel: Kernel,
    *,
    device: Device,
    limits: Limits | None = None,
    variants: Sequence[Variant] | None = None,
    models: bool = False,
) -> st.SearchStrategy[Case]:
    """Return the strategy of Cases of `kernel` on `device` with all checks that apply, within `variants` (default: all).

    With `models` they have the attention shapes of published models, and no relations: `variants` are of `model_variants` then.

    Raises:
        BadArgument: the kernel declares nothing that can be drawn.
    """
    chosen = tuple(variants) if variants is not None else all_variants(kernel, device)
    rest = (kernel.capabilities, device, limits, chosen, models)
    for each, of, strategy in tuple(_LAST):
        if each is kernel and of == rest:
            return strategy
    _LAST.append((kernel, rest, strategy := _built(kernel, device, limits, chosen, models=models)))
    return strategy


def _built(
    kernel: Kernel, device: Device, limits: Limits | None, chosen: tuple[Variant, ...], *, models: bool
) -> st.SearchStrategy[Case]:
    longest = (limits or Limits()).length

    def plain(room: Limits | None, of: tuple[Variant, ...]) -> st.SearchStrategy[Case]:
        if models:
            return model_cases(kernel, device=device, limits=room or Limits(), variants=of, longest=longest)
        return cases(kernel, device=device, limits=room, variants=of)

    def parts(room: Limits | None, of_relations: Limits, of: tuple[Variant, ...]) -> _Parts:
        relates = not models and bool(relations_of(kernel, of, device))
        relations = relation_cases(kernel, device=device, limits=of_relations, variants=of) if relates else None
        return _Parts(kernel, device, chosen, plain(room, of), relations)

    of_relations = limits if device == "cpu" and limits else RELATION_LIMITS[device]
    blocks = any(each.config.tile("block", 0) for each in chosen)
    cheap = chosen if models else _of_small_tiles(chosen, device)
    usual = [(size, _within(limits or of_relations, size, device, blocks=blocks)) for size in _SIZES[device]]
    smaller = [(size.oracle, size.relations, parts(room, room, cheap)) for size, room in usual]
    return _trials(_Sizes(smaller, parts(limits, of_relations, chosen)))


def _of_small_tiles(variants: tuple[Variant, ...], device: Device) -> tuple[Variant, ...]:
    """Return the variants whose tiles are no large part of what a Case costs on a CPU; all where there are none, or on a GPU."""

    def size(each: Variant) -> int:
        return each.config.tile("tile_m", DEFAULT_TILE) * each.config.tile("tile_n", DEFAULT_TILE)

    return tuple(each for each in variants if device != "cpu" or size(each) <= _SMALL_TILE) or variants


def _within(largest: Limits, size: _Size, device: Device, *, blocks: bool) -> Limits:
    """Return the limits of Cases of a size; on a CPU several blocks of a mask take all the tiles there are."""
    tiles = largest.tiles if blocks and device == "cpu" else size.tiles
    grouped = min(largest.heads, largest.tiles)
    return dataclasses.replace(largest, length=min(largest.length, size.length), tiles=min(largest.tiles, tiles), grouped=grouped)


@st.composite
def _trials(draw: st.DrawFn, sizes: _Sizes) -> Case:
    """Draw a Case of one of the sizes, the smallest first."""
    kind, share = draw(_KIND), draw(_SHARE)
    relates = kind >= sizes.first_relation and not (sizes.few_plain and share % 2)
    if relates and (strategy := sizes.for_relations[share].related) is not None:
        return draw(strategy)
    if kind == sizes.of_protocol:
        return replace(draw(sizes.for_oracle[0].plain), check="protocol", schedule=draw(SCHEDULES))
    return _with_check(draw, sizes.for_oracle[share], calls=kind >= sizes.first_relation - _CALLS)


def _with_check(draw: st.DrawFn, parts: _Parts, *, calls: bool) -> Case:
    case = draw(parts.plain)
    if not calls:
        return replace(case, check="twice") if parts.shows_an_order(case) else case
    check = draw(call_checks(parts.kernel, case.problem, case.config, parts.device))
    if check == "oracle" and parts.of_streams and (other := draw(_one_of((*_PLAIN, *parts.of_streams)))) != "oracle":
        return replace(case, check=other)
    if check == "other_mask" and not parts.has_other_masks(case):
        check = "twice"
    elif check == "oracle" and case.problem.dtype == "float32" and parts.takes_twice(case):
        # Another order of additions shows in few bits, which the rounding of O and gradients to 16 bits hides.
        check = "twice"
    return replace(case, check=check)


class _Sizes:
    """The strategies of Cases by their size: `_SHARES` of those against the oracle, and of relations, smallest first."""

    def __init__(self, smaller: Sequence[tuple[int, int, _Parts]], largest: _Parts) -> None:
        self.for_oracle = [parts for count, _, parts in smaller for _ in range(count)]
        self.for_relations = [parts for _, count, parts in smaller for _ in range(count)]
        for every in (self.for_oracle, self.for_relations):
            every += [largest] * (_SHARES - len(every))
        self.first_relation = _OUT_OF - _RELATIONS[largest.device]
        self.few_plain = largest.few_plain
        protocol = largest.device == "cpu" and protocol_of(largest.kernel) is not None
        self.of_protocol = self.first_relation - _CALLS - 1 if protocol else None
        """The one of `_OUT_OF` numbers whose Cases run as warp roles: of the smallest size, as they are interpreted."""

    def __repr__(self) -> str:
        return repr(self.for_oracle[0])


def call_checks(kernel: Kernel, problem: Problem, config: Config, device: Device) -> st.SearchStrategy[Check]:
    """Return the strategy of "oracle" and all of CALLS that apply to `problem`, simplest first."""
    return _one_of(("oracle", *(each for each in CALLS if takes_call(kernel, each, problem, config, device))))


@functools.cache
def _one_of(checks: tuple[Check, ...]) -> st.SearchStrategy[Check]:
    return st.sampled_from(checks)


class _Parts:
    """The strategies of a kernel's Cases, and the code compiled for its variants. Its repr is short: Hypothesis writes it out.

    A strategy with a filter that is an argument of a composite itself is validated by Hypothesis at each draw.
    """

    def __init__(
        self,
        kernel: Kernel,
        device: Device,
        variants: Sequence[Variant],
        plain: st.SearchStrategy[Case],
        related: st.SearchStrategy[Case] | None,
    ) -> None:
        self.kernel, self.device, self._variants = kernel, device, variants
        self.plain, self.related = plain, related
        self.of_streams = stream_checks(kernel, device)
        """Checks on other streams: of about one in 80 Cases, none on a CPU."""

    def __repr__(self) -> str:
        return f"<{self.kernel.name} on {self.device}>"

    @functools.cached_property
    def _keys(self) -> frozenset[str]:
        can = self.kernel.capabilities
        return frozenset(self.kernel.compile_key(each.problem(can), each.config) for each in self._variants)

    @property
    def few_plain(self) -> bool:
        """Whether most variants have modifiers, and no relations: half as many relations, as all are of the few others."""
        return 2 * sum(bool(each.modifiers) for each in self._variants) > len(self._variants)

    def takes_twice(self, case: Case) -> bool:
        """Whether the same call may be made twice."""
        return takes_call(self.kernel, "twice", case.problem, case.config, self.device)

    def shows_an_order(self, case: Case) -> bool:
        """Whether two equal calls are to show in which order a kernel adds, which gives equal bits each time.

        It takes three terms, so that two orders differ: heads of a group in dK and dV, or tiles of keys in dQ.
        """
        problem, tile = case.problem, case.config.tile("tile_n", DEFAULT_TILE)
        if problem.dtype != "float32" or not {*self.kernel.capabilities.deterministic} >= _GRADIENTS:
            return False
        pairs = zip(problem.seqlens_q, problem.seqlens_k, strict=True)
        several = problem.groups >= _TERMS or any(n_q and n_k > (_TERMS - 1) * tile for n_q, n_k in pairs)
        return several and self.takes_twice(case)

    def has_other_masks(self, case: Case) -> bool:
        """Whether every other mask of an earlier call is compiled already: a Trial must not wait for a compiler."""
        if self.device not in self.kernel.capabilities.compiles_on:
            return True
        others = other_problems(self.kernel, "other_mask", case.problem, case.config, self.device)
        return all(self.kernel.compile_key(other, case.config) in self._keys for other in others)
