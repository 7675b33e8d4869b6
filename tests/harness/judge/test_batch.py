"""Cases judged together have the Verdicts that they have alone, and a fault in one of them leaves the others' as they are."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.emulated.sinks import kernel as with_sinks
from support.emulated.whole import WIDE, Emulated
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.harness.judge import batch as batching
from attnfuzz.harness.judge import together
from attnfuzz.harness.judge.batch import Judged, judge_batch
from attnfuzz.harness.judge.judge import judge
from attnfuzz.harness.judge.together import Launched
from attnfuzz.harness.judge.truth import Truths, is_tiny, truth
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.contract import Config, Deviations, Inputs, Outputs
from attnfuzz.kernels.problem import OUTPUT_NAMES, Layout, Needs, Problem
from attnfuzz.oracles.budgets.batch import BatchTruth, truth_of_batches
from attnfuzz.strategies.case import PATTERNS, SINK_VALUES, Case, Recipe
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.draw import draw_values

DIMS = ((64, 48), (16, 40), (32, 32))
GOOD = Emulated(capabilities=replace(WIDE, window=True, dims=DIMS))
PLAIN = Deviations()


def launched(problem: Problem, recipe: Recipe) -> Launched:
    inputs = materialise(problem, recipe, "cpu")
    if problem.sinks:
        return Launched("k", inputs, with_sinks(inputs, first=bool(recipe.seed % 2)), Config())
    with torch.no_grad():
        o, lse = GOOD.forward(inputs)
        dq, dk, dv = GOOD.backward(inputs, o, lse)
    return Launched("k", inputs, Outputs(o=o, lse=lse, dq=dq, dk=dk, dv=dv), Config())


def alone(one: Launched, deviations: Deviations = PLAIN) -> Verdict:
    return judge(one.kernel, one.inputs, one.outputs, truth(one.inputs, deviations, "cpu"), one.config)


def in_batches(of: Sequence[Launched], size: int, deviations: Deviations = PLAIN) -> Iterator[Judged | None]:
    for at in range(0, len(of), size):
        yield from judge_batch(of[at : at + size], deviations, "cpu")


@functools.cache
def drawn() -> tuple[list[Launched], list[Verdict]]:
    """Cases of each dims, dtype and packing that the strategies draw, and their Verdicts alone."""
    chosen: list[Case] = []
    for seed, limits in enumerate((Limits(batch=4, heads=4, length=40, tiles=12), Limits(batch=3, heads=4, length=90, tiles=24))):
        draw_values(cases(GOOD, device="cpu", limits=limits), chosen.append, seed=seed, examples=110)
    every = [launched(each.problem, each.recipe) for each in chosen]
    return every, [alone(each) for each in every]


@pytest.mark.parametrize("size", [7, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 32, 1000))])
def test_drawn_cases_have_the_verdicts_that_they_have_alone(size: int) -> None:
    every, verdicts = drawn()
    assert len(every) >= 200
    judged = list(in_batches(every, size))
    differing = [
        (each.inputs.problem, own, one.verdict)
        for each, own, one in zip(every, verdicts, judged, strict=True)
        if one is not None and one.verdict != own
    ]
    assert not differing
    assert sum(each is None for each in judged) <= 0.04 * len(every), "few are left to be judged alone"


def test_the_drawn_cases_are_of_every_kind() -> None:
    every, verdicts = drawn()
    problems = [each.inputs.problem for each in every]
    kinds = {
        "ragged": [p.packing == "ragged" for p in problems],
        "dense": [p.packing == "dense" for p in problems],
        "groups": [p.groups > 1 for p in problems],
        "unequal": [p.seqlens_q != p.seqlens_k for p in problems],
        "no queries": [0 in p.seqlens_q for p in problems],
        "no keys": [0 in p.seqlens_k for p in problems],
        "window": [p.window is not None for p in problems],
        "bottom right": [p.causal == "bottom_right" for p in problems],
        "top left": [p.causal == "top_left" for p in problems],
        "negative scale": [p.scale < 0 for p in problems],
        "zero scale": [p.scale == 0 for p in problems],
        "dlse": [p.needs.dlse for p in problems],
        "slack": [p.slack_q > 0 for p in problems],
        "layouts": [p.layout_k != Layout() for p in problems],
        "tiny": [is_tiny(p) for p in problems],
        "statistics": [any(f.r is not None for f in v.figures.values()) for v in verdicts],
        "float32": [p.dtype == "float32" for p in problems],
    }
    assert {name: sum(counts) for name, counts in kinds.items() if sum(counts) < 3} == {}
    assert all(each.status == "pass" for each in verdicts)


SCALES = (1.0, 4.0)


@pytest.mark.parametrize(
    "dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16", pytest.param("float32", marks=pytest.mark.slow)]
)
def test_every_pattern_has_the_verdict_that_it_has_alone(dtype: str) -> None:
    problem = Problem(
        seqlens_q=(33, 0, 40), seqlens_k=(45, 7, 20), heads=4, kv_heads=2, dim_qk=64, dim_v=48, dtype=dtype, causal="bottom_right"
    )
    every = [
        launched(problem, Recipe(pattern=pattern, seed=4, q_scale=scale, k_scale=scale))
        for pattern in PATTERNS
        for scale in SCALES
    ]
    verdicts = [alone(each) for each in every]
    judged = list(in_batches(every, 9))
    for pattern, own, one in zip([p for p in PATTERNS for _ in range(2)], verdicts, judged, strict=True):
        assert one is None or one.verdict == own, pattern
    assert sum(each is not None for each in judged) >= 0.8 * len(every)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "deviations",
    [PLAIN, Deviations(half_partials=True), pytest.param(Deviations(ds_from_rounded_p=True), marks=pytest.mark.slow)],
)
def test_equal_values_are_counted_for_the_cases_that_need_it(
    dtype: str, deviations: Deviations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries that repeat take dK and dV beyond the budget without ties: the batch counts them for those Cases only."""
    counted: list[int] = []
    original = batching.truth_of_batches

    def truths(batches: Sequence[Inputs], *others: Any, ties: bool) -> BatchTruth:
        counted.extend([len(batches)] if ties else [])
        return original(batches, *others, ties=ties)

    monkeypatch.setattr(batching, "truth_of_batches", truths)
    lengths = [((320, 0, 60), (300, 7, 60)), ((250,), (280,)), ((128, 128), (190, 190))]
    every = [
        launched(
            Problem(seqlens_q=q, seqlens_k=k, heads=4, kv_heads=2, dim_qk=32, dim_v=32, dtype=dtype),
            Recipe(pattern=pattern, seed=seed, v_scale=4.0, do_scale=2.0),
        )
        for seed, (q, k) in enumerate(lengths)
        for pattern in ("ties_q", "normal")
    ]
    verdicts = [alone(each, deviations) for each in every]
    judged = judge_batch(every, deviations, "cpu")
    assert [each and each.verdict for each in judged] == verdicts
    assert sum(counted) <= len(every) // 2
    assert counted or deviations != PLAIN, "what a kernel declares makes budgets wider"


