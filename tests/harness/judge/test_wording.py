"""Messages of wrong numbers: what is accepted, a factor that follows from the numbers beside it, what to look for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.emulated.whole import Emulated

from attnfuzz.harness.judge.failure import Place
from attnfuzz.harness.judge.judge import judge
from attnfuzz.harness.judge.truth import truth
from attnfuzz.harness.judge.wording import of_statistic, wrong_elements, wrong_output
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.contract import Deviations, Outputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Recipe


def place(got: float, expected: float, allowed: float) -> Place:
    return Place(sequence=0, position=3, head=1, dim=5, got=got, expected=expected, allowed=allowed)


MESSAGES: dict[str, tuple[Place, float | None, str, str]] = {
    "a budget below the steps of float16": (
        place(-4.76837158e-07, -5.10386511e-07, 4.92e-10),
        7.61,
        "float16",
        "accepted -5.36441803e-07 alone: float16 has steps of 5.96e-08 there, and the error beyond half a step is 7.61 x its "
        "budget of 4.92e-10",
    ),
    "a budget below the steps, far off": (
        place(0.5, 0.3, 1e-5),
        19988.0,
        "float16",
        "accepted 0.300048828 alone, 2e+04 x its budget of 1e-05",
    ),
    "a budget above the steps": (
        place(-0.334228516, -0.287473183, 0.000309),
        151.0,
        "float16",
        "allowed error 0.000309, 151 x its budget",
    ),
    "a budget above the steps, near": (
        place(1.0, 1.002, 0.001),
        1.51,
        "float16",
        "allowed error 0.001, 1.51 x its budget beyond half a step of float16",
    ),
    "nothing allowed": (place(0.5, 0.0, 0.0), float("inf"), "float16", "allowed error 0"),
    "NaN": (place(float("nan"), 0.25, 0.1), None, "bfloat16", "allowed error 0.1"),
    "NaN, a budget below the steps": (place(float("nan"), 0.3, 1e-9), None, "bfloat16", "accepted 0.30078125 alone"),
    "an infinite value": (place(1.0, float("-inf"), 0.0), float("inf"), "bfloat16", "allowed error 0"),
}  # fmt: skip


@pytest.mark.parametrize(("at", "ratio", "dtype", "end"), MESSAGES.values(), ids=MESSAGES)
def test_what_is_accepted(at: Place, ratio: float | None, dtype: Any, end: str) -> None:
    message = wrong_output("dk", at, 3, 64, ratio, dtype)
    start = "dK: 3 of 64 elements are wrong; worst at sequence 0, key 3, head 1, dim 5: "
    assert message == f"{start}got {at.got:.9g}, expected {at.expected:.9g}, {end}"


def test_lse_is_not_rounded_to_the_problems_dtype() -> None:
    message = wrong_output("lse", place(0.5, 0.4999, 1e-6), 1, 1, 100.0, "float16")
    assert message.startswith("LSE: 1 of 1 element is wrong; ")
    assert message.endswith("got 0.5, expected 0.4999, allowed error 1e-06, 100 x its budget")


@pytest.mark.parametrize(
    ("over", "elements", "text"), [(1, 1, "1 of 1 element is"), (1, 2, "1 of 2 elements is"), (2, 9, "2 of 9 elements are")]
)
def test_counts(over: int, elements: int, text: str) -> None:
    assert wrong_elements("O", over, elements) == f"O: {text} wrong"


@pytest.mark.parametrize(
    ("check", "parts"),
    [
        ("R", ["within its budget", "mean square is 1.24 x the most that roundings explain (R)", "look for precision lost"]),
        ("z", ["within its budget", "lean one way", "1.24 x the most that chance explains (z)", "look for a factor"]),
    ],
)
def test_a_statistic_says_what_it_is_and_what_to_look_for(check: str, parts: list[str]) -> None:
    message = of_statistic("dq", check, 1.24)
    assert message.startswith("dQ: ")
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_a_message_accepts_the_judge_accepts(dtype: Any) -> None:
    """The ends of the interval named pass, and the next numbers beyond it fail."""
    problem = Problem(seqlens_q=(3,), seqlens_k=(4,), heads=1, kv_heads=1, dim_qk=8, dim_v=8, dtype=dtype)
    inputs = materialise(problem, Recipe(seed=1), "cpu")
    exact = truth(inputs, Deviations(), "cpu")
    kind = getattr(torch, dtype)
    outputs = Outputs(
        **{
            name: each.expected.float() if name == "lse" else each.expected.transpose(0, 1).to(kind)
            for name, each in exact.items()
        }
    )
    assert not judge(Emulated().name, inputs, outputs, exact).failures
    true = exact["o"]
    steps = true.expected.abs() * (2.0**-11 if dtype == "float16" else 2.0**-8)
    _, row, dim = (int(at) for at in (true.allowed < steps).nonzero()[0])
    outputs.o[row, 0, dim] *= 1.05
    (failure,) = judge("k", inputs, outputs, truth(inputs, Deviations(), "cpu")).failures
    accepted = re.search(r"accepted (\S+?)(?: alone| to (\S+?))[,:]", failure.message)
    assert accepted, failure.message
    for end in filter(None, accepted.groups()):
        outputs.o[row, 0, dim] = float(end)
        assert not judge("k", inputs, outputs, truth(inputs, Deviations(), "cpu")).failures
