"""Explanations: which parts of a minimal Case matter, and what failing Cases have in common, without a kernel being run."""

from __future__ import annotations

import gc
import json
import math
import random
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console
from support.runs import FunctionExecutor
from support.subjects import Subject

from attnfuzz.harness.campaign import explainer
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.contrast import Contrast, common_to, properties
from attnfuzz.harness.campaign.corpus import Corpus, StoredFinding, read_case
from attnfuzz.harness.campaign.events import Event, Finding, KernelSummary, TrialFinished
from attnfuzz.harness.campaign.explain import Common, Explanation, Outcome, Part, explanation_of, outcome_of
from attnfuzz.harness.campaign.minimise import Minimiser
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.core.statistics import fisher
from attnfuzz.harness.isolation.outcomes import OutOfTime
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Figures, Verdict
from attnfuzz.harness.report.explained import explanation_rows
from attnfuzz.harness.report.html import page
from attnfuzz.harness.report.machine import finding_object
from attnfuzz.harness.report.merge import merge_runs
from attnfuzz.harness.report.recorder import Recorder
from attnfuzz.harness.report.runfile import RunRecord, runs_of
from attnfuzz.harness.report.terminal import show_finding, show_stored
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import Layout, Needs, Problem
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.cases import Limits
from attnfuzz.strategies.neighbours import PARTS, differences, neighbours
from attnfuzz.strategies.variants import all_variants

CONFIGS = (
    Config(tile_m=32, tile_n=32, num_warps=4),
    Config(tile_m=64, tile_n=32, num_warps=4),
    Config(tile_m=64, tile_n=64, num_warps=8),
)
WIDE = Subject(
    {"packings": ("ragged", "dense"), "window": True, "softcap": True, "score_mod": True, "mask_mod": True, "layouts": True,
     "compiles_on": ()},
    CONFIGS,
)  # fmt: skip
LIMITS = Limits(batch=4, heads=6, length=300, tiles=64)
FAILURE = Failure(kernel=WIDE.name, kind="mismatch", output="o", check="element", message="O is wrong")
OTHER = Failure(kernel=WIDE.name, kind="mismatch", output="dv", check="element", message="dV is wrong")
FAIL, PASS = Verdict(status="fail", failures=(FAILURE,)), Verdict(status="pass")


def case_of(q: int = 3, k: int = 3, *, recipe: Recipe | None = None, config: Config = CONFIGS[0], **changes: Any) -> Case:
    problem: dict[str, Any] = {"seqlens_q": (q,), "seqlens_k": (k,), "dim_qk": 64, "dim_v": 64, **changes}
    return Case(kernel=WIDE.name, problem=Problem(**problem), recipe=recipe or Recipe(), config=config,
                check=changes.get("check", "oracle"))  # fmt: skip


def minimiser(verdict: Callable[[Case], Verdict], kernel: Subject = WIDE, executor: Any = None) -> Minimiser:
    runner = TrialRunner(executor or FunctionExecutor(verdict))
    return Minimiser(kernel, "cpu", all_variants(kernel, "cpu"), LIMITS, runner)


def explained(case: Case, verdict: Callable[[Case], Verdict], seconds: float = 60.0, **options: Any) -> Explanation:
    kept: list[Finding] = []
    finding = Finding(FAILURE.identity, case, FAIL, shrunk=True, rate=options.pop("rate", None))
    minimiser(verdict, **options).explain(finding, seconds, 6 * seconds, kept.append)
    [done] = kept
    assert done.explanation is not None
    return done.explanation


def of(fails: Callable[[Case], bool]) -> Callable[[Case], Verdict]:
    return lambda case: FAIL if fails(case) else PASS


def q_of(case: Case) -> int:
    return max(case.problem.seqlens_q)


def k_of(case: Case) -> int:
    return max(case.problem.seqlens_k)