def test_equal_values_of_cases_in_several_parts_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, bool]] = []
    original = batching.truth_of_batches

    def truths(batches: Sequence[Inputs], *others: Any, ties: bool) -> BatchTruth:
        calls.append((len(batches), ties))
        return original(batches, *others, ties=ties)

    problem = Problem(seqlens_q=(250,), seqlens_k=(280,), heads=4, kv_heads=2, dim_qk=32, dim_v=32, dtype="float16")
    recipe = Recipe(pattern="ties_q", v_scale=4.0, do_scale=2.0)
    # Of each part of two, one Case is beyond its budgets without ties.
    every = [launched(problem, replace(recipe, seed=seed)) for seed in (1, 3, 2, 3)]
    monkeypatch.setattr(batching, "truth_of_batches", truths)
    monkeypatch.setattr(together, "_most_elements", lambda _: 2 * together._elements(problem))
    judged = judge_batch(every, PLAIN, "cpu")
    assert [each and each.verdict for each in judged] == [alone(each) for each in every]
    assert calls == [(2, False), (2, False), (2, True)]


MIXED = [
    Problem(seqlens_q=(30, 5), seqlens_k=(40, 9), heads=4, kv_heads=2, dim_qk=32, dim_v=32, causal="top_left"),
    Problem(seqlens_q=(64,), seqlens_k=(64,), heads=2, kv_heads=2, dim_qk=32, dim_v=32, window=(7, 3), slack_q=2),
    Problem(seqlens_q=(90, 0), seqlens_k=(70, 3), heads=3, kv_heads=1, dim_qk=32, dim_v=32, softmax_scale=-0.25),
    Problem(seqlens_q=(20, 20), seqlens_k=(9, 9), heads=2, kv_heads=1, dim_qk=32, dim_v=32, packing="dense", slack_k=1,
            causal="bottom_right", needs=Needs(dlse=True)),
    Problem(seqlens_q=(50,), seqlens_k=(50,), heads=2, kv_heads=1, dim_qk=32, dim_v=32, softmax_scale=0.0,
            needs=Needs(dlse=True)),
    Problem(seqlens_q=(100, 60, 2), seqlens_k=(80, 90, 1), heads=2, kv_heads=2, dim_qk=32, dim_v=32, window=(None, 0)),
]  # fmt: skip
DECLARED = [
    Deviations(prescaled_q=True),
    Deviations(l_from_rounded_p=True),
    Deviations(lazy_rescale=True),
    Deviations(normalised_p=True),
    Deviations(ds_from_rounded_p=True),
    Deviations(half_partials=True),
    Deviations(half_delta_products=True),
    Deviations(half_scaled_k=True),
    Deviations(half_partial_o=True),
    Deviations(half_split_lse=True),
    Deviations(split_lse_weights=True),
    Deviations(lse_base2=True),
    Deviations(tf32_on=("cpu",)),
]


