"""The emulated kernel: right in every combination of its choices, wrong by each planted fault, reproducible by name."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from support.emulated.arithmetic import cut_to_tf32, halves_of, product, toward_zero
from support.emulated.choices import Choices, drawn_config, sample
from support.emulated.faults import FAULTS, NumericFault
from support.emulated.kernel import KERNEL, PRESCALED, ROUNDED_P, TF32, fault_kernel, registered

from attnfuzz.harness.judge.judge import judge
from attnfuzz.harness.judge.truth import truth
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Deviations, Inputs, Kernel, Outputs
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.modified import tensors_of
from attnfuzz.kernels.problem import OUTPUT_NAMES, Dtype, Needs, Problem
from attnfuzz.oracles.formats import CUT_OF_TF32X3, EPS, OF_TF32X3
from attnfuzz.strategies.case import PATTERNS, Case, Recipe
from attnfuzz.strategies.variants import all_variants

PLAIN = Problem(seqlens_q=(80,), seqlens_k=(100,), dim_qk=32, dim_v=32, heads=4, kv_heads=2, causal="bottom_right")
"""All that the faults wait for: fp16, a causal mask, two query heads per group, four tiles of keys, the last one partial."""
PLAIN_CONFIG = Choices(tile_m=32, tile_n=32, dq_order="permuted").config()


@pytest.fixture(scope="module", autouse=True)
def _by_name() -> Iterator[None]:
    with registered():
        yield


def outputs(kernel: Kernel, problem: Problem, config: Config, inputs: Inputs) -> Outputs:
    built = kernel.build(problem, config, "cpu")
    o, lse = built.forward(inputs)
    return Outputs(o, lse, *built.backward(inputs, o, lse))


def same(a: Outputs, b: Outputs) -> bool:
    return all(torch.equal(getattr(a, name).double(), getattr(b, name).double()) for name in OUTPUT_NAMES)


PROBLEMS = {
    "one": Problem(seqlens_q=(33,), seqlens_k=(65,), dim_qk=16, dim_v=24, heads=6, kv_heads=2, causal="top_left"),
    "dense": Problem(seqlens_q=(20, 20), seqlens_k=(37, 37), packing="dense", dim_qk=16, dim_v=16, slack_q=3, slack_k=2),
    "ragged": Problem(
        seqlens_q=(0, 17, 40, 5),
        seqlens_k=(9, 0, 33, 64),
        dim_qk=16,
        dim_v=16,
        heads=3,
        slack_q=2,
        slack_k=4,
        causal="bottom_right",
    ),
    "blind rows": Problem(seqlens_q=(50,), seqlens_k=(20,), dim_qk=16, dim_v=16, causal="bottom_right", window=(3, None)),
    "negative scale": Problem(seqlens_q=(30,), seqlens_k=(40,), dim_qk=16, dim_v=16, softmax_scale=-0.5),
    "no scale": Problem(seqlens_q=(30,), seqlens_k=(40,), dim_qk=16, dim_v=16, softmax_scale=0.0, window=(None, 4)),
    "dlse": Problem(seqlens_q=(30,), seqlens_k=(40,), dim_qk=16, dim_v=16, heads=2, kv_heads=1, needs=Needs(dlse=True)),
    "empty": Problem(seqlens_q=(0,), seqlens_k=(0,), dim_qk=16, dim_v=16),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_it_is_right_whatever_it_chooses(name: str, dtype: Dtype) -> None:
    problem = Problem(
        **{field: getattr(PROBLEMS[name], field) for field in Problem.__struct_fields__ if field != "dtype"}, dtype=dtype
    )
    rng = random.Random(f"{name}{dtype}")
    for number, pattern in enumerate(rng.sample(PATTERNS, 3)):
        kernel = "emulated.prescaled" if number == 2 and dtype != "float32" else "emulated"
        config = drawn_config(rng, problem)
        verdict = run_trial(Case(kernel=kernel, problem=problem, recipe=Recipe(pattern=pattern, seed=7), config=config), "cpu")
        assert verdict.status == "pass", verdict.failures


@pytest.mark.parametrize(
    "change",
    [
        {"mma": "rz"},
        {"mma": "tc"},
        {"exp": "fma"},
        {"exp": "natural"},
        {"delta": "fp32_o"},
        {"ds_scale": "after"},
        {"reversed_tiles": True},
        {"exp2_noise_bits": 22},
        {"division": "reciprocal"},
        {"dq_order": "permuted", "seed": 2},
        {"tile_m": 16},
        {"tile_n": 16},
    ],
    ids=str,
)
def test_each_choice_changes_bits_and_stays_right(change: dict[str, Any]) -> None:
    # The order of sums shows in float32's last bits, seldom in half.
    problem = PLAIN if change.keys() & {"mma", "delta", "ds_scale"} else msgspec.structs.replace(PLAIN, dtype="float32")
    base = Choices(tile_m=32, tile_n=32)
    config = dataclasses.replace(base, **change).config()
    kernel, inputs = KERNEL, materialise(problem, Recipe(seed=3), "cpu")
    assert not same(outputs(kernel, problem, base.config(), inputs), outputs(kernel, problem, config, inputs))
    assert run_trial(Case(kernel="emulated", problem=problem, recipe=Recipe(seed=3), config=config), "cpu").status == "pass"


def test_it_is_deterministic_and_its_seed_matters() -> None:
    kernel, inputs = KERNEL, materialise(PLAIN, Recipe(), "cpu")
    noisy = [Choices(exp2_noise_bits=22, dq_order="permuted", seed=seed).config() for seed in (1, 1, 2)]
    first, again, other = (outputs(kernel, PLAIN, config, inputs) for config in noisy)
    assert same(first, again)
    assert not same(first, other)


def test_prescaled_q_is_declared_and_would_fail_undeclared() -> None:
    problem = Problem(seqlens_q=(64,), seqlens_k=(64,), dim_qk=64, dim_v=64)
    inputs = materialise(problem, Recipe(pattern="large_logits"), "cpu")
    kernel = PRESCALED
    made = outputs(kernel, problem, PLAIN_CONFIG, inputs)
    assert kernel.capabilities.deviations == Deviations(prescaled_q=True)
    assert judge("x", inputs, made, truth(inputs, kernel.capabilities.deviations, "cpu")).status == "pass"
    assert judge("x", inputs, made, truth(inputs, Deviations(), "cpu")).status == "fail"


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(81, 3557), (186, 3569)])
def test_equal_queries_with_ds_from_rounded_p_are_right(seqlen_q: int, seqlen_k: int) -> None:
    """torch.efficient's dK on an H100, 81 x 3557: 1.01 times its budget, since roundings of P were taken as independent."""
    kernel = ROUNDED_P
    problem = Problem(seqlens_q=(seqlen_q,), seqlens_k=(seqlen_k,), dim_qk=64, dim_v=64, dtype="bfloat16", causal="bottom_right")
    case = Case(kernel=kernel.name, problem=problem, recipe=Recipe(pattern="ties_q"), config=kernel.configs(problem)[0])
    verdict = run_trial(case, "cpu")
    assert not verdict.failures
    assert verdict.figures["dk"].sigmas > 3


