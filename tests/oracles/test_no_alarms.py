"""Emulated kernels that are right, with all that they declare, fail in none of the Cases that a run draws of them."""

from __future__ import annotations

import pytest
from support.emulated.kernel import FMA, KERNEL, PRESCALED, ROUNDED_P, TF32, TF32X3, Emulated, registered

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.settings import Settings


@pytest.mark.parametrize(
    ("kernel", "cases"),
    [
        *(pytest.param(each, 40, id=each.name) for each in (KERNEL, PRESCALED, ROUNDED_P)),
        *(pytest.param(each, 400, id=f"{each.name}, more", marks=pytest.mark.slow) for each in (KERNEL, PRESCALED, ROUNDED_P)),
        # These compute product by product, which takes seconds for a Case of many keys.
        *(pytest.param(each, 60, id=each.name, marks=pytest.mark.slow) for each in (FMA, TF32, TF32X3)),
    ],
)
def test_a_right_kernel_has_no_failure(kernel: Emulated, cases: int) -> None:
    """Seed 21 drew a gradient of a captured tensor beyond its budget for "emulated.rounded_p", after 27 Cases."""
    settings = Settings("cpu", max_examples=cases, seed=21, in_process=True, out=None, shrink=1.0)
    with registered():
        done = run_campaign([kernel], settings, lambda _: None)
    (summary,) = done.summaries
    assert summary.cases == cases
    assert [(str(each.identity), each.case.canonical()) for each in done.findings] == []