@functools.cache
def _mixed(dtype: str) -> tuple[Launched, ...]:
    return tuple(launched(replace(p, dtype=dtype), Recipe(seed=seed)) for seed, p in enumerate(MIXED))


def mixed(dtype: str = "float16") -> list[Launched]:
    return list(_mixed(dtype))


IN_FLOAT32 = [
    Deviations(prescaled_q=True),
    Deviations(lazy_rescale=True),
    Deviations(split_lse_weights=True),
    Deviations(lse_base2=True),
    Deviations(tf32_on=("cpu",)),
]
"""All that makes a difference where nothing is rounded to half precision."""


@pytest.mark.parametrize(
    ("dtype", "deviations"),
    [
        pytest.param(
            dtype, each, marks=() if dtype == "bfloat16" or each in IN_FLOAT32 else pytest.mark.slow, id=f"{dtype}-{each}"
        )
        for dtype in ("bfloat16", "float32")
        for each in DECLARED
    ],
)
def test_declared_deviations_count_in_a_batch_too(deviations: Deviations, dtype: str) -> None:
    every = mixed(dtype)
    if deviations.lse_base2:
        outputs = [dataclasses.replace(each.outputs, lse=each.outputs.lse / math.log(2)) for each in every]
        every = [dataclasses.replace(each, outputs=x) for each, x in zip(every, outputs, strict=True)]
    verdicts = [alone(each, deviations) for each in every]
    # Twice, so that Cases of equal groups are together too.
    judged = judge_batch([*every, *every[::-1]], deviations, "cpu")
    for own, one in zip([*verdicts, *verdicts[::-1]], judged, strict=True):
        assert one is not None
        assert one.verdict == own