def test_ten_values_of_many_keys_next_to_a_power_of_two_are_right() -> None:
    """triton.varlen's dQ, in one row of 6,360: 1.01 times its budget by the mean over mantissas. Ten dS, 500 times each."""
    many = Problem(seqlens_q=(3180,), seqlens_k=(4095,), heads=2, kv_heads=2, dim_qk=40, dim_v=72, dtype="bfloat16")
    drawn = materialise(many, Recipe(pattern="block_const", seed=50218), "cpu")
    row, head = slice(1172, 1173), slice(0, 1)
    inputs = dataclasses.replace(
        drawn, problem=msgspec.structs.replace(many, seqlens_q=(1,), heads=1, kv_heads=1),
        q=drawn.q[row, head], d_o=drawn.d_o[row, head], k=drawn.k[:, head], v=drawn.v[:, head],
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
    )  # fmt: skip
    made = outputs(KERNEL, inputs.problem, Choices(tile_m=64, tile_n=128, ds_scale="after").config(), inputs)
    expected = truth(inputs, Deviations(), "cpu")
    verdict = judge("x", inputs, made, expected)
    assert verdict.status == "pass"
    assert 0.6 < verdict.figures["dq"].worst < 0.9
    made.dq[..., 35] += 0.5 * (made.dq[..., 35] - expected["dq"].expected[0, :, 35])
    assert judge("x", inputs, made, expected).status == "fail"


