"""The values of every pattern: the same bits always and everywhere, and what each promises."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from support.subjects import LIMITS, Subject
from support.verdict.cases import FAMILIES

from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.noise import chosen, hashed, noise, uniform
from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.strategies.case import PATTERNS, Case, Recipe
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.trials import trial_cases

PROBLEM = Problem(seqlens_q=(3, 0, 5), seqlens_k=(2, 4, 9), heads=4, kv_heads=2, dim_qk=8, dim_v=5, slack_q=1, slack_k=2)
TENSORS = ("q", "k", "v", "d_o")
DTYPES = ("float16", "bfloat16", "float32")
SEEDS = range(16)


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(x.cpu().contiguous().view(torch.uint8).numpy().tobytes() for x in tensors)).hexdigest()[:16]


def test_noise_is_pinned() -> None:
    """These bits are part of every case file: a change of them makes all stored Cases other Cases."""
    assert digest(noise(7, "q", (3, 5), "cpu")) == PINNED_NOISE
    inputs = materialise(PROBLEM, Recipe(seed=3), "cpu")
    assert digest(inputs.q, inputs.k, inputs.v, inputs.d_o) == PINNED_INPUTS


PINNED_NOISE, PINNED_INPUTS = "b9fdec114e27d0a1", "4a73599d667ebf30"


def test_noise_depends_on_seed_name_and_index_alone() -> None:
    torch.manual_seed(1)
    first = noise(7, "q", (4, 6), "cpu")
    torch.manual_seed(2)
    assert torch.equal(first, noise(7, "q", (4, 6), "cpu"))
    assert torch.equal(first.flatten()[:10], noise(7, "q", (10,), "cpu"))
    assert not torch.equal(first, noise(8, "q", (4, 6), "cpu"))
    assert not torch.equal(first, noise(7, "k", (4, 6), "cpu"))


def test_noise_is_close_to_normal() -> None:
    x = noise(1, "q", (200_000,), "cpu")
    assert abs(x.mean().item()) < 0.01
    assert abs(x.std().item() - 0.8165) < 0.005
    assert x.abs().max() < 4
    assert abs(torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1].item()) < 0.01


def test_hashed_numbers_are_uniform() -> None:
    numbers = hashed(1, "x", (60_000,), "cpu")
    assert 0 <= numbers.min() < numbers.max() < 2**48
    counts = (numbers % 5).bincount()
    assert (counts - 12_000).abs().max() < 500
    fractions = uniform(1, "x", (60_000,), "cpu")
    assert 0 <= fractions.min() < fractions.max() < 1
    assert abs(fractions.mean().item() - 0.5) < 0.01
    assert torch.equal(fractions * 2**16, (fractions * 2**16).round())


def test_what_the_seed_chooses_is_pinned_and_reaches_every_option() -> None:
    assert [chosen(seed, "x", "abc") for seed in range(8)] == list(CHOSEN)
    assert {chosen(seed, "x", range(9)) for seed in range(100)} == set(range(9))


CHOSEN = "cabbcbbb"
PINNED_PATTERNS = {
    "normal": "7ed3db84 58880c6d 9c7c30dd",
    "zeros": "12581e4a 57cf4fdc 181dd57a",
    "uniform01": "74d03aa6 094a9acc 20baec06",
    "fewvalued": "4d5ecb98 07da4f20 dbc1b9d7",
    "sparse": "f8d6fbd4 72fcf34d 04ec4b7f",
    "constant_v": "ed2d421e fd6d6011 5d5ef65e",
    "ties": "c1a04d2e 898f697c f2bd2a48",
    "ties_q": "a8ba226d 5958e488 bedd59a6",
    "dup_keys": "ab9b0456 d5cc9e69 12346bb4",
    "block_const": "1ad4046d 624a453f 1e2f7722",
    "needle": "bcea62b0 eeb42643 eafc4149",
    "small_logits": "6fa9fc13 dd9f8d50 2fba2619",
    "normal_scaled": "90654b3e 21aae351 23e74515",
    "large_logits": "f5f408ef 26435141 c4b25cd0",
    "huge_logits": "b7a78adf 15145d80 71eb8d35",
    "falling": "a4dafaca 69abc44e 3109468e",
    "rising": "fda7bb1d 9150767a 4d2199e6",
    "negative": "b53287e2 6e311c3f f9651d76",
    "below_sentinels": "60c012de 7028632c b11cc6ef",
    "large_products": "10d76af2 4cf83518 20495870",
    "sink": "9e722e88 05ab097f b87d4ead",
    "onehot": "43c1c4b4 2abcd530 8fb7d99d",
    "k_offset": "5dd79484 3d8837ca 8697f409",
    "v_mean": "d84d40e5 ee7622b2 5fae7a38",
    "sorted_do": "db22a6c6 e0e31791 0a9cd13c",
    "outlier": "69c65046 874fc854 55420b02",
    "chan_outlier": "0702e065 5ed14844 5fd923e7",
    "tok_outlier": "8e4d348d d23833fe c0adae34",
    "lognormal": "3807d842 15c50f87 08ec360e",
    "do_orthogonal": "3b761b7e 9f3d6217 f75f5657",
    "do_parallel": "25ff953b f69cfc43 eafbcd7f",
    "tiny": "3a5530bb ea0a9e49 dea1d4d9",
    "subnormal": "8723075a 88e9a3ea e31098e0",
    "near_overflow": "7aae4ab0 45411d6b 075cb5e3",
}
"""The first digits for float16, bfloat16 and float32."""


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_is_pinned(pattern: str) -> None:
    assert " ".join(pattern_digest(pattern, dtype) for dtype in DTYPES) == PINNED_PATTERNS[pattern]


def pattern_digest(pattern: str, dtype: str) -> str:
    problem = Problem(seqlens_q=(12, 0, 7, 5), seqlens_k=(12, 6, 0, 9), heads=4, kv_heads=2, dim_qk=8, dim_v=5, dtype=dtype)
    inputs = [materialise(problem, Recipe(pattern=pattern, seed=seed), "cpu") for seed in (0, 1, 3)]
    return digest(*(getattr(each, name) for each in inputs for name in TENSORS))[:8]


def test_the_families_of_the_calibration() -> None:
    assert len(FAMILIES) == len(set(FAMILIES)) == 26
    assert set(FAMILIES) < set(PATTERNS)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_token_and_nothing_at_all(pattern: str) -> None:
    for lengths in (((1,), (1,)), ((0,), (3,)), ((3,), (0,)), ((0, 0), (0, 0))):
        problem = Problem(seqlens_q=lengths[0], seqlens_k=lengths[1], dim_qk=1, dim_v=1)
        for seed in SEEDS:
            inputs = materialise(problem, Recipe(pattern=pattern, seed=seed), "cpu")
            assert all(torch.isfinite(getattr(inputs, name)).all() for name in TENSORS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_cpu_and_gpu_have_the_same_bits(pattern: str, dtype: str) -> None:
    problem = Problem(
        seqlens_q=(33, 0, 70),
        seqlens_k=(65, 7, 40),
        heads=3,
        dim_qk=40,
        dim_v=72,
        dtype=dtype,
        needs=Needs(dlse=True),
        kv_heads=1,
    )
    for scale in (1.0, 0.0625, 16.0):
        recipe = Recipe(pattern=pattern, seed=5, q_scale=scale, v_scale=scale)
        here, there = materialise(problem, recipe, "cpu"), materialise(problem, recipe, "cuda")
        for name in (*TENSORS, "d_lse"):
            assert digest(getattr(here, name)) == digest(getattr(there, name)), name


@pytest.mark.parametrize(("pattern", "dtype"), list(itertools.product(PATTERNS, ("float16", "bfloat16", "float32"))))
def test_every_pattern_is_finite_and_scales_exactly(pattern: str, dtype: str) -> None:
    problem = Problem(seqlens_q=(20,), seqlens_k=(30,), dim_qk=8, dim_v=8, dtype=dtype)
    plain, scaled = (materialise(problem, Recipe(pattern=pattern, q_scale=scale), "cpu") for scale in (1.0, 2.0))
    assert all(torch.isfinite(getattr(plain, name)).all() for name in TENSORS)
    if pattern != "subnormal":
        assert torch.equal(plain.q * 2, scaled.q)


def test_patterns_keep_their_promise() -> None:
    problem = Problem(seqlens_q=(40,), seqlens_k=(40,), dim_qk=16, dim_v=16, dtype="float32")
    make = {pattern: materialise(problem, Recipe(pattern=pattern, seed=2), "cpu") for pattern in PATTERNS}
    score = {pattern: (x.q[:, 0] @ x.k[:, 0].T) / 4 for pattern, x in make.items()}
    assert (make["constant_v"].v == make["constant_v"].v[:1]).all()
    assert (make["ties"].k == make["ties"].k[:1]).all()
    assert make["zeros"].q.abs().max() == 0
    assert score["large_logits"].abs().max() > 30
    assert score["negative"].max() < -8
    assert score["falling"][:, :8].mean() > score["falling"][:, 32:].mean() + 1
    assert score["rising"][:, :8].mean() < score["rising"][:, 32:].mean() - 1
    assert make["outlier"].v.abs().amax((1, 2)).max() > 20
    needle = make["needle"].v[:, 0]
    assert (needle.argmax(1) == torch.arange(40) % 16).all()
    assert needle.unique(dim=0).shape[0] == 40
    v, d_o = make["do_orthogonal"].v[:, 0], make["do_orthogonal"].d_o[:, 0]
    cosine = torch.nn.functional.cosine_similarity(v.mean(0), d_o.mean(0), dim=0)
    assert abs(cosine) < 0.1
    v, d_o = make["do_parallel"].v[:, 0], make["do_parallel"].d_o[:, 0]
    assert torch.nn.functional.cosine_similarity(v.mean(0), d_o.mean(0), dim=0) > 0.9
    half = materialise(Problem(seqlens_q=(9,), seqlens_k=(9,), dim_qk=8, dim_v=8), Recipe(pattern="subnormal"), "cpu")
    assert (half.v.abs() < torch.finfo(torch.float16).tiny).any()


# --- what each pattern promises


def inputs_of(pattern: str, seed: int = 1, dtype: str = "float32") -> Inputs:
    """Two sequences of 40 and 24 tokens, two heads in one group."""
    problem = Problem(seqlens_q=(40, 24), seqlens_k=(40, 24), heads=2, dim_qk=16, dim_v=16, dtype=dtype)
    return materialise(problem, Recipe(pattern=pattern, seed=seed), "cpu")


def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of each sequence."""
    return x[:40], x[40:]