@pytest.mark.parametrize("names", [("o", "lse"), ("dk",), ("dv", "o"), ("lse",)])
def test_fewer_outputs_are_judged_alone_or_together_alike(names: tuple) -> None:
    every = []
    for each in mixed():
        problem = replace(each.inputs.problem, needs=Needs(outputs=names, dlse=each.inputs.problem.needs.dlse))
        outputs = Outputs(**{name: getattr(each.outputs, name) for name in names})
        every.append(dataclasses.replace(each, inputs=dataclasses.replace(each.inputs, problem=problem), outputs=outputs))
    for each, one in zip(every, judge_batch(every, PLAIN, "cpu"), strict=True):
        assert one is not None
        assert one.verdict == alone(each)
        assert list(one.truths) == list(names)


def test_the_truths_of_a_batch_are_those_of_each_case() -> None:
    every = mixed()
    for each, one in zip(every, judge_batch(every, PLAIN, "cpu"), strict=True):
        assert one is not None
        for name, own in truth(each.inputs, PLAIN, "cpu").items():
            true = one.truths[name]
            assert true.form == own.form
            torch.testing.assert_close(true.expected, own.expected, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(true.allowed, own.allowed, rtol=1e-6, atol=1e-14)
            values = own.expected.nan_to_num(neginf=0.0)
            torch.testing.assert_close(true.reorder(values, values, 0.0), own.reorder(values, values, 0.0), rtol=1e-6, atol=1e-14)


# --- sinks


def sunk(dtype: str) -> list[Launched]:
    """Cases of all masks and packings, three quarters of them with sinks: of any size, beside any values."""
    rng = random.Random(f"sinks {dtype}")
    patterns = [each for each in PATTERNS if each != "large_products"]
    every = []
    for seed in range(48):
        batch, kv_heads, groups = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 2, 3))
        lengths = [tuple(rng.choice(each) for _ in range(batch)) for each in ((0, 1, 3, 17, 60, 130), (0, 1, 5, 33, 70, 120))]
        packing = rng.choice(("ragged", "ragged", "dense"))
        if packing == "dense":
            lengths = [(each[0],) * batch for each in lengths]
        problem = Problem(
            seqlens_q=lengths[0], seqlens_k=lengths[1], packing=packing, dim_qk=16, dim_v=40, heads=kv_heads * groups,
            kv_heads=kv_heads, dtype=dtype, causal=rng.choice((None, "bottom_right", "top_left")),
            window=rng.choice((None, None, (3, 1))), sinks=seed % 4 != 3, needs=Needs(dlse=rng.random() < 0.3),
        )  # fmt: skip
        values = SINK_VALUES[seed % 5] if problem.sinks else "moderate"
        pattern = rng.choice(("normal", rng.choice(patterns)))
        every.append(launched(problem, Recipe(seed=seed, sinks=values, pattern=pattern)))
    return every