def test_ds_from_rounded_p_is_declared_and_would_fail_undeclared() -> None:
    problem = Problem(seqlens_q=(64,), seqlens_k=(64,), dim_qk=64, dim_v=64)
    inputs = materialise(problem, Recipe(pattern="large_logits"), "cpu")
    made = outputs(ROUNDED_P, problem, PLAIN_CONFIG, inputs)
    assert ROUNDED_P.capabilities.deviations == Deviations(ds_from_rounded_p=True)
    assert judge("x", inputs, made, truth(inputs, ROUNDED_P.capabilities.deviations, "cpu")).status == "pass"
    assert judge("x", inputs, made, truth(inputs, Deviations(), "cpu")).status == "fail"


CAPTURED = (
    ["load", ["bias", ["heads", "seqlen_q", "seqlen_k"], "normal", True], ["h"], ["q_idx"], ["kv_idx"]],
    ["mul", ["score"], ["load", ["of_query", ["seqlen_q"], "normal", True], ["q_idx"]]],
    ["mul", ["score"], ["load", ["of_head", ["heads"], "normal", True], ["h"]]],
)


@pytest.mark.parametrize("score_mod", CAPTURED, ids=("bias", "of_query", "of_head"))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_of_captured_tensors_are_right_with_ds_from_rounded_p(score_mod: list[Any], dtype: Dtype) -> None:
    """A bias with one reader each: 1.4 times its budget in float16, where the rounding of P counted for dQ and dK alone."""
    problem = Problem(seqlens_q=(1, 5), seqlens_k=(22, 13), dim_qk=64, dim_v=64, dtype=dtype, score_mod=score_mod)
    undeclared, (name,) = set[str](), (each.name for each in tensors_of(problem))
    for seed in range(4):
        inputs = materialise(problem, Recipe(seed=seed), "cpu")
        made = outputs(ROUNDED_P, problem, PLAIN_CONFIG, inputs)
        assert judge("x", inputs, made, truth(inputs, ROUNDED_P.capabilities.deviations, "cpu")).status == "pass"
        undeclared |= {each.check for each in judge("x", inputs, made, truth(inputs, Deviations(), "cpu")).failures}
        (gradient,) = made.d_captured
        assert gradient is not None
        wrong = dataclasses.replace(made, d_captured=(gradient * (1.5 if name == "of_head" else 1.05),))
        found = judge("x", inputs, wrong, truth(inputs, ROUNDED_P.capabilities.deviations, "cpu")).failures
        assert [each.check for each in found] == [f"d {name}"]
    assert (f"d {name}" in undeclared) == (dtype != "float32" and name == "bias")


@pytest.mark.parametrize("planted", FAULTS, ids=lambda each: each.slug)
def test_each_fault_changes_bits_of_a_plain_case(planted: NumericFault) -> None:
    assert planted.applies(PLAIN, PLAIN_CONFIG)
    inputs = materialise(PLAIN, Recipe(), "cpu")
    faulty = fault_kernel(planted.slug)
    correct = outputs(KERNEL, PLAIN, PLAIN_CONFIG, inputs)
    wrong = outputs(faulty, PLAIN, PLAIN_CONFIG, inputs)
    assert not same(correct, wrong)
    if planted.slug not in ("lse_nomax", "norescale_O", "norescale_l", "delta_bf16O"):
        # Plausible all the same: nothing of it is far off, so that a loose rule may pass it.
        assert torch.isfinite(wrong.o).all()