def scores(inputs: Inputs) -> torch.Tensor:
    return (inputs.q[:40, 0] @ inputs.k[:40, 0].T) / 4


def sometimes(holds: Callable[[int], object]) -> bool:
    """Whether `holds` for some seeds and not for others: what the seed chooses."""
    return len({bool(holds(seed)) for seed in SEEDS}) == 2


def test_uniform01() -> None:
    for name in TENSORS:
        x = getattr(inputs_of("uniform01"), name)
        assert 0 <= x.min() < 0.1
        assert 0.9 < x.max() < 1


def test_fewvalued() -> None:
    assert all(getattr(inputs_of("fewvalued"), name).unique().tolist() == [-1, 0, 1] for name in TENSORS)


def test_sparse() -> None:
    assert all(0.75 < (getattr(inputs_of("sparse"), name) == 0).double().mean() < 0.85 for name in TENSORS)


def test_ties_q() -> None:
    first, second = parts(inputs_of("ties_q").q)
    assert (first == first[:1]).all()
    assert (second == second[:1]).all()
    assert not torch.equal(first[0], second[0])
    assert sometimes(lambda seed: (inputs_of("ties_q", seed).d_o[:40] == inputs_of("ties_q", seed).d_o[:1]).all())


def test_dup_keys() -> None:
    for seed in SEEDS:
        for part in parts(inputs_of("dup_keys", seed).k):
            assert 1 <= part.unique(dim=0).shape[0] <= part.shape[0] // 2
    assert sometimes(lambda seed: inputs_of("dup_keys", seed).v[:40].unique(dim=0).shape[0] <= 20)
    assert sometimes(lambda seed: inputs_of("dup_keys", seed).k[:40].unique_consecutive(dim=0).shape[0] <= 20)


