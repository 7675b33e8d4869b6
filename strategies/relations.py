"""The strategy of Cases for metamorphic relations, at sizes that only the kernel's own cost limits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st
from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Config, Device, Kernel, Shape
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Packing, Problem
from attnfuzz.strategies.case import RELATIONS, Case, Check, Recipe
from attnfuzz.strategies.cases import Limits
from attnfuzz.strategies.heads import heads
from attnfuzz.strategies.kernel_limits import Room, shapes_in_room, within_limits
from attnfuzz.strategies.lengths import batches
from attnfuzz.strategies.recipes import scales
from attnfuzz.strategies.relation_problems import SPREAD, related_problems, spread, why_not_relation
from attnfuzz.strategies.variants import Variant, all_variants, one_variant

__all__ = ["RELATION_LIMITS", "relation_cases", "relations_of"]

RELATION_LIMITS: dict[Device, Limits] = {
    "cpu": Limits(batch=4, heads=6, length=300, tiles=12, scores=1 << 17),
    "cuda": Limits(batch=8, heads=8, length=1 << 17, tiles=1 << 20),
}
"""Limits of a Trial without an oracle: on CUDA up to 65,536 x 65,536 in tiles of 64 for one head, or 131,072 keys."""
_FACTORS = (1.0, 1.0, 1.0, 0.5, 0.25, 2.0, 4.0)
_MODERATE = st.sampled_from((1.0, 1.0, 1.0, 0.25, 4.0))
_SEEDS, _BOOLEANS = st.integers(0, 2**16 - 1), st.booleans()
_TINY = st.sampled_from((1, 2, 2))
_SLACK, _NO_SLACK = st.sampled_from((0, 0, 0, 1, 3)), st.just(0)
_Pairs = tuple[tuple[int, int], ...]


def relations_of(kernel: Kernel, variants: Sequence[Variant], device: Device) -> dict[Check, tuple[Variant, ...]]:
    """Return the relations that apply to `kernel`, each with the variants it applies to."""
    can = kernel.capabilities
    wanted: dict[Check, bool] = {
        "repeated_heads": (can.groups is None or (1 in can.groups and max(can.groups) > 1))
        and (can.heads_max is None or can.heads_max >= min(each for each in can.groups or (2,) if each > 1)),
        "shifted_scores": not (can.deviations.prescaled_q or can.deviations.half_scaled_k),
        "split_keys": can.unequal and can.multiple_k == 1 and {"o", "lse"} <= set(can.outputs),
        "split_batch": can.batch_max is None or can.batch_max > 1,
        "huge_strides": can.layouts and can.multiples == (1, 1) and not can.shapes,
    }
    if can.shapes:
        wanted |= {check: bool(_shapes_of(check, can)) for check in RELATIONS}
    fits: dict[Check, Callable[[Variant], bool]] = {
        "permuted_keys": lambda variant: variant.causal is None,
        "split_keys": lambda variant: variant.causal is None,
        "future_keys": lambda variant: variant.causal is not None,
        "shifted_scores": lambda variant: variant.dims[0] > 1,
        "huge_strides": _takes_huge_strides(kernel, device),
    }
    if 0 not in can.page_sizes:
        return {}
    # The size of errors under modifiers is not known: no relation takes them.
    plain = [each for each in variants if not each.modifiers]
    fitting_variants = {}
    for check in RELATIONS:
        fitting = tuple(each for each in plain if fits.get(check, _always)(each)) if wanted.get(check, True) else ()
        if fitting:
            fitting_variants[check] = fitting
    return fitting_variants


def _shapes_of(check: Check, can: Capabilities) -> tuple[Shape, ...]:
    """Return the shapes of a kernel's pool to which a relation applies: those of its other launches are in the pool too."""

    def applies(shape: Shape) -> bool:
        batch, heads_q, kv_heads, n_q, n_k = shape
        match check:
            case "split_batch":
                return batch > 1 and (1, heads_q, kv_heads, n_q, n_k) in can.shapes
            case "repeated_heads":
                return heads_q > kv_heads and (batch, heads_q, heads_q, n_q, n_k) in can.shapes
            case "split_keys":
                # The middle is one of the places where keys are cut.
                parts = {n_k // 2, n_k - n_k // 2}
                return {"o", "lse"} <= set(can.outputs) and all((*shape[:4], n) in can.shapes for n in parts)
            case "huge_strides":
                return False
            case "shifted_scores":
                return not (can.deviations.prescaled_q or can.deviations.half_scaled_k)
            case "future_keys":
                return n_q > 1 and n_k > 1
            case _:
                return True

    return tuple(each for each in can.shapes if min(each[3:]) > 0 and applies(each))


def _always(variant: Variant) -> bool:  # noqa: ARG001 - one of the table's functions
    return True


def _takes_huge_strides(kernel: Kernel, device: Device) -> Callable[[Variant], bool]:
    """Return whether a variant takes them: a kernel that takes other layouts need not take these."""

    @functools.cache
    def problems(*parts: Any) -> tuple[Problem, ...]:
        # Checking a Problem takes longer than asking the kernel, and does not depend on the Config.
        dtype, causal, dims, modifiers = parts
        problem = Variant(dtype, causal, dims, Config(), modifiers).problem(kernel.capabilities)
        return related_problems("huge_strides", replace(problem, seqlens_q=(2,), seqlens_k=(2,)), 0)

    def takes(variant: Variant) -> bool:
        pitched = problems(variant.dtype, variant.causal, variant.dims, variant.modifiers)
        return all(kernel.supports(each, variant.config, device) is None for each in pitched)

    return takes


def relation_cases(
    kernel: Kernel, *, device: Device, limits: Limits | None = None, variants: Sequence[Variant] | None = None
) -> st.SearchStrategy[Case]:
    """Return the strategy of Cases with a relation as check, within `variants` (default: all it declares) and `limits`.

    Raises:
        BadArgument: no relation applies to the kernel.
    """
    chosen = tuple(variants) if variants is not None else all_variants(kernel, device)
    variants_of = relations_of(kernel, chosen, device)
    if not variants_of:
        raise BadArgument(f"kernel={kernel.name!r}: no relation applies to it on {device}; give it more variants")
    return _relation_cases(_Parts(kernel, device, limits or RELATION_LIMITS[device], variants_of))


class _Parts:
    """The strategies of the parts of a kernel's relations, each built once. Its repr is short, since Hypothesis writes it out."""

    def __init__(self, kernel: Kernel, device: Device, limits: Limits, variants_of: dict[Check, tuple[Variant, ...]]) -> None:
        self.kernel, self.device, self.limits, self.can = kernel, device, limits, kernel.capabilities
        huge = variants_of.get("huge_strides", ())
        self.first = huge[0] if huge and device in self.can.compiles_on else None
        """The variant of half of the Cases with huge strides, where each variant's code for strides is compiled."""
        # Which offset is huge is one of three, in one of four tensors. Where one variant alone has relations, they are few.
        weight = 6 if self.first is not None and len(huge) == 1 else 3
        self.check = st.sampled_from([check for check in variants_of for _ in range(weight if check == "huge_strides" else 1)])
        self.packing = st.sampled_from(self.can.packings)
        self.variant = {check: one_variant(variants) for check, variants in variants_of.items()}

    def __repr__(self) -> str:
        return f"<relations of {self.kernel.name}>"


@st.composite
def _relation_cases(draw: st.DrawFn, parts: _Parts) -> Case:
    kernel, device, can = parts.kernel, parts.device, parts.can
    check = draw(parts.check)
    of_first = check == "huge_strides" and parts.first is not None and draw(_BOOLEANS)
    variant = parts.first if of_first and parts.first is not None else draw(parts.variant[check])
    packing, room, kv_heads, pairs = draw(_lengths(parts, check, variant))
    slack = _SLACK if can.slack and check != "huge_strides" else _NO_SLACK
    problem = replace(
        variant.problem(can),
        seqlens_q=tuple(pair[0] for pair in pairs),
        seqlens_k=tuple(pair[1] for pair in pairs),
        packing=packing,
        heads=room.heads,
        kv_heads=kv_heads,
        slack_q=draw(slack),
        slack_k=draw(slack),
    )
    scale = draw(scales(can))
    problem = replace(problem, softmax_scale=scale if spread(replace(problem, softmax_scale=scale)) <= SPREAD else None)
    case = Case(kernel=kernel.name, problem=problem, recipe=draw(_recipes(problem)), config=variant.config, check=check)
    # A kernel may take less than it declares: only some lengths, say.
    assume(kernel.supports(problem, variant.config, device) is None)
    # A cut that leaves a part empty may not be supported; another seed cuts elsewhere.
    seeds = (replace(case, recipe=replace(case.recipe, seed=case.recipe.seed + step)) for step in range(5))
    fitting = next((each for each in seeds if why_not_relation(kernel, each, device) is None), None)
    assume(fitting is not None)
    assert fitting is not None
    return fitting


@st.composite
def _lengths(draw: st.DrawFn, parts: _Parts, check: Check, variant: Variant) -> tuple[Packing, Room, int, _Pairs]:
    """Draw the packing, the room for lengths, which has the heads, the key/value heads, and the lengths of each sequence."""
    limits, can = parts.limits, parts.can
    tiles = limits.tiles_of(variant.config)
    if can.shapes:
        shapes = shapes_in_room(_shapes_of(check, can), limits.room(variant, 1, tiles))
        batch, heads_q, kv_heads, n_q, n_k = draw(shapes)
        return draw(parts.packing), limits.room(variant, heads_q, tiles), kv_heads, ((n_q, n_k),) * batch
    heads_q, kv_heads = draw(_heads(check, can, min(limits.heads, max(1, tiles // 2))))
    packing = draw(parts.packing)
    dense = packing == "dense"
    room = limits.room(variant, heads_q, max(heads_q, tiles // 2 if check == "split_batch" else tiles))
    pairs = draw(_tiny(can.unequal) if check == "huge_strides" else batches(can, room, dense=dense))
    pairs = _suited(check, can, variant, pairs, dense)
    # Only where it changes something: the room for two halves of a batch is less than the whole needs.
    return packing, room, kv_heads, pairs if can.multiples == (1, 1) else _in_multiples(check, can, room, pairs)


def _in_multiples(check: Check, can: Capabilities, room: Room, pairs: _Pairs) -> _Pairs:
    pairs = within_limits(pairs, can, room)
    return pairs * 2 if check == "split_batch" and len(pairs) == 1 else pairs


def _heads(check: Check, can: Capabilities, most: int) -> st.SearchStrategy[tuple[int, int]]:
    if check != "repeated_heads":
        return heads(can, most)
    return _groups(can.groups or tuple(range(2, 9)), most if can.heads_max is None else min(most, can.heads_max))


@functools.cache
def _groups(of_kernel: tuple[int, ...], most: int) -> st.SearchStrategy[tuple[int, int]]:
    groups = [each for each in of_kernel if each > 1]
    groups = [each for each in groups if each <= most] or [min(groups)]
    return st.sampled_from(sorted((group * kv, kv) for group in groups for kv in range(1, max(1, most // group) + 1)))


@functools.cache
def _tiny(unequal: bool) -> st.SearchStrategy[_Pairs]:
    # Memory is mapped around each row, which takes as long as launches.
    pair = st.tuples(st.integers(2, 5), st.integers(2, 5))
    pair = pair if unequal else pair.map(lambda lengths: (lengths[0], lengths[0]))
    # One sequence has no stride of sequences.
    return _TINY.flatmap(lambda count: st.tuples(*[pair] * count))


def _suited(check: Check, can: Capabilities, variant: Variant, pairs: _Pairs, dense: bool) -> _Pairs:
    """Return the drawn batch, changed as little as the relation needs."""
    least = (1, 1)
    if check == "future_keys":
        least = (2, 2) if not can.unequal else (1, 2) if variant.causal == "top_left" else (2, 1)
    if check == "split_keys" and not can.zero_k:
        pairs = tuple((q, max(2, k)) for q, k in pairs)
    if not any(q >= least[0] and k >= least[1] for q, k in pairs):
        pairs = ((max(pairs[0][0], least[0]), max(pairs[0][1], least[1])), *pairs[1:])
    if check == "split_batch" and len(pairs) == 1:
        pairs = pairs * 2
    return (pairs[0],) * len(pairs) if dense else pairs


@st.composite
def _recipes(draw: st.DrawFn, problem: Problem) -> Recipe:
    """Draw a Recipe of near-normal values whose scores stay generic."""
    q_scale = draw(_scales(tuple(each for each in _FACTORS if spread(problem, each) <= SPREAD or each == 1.0)))
    fitting = tuple(each for each in _FACTORS if spread(problem, q_scale * each) <= SPREAD or each * q_scale == 1.0)
    return Recipe(
        q_scale=q_scale,
        k_scale=draw(_scales(fitting)),
        v_scale=draw(_MODERATE),
        do_scale=draw(_MODERATE),
        seed=draw(_SEEDS),
    )


@functools.cache
def _scales(factors: tuple[float, ...]) -> st.SearchStrategy[float]:
    return st.sampled_from(factors)