@pytest.mark.parametrize("dtype", ["float16", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bfloat16", "float32"))])
def test_cases_with_sinks_beside_others_have_the_verdicts_that_they_have_alone(dtype: str) -> None:
    every = sunk(dtype)
    verdicts = [alone(each) for each in every]
    assert all(each.status == "pass" for each in verdicts)
    for size in (9, 48):
        judged = list(in_batches(every, size))
        for each, own, one in zip(every, verdicts, judged, strict=True):
            assert one is None or one.verdict == own, each.inputs.problem
            assert one is None or set(one.verdict.captured) == ({"sinks"} if each.inputs.problem.sinks else set())
        assert sum(each is None for each in judged) <= 3, "few are left to be judged alone"
    problems = [each.inputs.problem for each in every if each.inputs.problem.sinks]
    assert any(0 in p.seqlens_k and any(p.seqlens_q) for p in problems)
    statistics = [any(f.r is not None for f in v.figures.values()) for v in verdicts if v.captured]
    assert dtype == "float32" or sum(statistics) >= 3


@functools.cache
def sinks_beside_none() -> tuple[Launched, ...]:
    return tuple(launched(replace(p, sinks=at % 3 > 0), Recipe(seed=at)) for at, p in enumerate([*MIXED, *MIXED[::-1]]))


@pytest.mark.parametrize("deviations", [each for each in DECLARED if not each.lse_base2 and not each.tf32_on], ids=repr)
def test_declared_deviations_count_beside_sinks_too(deviations: Deviations) -> None:
    every = sinks_beside_none()
    for each, one in zip(every, judge_batch(every, deviations, "cpu"), strict=True):
        assert one is not None
        assert one.verdict == alone(each, deviations)


def test_the_truths_beside_sinks_are_those_of_each_case() -> None:
    every = [launched(replace(p, sinks=at != 1), Recipe(seed=at, sinks="mixed")) for at, p in enumerate(MIXED)]
    for ties in (False, True):
        batch = truth_of_batches([each.inputs for each in every], PLAIN, "cpu", 1 << 16, [], ties=ties)
        assert batch.sinks is not None
        for at, each in enumerate(every):
            own = truth(each.inputs, PLAIN, "cpu")
            assert isinstance(own, Truths)
            if ties:
                own.count_ties()
            heads = slice(*batch.slots.head_starts[at : at + 2])
            if each.inputs.problem.sinks:
                of = own.captured["sinks"]
                torch.testing.assert_close(batch.sinks[0][heads], of.expected, rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(batch.sinks[1][heads], of.allowed, rtol=1e-6, atol=1e-14)


def test_a_sink_of_minus_infinity_and_a_gradient_in_half_are_judged_together_too() -> None:
    every = [launched(replace(p, sinks=True), Recipe(seed=at)) for at, p in enumerate(MIXED)]
    none = dataclasses.replace(launched(MIXED[0], Recipe(seed=3)).inputs, problem=replace(MIXED[0], sinks=True))
    plain = launched(MIXED[0], Recipe(seed=3)).outputs
    every[0] = Launched(
        "k", dataclasses.replace(none, captured=(torch.full((4,), -math.inf),)),
        dataclasses.replace(plain, d_captured=(torch.zeros(4),)), Config(),
    )  # fmt: skip
    every[2] = with_gradient(every[2], lambda x: x.half())
    judged = judge_batch(every, PLAIN, "cpu")
    assert [each and each.verdict for each in judged] == [alone(each) for each in every]


def with_gradient(each: Launched, change: Callable[[torch.Tensor], Any]) -> Launched:
    """The Case with another gradient of its sinks."""
    (own,) = each.outputs.d_captured
    assert own is not None
    return dataclasses.replace(each, outputs=dataclasses.replace(each.outputs, d_captured=(change(own.clone()),)))


GRADIENTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "2 % too large": lambda x: x * 1.02,
    "of another head": lambda x: x.roll(1),
    "nan": lambda x: x.index_fill(0, torch.tensor([1]), math.nan),
    "infinite": lambda x: x.index_fill(0, torch.tensor([1]), math.inf),
    "of another shape": lambda x: x[:-1],
    "of another dtype": lambda x: x.double(),
    "missing": lambda x: None,
}


@pytest.mark.parametrize("fault", GRADIENTS)
def test_a_wrong_gradient_of_sinks_is_left_to_the_judge(fault: str) -> None:
    every = [launched(replace(p, sinks=True), Recipe(seed=at)) for at, p in enumerate(MIXED)]
    before = judge_batch(every, PLAIN, "cpu")
    every[AT] = with_gradient(every[AT], GRADIENTS[fault])
    after = judge_batch(every, PLAIN, "cpu")
    assert after[AT] is None
    assert [each.check for each in alone(every[AT]).failures] == ["d sinks"]
    for at, (one, other) in enumerate(zip(before, after, strict=True)):
        assert one is not None
        assert at == AT or (other is not None and other.verdict == one.verdict)
    none = dataclasses.replace(every[0], outputs=dataclasses.replace(every[0].outputs, d_captured=()))
    assert judge_batch([none], PLAIN, "cpu") == [None]


AT = 2
"""The Case of `MIXED` in which a fault is planted."""


def off_by(each: Launched, name: str, times: float) -> torch.Tensor:
    """The output with one element off by `times` its budget and half a unit of its last place."""
    true, x = truth(each.inputs, PLAIN, "cpu")[name], getattr(each.outputs, name).clone()
    index = tuple(int(i) for i in torch.unravel_index(true.allowed.nan_to_num(posinf=-1.0).argmax(), true.allowed.shape))
    at = index if name == "lse" else (index[1], index[0], index[2])
    unit = abs(float(torch.nextafter(x[at], torch.tensor(math.inf, dtype=x.dtype)) - x[at]))
    x[at] = float(true.expected[index]) + times * (float(true.allowed[index]) + unit)
    return x


def biased(each: Launched, name: str) -> torch.Tensor:
    """The expected output, a little too large in all elements."""
    expected = truth(each.inputs, PLAIN, "cpu")[name].expected.transpose(0, 1)
    return (expected * (1 + 2.0**-12)).to(each.inputs.q.dtype)


def with_nan(each: Launched, name: str) -> torch.Tensor:
    x = getattr(each.outputs, name).clone()
    x.flatten()[x.numel() // 2] = math.nan
    return x


FAULTS = {
    **{f"off by twice the budget in {name}": (name, functools.partial(off_by, times=2.0)) for name in OUTPUT_NAMES},
    **{f"nan in {name}": (name, with_nan) for name in OUTPUT_NAMES},
    "a bias": ("dv", biased),
    "wrong dtype": ("o", lambda each, name: each.outputs.o.float()),
    "wrong shape": ("lse", lambda each, name: each.outputs.lse[:, :-1]),
    "missing": ("dk", lambda each, name: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_its_case_to_the_judge_and_the_others_as_they_are(fault: str) -> None:
    name, planted = FAULTS[fault]
    every = mixed()
    before = judge_batch(every, PLAIN, "cpu")
    every[AT] = dataclasses.replace(every[AT], outputs=dataclasses.replace(every[AT].outputs, **{name: planted(every[AT], name)}))
    after = judge_batch(every, PLAIN, "cpu")
    assert after[AT] is None
    assert alone(every[AT]).status == "fail"
    for at, (one, other) in enumerate(zip(before, after, strict=True)):
        assert one is not None
        assert at == AT or (other is not None and other.verdict == one.verdict)


def test_a_bias_is_noticed_in_a_tiny_case_too() -> None:
    tiny = launched(Problem(seqlens_q=(60,), seqlens_k=(60,), dim_qk=32, dim_v=32), Recipe(seed=3))
    assert is_tiny(tiny.inputs.problem)
    bad = dataclasses.replace(tiny, outputs=dataclasses.replace(tiny.outputs, dv=biased(tiny, "dv")))
    one, other = judge_batch([tiny, bad], PLAIN, "cpu")
    assert one is not None
    assert other is None
    assert alone(bad).failures[0].check == "z"


def test_an_error_at_the_edge_is_left_to_the_judge() -> None:
    every = mixed()
    inside = off_by(every[AT], "lse", 1.0)
    every[AT] = dataclasses.replace(every[AT], outputs=dataclasses.replace(every[AT].outputs, lse=inside))
    results = judge_batch(every, PLAIN, "cpu")
    assert [at for at, each in enumerate(results) if each is None] == [AT]


@pytest.mark.parametrize("change", [{"softcap": 3.0}, {"mask_mod": ("lt", ("kv_idx",), ("q_idx",))}], ids=["softcap", "mask_mod"])
def test_modifiers_are_left_to_the_judge(change: dict) -> None:
    problem = replace(MIXED[0], **change)
    inputs: Inputs = materialise(problem, Recipe(), "cpu")
    plain = mixed()
    one = dataclasses.replace(plain[0], inputs=inputs)
    assert [each is None for each in judge_batch([one, *plain], PLAIN, "cpu")] == [True, *[False] * len(plain)]


def test_what_fills_the_device_alone_is_left_to_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(together.CHUNK, "cpu", 6000)
    judged = judge_batch(mixed(), PLAIN, "cpu")
    sizes = [max(a * b for a, b in zip(p.seqlens_q, p.seqlens_k, strict=True)) * p.groups for p in MIXED]
    assert [each is None for each in judged] == [size > 6000 for size in sizes]
    assert {size > 6000 for size in sizes} == {True, False}


def test_many_elements_are_judged_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    every = mixed()
    whole = judge_batch(every, PLAIN, "cpu")
    calls = []
    counted = batching.truth_of_batches
    monkeypatch.setattr(
        batching,
        "truth_of_batches",
        lambda batches, *rest, **named: calls.append(len(batches)) or counted(batches, *rest, **named),
    )
    monkeypatch.setattr(together, "_most_elements", lambda _: 40_000)
    parts = judge_batch(every, PLAIN, "cpu")
    assert len(calls) > 1
    assert sum(calls) == len(every)
    assert [each and each.verdict for each in parts] == [each and each.verdict for each in whole]


def test_parts_have_cases_of_similar_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (60, 7, 55, 9)
    every = [
        launched(Problem(seqlens_q=(n,), seqlens_k=(n,), heads=2, kv_heads=1, dim_qk=32, dim_v=32), Recipe()) for n in lengths
    ]
    seen: list[list[int]] = []
    counted = batching.truth_of_batches

    def truths(batches: Sequence[Inputs], *others: Any, ties: bool) -> BatchTruth:
        seen.append([each.problem.total_q for each in batches])
        return counted(batches, *others, ties=ties)

    monkeypatch.setattr(batching, "truth_of_batches", truths)
    monkeypatch.setattr(together, "_most_elements", lambda _: 64 * 60 * 3)
    judged = judge_batch(every, PLAIN, "cpu")
    assert seen == [[7, 9], [55], [60]]
    assert [each and each.verdict for each in judged] == [alone(each) for each in every]


def test_nothing_is_judged_from_nothing() -> None:
    assert judge_batch([], PLAIN, "cpu") == []


class Operations(TorchDispatchMode):
    """Counts operations on floats that launch something on a GPU, and those that wait for it. Indices are made on the host."""

    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")
    views = ("view", "expand", "slice", "select", "transpose", "permute", "split", "unbind", "detach", "alias", "unsqueeze",
             "squeeze", "flatten", "unflatten", "mT", "chunk")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1]
        by_truth = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if by_truth or name in self.waiting:
            self.waits.append(name)
        result = func(*args, **(kwargs or {}))
        floats = any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in (*args, result))
        self.count += floats and name not in self.views
        return result


@pytest.mark.parametrize("sinks", [False, True])
def test_a_batch_costs_about_the_launches_of_one_case_and_waits_once(sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(together.FRAME, "cpu", together.FRAME["cuda"])
    monkeypatch.setattr(together, "_most_elements", lambda _: 1 << 24)
    every = [
        launched(replace(p, sinks=sinks and at % 2 == 0), Recipe(seed=seed)) for seed in range(4) for at, p in enumerate(MIXED)
    ]
    with Operations() as of_one:
        alone(every[0])
    with Operations() as of_all:
        results = judge_batch(every, PLAIN, "cpu")
    assert all(each is not None for each in results)
    assert of_all.waits == []
    assert of_all.count < 2 * of_one.count