def test_block_const() -> None:
    def blocks(x: torch.Tensor) -> list[int]:
        return [part.unique_consecutive(dim=0).shape[0] for part in parts(x)]

    assert blocks(inputs_of("block_const").q) == blocks(inputs_of("block_const").k) == [4, 4]
    assert sometimes(lambda seed: inputs_of("block_const", seed).v[..., 0].unique_consecutive(dim=0).shape[0] <= 8)
    assert sometimes(lambda seed: (inputs_of("block_const", seed).v == inputs_of("block_const", seed).v[..., :1]).all())
    assert sometimes(lambda seed: set(inputs_of("block_const", seed).v.unique().tolist()) <= {-1, 0, 1})


def test_small_logits() -> None:
    assert all(scores(inputs_of("small_logits", seed)).abs().max() < 0.3 for seed in SEEDS)
    assert inputs_of("small_logits").k.abs().max() > 2


def test_normal_scaled() -> None:
    for name in TENSORS:
        assert len({inputs_of("normal_scaled", seed).v.abs().max().frexp().exponent.item() for seed in SEEDS}) > 3, name


def test_huge_logits() -> None:
    assert scores(inputs_of("huge_logits")).abs().max() > 1000


def test_sink() -> None:
    inputs = inputs_of("sink")
    assert all((part[0] == 1).all() and not (part[1] == 1).any() for part in parts(inputs.k))
    assert scores(inputs)[:, 0].mean() > scores(inputs)[:, 1:].mean() + 1
    assert sometimes(lambda seed: all((part[0] == 0).all() for part in parts(inputs_of("sink", seed).v)))


