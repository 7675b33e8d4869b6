"""Modifiers where each is a compile: those of the variants of a pool, and the Cases that are drawn with their code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from msgspec.structs import replace as changed
from support.subjects import LIMITS, Subject

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Device, Kernel
from attnfuzz.kernels.expressions.named import MASKS
from attnfuzz.kernels.expressions.tree import parse, to_data
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import Limits, cases, cases_by_compile_key
from attnfuzz.strategies.compiled_modifiers import pooled
from attnfuzz.strategies.draw import draw_values
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


@pytest.mark.parametrize("count", [3, 9, 10])
@pytest.mark.parametrize("seed", range(3))
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


@dataclass(frozen=True)
class WithWindows(Subject):
    """Code with modifiers, whose key has the widths of a window, or only whether there is one or a causal mask."""

    widths_in_key: bool = False

    def compile_key(self, problem: Problem, config: Config) -> str:
        banded = problem.causal is not None or problem.window not in (None, (None, None))
        widths = problem.window if self.widths_in_key else None
        return f"{_trees(problem)} {banded} {widths} {config.canonical()}"


def with_windows(*, multiple: int = 1, widths_in_key: bool = False) -> WithWindows:
    can = {"window": True, "window_multiple": multiple, "mask_mod": True, "captured": True, "packings": ("dense",)}
    return WithWindows(can=can, tiles=(CONFIG,), widths_in_key=widths_in_key)


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
    windows = windows_of(with_windows(widths_in_key=True), limited, masked)
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


def test_drawn_widths_are_multiples() -> None:
    its = windows_of(with_windows(multiple=16), variant(window=(16, None))).popitem()[1]
    assert {(side or 0) % 16 for each in its for side in each} == {0}


def test_windows_of_real_code_are_drawn_around_the_blocks_of_each_case() -> None:
    kernel = registry.get("triton.flex")
    plain = pool(all_variants(kernel, "cuda"), 10, 0)
    variants = modified(plain, kernel, "cuda", 0)
    keys = {_plain_key(kernel, each.problem(kernel.capabilities), each.config) for each in variants}
    its = drawn(kernel, variants, "cuda", Limits(length=300))
    assert len({each.problem.window for each in its}) > 40
    assert {_plain_key(kernel, each.problem, each.config) for each in its} <= keys, "none is compiled for its width"


def _plain_key(kernel: Kernel, problem: Problem, config: Config) -> str:
    layouts = dict.fromkeys(("layout_q", "layout_k", "layout_v", "layout_do"), Problem(**SMALLEST).layout_q)
    return kernel.compile_key(changed(problem, seqlens_q=(1,), seqlens_k=(1,), **layouts), config)


SMALLEST: dict[str, Any] = {"seqlens_q": (1,), "seqlens_k": (1,), "dim_qk": 64, "dim_v": 64}


def test_a_case_with_another_window_shrinks_to_the_other_variants() -> None:
    """It is of none by its modifiers, and no dtype, dims or Config would be simpler."""
    window = {"window": (3, None)}
    larger, mask = replace(variant(**window), config=Config(tile_m=32, tile_n=16)), variant("bottom_right")
    pooled_ones = [variant(), variant(**window), larger, mask, replace(mask, config=larger.config)]
    for of, own in ((larger, (17, None)), (replace(mask, config=larger.config), (17, None)), (larger, (3, None))):
        problem = Problem(**SMALLEST, causal=of.causal, window=own)
        steps = list(simpler(Case(kernel="acme.flash", problem=problem, config=of.config), pooled_ones))
        assert (own, CONFIG) in {(each.problem.window, each.config) for each in steps}
        assert {each.problem.window for each in steps if each.config == of.config} >= {None, (0, None)}