@pytest.mark.parametrize(
    ("slug", "problem", "config"),
    [
        ("P_bf16_fwd", Problem(seqlens_q=(9,), seqlens_k=(9,), dim_qk=16, dim_v=16, dtype="bfloat16"), PLAIN_CONFIG),
        ("norescale_O", Problem(seqlens_q=(9,), seqlens_k=(32,), dim_qk=16, dim_v=16), PLAIN_CONFIG),
        ("pad_keys_unmasked", Problem(seqlens_q=(9,), seqlens_k=(64,), dim_qk=16, dim_v=16), PLAIN_CONFIG),
        ("dKdV_split_half", Problem(seqlens_q=(9,), seqlens_k=(9,), dim_qk=16, dim_v=16), PLAIN_CONFIG),
        ("causal_edge_off1", Problem(seqlens_q=(9,), seqlens_k=(9,), dim_qk=16, dim_v=16), PLAIN_CONFIG),
        ("log2e_1.4424_all", PLAIN, Choices(exp="natural").config()),
    ],
)
def test_a_fault_that_does_not_apply_changes_nothing(slug: str, problem: Problem, config: Config) -> None:
    fault = next(each for each in FAULTS if each.slug == slug)
    assert not fault.applies(problem, config)
    inputs = materialise(problem, Recipe(), "cpu")
    correct, wrong = (outputs(kernel, problem, config, inputs) for kernel in (KERNEL, fault_kernel(slug)))
    assert same(correct, wrong)


def test_there_are_35_faults_and_a_gray_one() -> None:
    assert len(FAULTS) == len({each.slug for each in FAULTS}) == 36
    assert [each.slug for each in FAULTS if each.gray] == ["l_from_rounded_P"]


def test_the_correct_ones_are_known_by_name_and_where_other_processes_find_them() -> None:
    for kernel in (KERNEL, PRESCALED, ROUNDED_P, TF32):
        assert isinstance(kernel, Kernel)
        origin = registry.origin(kernel.name)
        assert origin is not None
        assert registry.get(kernel.name) is kernel is registry.object_at(origin.target)
    with pytest.raises(registry.UnknownKernel):
        registry.get(fault_kernel("O_truncated").name)


def test_a_config_that_it_does_not_know_is_refused() -> None:
    kernel = KERNEL
    for config, text in (
        (Config(tile=3), "config='tile': no such choice"),
        (Config(mma="half"), "config.mma='half'"),
        (Config(tile_n=0), "config.tile_n=0"),
        (Config(reversed_tiles=1), "config.reversed_tiles=1"),
    ):
        assert text in str(kernel.supports(PLAIN, config, "cpu"))
        with pytest.raises(BadArgument, match="ask supports"):
            kernel.build(PLAIN, config, "cpu")
    fp32 = Problem(seqlens_q=(4,), seqlens_k=(4,), dim_qk=16, dim_v=16, dtype="float32")
    assert "tensor cores" in str(kernel.supports(fp32, Config(mma="tc"), "cpu"))
    assert kernel.unavailable("cuda")
    with pytest.raises(BadArgument, match="lse=None"):
        kernel.build(PLAIN, Config(), "cpu").backward(materialise(PLAIN, Recipe(), "cpu"), torch.zeros(1), None)


def test_its_configs_can_all_be_drawn() -> None:
    kernel = KERNEL
    assert len(sample(PLAIN)) == len(set(sample(PLAIN)))
    variants = all_variants(kernel, "cpu")
    assert {each.config["mma"] for each in variants if each.dtype == "float16"} == {"f32", "rz", "tc"}
    assert {each.config["mma"] for each in variants if each.dtype == "float32"} == {"f32"}


