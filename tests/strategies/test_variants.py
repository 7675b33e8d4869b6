"""Variants of a kernel: all that it declares, and those of dims that it takes without listing them."""

from __future__ import annotations

import gc

import pytest
from hypothesis import strategies as st
from support.subjects import CONFIGS, Subject

from attnfuzz.harness.campaign.plan import variants_of
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Capabilities, Config, Device
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.cases import cases
from attnfuzz.strategies.compiled_modifiers import pooled
from attnfuzz.strategies.draw import drawn
from attnfuzz.strategies.variants import Variant, all_variants, one_variant, other_dims


def test_all_variants_are_every_combination_simplest_first() -> None:
    variants = all_variants(Subject(), "cpu")
    assert len(variants) == len(set(variants)) == 3 * 3 * 3 * 2
    assert variants[0] == Variant("float16", None, (64, 64), CONFIGS[0])
    assert [variant.dtype for variant in variants[::18]] == ["float16", "bfloat16", "float32"]
    assert list(dict.fromkeys(variant.causal for variant in variants)) == [None, "bottom_right", "top_left"]


def test_a_variant_that_the_kernel_refuses_is_left_out() -> None:
    def refuse(problem: Problem, config: Config) -> str | None:
        return "too wide" if problem.dim_qk == 192 and config["tile_m"] == 64 else None

    variants = all_variants(Subject(refuse=refuse), "cpu")
    assert len(variants) == 54 - 9
    assert not any(refuse(variant.problem(Subject().capabilities), variant.config) for variant in variants)


def test_a_dense_kernel_has_variants() -> None:
    assert len(all_variants(Subject(can={"packings": ("dense",)}), "cpu")) == 54


@pytest.mark.parametrize(
    ("subject", "device", "reason"),
    [
        (Subject(), "cuda", "nothing to draw on cuda: dtype"),
        (Subject(can={"dtypes": ()}), "cpu", "nothing to draw on cpu: capabilities declare no dtype, mask or dims"),
        (Subject(can={"causal": ()}), "cpu", "nothing to draw on cpu: capabilities declare no dtype, mask or dims"),
        (Subject(can={"dims": ()}), "cpu", "nothing to draw on cpu: capabilities declare no dtype, mask or dims"),
        (Subject(refuse=lambda problem, config: "it is Sunday"), "cpu", "nothing to draw on cpu: it is Sunday"),
    ],
)
def test_nothing_to_draw_is_an_error_with_the_reason(subject: Subject, device: Device, reason: str) -> None:
    if device == "cuda":
        reason = "nothing to draw on cuda: device='cuda': runs on cpu only"
    with pytest.raises(BadArgument) as caught:
        all_variants(subject, device)
    assert str(caught.value) == f"kernel='acme.flash': {reason}; correct its capabilities or configs"
    with pytest.raises(BadArgument):
        cases(subject, device=device)


@pytest.mark.parametrize(("step", "most"), [(1, 256), (8, 256), (16, 128), (40, 100), (64, 64)])
def test_dims_that_a_kernel_takes_without_listing_them(step: int, most: int) -> None:
    subject = Subject(can={"dim_multiple": step, "dim_max": most})
    can = subject.capabilities
    found = [each for seed in range(20) for each in other_dims(subject, "cpu", seed, 9)]
    assert all(each.dims not in can.dims and max(each.dims) <= most for each in found)
    assert all(dim % step == 0 and dim > 0 for each in found for dim in each.dims)
    assert all(subject.supports(each.problem(can), each.config, "cpu") is None for each in found)
    if step == 1:
        assert {each.dtype for each in found} == set(can.dtypes)
        assert {each.causal for each in found} == set(can.causal)
        # Both sides of a power of two, and a value dim beyond what the kernel lists.
        assert {127, 128, 129} <= {dim for each in found for dim in each.dims}
        assert any(each.dims[1] > 128 for each in other_dims(subject, "cpu", 0, 9))
        assert other_dims(subject, "cpu", 5, 4) == other_dims(subject, "cpu", 5, 4) != other_dims(subject, "cpu", 6, 4)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("step", [1, 4])