TILED = case_of(1, 1)
# fault, minimal Case, whether it fails, the parts that matter with the rules that must be stated for them
FAULTS: list[tuple[str, Case, Callable[[Case], bool], dict[str, tuple[str, ...]]]] = [
    ("mask off by one", case_of(2, 2, causal="bottom_right"), lambda c: c.problem.causal is not None and q_of(c) > 1,
     {"causal": (), "seqlen_q": ("from 2 queries on",)}),
    ("tail keys", TILED, lambda c: k_of(c) % c.config.tile("tile_n") != 0,
     {"seqlen_k": ("seqlen_k not a multiple of tile_n=32",)}),
    ("tail queries", TILED, lambda c: q_of(c) % c.config.tile("tile_m") != 0,
     {"seqlen_q": ("seqlen_q not a multiple of tile_m=32",)}),
    ("diagonal offset", case_of(1, 2, causal="bottom_right"), lambda c: bool(c.problem.causal) and 0 < q_of(c) != k_of(c) > 0,
     {"causal": (), "seqlen_q": ("seqlen_q != seqlen_k",), "seqlen_k": ("seqlen_q != seqlen_k",)}),
    ("second key tile", case_of(1, 33), lambda c: k_of(c) > c.config.tile("tile_n"),
     {"seqlen_k": ("seqlen_k > tile_n=32", "from 33 keys on"),
      "config": ("num_warps=4 or tile_n=32 (changed together in each Config tried)",)}),
    ("from 65 keys", case_of(1, 65), lambda c: k_of(c) >= 65, {"seqlen_k": ("from 65 keys on",)}),
    ("found far above its bound", case_of(1, 200), lambda c: k_of(c) >= 77, {"seqlen_k": ("from 77 keys on",)}),
    ("exactly 17", case_of(17, 1), lambda c: 17 in c.problem.seqlens_q, {"seqlen_q": ("exactly 17 queries",)}),
    ("groups", case_of(heads=2), lambda c: c.problem.groups > 1, {"groups": ()}),
    ("key/value heads", case_of(heads=2, kv_heads=2), lambda c: c.problem.kv_heads > 1, {"kv_heads": ()}),
    ("one Config of three", case_of(config=CONFIGS[2]), lambda c: c.config.tile("tile_n") == 64,
     {"config": ("num_warps=8 or tile_n=64 (changed together in each Config tried)",)}),
    ("one choice of three Configs", case_of(config=CONFIGS[1]), lambda c: c.config["tile_m"] == 64 and c.config["num_warps"] == 4,
     {"config": ()}),
    ("the first Config", case_of(), lambda c: c.config["tile_m"] == 32, {"config": ("tile_m=32",)}),
    ("dtype", case_of(dtype="bfloat16"), lambda c: c.problem.dtype == "bfloat16", {"dtype": ()}),
    ("dims", case_of(dim_qk=192, dim_v=128), lambda c: c.problem.dim_qk > 128, {"dims": ()}),
    ("several sequences", case_of(seqlens_q=(1, 1), seqlens_k=(1, 1)), lambda c: c.problem.batch > 1, {"batch": ()}),
    ("empty queries", case_of(0, 1), lambda c: 0 in c.problem.seqlens_q, {"seqlen_q": ()}),
    ("window", case_of(window=(1, 1)), lambda c: c.problem.window is not None, {"window": ()}),
    ("softcap", case_of(softcap=20.0), lambda c: c.problem.softcap > 0, {"softcap": ()}),
    ("slack", case_of(slack_k=1), lambda c: c.problem.slack_k > 0, {"slack_k": ()}),
    ("layout", case_of(layout_q=Layout(pitch=8)), lambda c: c.problem.layout_q != Layout(), {"layouts": ()}),
    ("dense", case_of(packing="dense"), lambda c: c.problem.packing == "dense", {"packing": ()}),
    ("large scores", case_of(recipe=Recipe(q_scale=4.0)), lambda c: c.recipe.q_scale > 1, {"q_scale": ()}),
    ("pattern", case_of(recipe=Recipe(pattern="negative")), lambda c: c.recipe.pattern == "negative", {"pattern": ()}),
    ("values of one seed", case_of(recipe=Recipe(seed=2)), lambda c: c.recipe.seed in (2, 3), {"seed": ()}),
    ("second call", replace(case_of(), check="twice"), lambda c: c.check != "oracle", {"check": ()}),
    ("always", case_of(), lambda _: True, {}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "fails", "matters"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_the_cause_is_named_and_nothing_else(
    case: Case, fails: Callable[[Case], bool], matters: dict[str, tuple[str, ...]]
) -> None:
    assert fails(case)
    explanation = explained(case, of(fails))
    assert explanation.ended == ""
    parts = {each.part: each for each in explanation.parts}
    # Both lengths at once say nothing of their own, a larger batch or group may leave no room.
    assert {name for name, each in parts.items() if each.passes} - {"both lengths"} == set(matters)
    for name, rules in matters.items():
        assert set(rules) <= set(parts[name].rules), parts[name]
    text = dict(explanation_rows(explanation))
    assert all(name in text["matters"] for name in matters)
    assert not any(f"{name} (" in text.get("does not matter", "") for name in matters)


@pytest.mark.parametrize("row", FAULTS, ids=[row[0] for row in FAULTS])
def test_each_statement_is_true_of_the_fault(row: tuple[Any, ...]) -> None:
    """Every neighbour is asked again: what is listed as passing passes, what is listed as failing fails."""
    _, case, fails, _ = row
    seen: dict[Case, bool] = {}

    def verdict(each: Case) -> Verdict:
        seen[each] = fails(each)
        return FAIL if seen[each] else PASS

    explanation = explained(case, verdict)
    for part in explanation.parts:
        own = [failing for each, failing in seen.items() if differences(case, each) == (part.part,)]
        assert (len(part.fails), len(part.passes), len(part.otherwise)) == (sum(own), len(own) - sum(own), 0)
    assert explanation.trials <= 64


# --- neighbours


@pytest.mark.parametrize("row", FAULTS, ids=[row[0] for row in FAULTS])
def test_a_neighbour_differs_in_its_part_alone(row: tuple[Any, ...]) -> None:
    for part, cases in neighbours(WIDE, row[1], "cpu").items():
        assert part in PARTS
        assert len(cases) == len(set(cases))
        for each in cases:
            assert differences(row[1], each) == (part,)


def test_every_part_is_varied() -> None:
    others = {"check", "sink_values", "page_size"}
    assert set(neighbours(WIDE, case_of(causal="bottom_right"), "cpu")) == set(PARTS) - others
    sunk = neighbours(WIDE, case_of(sinks=True), "cpu")
    assert [each.recipe.sinks for each in sunk["sink_values"]] == ["zero", "large", "small", "mixed"]
    assert [each.problem.sinks for each in sunk["sinks"]] == [False]
    large = replace(case_of(sinks=True), recipe=Recipe(sinks="large"))
    [without] = neighbours(WIDE, large, "cpu")["sinks"]
    assert (without.problem.sinks, without.recipe) == (False, Recipe())
    paged = Subject({"page_sizes": (16, 64, 0), "outputs": ("o", "lse")}, CONFIGS)
    case = case_of(page_size=16, needs=Needs(outputs=("o", "lse")))
    assert [each.problem.page_size for each in neighbours(paged, case, "cpu")["page_size"]] == [64, 0]
    assert "check" in neighbours(WIDE, replace(case_of(), check="twice"), "cpu")


def test_only_cases_run_that_the_kernel_takes_and_a_campaign_draws() -> None:
    kernel = Subject(
        {"compiles_on": (), "groups": (1,)},
        CONFIGS,
        lambda problem, _: "odd" if problem.seqlens_k[0] % 2 > (problem.seqlens_k[0] == 1) else None,
    )
    executor = FunctionExecutor(of(lambda _: True))
    explanation = explained(case_of(2, 2), of(lambda _: True), kernel=kernel, executor=executor)
    assert explanation.ended == ""
    assert all((k_of(each) % 2 == 0 or k_of(each) == 1) and each.problem.groups == 1 for each in executor.cases)
    assert all(each.problem.window is None and each.problem.heads <= LIMITS.heads for each in executor.cases)
    assert all(max(each.problem.seqlens_q) <= LIMITS.length for each in executor.cases)
    assert "groups" not in {each.part for each in explanation.parts}


def test_no_code_is_compiled_for_a_neighbour() -> None:
    kernel = Subject({"compiles_on": ("cpu",)}, CONFIGS)
    variants = [each for each in all_variants(kernel, "cpu") if each.config == CONFIGS[0]]
    executor = FunctionExecutor(of(lambda _: True))
    finding = Finding(FAILURE.identity, case_of(), FAIL)
    Minimiser(kernel, "cpu", variants, LIMITS, TrialRunner(executor)).explain(finding, 60.0, 600.0, lambda _: None)
    assert {each.config for each in executor.cases} == {CONFIGS[0]}


# --- outcomes


def figures(**values: Any) -> Verdict:
    return Verdict(status="pass", figures={"o": Figures(**{"elements": 4, **values})})


@pytest.mark.parametrize(
    ("verdict", "kind", "outcome"),
    [
        (FAIL, "mismatch", "fails"),
        (Verdict(status="fail", failures=(OTHER, FAILURE)), "mismatch", "fails"),
        (Verdict(status="fail", failures=(OTHER,)), "mismatch", "otherwise"),
        (PASS, "mismatch", "passes"),
        (figures(), "mismatch", "passes"),
        (figures(unjudged="overflow"), "mismatch", "unjudged"),
        (figures(elements=0), "mismatch", "unjudged"),
        (figures(), "aggregate", "unjudged"),
        (figures(r=0.1, z=0.1), "aggregate", "passes"),
    ],
)
def test_the_outcome_of_a_neighbour(verdict: Verdict, kind: Any, outcome: Outcome) -> None:
    assert outcome_of(verdict, replace(FAILURE.identity, kind=kind)) == outcome


def test_what_fails_otherwise_or_is_not_judged_does_not_pass() -> None:
    def verdict(case: Case) -> Verdict:
        if case.problem.dtype != "float16":
            return Verdict(status="fail", failures=(OTHER,))
        return figures(unjudged="overflow") if case.problem.causal else FAIL

    explanation = explained(case_of(), verdict)
    parts = {each.part: each for each in explanation.parts}
    assert not any(each.passes for each in parts.values())
    assert set(parts["dtype"].otherwise) == {"bfloat16", "float32"}
    assert "causal" not in parts
    rows = dict(explanation_rows(explanation))
    assert "dtype (float32, bfloat16)" in rows["fails otherwise"]
    assert "matters" not in rows
    assert "dtype" not in rows["does not matter"]


# --- failures that show only sometimes


def test_a_failure_with_a_rate_is_not_explained() -> None:
    executor = FunctionExecutor(of(lambda _: True))
    explanation = explained(case_of(), of(lambda _: True), rate=(3, 11), executor=executor)
    assert (executor.cases, explanation.parts) == ([], ())
    assert dict(explanation_rows(explanation)) == {
        "not explained": "the failure shows in 3 of 11 runs, so that a neighbour that passes says nothing"
    }


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_nothing_false_is_said_of_a_random_failure(rate: float) -> None:
    """Shrinking took it for one that shows every time."""
    for seed in range(10):
        chance = random.Random(f"{rate} {seed}")
        explanation = explained(case_of(), of(lambda _, chance=chance: chance.random() < rate))
        assert not any(each.passes for each in explanation.parts), seed
        assert "matters" not in dict(explanation_rows(explanation))


def test_a_case_that_passes_in_the_end_is_no_ground_for_an_explanation() -> None:
    case, calls = case_of(causal="bottom_right"), list[Case]()

    def verdict(each: Case) -> Verdict:
        calls.append(each)
        return PASS if each == case or each.problem.causal is None else FAIL

    explanation = explained(case, verdict)
    assert calls[-1] == case
    assert explanation.parts == ()
    assert "one Case failed in one run and passed in another" in explanation.ended


# --- time


def test_without_time_nothing_runs_and_that_is_said() -> None:
    executor = FunctionExecutor(of(lambda _: True))
    explanation = explained(case_of(), of(lambda _: True), seconds=0.0, executor=executor)
    assert executor.cases == []
    assert explanation_rows(explanation) == [("not explained", "the time for shrinking is over")]


def test_a_slow_kernel_is_explained_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first neighbour of every part comes before the second of any."""
    now = [0.0]
    monkeypatch.setattr(explainer.time, "monotonic", lambda: now[0])

    def verdict(_: Case) -> Verdict:
        now[0] += 1.0
        return FAIL

    explanation = explained(case_of(), verdict, seconds=9.5)
    assert (explanation.trials, explanation.ended) == (10, "the time for shrinking is over")
    assert [len(each.fails) for each in explanation.parts] == [1] * 10
    assert explanation_rows(explanation)[-1] == ("explained in part", "the time for shrinking is over")


def test_explaining_ends_with_its_share_of_the_time_for_shrinking() -> None:
    def verdict(_: Case) -> Verdict:
        time.sleep(0.02)
        return FAIL

    kept: list[Finding] = []
    start = time.monotonic()
    minimiser(verdict).explain(Finding(FAILURE.identity, case_of(), FAIL), 5.0, 0.6, kept.append)
    assert time.monotonic() - start < 1.0
    assert kept[0].explanation is not None
    assert kept[0].explanation.ended == "the time for shrinking is over"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OutOfTime, SystemError])
def test_what_ends_it_keeps_the_finding_and_what_is_known(error: type[BaseException]) -> None:
    case, kept = case_of(1, 1), list[Finding]()
    calls = 0

    def verdict(_: Case) -> Verdict:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise error
        return FAIL

    run = minimiser(verdict)
    if error is OutOfTime:
        run.minimise(Finding(FAILURE.identity, case, FAIL), 60.0, kept.append)
    else:
        with pytest.raises(error):
            run.minimise(Finding(FAILURE.identity, case, FAIL), 60.0, kept.append)
    assert len(kept) == 2
    assert kept[0].minimal
    assert (kept[1].case, kept[1].minimal) == (case, True)
    assert kept[1].explanation is not None
    assert kept[1].explanation.parts
    assert kept[1].explanation.ended


def test_it_is_the_same_each_time() -> None:
    case, fails = case_of(1, 1), of(lambda c: k_of(c) % 32 != 0)
    assert explained(case, fails) == explained(case, fails)


def test_what_shrinking_has_tried_is_not_run_again() -> None:
    executor, kept = FunctionExecutor(of(lambda c: k_of(c) >= 9)), list[Finding]()
    minimiser(PASS, executor=executor).minimise(Finding(FAILURE.identity, case_of(1, 200), FAIL), 600.0, kept.append)  # type: ignore[arg-type]
    shrunk, done = kept
    assert shrunk.case.problem.seqlens_k == (9,)
    assert done.explanation is not None
    part = next(each for each in done.explanation.parts if each.part == "seqlen_k")
    assert part.rules == ("from 9 keys on",)
    # 1, 2, 3, half and one less are steps of shrinking: they ran once there, and the one that stands for all twice more.
    runs = [
        executor.cases.count(each)
        for each in set(executor.cases)
        if differences(shrunk.case, each) == ("seqlen_k",) and k_of(each) != 200
    ]
    assert sorted(set(runs)) == [1, 3]
    assert runs.count(3) == 1, "apart from the Case that shrinking began with"


# --- in common


@pytest.mark.parametrize(
    ("table", "p"),
    [
        ((5, 5, 0, 5), 1 / 252),
        ((3, 4, 1, 4), 17 / 70),
        ((0, 3, 2, 4), 1.0),
        ((2, 2, 2, 2), 1.0),
        ((12, 12, 35, 141), math.comb(47, 12) / math.comb(153, 12)),
    ],
)
def test_fishers_exact_test(table: tuple[int, int, int, int], p: float) -> None:
    assert fisher(*table) == pytest.approx(p, rel=1e-9)


def test_a_condition_is_found_and_what_goes_along_is_left_out() -> None:
    chance = random.Random(0)
    failing: list[set[str]] = []
    passing: list[set[str]] = []
    for _ in range(300):
        causal, ragged = chance.random() < 0.5, chance.random() < 0.4
        # Half of what is causal has rows without keys: it goes along with the cause.
        has = {f"noise {chance.randrange(6)}"} | ({"causal"} if causal else set()) | ({"ragged"} if ragged else set())
        has |= {"rows without keys"} if causal and chance.random() < 0.5 else set()
        (failing if causal and ragged else passing).append(has)
    common = common_to(failing, passing)
    assert {each.property for each in common} == {"causal", "ragged"}
    assert all(each.failing == each.of_failing == len(failing) and each.of_passing == len(passing) for each in common)
    assert all(each.p < 0.01 for each in common)
    first, second = common
    assert (first.failing_together, first.passing_together) == (None, None)
    assert (second.failing_together, second.passing_together) == (len(failing), 0)
    assert second.passing > 0, "alone it is no condition"
    rows = [text for _, text in explanation_rows(Explanation(common=common))]
    assert "above" not in rows[0]
    assert rows[1].endswith(f"; with what stands above as well: {len(failing)} failed, none passed")


def test_chance_is_not_a_cause() -> None:
    """Failures at random, of Cases with 60 properties each: something is said in fewer than 1 of 100 runs."""
    said = 0
    for seed in range(200):
        chance = random.Random(seed)
        cases = [{f"{n}={chance.randrange(3)}" for n in range(20)} for _ in range(100)]
        said += bool(common_to(cases[:12], cases[12:]))
    assert said <= 4


def test_drawn_cases_alone_are_compared() -> None:
    contrast = Contrast()
    for number in range(40):
        tail, case = number % 3 == 0, case_of(1, 32 if number % 3 else 33, recipe=Recipe(seed=number))
        contrast.add("generate", case, FAIL if tail else PASS)
        contrast.add("shrink", replace(case, problem=replace(case.problem, seqlens_k=(64,))), FAIL)
    [common] = contrast.common(FAILURE.identity)
    assert common.property in ("seqlen_k not a multiple of tile_n", "seqlen_k > tile_n", "seqlen_k > 32")
    assert (common.failing, common.of_failing, common.passing, common.of_passing) == (14, 14, 0, 26)
    assert contrast.common(OTHER.identity) == ()
    [(title, text)] = explanation_rows(Explanation(common=(common,)))
    assert (title, text) == ("in common", f"all 14 failing cases have {common.property}; of 26 that passed, none")


def test_of_many_passing_cases_a_sample_is_kept() -> None:
    contrast = Contrast()
    for number in range(5000):
        contrast.add("generate", case_of(1, 1 + number % 2, recipe=Recipe(seed=number)), PASS)
    for number in range(4):
        contrast.add("generate", case_of(1, 33, recipe=Recipe(seed=number)), FAIL)
    [common] = contrast.common(FAILURE.identity)
    assert common.of_passing == 1500


def test_no_case_is_kept_for_the_comparison() -> None:
    """A Case has kilobytes: in hours the sample becomes Cases that nothing else remembers."""

    def living() -> int:
        gc.collect()
        return sum(type(each) is Case for each in gc.get_objects())

    contrast, before = Contrast(), living()
    for number in range(200):
        contrast.add("generate", case_of(1, 32 + number % 2, recipe=Recipe(seed=number)), FAIL if number % 2 else PASS)
    assert living() <= before
    assert contrast.common(FAILURE.identity)[0].of_failing == 100


def test_properties_are_true_of_their_case() -> None:
    found = set(properties(case_of(2, 33, causal="bottom_right", heads=2)))
    assert {"causal=bottom_right", "seqlen_q != seqlen_k", "seqlen_k not a multiple of tile_n", "groups > 1"} <= found
    assert not {"seqlen_k = 0", "several sequences", "a window", "seqlen_q > tile_m"} & found


def failing_run(tmp_path: Path, listener: Callable[[Event], None] = lambda _: None, interrupt: str = "") -> KernelSummary:
    """A campaign of a kernel that is wrong under a causal mask in grouped heads; `interrupt`: Ctrl-C in that phase."""
    kernel = registry.get("torch.reference_cpu")
    wrong = Failure(kernel=kernel.name, kind="mismatch", output="o", check="element", message="O is wrong")

    def listen(event: Event) -> None:
        listener(event)
        if isinstance(event, TrialFinished) and event.phase == interrupt:
            raise KeyboardInterrupt

    def verdict(case: Case) -> Verdict:
        failing = case.problem.causal is not None and case.problem.groups > 1
        return Verdict(status="fail", failures=(wrong,)) if failing else PASS

    settings = Settings(device="cpu", max_examples=150, out=str(tmp_path), maps=False)
    done = run_campaign([kernel], settings, listen, FunctionExecutor(verdict))
    assert done.interrupted == bool(interrupt)
    return done.summaries[0]


def test_a_campaign_explains_its_finding_everywhere(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    summary = failing_run(tmp_path, recorder)
    [finding] = summary.findings
    assert finding.explanation is not None
    assert {each.part for each in finding.explanation.parts if each.passes} == {"causal", "groups"}
    assert {each.property for each in finding.explanation.common} == {"causal=top_left", "groups > 1"}
    assert all(each.failing == each.of_failing > 10 for each in finding.explanation.common)
    # In its file, and in all that is printed of it.
    stored = read_case(Path(str(finding.path)))
    assert stored.finding.explanation == finding.explanation
    rows = explanation_rows(finding.explanation)
    assert [title for title, _ in rows] == ["matters", "does not matter", "in common", "in common"]
    assert finding_object(finding)["explanation"]["text"] == [f"{title}: {text}" for title, text in rows]
    assert json.loads(json.dumps(finding_object(finding)))["explanation"]["parts"][0]["part"] == "causal"
    [run] = runs_of(tmp_path)
    assert isinstance(run, RunRecord)
    assert run.failures[0].explanation == rows
    shown = StringIO()
    show_finding(Console(file=shown, width=400), 1, finding)
    show_stored(Console(file=shown, width=400), stored)
    for title, text in rows:
        assert shown.getvalue().count(f"   {title:<20} {text}\n") == 2
    html = page(merge_runs([run]), tmp_path, pictures=0).text
    assert "<h4>What matters</h4>" in html
    assert "causal=top_left (passes without)" in html


def test_ctrl_c_while_it_is_explained_keeps_the_minimal_case(tmp_path: Path) -> None:
    summary = failing_run(tmp_path, interrupt="explain")
    [finding] = summary.findings
    assert finding.minimal
    assert (finding.case.problem.seqlens_q, finding.case.problem.heads) == ((1,), 2)
    assert finding.explanation is not None
    assert finding.explanation.ended == "it was interrupted"
    assert read_case(Path(str(finding.path))).finding.explanation == finding.explanation


# --- files


EXPLANATION = Explanation(
    parts=(Part(part="causal", value="bottom_right", passes=("none",)), Part(part="seed", value="0", fails=("1", "2"))),
    common=(Common(property="causal=bottom_right", failing=4, of_failing=4, passing=1, of_passing=40, p=0.001),),
    trials=7,
)


def test_a_case_file_holds_its_explanation(tmp_path: Path) -> None:
    finding = Finding(FAILURE.identity, case_of(), FAIL, shrunk=True, explanation=EXPLANATION)
    stored = read_case(Corpus(tmp_path).write(finding, seed=0))
    assert stored.finding.explanation == EXPLANATION
    assert explanation_rows(stored.finding.explanation) == [
        ("matters", "causal=bottom_right (passes without)"),
        ("does not matter", "fails alike with each value tried of seed (0, 1, 2)"),
        ("in common", "all 4 failing cases have causal=bottom_right; of 40 that passed, 1"),
    ]


@pytest.mark.parametrize(
    "broken",
    [
        3, "text", [], {"parts": 3}, {"parts": [{"part": "x"}]}, {"parts": [{"part": "x" * 501, "value": ""}]}, {"trials": -1},
        {"parts": [{"part": "x", "value": "y", "fails": ["z"] * 101}]}, {"parts": [{"part": "x", "value": "y"}] * 101},
        {"common": [{"property": "x", "failing": -1, "of_failing": 1, "passing": 1, "of_passing": 1, "p": 0.1}]},
    ],
    ids=lambda each: json.dumps(each)[:30],
)  # fmt: skip
def test_a_broken_explanation_counts_as_none(broken: object, tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps({**case_of().to_object(), "found": {"explanation": broken, "seed": 5}}))
    finding = read_case(path).finding
    assert (finding.explanation, finding.seed) == (None, 5)


def test_a_file_without_one_is_as_before() -> None:
    assert "explanation" not in StoredFinding(seed=1).to_object()


def test_values_are_cut_where_they_are_many() -> None:
    outcomes: dict[Case, Outcome] = {case_of(recipe=Recipe(seed=seed)): "fails" for seed in range(1, 9)}
    rows = dict(explanation_rows(explanation_of(case_of(), {"seed": outcomes})))
    assert rows["does not matter"] == "fails alike with each value tried of seed (0, 1, 2, 3 and 5 more)"
