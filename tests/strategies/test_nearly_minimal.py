"""Nearly minimal Cases: those that keep least of a Case come first, and each sequence is tried alone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Config
from attnfuzz.kernels.problem import Layout, Problem
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.nearly_minimal import nearly_minimal
from attnfuzz.strategies.variants import Variant

ANY = Capabilities(unequal=True)
FIRST, OWN = Config(tile_m=32, tile_n=32), Config(tile_m=64, tile_n=16)
VARIANTS = (Variant("float16", None, (64, 64), FIRST), Variant("float32", "top_left", (8, 8), OWN))
PLAIN = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=64, dim_v=64)
CASE = Case(
    kernel="acme.flash",
    problem=Problem(
        seqlens_q=(90, 7),
        seqlens_k=(400, 0),
        heads=4,
        kv_heads=2,
        dim_qk=8,
        dim_v=8,
        dtype="float32",
        causal="top_left",
        window=(3, None),
        layout_q=Layout(pitch=3),
        score_mod=("add", ("score",), ("const", 2.0)),
    ),
    recipe=Recipe(pattern="needle", seed=9),
    config=OWN,
    check="twice",
)


def test_the_first_keep_one_sequence_and_nothing_else() -> None:
    first, second, *_ = nearly_minimal(CASE, VARIANTS, ANY)
    assert first == Case(kernel="acme.flash", problem=PLAIN, config=FIRST)
    assert second.problem == replace(PLAIN, seqlens_k=(0,))


@pytest.mark.parametrize(
    "kept",
    [
        {"dim_qk": 8, "dim_v": 8, "dtype": "float32", "causal": "top_left"},
        {"window": (3, None)},
        {"score_mod": ("add", ("score",), ("const", 2.0))},
        {"seqlens_q": (90,), "seqlens_k": (400,)},
        {"heads": 4, "kv_heads": 2},
        {"seqlens_q": (90,), "seqlens_k": (400,), "window": (3, None)},
        {"seqlens_q": (1, 1), "seqlens_k": (1, 0)},
        {"seqlens_q": (90, 7), "seqlens_k": (400, 0)},
    ],
    ids=["variant", "window", "tree", "lengths", "heads", "lengths and window", "all sequences", "all sequences and lengths"],
)
def test_one_or_two_parts_are_kept(kept: dict[str, object]) -> None:
    assert replace(PLAIN, **kept) in [each.problem for each in nearly_minimal(CASE, VARIANTS, ANY)]


def test_none_is_yielded_twice_nor_the_case_itself() -> None:
    cases = list(nearly_minimal(CASE, VARIANTS, ANY))
    assert len(cases) == len(set(cases)) <= 80
    assert CASE not in cases
    assert list(nearly_minimal(cases[0], VARIANTS, ANY)) == []


def test_shapes_are_those_of_the_pool() -> None:
    shapes = ((1, 1, 1, 16, 32), (2, 4, 2, 64, 128))
    problem = Problem(seqlens_q=(64, 64), seqlens_k=(128, 128), heads=4, kv_heads=2, dim_qk=64, dim_v=64, packing="dense")
    cases = list(
        nearly_minimal(Case(kernel="acme.flash", problem=problem, recipe=Recipe(seed=9)), VARIANTS, Capabilities(shapes=shapes))
    )
    assert {each.problem.seqlens_q for each in cases} == {(16,), (64, 64)}


def test_multiples_of_lengths_are_kept() -> None:
    can = Capabilities(unequal=True, multiple_q=16, multiple_k=24)
    problem = Problem(seqlens_q=(64,), seqlens_k=(72,), dim_qk=64, dim_v=64)
    first = next(nearly_minimal(Case(kernel="acme.flash", problem=problem), VARIANTS, can))
    assert (first.problem.seqlens_q, first.problem.seqlens_k) == ((16,), (24,))