def test_one_of_the_other_dims_at_least_is_no_multiple_of_8_and_one_has_a_wide_v(step: int, count: int) -> None:
    """A run on a GPU has one variant of them: whole vectors of 16 bytes, or parts of V, fit its rows only by chance."""
    subject = Subject(can={"dim_multiple": step, "dim_max": 256})
    for seed in range(20):
        others = other_dims(subject, "cpu", seed, count)
        assert len(set(others)) == count
        assert any(each.dims[0] % 8 and each.dims[1] % 8 for each in others)
        assert any(each.dims[1] > 128 for each in others)


@pytest.mark.parametrize(("step", "most"), [(8, 256), (1, 128)])
def test_a_kernel_that_takes_one_rare_kind_of_dims_has_that(step: int, most: int) -> None:
    subject = Subject(can={"dim_multiple": step, "dim_max": most})
    for seed in range(20):
        (other,) = other_dims(subject, "cpu", seed, 1)
        assert other.dims[1] > 128 if most > 128 else other.dims[0] % 8 and other.dims[1] % 8


def test_a_kernel_that_refuses_uneven_dims_has_others() -> None:
    subject = Subject(
        can={"dim_multiple": 1, "dim_max": 256},
        refuse=lambda problem, config: "no vectors" if problem.dim_qk % 8 or problem.dim_v % 8 else None,
    )
    assert len(other_dims(subject, "cpu", 0, 2)) == 2


def test_a_kind_without_other_dims_does_not_keep_the_rest_from_theirs() -> None:
    subject = Subject(
        can={"dim_multiple": 1, "dim_max": 128},
        refuse=lambda problem, config: "64 alone" if problem.dtype == "float32" and problem.dim_qk != 64 else None,
    )
    assert {each.dtype for each in other_dims(subject, "cpu", 3, 12)} >= {"float16", "bfloat16"}
    assert len(other_dims(subject, "cpu", 3, 12)) == 12


def test_the_seed_selects_which_kind_gets_other_dims() -> None:
    subject = Subject(can={"dim_multiple": 1, "dim_max": 128})
    assert len({(each.dtype, each.causal) for seed in range(20) for each in other_dims(subject, "cpu", seed, 1)}) > 4


def test_a_campaign_draws_from_dims_that_a_kernel_does_not_list() -> None:
    subject = Subject(can={"dim_multiple": 1, "dim_max": 128})
    variants = variants_of(subject, Settings(device="cpu", seed=5))
    listed = subject.capabilities.dims
    assert variants[0].dims in listed
    assert len([each for each in variants if each.dims not in listed]) == 2 * 9
    compiled = Subject(can={"dim_multiple": 1, "dim_max": 128, "compiles_on": ("cpu",)})
    variants = variants_of(compiled, Settings(device="cpu", seed=5, profile="gate"))
    assert len(variants) == 8
    assert len([each for each in variants if each.dims not in listed]) == 1


def test_windows_without_limits_are_drawn() -> None:
    can = Capabilities(packings=("dense",), window=True, softcap=True)
    fields = [dict(each) for each in pooled(can, 60, 1)]
    assert {"window": (None, None)} in [{name: value for name, value in each.items() if name == "window"} for each in fields]


def test_a_kernel_of_listed_dims_alone_gets_no_others() -> None:
    assert other_dims(Subject(), "cpu", 0, 9) == ()
    assert other_dims(Subject(can={"dim_multiple": 300, "dim_max": 256}), "cpu", 0, 9) == ()
    refusing = Subject(can={"dim_multiple": 1}, refuse=lambda problem, config: "not these")
    assert other_dims(refusing, "cpu", 0, 9) == ()


def test_drawing_makes_few_strategies() -> None:
    """With one for each branch of the trees of variants, two for each check that is drawn, a run of hours grew by megabytes."""

    def strategies() -> int:
        gc.collect()
        return sum(issubclass(type(each), st.SearchStrategy) for each in gc.get_objects())

    variants = variants_of(registry.get("triton.varlen"), Settings(device="cpu"))
    strategy = one_variant(variants)
    drawn(strategy, seed=0, examples=10, quota=10)
    before = strategies()
    assert len(drawn(strategy, seed=1, examples=2000, quota=2000)) > len(variants) / 2
    lengths = len({len({getattr(each, part) for each in variants}) for part in ("dtype", "causal", "dims", "config")})
    assert strategies() - before <= lengths + 10
