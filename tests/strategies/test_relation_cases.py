"""Cases of relations of kernels that take less than they declare."""

from __future__ import annotations

from typing import Any

import pytest
from support.emulated.whole import Emulated

from attnfuzz.harness.campaign.plan import plan_of
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.draw import drawn
from attnfuzz.strategies.relations import relation_cases, relations_of


class SomeLengths(Emulated):
    """A kernel for lengths that are multiples of four, and for a probe of one token."""

    def supports(self, problem: Problem, config: Any, device: Any) -> str | None:
        odd = [each for each in problem.seqlens_q + problem.seqlens_k if each % 4 and each != 1]
        return f"seqlen={odd[0]}: only multiples of 4" if odd else super().supports(problem, config, device)


@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_supports_every_case(seed: int) -> None:
    kernel = SomeLengths(name="test.some_lengths")
    cases = drawn(relation_cases(kernel, device="cpu"), seed=seed, examples=200, quota=40)
    assert cases
    assert [reason for each in cases if (reason := why_not_case(kernel, each, "cpu"))] == []


def of_a_gpu(name: str, seed: int) -> list[Case]:
    """Relations that a campaign on a GPU draws: of variants with modifiers compiled in, where the kernel has some."""
    kernel = registry.get(name)
    plan = plan_of(kernel, Settings(device="cuda", seed=seed))
    return drawn(relation_cases(kernel, device="cuda", variants=plan.variants), seed=seed, examples=100, quota=100)


@pytest.mark.parametrize("seed", range(3))
def test_relations_are_drawn_of_variants_without_modifiers(seed: int) -> None:
    """No relation takes others: of 40 variants nearly all draws were lost, and offsets beyond 2^31 hardly tried."""
    kernel = registry.get("triton.flex")
    variants = plan_of(kernel, Settings(device="cuda", seed=seed)).variants
    assert not any(each.modifiers for of in relations_of(kernel, variants, "cuda").values() for each in of)
    assert relations_of(kernel, [each for each in variants if each.modifiers], "cuda") == {}
    assert sum(each.check == "huge_strides" for each in of_a_gpu("triton.flex", seed)) >= 15


@pytest.mark.parametrize("seed", range(3))
def test_half_of_huge_strides_are_the_first_variants_where_each_is_compiled(seed: int) -> None:
    huge = [each for each in of_a_gpu("triton.varlen", seed) if each.check == "huge_strides"]
    first = plan_of(registry.get("triton.varlen"), Settings(device="cuda", seed=seed)).variants[0]
    own = [each for each in huge if each.config == first.config and each.problem.dtype == first.dtype]
    assert len(own) >= 0.4 * len(huge) > 4


def test_most_huge_strides_have_several_sequences() -> None:
    """A stride of sequences matters where there are two. One seed draws some 30 of these Cases: too few to count alone."""
    huge = [each for seed in range(6) for each in of_a_gpu("triton.varlen", seed) if each.check == "huge_strides"]
    assert sum(each.problem.batch > 1 for each in huge) > len(huge) / 2
