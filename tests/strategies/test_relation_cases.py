"""Cases of relations of kernels that take less than they declare."""

from __future__ import annotations

from typing import Any

import pytest
from support.emulated.whole import Emulated

from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.draw import drawn
from attnfuzz.strategies.relations import relation_cases


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