def test_onehot() -> None:
    inputs = inputs_of("onehot")
    for q, k in zip(parts(inputs.q), parts(inputs.k), strict=True):
        own = (q[:, 0] @ k[:, 0].T).argmax(1) == torch.arange(len(q))
        assert own.double().mean() > 0.9
    unequal = materialise(Problem(seqlens_q=(3,), seqlens_k=(4,), dim_qk=8, dim_v=8), Recipe(pattern="onehot"), "cpu")
    assert unequal.k.abs().max() > 8


def test_k_offset() -> None:
    s = scores(inputs_of("k_offset"))
    assert s.mean(1).abs().mean() > 3 * s.std(1).mean()


def test_v_mean() -> None:
    assert all(inputs_of("v_mean", seed).v.mean() > 0.9 for seed in SEEDS)
    assert sometimes(lambda seed: inputs_of("v_mean", seed).v.mean() > 10)
    assert sometimes(lambda seed: inputs_of("v_mean", seed).d_o.mean() > 0.5)


def test_sorted_do() -> None:
    inputs, plain = inputs_of("sorted_do"), inputs_of("normal")
    for name in ("v", "d_o"):
        for part, unsorted in zip(parts(getattr(inputs, name)), parts(getattr(plain, name)), strict=True):
            assert torch.equal(part, unsorted.sort(0).values)
    assert sometimes(lambda seed: (inputs_of("sorted_do", seed).q[:40].diff(dim=0) >= 0).all())


def test_chan_outlier() -> None:
    def large(x: torch.Tensor) -> set[int]:
        return set((x.abs().amax((0, 1)) > 4).nonzero().flatten().tolist())

    by_seed = {seed: inputs_of("chan_outlier", seed) for seed in SEEDS}
    assert all(len(large(inputs.q)) == 2 and large(inputs.k) <= large(inputs.q) for inputs in by_seed.values())
    assert all(len(large(inputs.v)) == 1 and not large(inputs.v) & large(inputs.d_o) for inputs in by_seed.values())
    assert len({*map(frozenset, (large(inputs.v) for inputs in by_seed.values()))}) > 3


def test_tok_outlier() -> None:
    for seed in SEEDS:
        rows = [(part.abs().amax((1, 2)) > 4).nonzero().flatten().tolist() for part in parts(inputs_of("tok_outlier", seed).v)]
        assert [len(each) for each in rows] == [1, 1]
    assert sometimes(lambda seed: inputs_of("tok_outlier", seed).q.abs().max() > 16)