def test_toward_zero_never_grows() -> None:
    x = torch.tensor([1 + 2.0**-30, -1 - 2.0**-30, 0.1, -0.1, 0.0, 1e-45, math.inf], dtype=torch.float64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        y = toward_zero(x, dtype).double()
        assert (y.abs() <= x.abs()).all()
        assert (torch.sign(y) * torch.sign(x) >= 0).all()
    assert toward_zero(x, torch.float32)[0] == 1
    assert toward_zero(torch.tensor([0.1]), torch.float16).item() < 0.1


def test_products_accumulate_as_they_say() -> None:
    one = torch.tensor([[1.0] + [2.0**-24] * 31])
    ones = torch.ones(32, 1)
    exact = 1 + 31 * 2.0**-24
    assert product(one, ones, "rz").item() < exact  # cut at each of the two additions
    assert product(one, ones, "tc").item() == 1 + 2.0**-23 * math.floor(15 * 0.5) + 2.0**-23 * 8
    assert product(one, ones, "fma").item() == 1.0  # each addition is halfway, and to even
    small = torch.tensor([[1.0] + [2.0**-26] * 15])
    assert product(small, torch.ones(16, 1), "tc").item() == 1.0  # below the two extra bits: each term is cut to nothing
    assert product(small, torch.ones(16, 1), "rz").item() == 1 + 2.0**-23
    half = torch.tensor([[1.0] * 16 + [2.0**-12] * 16])
    assert product(half, ones, "half", dtype=torch.float16).item() == 1 * 16
    start = torch.tensor([[2.0]])
    for mode in ("f32", "fma", "rz", "tc"):
        assert product(torch.ones(1, 4), torch.ones(4, 1), mode, start).item() == 6.0  # type: ignore[arg-type]


def test_tf32_is_within_its_budgets() -> None:
    """A row that sees a key with V = 0 and one that cancels in dP: every entry of V is cut for itself, which moves Delta."""
    problem = Problem(
        seqlens_q=(2, 2), seqlens_k=(2, 2), packing="dense", dim_qk=64, dim_v=64, heads=3, kv_heads=3, dtype="float32",
        causal="top_left", softmax_scale=0.0078125,
    )  # fmt: skip
    kernel = TF32
    for seed in range(40):
        for pattern in ("sink", "normal"):
            recipe = Recipe(pattern=pattern, seed=seed)
            verdict = run_trial(
                Case(kernel=kernel.name, problem=problem, recipe=recipe, config=kernel.configs(problem)[0]), "cpu"
            )
            assert not verdict.failures, (seed, pattern, verdict.failures)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (1 + 2.0**-10, 1 + 2.0**-10),
        (1 + 3 * 2.0**-11, 1 + 2.0**-10),
        (-1 - 2.0**-11, -1.0),
        (5 * 2.0**-137, 2.0**-135),
        (2.0**-137, 0.0),
    ],
)
def test_tf32_cuts_toward_zero(given: float, kept: float) -> None:
    assert float(cut_to_tf32(torch.tensor([given]))) == kept


def test_tf32x3_adds_products_of_halves_in_blocks_of_4() -> None:
    one = torch.tensor([[1.0] + [2.0**-24] * 7])
    # 1.5 units of 2^-23 are cut to 1, and 4 terms more are 2.
    assert product(one, torch.ones(8, 1), "tf32x3").item() == 1 + 3 * 2.0**-23
    # Of a low half of 13 bits 11 are kept: half of the last one's unit is added.
    high, low = halves_of(torch.tensor([1 + 2.0**-11 + 2.0**-22, 1 + 2.0**-11 + 2.0**-23]))
    assert high.tolist() == [1.0, 1.0]
    assert low.tolist() == [2.0**-11 + 2.0**-21, 2.0**-11]
    exact = torch.tensor([[1 + 2.0**-11]])
    assert product(exact, exact, "tf32x3").item() == 1 + 2.0**-10  # without the product of the low halves, 2^-22
    assert product(exact, exact, "tf32").item() == 1.0
    assert product(torch.ones(1, 9), torch.ones(9, 1), "tf32x3", torch.tensor([[2.0]])).item() == 11.0


def test_products_by_tf32x3_are_off_by_what_is_known_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand((2, 20_000, 1, 1), generator=generator) + 1
    exact = x.double() * y.double()
    off = (product(x, y, "tf32x3").double() - exact) / exact / EPS
    # The sum of one product is cut three times.
    assert -OF_TF32X3 - 6 <= float(off.min()) < -OF_TF32X3 / 2
    assert float(off.max()) <= 8


@pytest.mark.parametrize("terms", [64, 1024])
def test_sums_by_tf32x3_are_cut_by_less_than_assumed(terms: int) -> None:
    generator = torch.Generator().manual_seed(terms)
    x = torch.rand((40, terms), generator=generator) / terms
    constant = torch.full((terms, 1), 1.2345678)
    # The first term is most of the sum: all that follows is added to a sum of this size, of a large unit or a small one.
    for first in (1.0, 1.9):
        x[:, 0] = first
        exact = x.double() @ constant.double()
        off = (product(x, constant, "tf32x3").double() - exact) / exact / EPS
        assert -CUT_OF_TF32X3 * terms - OF_TF32X3 <= float(off.min())
        # Not by far: 0.67 and 0.85 eps for each of many terms.
        assert float(off.mean()) < -CUT_OF_TF32X3 * terms / 3
