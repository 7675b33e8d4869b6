"""Modifiers where each is a compile: those of the variants of a pool, and the Cases that are drawn with their code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from msgspec.structs import replace as changed
from support.subjects import LIMITS, Subject

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Device, Kernel, WindowForm
from attnfuzz.kernels.expressions.named import MASKS
from attnfuzz.kernels.expressions.tree import parse, to_data
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import Limits, cases, cases_by_compile_key
from attnfuzz.strategies.compiled_modifiers import kinds_of, pooled
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.modifiers import Blocks, chosen, windows
from attnfuzz.strategies.pools import pool
from attnfuzz.strategies.shrink_steps import simpler
from attnfuzz.strategies.variants import MODIFIED, Variant, all_variants, modified


def test_where_each_is_a_compile_variants_have_modifiers_of_their_own() -> None:
    kernel = registry.get("triton.flex")
    plain = pool(all_variants(kernel, "cuda"), 10, 1)
    actual = modified(plain, kernel, "cuda", 1)
    assert actual == modified(plain, kernel, "cuda", 1)
    assert len(actual) == MODIFIED
    assert actual[0] == replace(plain[0], modifiers=())
    assert len({each.modifiers for each in actual}) == MODIFIED
    for each in actual:
        problem = each.problem(kernel.capabilities)
        assert all(getattr(problem, name) == value for name, value in each.modifiers)
    # A kernel without any has what it had.
    other = registry.get("triton.varlen")
    assert modified(plain, other, "cuda", 1) == plain


@pytest.mark.parametrize("name", ["triton.flex", "triton.flex.prescaled", "triton.flex.tf32", "tilelang.modified"])
@pytest.mark.parametrize("seed", range(4))
def test_a_variant_is_given_no_modifiers_that_its_config_does_not_take(name: str, seed: int) -> None:
    kernel = registry.get(name)
    plain = pool(all_variants(kernel, "cuda"), 10, seed)
    actual = modified(plain, kernel, "cuda", seed)
    assert len(actual) >= MODIFIED
    refused = [kernel.supports(each.problem(kernel.capabilities), each.config, "cuda") for each in actual]
    assert refused == [None] * len(actual)
    assert {replace(each, modifiers=None) for each in actual} == set(plain)


def _edges(modifiers: tuple[tuple[str, Any], ...]) -> set[int]:
    """Return the sides of a window and the integers in a mask_mod."""
    found = {int(side) for name, sides in modifiers if name == "window" for side in sides if side is not None}
    trees = [parse(value) for name, value in modifiers if name == "mask_mod"]
    return found | {int(str(each.value)) for tree in trees for each in tree.walk() if each.op == "int"}


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        pytest.param(seed, count, marks=() if seed == at else pytest.mark.slow)
        for at, count in enumerate((3, 9, 10))
        for seed in range(3)
    ],
)
def test_half_of_the_compiled_modifiers_are_for_the_blocks_of_their_variant(count: int, seed: int) -> None:
    """Drawn for any place, they missed the edges of blocks, and lists of blocks hardly differed by head (FLX-30)."""
    kernel = registry.get("triton.flex")
    plain = pool(all_variants(kernel, "cuda"), count, seed)
    for_blocks = {each: set(pooled(kernel.capabilities, MODIFIED, seed, each)) for each in (32, 64, 128)}
    anywhere = set(pooled(kernel.capabilities, MODIFIED, seed))
    shares, edges = [], []
    for variant in plain:
        block = variant.config.integer("block")
        its = [each.modifiers or () for each in modified(plain, kernel, "cuda", seed) if replace(each, modifiers=None) == variant]
        of_blocks = [each for each in its if each in for_blocks[block] - anywhere]
        shares.append(len(of_blocks) / len(its))
        edges += [any(n >= block - 2 and (n + 2) % block <= 3 for n in _edges(each)) for each in of_blocks if _edges(each)]
    # Modifiers that hide a tile of their variant are in no pool as they are.
    assert all(0.2 <= share <= 0.8 for share in shares)
    assert sum(edges) >= len(edges) * 0.5


def test_modifiers_for_blocks_differ_by_block() -> None:
    can = registry.get("triton.flex").capabilities
    longest = [max(max(_edges(each), default=0) for each in pooled(can, MODIFIED, 0, block)) for block in (32, 64, 128)]
    assert longest == sorted(set(longest))
    assert all(longest[i] < 3 * (32, 64, 128)[i] + 2 for i in range(3))


def test_drawn_cases_keep_to_those_modifiers() -> None:
    kernel = registry.get("triton.flex")
    variants = modified(pool(all_variants(kernel, "cuda"), 4, 2), kernel, "cuda", 2)
    allowed = {_trees(each.problem(kernel.capabilities)) for each in variants}
    first, again = (
        cases_by_compile_key(kernel, device="cuda", limits=Limits(), variants=variants, seed=1, draws=60) for _ in range(2)
    )
    assert len(first) > 8
    for key, case in first.items():
        assert _trees(case.problem) in allowed
        assert key == kernel.compile_key(case.problem, case.config)
    assert first.keys() == again.keys()


def _trees(problem: Problem) -> tuple[object, ...]:
    return problem.score_mod, problem.mask_mod, problem.softcap


CONFIG = Config(tile_m=16, tile_n=16)
MASK_MOD = to_data(MASKS["prefix"])


def _key_of(window: Any, key: str) -> object:
    sides = [] if window is None else [side for side in window if side is not None]
    match key:
        case "widths":
            return window
        case "sides":
            return sides_of(window or (None, None))
        case "multiples of 16":
            return [side % 16 == 0 < side for side in sides]
        case "zero":
            return 0 in sides
        case "raises beyond 50":
            assert max(sides, default=0) <= 50, "a key of what the kernel refuses"
    return None


@dataclass(frozen=True)
class WithWindows(Subject):
    """Code with modifiers, whose key has of a window whether there is one, or a causal mask, and what `key` says."""

    key: str = ""

    def compile_key(self, problem: Problem, config: Config) -> str:
        banded = problem.causal is not None or problem.window not in (None, (None, None))
        return f"{_trees(problem)} {banded} {_key_of(problem.window, self.key)} {config.canonical()}"


def _too_wide(problem: Problem, _: Config) -> str | None:
    return "too wide" if problem.window and any((side or 0) > 50 for side in problem.window) else None


def with_windows(*, multiple: int = 1, key: str = "") -> WithWindows:
    can = {"window": True, "window_multiple": multiple, "mask_mod": True, "captured": True, "packings": ("dense",)}
    kernel = WithWindows(can=can, tiles=(CONFIG,), key=key)
    return replace(kernel, refuse=_too_wide) if key == "raises beyond 50" else kernel


def drawn(kernel: Kernel, variants: Sequence[Variant], device: Device = "cpu", limits: Limits = LIMITS) -> list[Case]:
    collected: list[Case] = []
    draw_values(cases(kernel, device=device, limits=limits, variants=variants), collected.append, seed=5, examples=300)
    return collected


def windows_of(kernel: Kernel, *variants: Variant) -> dict[Variant, list[Any]]:
    """Return the windows of Cases drawn of these variants, which differ by causal mask, mask_mod or both."""
    of = {(each.causal, dict(each.modifiers or ()).get("mask_mod")): each for each in variants}
    windows = defaultdict[Variant, list[Any]](list)
    for case in drawn(kernel, variants):
        windows[of[case.problem.causal, case.problem.mask_mod]].append(case.problem.window)
    return windows


def variant(causal: Any = None, **modifiers: Any) -> Variant:
    return Variant("float16", causal, (64, 64), CONFIG, tuple(modifiers.items()))


def test_widths_of_windows_that_are_no_part_of_the_key_are_drawn_for_each_case() -> None:
    """With the few widths of a pool, hardly any met the ends of blocks, which lie elsewhere in each Case (FLX-37, FLX-38)."""
    limited, beside = variant(window=(2, None)), variant("bottom_right", mask_mod=MASK_MOD, window=(3, 1))
    windows = windows_of(with_windows(), limited, beside)
    for its in windows.values():
        assert len(set(its)) > 30
        assert all(each not in (None, (None, None)) for each in its)
        assert {(left is None, right is None) for left, right in its} == {(False, True), (True, False), (False, False)}
    assert len(windows) == 2


def test_widths_that_are_compiled_are_those_of_the_variant() -> None:
    limited, masked = variant(window=(2, None)), variant("bottom_right")
    windows = windows_of(with_windows(key="widths"), limited, masked)
    assert {each: set(its) for each, its in windows.items()} == {limited: {(2, None)}, masked: {None}}


def test_half_of_the_cases_have_a_window_where_the_code_of_a_mask_serves_one() -> None:
    masked, other = variant("bottom_right"), variant()
    windows = windows_of(with_windows(), masked, other)
    assert 0.3 < sum(each is not None for each in windows[masked]) / len(windows[masked]) < 0.7
    assert set(windows[other]) == {None}, "its key would be another"


def test_no_window_that_the_kernel_refuses_is_drawn_beside_a_mask() -> None:
    """Half of the draws would be thrown away."""
    refused: list[Problem] = []

    def refuse(problem: Problem, _: Config) -> str | None:
        if not (problem.window and problem.causal):
            return None
        refused.append(problem)
        return "a window beside a mask"

    masked = variant("bottom_right")
    assert set(windows_of(replace(with_windows(), refuse=refuse), masked)[masked]) == {None}
    assert len(refused) < 20


def test_windows_without_limits_stay_and_a_mask_mod_has_none_beside_it() -> None:
    unlimited, alone = variant("bottom_right", window=(None, None)), variant("bottom_right", mask_mod=MASK_MOD)
    windows = windows_of(with_windows(), unlimited, alone)
    assert {each: set(its) for each, its in windows.items()} == {unlimited: {(None, None)}, alone: {None}}


@pytest.mark.parametrize("multiple", [16, 64])
def test_drawn_widths_are_multiples(multiple: int) -> None:
    its = windows_of(with_windows(multiple=multiple), variant(window=(multiple, None))).popitem()[1]
    assert {(side or 0) % multiple for each in its for side in each} == {0}
    assert len(set(its)) > 4


def sides_of(window: Any) -> tuple[bool, bool]:
    return window[0] is not None, window[1] is not None


def test_only_forms_with_the_same_key_are_drawn() -> None:
    """Code may be compiled for the side that has a limit."""
    limited = variant(window=(2, None))
    its = windows_of(with_windows(key="sides"), limited)[limited]
    assert len(set(its)) > 8
    assert {sides_of(each) for each in its} == {(True, False)}


@pytest.mark.parametrize("key", ["multiples of 16", "zero"])
def test_widths_of_which_some_are_compiled_apart_are_those_of_the_variant(key: str) -> None:
    limited = variant(window=(2, None))
    assert set(windows_of(with_windows(key=key), limited)[limited]) == {(2, None)}


def test_widths_of_which_the_kernel_refuses_some_are_those_of_the_variant() -> None:
    """And no key is asked for what it refuses: it may raise."""
    limited = variant(window=(2, None))
    kernel = with_windows(key="raises beyond 50")
    assert set(windows_of(kernel, limited)[limited]) == {(2, None)}


def test_windows_of_real_code_are_drawn_around_the_blocks_of_each_case() -> None:
    kernel = registry.get("triton.flex")
    variants = modified(pool(all_variants(kernel, "cuda"), 10, 0), kernel, "cuda", 0)
    keys = {_plain_key(kernel, each.problem(kernel.capabilities), each.config) for each in variants}
    its = drawn(kernel, variants, "cuda", Limits(length=300))
    assert len({each.problem.window for each in its}) > 40
    assert {_plain_key(kernel, each.problem, each.config) for each in its} <= keys, "none is compiled for its width"
    near = [_distances(each) for each in its if each.problem.window not in (None, (None, None)) and _has_blocks(each)]
    assert sum(any(each in (-2, -1, 0, 1) for each in every) for every in near) > 0.6 * len(near) > 12


def test_each_side_of_a_window_lies_at_the_ends_of_its_blocks() -> None:
    blocks, can = Blocks(32, 64, 70, 6), registry.get("triton.flex").capabilities
    assert not set(blocks.left) & set(blocks.right)
    for form, at, widths in (("left", 0, blocks.left), ("right", 1, blocks.right)):
        collected: list[Any] = []
        draw_values(windows(can, (cast("WindowForm", form),), blocks), collected.append, seed=3, examples=100)
        assert {each[at] for each in collected} == set(widths)


def _has_blocks(case: Case) -> bool:
    return min(case.problem.seqlens_q[0], case.problem.seqlens_k[0]) >= case.config.integer("block")


def _distances(case: Case) -> list[int]:
    """Return how far the edges of a window lie from multiples of the block, without the diagonal that they begin at."""
    p, block = case.problem, case.config.integer("block")
    diagonal = 0 if p.causal == "top_left" else p.seqlens_k[0] - p.seqlens_q[0]
    left, right = p.window or (None, None)
    edges = [*([] if left is None else [left - diagonal]), *([] if right is None else [right + diagonal])]
    return [(each + block // 2) % block - block // 2 for each in edges]


def _plain_key(kernel: Kernel, problem: Problem, config: Config) -> str:
    layouts = dict.fromkeys(("layout_q", "layout_k", "layout_v", "layout_do"), Problem(**SMALLEST).layout_q)
    return kernel.compile_key(changed(problem, seqlens_q=(1,), seqlens_k=(1,), **layouts), config)


SMALLEST: dict[str, Any] = {"seqlens_q": (1,), "seqlens_k": (1,), "dim_qk": 64, "dim_v": 64}


def steps_of(case: Case, variants: Sequence[Variant]) -> set[tuple[Any, ...]]:
    """Return window, dims and Config of the simpler Cases."""
    return {(each.problem.window, each.problem.dim_qk, each.config) for each in simpler(case, variants)}


LARGER = Config(tile_m=32, tile_n=16)


@pytest.mark.parametrize("causal", [None, "bottom_right"])
@pytest.mark.parametrize("own", [(17, None), (3, None), (None, 5)])
def test_a_case_with_another_window_shrinks_to_the_other_variants(causal: Any, own: Any) -> None:
    """It is of none by its modifiers, and no dtype, dims or Config would be simpler."""
    of, mask = variant(window=(3, None)), variant("bottom_right")
    same_code = [each for one in (of, mask) for each in (one, replace(one, config=LARGER))]
    problem = Problem(**SMALLEST, causal=causal, window=own)
    steps = steps_of(Case(kernel="acme.flash", problem=problem, config=LARGER), [variant(), *same_code])
    assert (own, 64, CONFIG) in steps
    assert {window for window, _, config in steps if config == LARGER} >= {None}


def test_variants_of_other_widths_are_of_the_same_code() -> None:
    small = replace(variant(window=(3, None)), dims=(32, 32))
    variants = [replace(variant(), dims=(32, 32)), small, replace(variant(window=(5, 1)), config=LARGER)]
    case = Case(kernel="acme.flash", problem=Problem(**SMALLEST, window=(17, None)), config=LARGER)
    assert ((17, None), 64, CONFIG) not in steps_of(case, variants), "the code without a window does not serve it"
    assert ((17, None), 32, LARGER) not in steps_of(case, variants)
    of_code = replace(small, config=LARGER)
    assert ((17, None), 32, LARGER) in steps_of(case, [*variants, replace(variant(), config=LARGER), of_code])


def test_the_widths_of_a_variant_are_kept_where_they_may_be_compiled() -> None:
    """A Case that has those of its variant may need code of its own with others."""
    variants = [replace(variant(window=(3, None)), dims=(32, 32)), variant(window=(5, None))]
    case = Case(kernel="acme.flash", problem=Problem(**SMALLEST, window=(5, None)), config=CONFIG)
    assert all(dim == 64 for _, dim, _ in steps_of(case, variants))


def test_a_case_of_no_variant_keeps_its_modifiers() -> None:
    """Shrinking is offered Cases of other versions too."""
    case = Case(kernel="acme.flash", problem=Problem(**SMALLEST, softcap=20.0), config=CONFIG)
    assert all(dim == 64 for _, dim, _ in steps_of(case, [replace(variant(), dims=(32, 32)), variant()]))


def test_smaller_tiles_are_those_of_the_same_modifiers() -> None:
    sizes = {**SMALLEST, "seqlens_q": (160,), "seqlens_k": (160,)}
    case = Case(kernel="acme.flash", problem=Problem(**sizes, window=(17, None)), config=LARGER)
    larger = replace(variant(window=(3, None)), config=LARGER)
    assert CONFIG not in {config for _, _, config in steps_of(case, [larger, variant(softcap=20.0), variant()])}
    shorter = {each.problem.seqlens_q for each in simpler(case, [larger, variant(window=(5, 2))]) if each.config == CONFIG}
    assert (80,) in shorter, "with lengths cut as much"


def test_modifiers_other_than_a_window_are_those_of_the_variant() -> None:
    softcap = replace(variant(softcap=20.0, window=(3, None)), dims=(32, 32))
    case = Case(kernel="acme.flash", problem=Problem(**SMALLEST, window=(17, None)), config=CONFIG)
    assert all(dim == 64 for _, dim, _ in steps_of(case, [softcap, variant(window=(3, None))]))


def test_fields_are_in_one_order_whatever_order_they_are_drawn_in() -> None:
    """A Case of a variant was of none where Hypothesis had drawn its fields in another order."""
    assert chosen({"window": (1, None), "softcap": 20.0}) == chosen({"softcap": 20.0, "window": (1, None)})
    kernel = registry.get("triton.flex")
    variants = modified(pool(all_variants(kernel, "cuda"), 10, 0), kernel, "cuda", 0)
    assert any(len(each.modifiers or ()) > 1 for each in variants)
    for each in variants:
        assert each.modifiers == chosen(dict(each.modifiers or ()))


def test_pools_have_a_gradient_under_a_slope() -> None:
    """With a slope of 1 in all of a pool, one that is multiplied twice is right (FLX-33)."""
    kernel = registry.get("triton.flex")
    for seed in range(6):
        variants = modified(pool(all_variants(kernel, "cuda"), 10, seed), kernel, "cuda", seed)
        assert "gradient under a slope" in {kind for each in variants for kind in kinds_of(each.modifiers or ())}
