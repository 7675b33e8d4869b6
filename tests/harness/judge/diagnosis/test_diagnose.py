"""The pattern of a failure: every look and place planted, in plain tensors and in kernels; nothing said where nothing shows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.emulated.whole import Emulated

from attnfuzz.harness.campaign.corpus import Corpus, read_case
from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.judge.diagnosis.diagnose import diagnose
from attnfuzz.harness.judge.diagnosis.model import Pattern, Span, span_words, spans
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.judge import judge
from attnfuzz.harness.judge.truth import truth
from attnfuzz.harness.report.describe import describe_verdict
from attnfuzz.harness.report.machine import verdict_object
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Deviations, Inputs, Outputs
from attnfuzz.kernels.problem import OUTPUT_NAMES, OutputName, Problem
from attnfuzz.strategies.case import Case, Recipe

TILES = Config(tile_m=32, tile_n=16)
RAGGED = Problem(seqlens_q=(100, 0, 70, 128), seqlens_k=(60, 9, 70, 140), heads=4, kv_heads=2, dim_qk=32, dim_v=32)
STARTS = {"q": (0, 100, 100, 170), "k": (0, 60, 69, 139)}


@dataclass
class Plant:
    """Values expected and got of one output of `problem`; `wrong` marks what is changed."""

    problem: Problem = RAGGED
    name: OutputName = "o"
    seed: int = 0
    wrong: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        p, by_query = self.problem, self.name in ("o", "lse", "dq")
        heads, rows = (p.heads, p.total_q) if by_query else (p.kv_heads, p.total_k)
        shape = (heads, rows) if self.name == "lse" else (heads, rows, p.dim_v)
        self.random = torch.Generator().manual_seed(self.seed)
        self.expected = torch.randn(shape, generator=self.random, dtype=torch.float64)
        self.expected += 4.0 if self.name == "lse" else 0.0
        self.allowed = 1e-3 * self.expected.abs() + 1e-5
        self.got = self.expected + 0.9 * self.allowed * (2 * torch.rand(shape, generator=self.random, dtype=torch.float64) - 1)
        self.wrong = torch.zeros(shape, dtype=torch.bool)

    def normal(self) -> torch.Tensor:
        return torch.randn(self.expected.shape, generator=self.random, dtype=torch.float64)

    def put(self, where: tuple, values: torch.Tensor | float) -> Plant:
        mask = torch.zeros_like(self.wrong)
        mask[where] = True
        self.got = torch.where(mask, torch.as_tensor(values, dtype=torch.float64), self.got)
        return self

    def pattern(self, config: Config = TILES, others: dict[OutputName, torch.Tensor] | None = None) -> Pattern:
        bad = ~((self.got - self.expected).abs() <= self.allowed)
        return diagnose(self.problem, config, self.name, self.got, self.expected, self.allowed, bad, others)


ALL = slice(None)
NAN = math.nan
# In the batch: sequence 0 has rows 0-99, 1 none, 2 rows 100-169, 3 rows 170-297; keys 0-59, 60-68, 69-138, 139-278.
PLACES = [
    ("o", (), "everywhere", ""),
    ("o", (2,), "head 2 (of 4)", ""),
    ("o", (slice(1, 4, 2),), "heads 1 and 3 (of 4)", ""),
    ("o", (ALL, slice(170, 298)), "sequence 3 (of 4), all heads", ""),
    ("o", (ALL, slice(202, 234)), "rows 32-63 of sequence 3 (of 4) (one whole tile of 32), all heads", "one whole tile of 32"),
    (
        "o",
        (3, slice(266, 298)),
        "rows 96-127 of sequence 3 (of 4) (one whole tile of 32, the last), head 3",
        "one whole tile of 32",
    ),
    ("o", (ALL, slice(202, 266)), "rows 32-95 of sequence 3 (of 4) (2 whole tiles of 32), all heads", "2 whole tiles"),
    ("o", (ALL, slice(96, 100)), "rows 96-99 of sequence 0 (of 4) (the tail tile, the last and partial one of 32", "tail tile"),
    (
        "o",
        (ALL, [*range(96, 100), *range(164, 170)]),
        "the tail tile of each sequence, the last and partial one of 32",
        "tail tile",
    ),
    ("o", (ALL, [0, 32, 64, 96]), "(the first row of each tile of 32)", "first row of each tile"),
    ("o", (ALL, [31, 63, 95]), "(the last row of each tile of 32)", "last row of each tile"),
    ("o", (ALL, slice(203, 235)), "rows 33-64 of sequence 3 (of 4), all heads", ""),
    ("o", (ALL, slice(192, 224)), "one whole tile of 32 counted from the start of the batch", "start of the batch"),
    ("o", (ALL, [99, 169, 297]), "the last row of each sequence, all heads", ""),
    ("o", (ALL, [0, 100, 170]), "the first row of each sequence, all heads", ""),
    ("o", (ALL, slice(60, 100)), "rows beyond seqlen_k of sequence 0 (of 4), all heads", ""),
    ("o", (ALL, ALL, slice(16, 32)), "dims 16-31 (of 32)", ""),
    ("o", (ALL, ALL, slice(0, 32, 2)), "every 2nd dim from 0 to 30 (of 32)", ""),
    ("o", (ALL, slice(171, 298, 2)), "every 2nd row from 1 to 127 of sequence 3 (of 4), all heads", ""),
    ("o", (1, 177, 5), "row 7 of sequence 3 (of 4), head 1 (of 4), dim 5 (of 32)", ""),
    ("lse", (ALL, [99, 169, 297]), "the last row of each sequence, all heads", ""),
    ("dk", (ALL, slice(60, 69)), "sequence 1 (of 4), the one without queries, all kv heads", ""),
    ("dk", (ALL, [59, 68, 138, 278]), "the last key of each sequence, all kv heads", ""),
    (
        "dv",
        (1, slice(155, 171)),
        "keys 16-31 of sequence 3 (of 4) (one whole tile of 16), kv head 1 (of 2)",
        "one whole tile of 16",
    ),
]


@pytest.mark.parametrize(("name", "where", "text", "tiles"), PLACES, ids=range(len(PLACES)))
def test_the_place_is_told(name: OutputName, where: tuple, text: str, tiles: str) -> None:
    pattern = Plant(name=name).put(where, NAN).pattern()
    assert text in pattern.text
    assert tiles in pattern.where.tiles
    assert bool(tiles) == bool(pattern.where.tiles), pattern.where.tiles
    assert pattern.where.share == 1
    assert pattern.text.endswith(": NaN")
    assert [each.kind for each in pattern.looks] == ["nan"]


def test_rows_that_the_mask_leaves_alone_are_told() -> None:
    problem = msgspec.structs.replace(RAGGED, causal="bottom_right")
    pattern = Plant(problem=problem).put((ALL, slice(0, 40)), NAN).pattern()
    assert pattern.text == "rows that see no key of sequence 0 (of 4), all heads: NaN"
    problem = Problem(seqlens_q=(20,), seqlens_k=(50,), dim_qk=16, dim_v=16, causal="top_left")
    assert Plant(problem=problem, name="dk").put((ALL, slice(20, 50)), NAN).pattern().text.startswith("keys that no query sees")
    windowed = Problem(seqlens_q=(20,), seqlens_k=(50,), dim_qk=16, dim_v=16, window=(3, 0))
    assert Plant(problem=windowed, name="dk").put((ALL, slice(0, 27)), NAN).pattern().text.startswith("keys that no query sees")
    assert Plant(problem=windowed, name="dk").put((ALL, slice(0, 26)), NAN).pattern().text.startswith("keys 0-25")


@pytest.mark.parametrize("config", [Config(), Config(tile_m=1), Config(tile_m=512)])
def test_without_evidence_nothing_is_said_of_tiles(config: Config) -> None:
    assert Plant().put((ALL, slice(202, 234)), NAN).pattern(config).where.tiles == ""


def test_a_few_right_elements_do_not_hide_a_tile() -> None:
    plant = Plant(name="lse").put((ALL, slice(202, 234)), 9.0)
    plant.got[:, 210] = plant.expected[:, 210]
    pattern = plant.pattern()
    assert (pattern.where.rows, pattern.where.tiles) == ((Span(32, 64),), "one whole tile of 32")
    assert pattern.where.share == 31 / 32


TILE = (ALL, slice(202, 234))


def rolled(x: torch.Tensor, step: int, dim: int) -> torch.Tensor:
    return x.roll(-step, dim)


LOOKS: list[tuple[str, OutputName, tuple, Callable[[Plant], torch.Tensor | float], str, float | None]] = [
    ("nan", "o", TILE, lambda p: NAN, "NaN", None),
    ("inf", "o", TILE, lambda p: -math.inf, "-inf", None),
    ("missing", "dk", (), lambda p: 0.0, "everywhere: zeros where values are expected", None),
    ("sign", "dq", TILE, lambda p: -p.got, "the other sign", -1.0),
    ("scaled", "lse", (), lambda p: p.got / math.log(2), "times 1.44 (1/ln 2)", 1 / math.log(2)),
    ("scaled", "o", TILE, lambda p: p.got * 1.01, "times 1.01", 1.01),
    ("scaled", "dk", (), lambda p: p.got / 2, "times 0.5 (1/2, 1/groups)", 0.5),
    ("scaled", "dq", (), lambda p: p.got * 32**-0.5, "(softmax_scale)", 32**-0.5),
    ("scaled", "dk", (), lambda p: p.got * 32**0.5, "(1/softmax_scale, sqrt(dim_qk))", 32**0.5),
    (
        "scaled",
        "o",
        (),
        lambda p: p.got * (1.5 + torch.rand(p.got.shape[:2], generator=p.random))[..., None],
        "each row times",
        None,
    ),
    ("offset", "lse", TILE, lambda p: p.got - math.log(2), "minus 0.693 (-ln 2", -math.log(2)),
    ("offset", "lse", (), lambda p: p.got + 0.125, "plus 0.125", 0.125),
    ("shifted", "o", TILE, lambda p: rolled(p.got, 1, 1), "the values expected 1 row further on", 1.0),
    ("shifted", "dk", (ALL, slice(155, 171)), lambda p: rolled(p.got, -1, 1), "the values expected 1 key before", -1.0),
    ("shifted", "o", TILE, lambda p: rolled(p.got, -32, 1), "the values expected 32 rows before", -32.0),
    ("shifted", "o", TILE, lambda p: rolled(p.got, 23, 1), "the values expected 23 rows further on", 23.0),
    ("shifted", "lse", TILE, lambda p: rolled(p.got, 2, 1), "the values expected 2 rows further on", 2.0),
    ("shifted", "o", (ALL, slice(100, 170)), lambda p: rolled(p.got, 70, 1), "the values expected of the next sequence", 1.0),
    ("shifted", "o", TILE, lambda p: rolled(p.got, 8, 2), "the values expected 8 dims further on, round the end", 8.0),
    ("shifted", "o", TILE, lambda p: rolled(p.got, 1, 0), "the values expected of the next head", None),
    ("swapped", "o", TILE, lambda p: p.got[[1, 0, 3, 2]], "heads swapped: 0 and 1, 2 and 3", None),
    ("swapped", "dv", (), lambda p: p.got[[1, 0]], "kv heads swapped: 0 and 1", None),
    ("stale", "o", TILE, lambda p: p.got[:, 203:204].expand_as(p.got), "the values expected of row 33 of sequence 3", None),
    ("stale", "o", TILE, lambda p: p.got[:, torch.randperm(298, generator=p.random)], "values expected of other rows", None),
    ("foreign", "o", TILE, lambda p: 0.25, "0.25 everywhere", 0.25),
    ("foreign", "o", TILE, lambda p: p.normal(), "nothing to do with those expected", None),
    ("partial", "dk", (), lambda p: p.part, "about 5", None),
    ("rounded", "lse", (), lambda p: p.expected.half().double(), "rounded to float16 on the way", None),
    ("rounded", "lse", (), lambda p: p.expected.bfloat16().double(), "rounded to bfloat16 on the way", None),
    ("noise", "o", TILE, lambda p: p.expected + 5 * p.allowed * p.normal(), "errors without a pattern", None),
]


@pytest.mark.parametrize(("kind", "name", "where", "values", "text", "value"), LOOKS, ids=[f"{k}: {t}" for k, *_, t, _ in LOOKS])
def test_the_look_is_told(kind: str, name: OutputName, where: tuple, values: Callable, text: str, value: float | None) -> None:
    plant = Plant(name=name)
    if kind == "partial":
        plant.part = plant.expected.clone()
        plant.expected = plant.part + plant.normal()
        plant.allowed = 1e-3 * plant.expected.abs() + 1e-5
    if kind == "rounded":
        plant.allowed *= 1e-3
    pattern = plant.put(where, values(plant)).pattern()
    (look,) = pattern.looks
    assert (kind, text in pattern.text) == (look.kind, True), pattern.text
    assert look.share > 0.9
    assert look.confidence >= 0.95 or kind in ("noise", "partial", "foreign")
    if value is not None:
        assert look.value == pytest.approx(value, rel=2e-3)


def test_truncation_is_told_from_a_scale() -> None:
    """bf16 cut off instead of rounded; a factor of 0.99, about one unit in the last place of bf16 as well, is a factor."""
    problem = msgspec.structs.replace(RAGGED, dtype="bfloat16")
    plant = Plant(problem=problem)
    plant.expected = plant.expected.float().double()
    plant.allowed = 0.001 * plant.expected.abs()
    bits = plant.expected.float().view(torch.int32)
    plant.got = (bits & ~0xFFFF).view(torch.float32).double()
    pattern = plant.pattern()
    assert [each.kind for each in pattern.looks] == ["truncated"], pattern.text
    plant.got = (plant.expected * 0.99).bfloat16().double()
    pattern = plant.pattern()
    assert [each.kind for each in pattern.looks] == ["scaled"], pattern.text
    plant.got = plant.expected.bfloat16().double()
    pattern = plant.pattern()
    assert [each.kind for each in pattern.looks] == ["noise"], pattern.text


def test_another_output_is_recognised() -> None:
    plant = Plant(name="dk")
    other = plant.normal()
    pattern = plant.put((), other).pattern(others={"dv": other, "o": Plant().expected, "lse": Plant(name="lse").expected})
    assert pattern.text == "everywhere: the values expected of dV"
    assert pattern.looks[0].name == "dv"


def test_two_looks_are_told_apart_each_with_its_place() -> None:
    pattern = Plant().put(TILE, 0.0).put((2, slice(0, 32)), NAN).put((ALL, slice(100, 132)), math.inf).pattern()
    assert [each.kind for each in pattern.looks] == ["nan", "inf", "missing"]
    assert sum(each.share for each in pattern.looks) == pytest.approx(1)
    assert "rows 0-31 of sequence 0 (of 4) (one whole tile of 32), head 2 (of 4)" in pattern.looks[0].text
    pattern = Plant().put(TILE, 0.0).put((ALL, slice(0, 100)), 7.0).pattern()
    assert [each.kind for each in pattern.looks] == ["missing", "foreign"]
    assert "rows 32-63 of sequence 3 (of 4) (one whole tile of 32)" in pattern.looks[0].text


def test_an_infinity_that_was_expected_is_told() -> None:
    plant = Plant(name="lse")
    plant.expected[:, :10] = -math.inf
    plant.allowed[:, :10] = 0
    plant.got[:, :10] = -30000.0
    bad = torch.zeros_like(plant.wrong)
    bad[:, :10] = True
    pattern = diagnose(RAGGED, TILES, "lse", plant.got, plant.expected, plant.allowed, bad)
    assert pattern.text == "rows 0-9 of sequence 0 (of 4), all heads: finite values where an infinity is expected"


ONE = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=16, dim_v=16)


def test_one_element_is_a_known_factor_only_where_chance_is_out() -> None:
    plant = Plant(problem=ONE, name="lse")
    plant.allowed[:] = 1e-5
    plant.got = plant.expected / math.log(2)
    assert plant.pattern().text == "everywhere: the values expected, times 1.4427 (1/ln 2)"
    plant.got = plant.expected * 1.31
    assert plant.pattern().text == "everywhere"
    plant.allowed[:] = 0.1
    plant.got = plant.expected / math.log(2)
    assert plant.pattern().looks == ()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("size", [1.2, 5.0, 100.0])
@pytest.mark.parametrize("name", ["o", "lse", "dk"])
def test_noise_is_called_noise(name: OutputName, size: float, seed: int) -> None:
    plant = Plant(name=name, seed=seed)
    plant.got = plant.expected + size * plant.allowed * plant.normal()
    pattern = plant.pattern()
    assert [each.kind for each in pattern.looks] == ["noise"], pattern.text
    assert pattern.where.tiles == ""
    assert "tile" not in pattern.text
    assert pattern.looks[0].value == pytest.approx(size, rel=0.6)


@pytest.mark.parametrize("seed", range(20))
def test_a_handful_of_noisy_elements_shows_no_pattern(seed: int) -> None:
    plant = Plant(seed=seed)
    flat = torch.randperm(plant.got.numel(), generator=plant.random)[: 4 + seed]
    plant.got.view(-1)[flat] += 3 * (plant.allowed * plant.normal().sign()).view(-1)[flat]
    pattern = plant.pattern()
    assert {each.kind for each in pattern.looks} <= {"noise"}, pattern.text
    assert pattern.where.tiles == ""


def test_a_whole_tensor_is_not_called_aligned() -> None:
    problem = Problem(seqlens_q=(64, 128), seqlens_k=(64, 128), dim_qk=16, dim_v=16)
    for name in OUTPUT_NAMES:
        pattern = Plant(problem=problem, name=name).put((), NAN).pattern()
        assert pattern.text == "everywhere: NaN"
        assert pattern.where.tiles == ""
    pattern = Plant(problem=problem).put((ALL, slice(0, 64)), NAN).pattern()
    assert pattern.text == "sequence 0 (of 2): NaN"
    assert pattern.where.tiles == ""


@settings(max_examples=120, database=None, deadline=None)
@given(data=st.data())
def test_any_mask_has_a_pattern(data: st.DataObject) -> None:
    """Every mask has a region that holds all of it, with the right share."""
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any))
    problem = Problem(
        seqlens_q=tuple(lengths), seqlens_k=tuple(data.draw(st.permutations(lengths))), heads=4, kv_heads=2, dim_qk=8, dim_v=8
    )
    plant = Plant(problem=problem, name=data.draw(st.sampled_from(OUTPUT_NAMES)), seed=data.draw(st.integers(0, 99)))
    bad = plant.normal() > data.draw(st.sampled_from([-9.0, 0.0, 2.0]))
    bad.view(-1)[data.draw(st.integers(0, bad.numel() - 1))] = True
    value = data.draw(st.sampled_from([0.0, NAN, math.inf, 1e300, 1e-300, 1.0]))
    plant.expected = plant.expected * data.draw(st.sampled_from([0.0, 1.0, 1e30]))
    plant.allowed = plant.allowed * data.draw(st.sampled_from([0.0, 1.0, NAN, math.inf]))
    got = torch.where(bad, value, plant.expected)
    pattern = diagnose(problem, TILES, plant.name, got, plant.expected, plant.allowed, bad)
    region = pattern.where
    heads, rows, columns = (
        [i for s in each for i in range(s.start, s.stop, s.step)] for each in (region.heads, region.rows, region.columns)
    )
    assert set(bad.flatten(1).any(1).nonzero().flatten().tolist()) <= set(heads)
    assert 0 < region.share <= 1
    assert bad.dim() == 2 or set(bad.any(0).any(0).nonzero().flatten().tolist()) <= set(columns)
    assert rows
    assert msgspec.json.decode(msgspec.json.encode(pattern), type=Pattern) == pattern
    assert all(math.isfinite(each.confidence) and (each.value is None or math.isfinite(each.value)) for each in pattern.looks)


def test_ten_million_elements_take_about_a_second() -> None:
    problem = Problem(seqlens_q=(4096,), seqlens_k=(16,), heads=19, kv_heads=19, dim_qk=128, dim_v=128)
    plant = Plant(problem=problem)
    bad = (plant.got - plant.expected).abs() > 0.1 * plant.allowed
    start = time.process_time()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        diagnose(problem, TILES, "o", plant.got, plant.expected, plant.allowed, bad)
    finally:
        torch.set_num_threads(threads)
    assert time.process_time() - start < 4


def test_spans_are_short() -> None:
    assert spans([]) == ()
    assert spans([3]) == (Span(3, 4),)
    assert spans([0, 1, 2, 5]) == (Span(0, 3), Span(5, 6))
    assert spans([1, 4, 7]) == (Span(1, 8, 3),)
    assert spans([0, 1, 3, 7, 12, 20, 33]) == (Span(0, 34),)
    assert span_words("head", spans([1, 3, 5]), 8) == "every 2nd head from 1 to 5 (of 8)"
    assert span_words("row", spans([0, 1, 2, 5])) == "rows 0-2 and 5"


# Through the judge: kernels.

PROBLEM = Problem(seqlens_q=(128, 40), seqlens_k=(130, 90), heads=4, kv_heads=2, dim_qk=64, dim_v=64, causal="bottom_right")
CONFIG = Config(tile_m=32, tile_n=32)


def outputs_of(faults: set[str], problem: Problem = PROBLEM, seed: int = 1) -> tuple[Inputs, Outputs]:
    inputs, kernel = materialise(problem, Recipe(seed=seed), "cpu"), Emulated(faults=frozenset(faults))
    o, lse = kernel.forward(inputs)
    dq, dk, dv = kernel.backward(inputs, o, lse)
    return inputs, Outputs(o=o, lse=lse, dq=dq, dk=dk, dv=dv)


def judged(inputs: Inputs, outputs: Outputs) -> dict[str | None, Failure]:
    verdict = judge("k", inputs, outputs, truth(inputs, Deviations(), "cpu"), CONFIG)
    for each in verdict.failures:
        assert each.pattern is not None
        text = each.pattern.text
        assert each.message.endswith(f". {text[0].upper()}{text[1:]}")
    return {each.output: each for each in verdict.failures}


FAULTS = [
    ("lse in base 2", "lse", "everywhere: the values expected, times 1.4427 (1/ln 2)"),
    ("dq scale 1 %", "dq", "the values expected, times 1.01"),
    ("lse in half", "lse", "rounded to float16 on the way"),
    ("o truncated", "o", "always nearer to zero"),
    ("group not summed", "dk", "of the sum expected (perhaps 1 of 2 heads of the group), the rest of its terms missing"),
    ("last key dropped", "lse", "the last row of each sequence, all heads: errors without a pattern"),
    ("last key dropped", "dv", "zeros where values are expected (4.6 % of them: the last key of each sequence, all kv heads)"),
    ("mask off by one", "o", "all rows but the last of each sequence, all heads"),
    ("p in bf16", "o", "errors without a pattern"),
    ("delta missing", "dq", "errors without a pattern"),
]


@pytest.mark.parametrize(("fault", "output", "text"), FAULTS)
def test_a_faulty_kernel_is_described(fault: str, output: str, text: str) -> None:
    failures = judged(*outputs_of({fault}))
    assert text in failures[output].pattern.text
    assert "tile" not in failures[output].pattern.text


def test_the_other_faults_of_an_output_with_none_are_left_alone() -> None:
    assert judged(*outputs_of(set())) == {}


def tile_not_written(x: Outputs, _: Outputs) -> None:
    x.o[32:64] = math.nan


def tile_left_at_zero(x: Outputs, _: Outputs) -> None:
    x.dq[128 + 32 : 168, 1] = 0


def rows_shifted(x: Outputs, _: Outputs) -> None:
    x.o[64:96] = x.o[65:97].clone()


def heads_swapped(x: Outputs, _: Outputs) -> None:
    x.dv[:] = x.dv[:, [1, 0]].clone()


def earlier_call(x: Outputs, before: Outputs) -> None:
    x.dk[32:64] = before.dk[32:64]


def tile_of_the_loop_before(x: Outputs, _: Outputs) -> None:
    x.dk[64:96] = x.dk[32:64].clone()


def gradients_mixed_up(x: Outputs, _: Outputs) -> None:
    x.dk[:], x.dv[:] = x.dv.clone(), x.dk.clone()


TILE_FAULTS = [
    (tile_not_written, "o", "rows 32-63 of sequence 0 (of 2) (one whole tile of 32), all heads: NaN"),
    (tile_left_at_zero, "dq", "the last and partial one of 32), head 1 (of 4): zeros where values are expected"),
    (
        rows_shifted,
        "o",
        "rows 64-95 of sequence 0 (of 2) (one whole tile of 32), all heads: the values expected 1 row further on",
    ),
    (heads_swapped, "dv", "kv heads swapped: 0 and 1"),
    (earlier_call, "dk", "(one whole tile of 32), all kv heads: values of the right size that have nothing to do with those"),
    (tile_of_the_loop_before, "dk", "(one whole tile of 32), all kv heads: the values expected 32 keys before"),
    (gradients_mixed_up, "dk", "the values expected of dV"),
]


@pytest.mark.parametrize(("plant", "output", "text"), TILE_FAULTS, ids=lambda x: getattr(x, "__name__", None))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_planted_tile_fault_is_described(plant: Callable, output: str, text: str, dtype: str) -> None:
    problem = msgspec.structs.replace(PROBLEM, dtype=dtype, causal=None)
    inputs, got = outputs_of(set(), problem)
    plant(got, outputs_of(set(), problem, seed=2)[1])
    failure = judged(inputs, got)[output]
    assert text in failure.pattern.text
    assert text[1:] in failure.message


def test_the_pattern_is_no_part_of_the_identity_and_is_kept(tmp_path: Path) -> None:
    kernel = registry.register(Emulated(name="test.base2", faults=frozenset({"lse in base 2"})))
    try:
        case = Case(kernel=kernel.name, problem=PROBLEM, config=CONFIG)
        verdict = run_trial(case, "cpu")
    finally:
        registry.unregister(kernel.name)
    failure = verdict.failures[0]
    assert failure.pattern is not None
    assert msgspec.structs.replace(failure, pattern=None).identity == failure.identity
    assert msgspec.json.decode(msgspec.json.encode(failure), type=Failure) == failure
    assert "times 1.4427 (1/ln 2)" in describe_verdict(verdict)[0]
    assert verdict_object(verdict)["failures"][0]["pattern"]["looks"][0]["kind"] == "scaled"
    stored = read_case(Corpus(tmp_path).write(Finding(failure.identity, case, verdict), seed=1))
    assert stored.finding.pattern.looks[0].name == "1/ln 2"
    assert stored.finding.pattern.text in stored.finding.message.lower()


def test_wrong_values_whose_squares_are_0_are_described() -> None:
    plant = Plant()
    tiny = 1e-200
    expected, got = tiny * plant.expected, tiny * plant.normal()
    pattern = diagnose(RAGGED, TILES, "o", got, expected, tiny * plant.allowed, torch.ones_like(plant.wrong), {})
    assert pattern is not None