def test_lognormal() -> None:
    for name in TENSORS:
        x = getattr(inputs_of("lognormal"), name).abs()
        assert 1.1 < x.log().std() < 1.35
        assert 0.7 < x.median() < 1.4
        assert 0.45 < (getattr(inputs_of("lognormal"), name) > 0).double().mean() < 0.55


def test_subnormal() -> None:
    """Many values lie below the smallest normal number, and yet the largest products do not vanish."""
    for seed, dtype in itertools.product(SEEDS, DTYPES):
        inputs = inputs_of("subnormal", seed, dtype)
        tiny = torch.finfo(inputs.q.dtype).tiny
        below = [(getattr(inputs, name).abs() < tiny).double().mean() for name in TENSORS]
        assert max(below) > 0.5
        if dtype != "float16":
            assert min(below) < 0.01


def test_near_overflow() -> None:
    for seed in SEEDS:
        assert 2**13 < inputs_of("near_overflow", seed, "float16").v.abs().max() <= 65504
        assert 2.0**100 < inputs_of("near_overflow", seed, "bfloat16").v.abs().max() < 2.0**102


@pytest.mark.parametrize("scale", [None, 1.0, 0.1, 0.0078125, -0.125])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_scores_lie_below_the_sentinels(dtype: str, scale: float | None) -> None:
    problem = Problem(seqlens_q=(40,), seqlens_k=(24,), dim_qk=64, dim_v=8, dtype=dtype, softmax_scale=scale)
    highest = []
    for seed in SEEDS:
        inputs = materialise(problem, Recipe(pattern="below_sentinels", seed=seed), "cpu")
        scores = inputs.q[:, 0].double() @ inputs.k[:, 0].double().T * problem.scale
        highest.append(scores.max())
        # Relative to each other they are as those of normal values.
        assert 0.01 < scores.std() < 20
    assert max(highest) < -1e4
    assert sum(each < -65504 for each in highest) > len(SEEDS) / 2


@pytest.mark.parametrize("scale", [2.0**-16, 1e-5, 2.0**-18])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_large_and_scores_are_not(dtype: str, scale: float) -> None:
    problem = Problem(seqlens_q=(40,), seqlens_k=(24,), dim_qk=64, dim_v=8, dtype=dtype, softmax_scale=scale)
    inputs = materialise(problem, Recipe(pattern="large_products", seed=3), "cpu")
    products = inputs.q[:, 0].double() @ inputs.k[:, 0].double().T
    assert products.max() > 65504
    assert products.min() < -65504
    assert 0.5 < (products * scale).std() < 2.5


def depths(case: Case) -> set[str]:
    """What a Case meets: a row whose scores are all so low, or a product beyond float16's range whose score is plain."""
    problem, met = case.problem, set[str]()
    inputs = materialise(problem, case.recipe, "cpu")
    queries = inputs.q[: problem.total_q].split(problem.seqlens_q)
    keys = inputs.k[: problem.total_k].split(problem.seqlens_k)
    for q, k in zip(queries, keys, strict=True):
        products = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(problem.groups, 1))
        if products.numel():
            scores = products * problem.scale
            highest = scores.amax(-1).min()
            met |= {name for name, limit in (("-88", -88), ("-1e4", -1e4), ("-65504", -65504)) if highest < limit}
            if products.abs().max() > 65504 and scores.abs().max() < 100:
                met.add("products")
    return met


def test_two_in_a_hundred_cases_are_deep() -> None:
    subject, counts, drawn = Subject(), Counter[str](), list[Case]()
    draw_values(trial_cases(subject, device="cpu", limits=LIMITS), drawn.append, seed=1, examples=800)
    for case in drawn:
        if case.recipe.pattern in ("negative", "below_sentinels", "large_products"):
            counts.update(depths(case))
    assert set(counts) == {"-88", "-1e4", "-65504", "products"}
    assert min(counts.values()) > 0.02 * len(drawn), counts
