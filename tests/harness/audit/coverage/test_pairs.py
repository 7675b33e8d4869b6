"""Pairs of features: which were reached, which were not although one Case could have both, which no Case can have."""

from __future__ import annotations

from support.subjects import LIMITS, Subject

from attnfuzz.harness.audit.coverage.pairs import PairCoverage, Pairs, paired_features
from attnfuzz.harness.campaign.plan import every_variant
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import Layout, Problem
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.draw import drawn
from attnfuzz.strategies.trials import trial_cases
from attnfuzz.strategies.variants import all_variants

DIMS = frozenset({"64 x 64"})


def no_float16_without_mask(problem: Problem, config: Config) -> str | None:
    return "float16 needs a mask" if problem.dtype == "float16" and problem.causal is None else None


def plain(**more: object) -> Case:
    fields = {"seqlens_q": (5,), "seqlens_k": (5,), "dim_qk": 64, "dim_v": 64, "dtype": "float32", **more}
    return Case(kernel="acme.flash", problem=Problem(**fields), config=Config(tile_m=64, tile_n=32))  # type: ignore[arg-type]


def of(cases: list[Case], subject: Subject | None = None) -> PairCoverage:
    subject = subject or Subject()
    pairs = Pairs(subject, "cpu", all_variants(subject, "cpu"))
    for each in cases:
        pairs.add(each)
    return pairs.result()


def test_features_of_a_case() -> None:
    packed = Layout(packed=True, pitch=3)
    case = plain(seqlens_q=(5, 0), seqlens_k=(9, 4), heads=6, kv_heads=2, layout_k=packed, layout_v=packed, dim_v=32)
    features = set(paired_features(case, DIMS))
    assert features >= {("layout", "packed k, v"), ("layout", "pitch"), ("dim_qk x dim_v", "not listed")}
    assert features >= {("groups", "others, several"), ("empty queries", "yes"), ("empty keys", "no"), ("queries : keys", "<")}
    assert features >= {("slack rows", "no"), ("values", "normal"), ("check", "oracle"), ("softmax_scale", "default")}
    assert ("queries : keys", ">") not in features


def test_a_pair_that_no_case_had_is_missing_with_a_case_that_has_it() -> None:
    subject = Subject()
    result = of([plain(causal="bottom_right"), plain(softmax_scale=0.0)])
    pair = (("causal", "bottom_right"), ("softmax_scale", "0"))
    assert result.counts[("causal", "no"), ("softmax_scale", "0")] == 1
    case = result.missing[pair]
    assert set(paired_features(case, DIMS)) >= set(pair)
    assert why_not_case(subject, case, "cpu") is None
    assert result.share == 2 / 4


def test_sinks_make_pairs_with_what_a_case_has_beside_them() -> None:
    subject = Subject({"sinks": True, "window": True})
    result = of([plain(sinks=True), plain(window=(3, 1)), plain(causal="bottom_right")], subject)
    assert result.counts[("causal", "no"), ("sinks", "yes")] == 1
    assert result.counts[("causal", "bottom_right"), ("sinks", "no")] == 1
    case = result.missing[("sinks", "yes"), ("window", "yes")]
    assert case.problem.sinks
    assert case.problem.window == (3, 1)
    assert not any(name == "sinks" for pair in of([plain(), plain(window=(3, 1))]).counts for name, _ in pair)


def test_a_pair_that_the_kernel_refuses_is_not_missing() -> None:
    cases = [plain(dtype="float16", causal="bottom_right"), plain(softmax_scale=0.0), plain(slack_q=3)]
    result = of(cases, Subject(refuse=no_float16_without_mask))
    assert (("causal", "no"), ("dtype", "float16")) not in result.missing
    assert (("dtype", "float16"), ("softmax_scale", "0")) in result.missing


def test_a_pair_of_which_no_problem_can_be_built_is_not_missing() -> None:
    packed = Layout(packed=True)
    result = of([plain(layout_q=packed, layout_k=packed, layout_v=packed), plain(seqlens_k=(9,))], Subject({"layouts": True}))
    assert (("layout", "packed q, k, v"), ("queries : keys", "<")) not in result.missing
    assert (("layout", "packed q, k, v"), ("queries : keys", "=")) in result.counts


def test_a_value_that_all_cases_have_makes_no_pair() -> None:
    result = of([plain(softmax_scale=0.0), plain()])
    assert not any(name == "dtype" for pair in result.counts for name, _ in pair)


def test_values_and_checks_are_no_declared_features() -> None:
    zeros = Case(kernel="acme.flash", problem=plain(causal="top_left").problem, recipe=Recipe(pattern="zeros"))
    result = of([plain(softmax_scale=0.0), zeros])
    assert any(name == "values" for pair in result.missing for name, _ in pair)
    declared = result.declared()
    assert declared.possible < result.possible
    assert not any(name in ("values", "check") for pair in (*declared.counts, *declared.missing) for name, _ in pair)


def test_the_strategies_reach_nearly_all_pairs_of_declared_features() -> None:
    # In 2,000 Cases it is 98 % of every kernel's at least (docs/coverage.md); this is the part of it that is fast.
    kernel = registry.get("torch.reference_cpu")
    variants = every_variant(kernel, Settings())
    strategy = trial_cases(kernel, device="cpu", limits=LIMITS, variants=variants)
    pairs = Pairs(kernel, "cpu", variants)
    for seed in range(8):
        for case in drawn(strategy, seed=seed, examples=100, quota=100):
            pairs.add(case)
    declared = pairs.result().declared()
    assert declared.share > 0.98, list(declared.missing)
