"""Relations between sizes: the class of a length beside a tile, what a Case has, and what Cases could have."""

from __future__ import annotations

import pytest
from support.subjects import LIMITS, Subject

from attnfuzz.harness.campaign.coverage import Tally, features
from attnfuzz.harness.campaign.size_relations import at_tile, possible_relations, size_relations
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.trials import trial_cases
from attnfuzz.strategies.variants import all_variants


def case(seqlens_q: tuple[int, ...], seqlens_k: tuple[int, ...], config: Config | None = None, **more: int) -> Case:
    problem = Problem(seqlens_q=seqlens_q, seqlens_k=seqlens_k, **{"dim_qk": 64, "dim_v": 64, **more})
    return Case(kernel="acme.flash", problem=problem, config=config or Config(tile_m=32, tile_n=16))


def relations(case_: Case) -> dict[str, set[str]]:
    values: dict[str, set[str]] = {}
    for name, value in size_relations(case_):
        assert value not in values.setdefault(name, set()), "each once"
        values[name].add(value)
    return values


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        *((0, "0"), (1, "1"), (2, "within a tile"), (31, "tile - 1"), (32, "tile"), (33, "tile + 1"), (34, "between tiles")),
        *((63, "n tiles - 1"), (64, "n tiles"), (65, "n tiles + 1"), (100, "between tiles"), (320, "n tiles")),
    ],
)
def test_the_class_of_a_length(length: int, expected: str) -> None:
    assert at_tile(length, 32) == expected


def test_tiles_of_one_row_have_no_neighbours() -> None:
    assert at_tile(7, 1) == "between tiles"


@pytest.mark.parametrize(
    ("n_q", "n_k", "by", "grid"),
    [
        *(
            (32, 16, "> by a tile or more", "1 x 1"),
            (33, 17, "> by a tile or more", "n x n"),
            (31, 16, "> within a tile", "1 x 1"),
        ),
        *(
            (16, 31, "< within a tile", "1 x n"),
            (15, 31, "< by a tile or more", "1 x n"),
            (33, 16, "> by a tile or more", "n x 1"),
        ),
        (16, 16, "=", "1 x 1"),
    ],
)
def test_a_tile_or_more_begins_at_a_tile(n_q: int, n_k: int, by: str, grid: str) -> None:
    values = relations(case((n_q,), (n_k,)))
    assert (values["queries : keys"], values["tiles of queries x keys"]) == ({by}, {grid})


def test_relations_of_a_ragged_batch() -> None:
    values = relations(case((0, 0, 33, 1), (5, 0, 33, 70), dim_qk=192, dim_v=128, heads=6, kv_heads=2))
    assert values["queries at the tile"] == {"0", "1", "tile + 1"}
    assert values["keys at the tile"] == {"0", "within a tile", "n tiles + 1", "between tiles"}
    assert values["empty queries"] == {"the first", "a middle one", "several in a row"}
    assert values["empty keys"] == {"a middle one"}
    assert values["queries : keys"] == {"no queries", "=", "< by a tile or more"}
    assert values["tiles of queries x keys"] == {"n x n", "1 x n"}
    assert values["tile_m : tile_n"] == {">"}
    assert values["groups : kv_heads"] == {">"}
    assert values["dim_qk : dim_v"] == {">"}
    assert values["dims"] == {"multiples of 16"}
    assert values["queries mod 32"] == {"1"}


def test_a_length_around_multiples_of_the_tile_is_a_feature() -> None:
    around = "a length around multiples of the tile"
    assert around in features(case((31,), (3,)))
    assert around in features(case((3,), (49,)))
    assert around not in features(case((3, 1, 0), (5, 5, 0)))


def test_what_is_drawn_is_possible_and_nearly_all_that_is_possible_is_drawn() -> None:
    subject, tally = Subject(), Tally()
    strategy = trial_cases(subject, device="cpu", limits=LIMITS)
    for seed in range(6):
        draw_values(strategy, tally.count_drawn, seed=seed, examples=100)
    possible = possible_relations(subject.capabilities, all_variants(subject, "cpu"), LIMITS)
    for name, values in possible.items():
        drawn = set(tally.drawn[name])
        assert drawn <= set(values), name
        if "mod" not in name:
            assert drawn == set(values), name


def test_what_a_kernel_cannot_take_is_not_possible() -> None:
    can = {"unequal": False, "zero_q": False, "zero_k": False, "groups": (1,), "dims": ((64, 64),), "packings": ("dense",)}
    subject = Subject(can, (Config(tile_m=32, tile_n=32),))
    possible = possible_relations(subject.capabilities, all_variants(subject, "cpu"), LIMITS)
    assert possible["queries : keys"] == ("=",)
    assert possible["tile_m : tile_n"] == ("=",)
    assert possible["groups : kv_heads"] == ("<", "=")
    assert "empty keys" not in possible
    assert "0" not in possible["keys at the tile"]
