"""The strategy of all Cases of a campaign: mostly one call against the oracle, then sequences of calls, and relations."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Sequence

from hypothesis import strategies as st
from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Config, Device, Kernel
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import CALLS, Case, Check
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.earlier_calls import other_problems, takes_call
from attnfuzz.strategies.models import model_cases
from attnfuzz.strategies.relations import RELATION_LIMITS, relation_cases, relations_of
from attnfuzz.strategies.shapes import Variant, all_variants

__all__ = ["call_checks", "trial_cases"]

_OUT_OF = 16
_RELATIONS, _CALLS = 2, 3
"""Number of Cases in 16 that are relations, and that draw a check with or without earlier calls (`call_checks`)."""

_Of = tuple[Capabilities, Device, Limits | None, tuple[Variant, ...], bool]
_KIND = st.integers(0, _OUT_OF - 1)
_SHARES = 64
_SHARE = st.integers(0, _SHARES - 1)


_USUAL: dict[Device, Limits] = {"cpu": Limits(length=300, tiles=4), "cuda": Limits(length=2048, tiles=96)}
"""Length and tiles of most Cases: on a CPU they take half as long as those of 12 tiles; on a GPU up to 400,000 scores are judged
in half a millisecond, and a large Case takes as long as a hundred of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Shares:
    """Number of Cases in 64 that are large: of those against the oracle, and of relations."""

    oracle: int
    relations: int


_SHARES_OF: dict[Device, _Shares] = {"cpu": _Shares(32, 32), "cuda": _Shares(4, 1)}
"""Relations have no oracle, so that their largest Cases on a GPU are larger still."""
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

    def plain(room: Limits | None) -> st.SearchStrategy[Case]:
        if models:
            return model_cases(kernel, device=device, limits=room or Limits(), variants=chosen, longest=longest)
        return cases(kernel, device=device, limits=room, variants=chosen)

    def related(room: Limits) -> st.SearchStrategy[Case] | None:
        return relation_cases(kernel, device=device, limits=room, variants=chosen) if relates else None

    relates = not models and bool(relations_of(kernel, chosen, device))
    of_relations = limits if device == "cpu" and limits else RELATION_LIMITS[device]
    usual = _usual(limits or of_relations, device, blocks=any(each.config.tile("block", 0) for each in chosen))
    large = _Parts(kernel, device, chosen, plain(limits), related(of_relations))
    return _trials(_Sizes(_Parts(kernel, device, chosen, plain(usual), related(usual)), large, _SHARES_OF[device]))


def _usual(largest: Limits, device: Device, *, blocks: bool) -> Limits:
    """Return the limits of most Cases; on a CPU several blocks of a mask take all the tiles there are."""
    usual = _USUAL[device]
    tiles = largest.tiles if blocks and device == "cpu" else usual.tiles
    return dataclasses.replace(largest, length=min(largest.length, usual.length), tiles=min(largest.tiles, tiles))


@st.composite
def _trials(draw: st.DrawFn, sizes: _Sizes) -> Case:
    """Draw a Case of the usual size, or a large one."""
    kind, share = draw(_KIND), draw(_SHARE)
    if sizes.usual.related is not None and kind >= _OUT_OF - _RELATIONS:
        strategy = (sizes.large if share >= _SHARES - sizes.shares.relations else sizes.usual).related
        assert strategy is not None
        return draw(strategy)
    return _with_check(draw, sizes.large if share >= _SHARES - sizes.shares.oracle else sizes.usual, kind)


def _with_check(draw: st.DrawFn, parts: _Parts, kind: int) -> Case:
    case = draw(parts.plain)
    if kind < _OUT_OF - _RELATIONS - _CALLS:
        return case
    check = draw(call_checks(parts.kernel, case.problem, case.config, parts.device))
    if check == "other_mask" and not parts.has_other_masks(case):
        check = "twice"
    return replace(case, check=check)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The strategies of Cases of the usual size and of large ones."""

    usual: _Parts
    large: _Parts
    shares: _Shares

    def __repr__(self) -> str:
        return repr(self.usual)


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

    def __repr__(self) -> str:
        return f"<{self.kernel.name} on {self.device}>"

    @functools.cached_property
    def _keys(self) -> frozenset[str]:
        can = self.kernel.capabilities
        return frozenset(self.kernel.compile_key(each.problem(can), each.config) for each in self._variants)

    def has_other_masks(self, case: Case) -> bool:
        """Whether every other mask of an earlier call is compiled already: a Trial must not wait for a compiler."""
        if self.device not in self.kernel.capabilities.compiles_on:
            return True
        others = other_problems(self.kernel, "other_mask", case.problem, case.config, self.device)
        return all(self.kernel.compile_key(other, case.config) in self._keys for other in others)
