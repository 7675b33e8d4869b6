"""`attnfuzz coverage`: what it prints, for people and for machines, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.schema import wrong

from attnfuzz.harness.audit.coverage import measure as measuring
from attnfuzz.harness.audit.coverage.lines import LineCoverage
from attnfuzz.harness.audit.coverage.source import FunctionCoverage
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.events import TrialFinished
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.cli.main import main
from attnfuzz.kernels import registry

KERNEL = "torch.reference_cpu"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["coverage", KERNEL, "--device", "cpu", *arguments])


def printed(*arguments: str) -> dict[str, Any]:
    result = run("--json", *arguments)
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout)
    assert not list(wrong(content, "Coverage"))
    return content


def test_the_text_names_what_was_reached_and_what_was_not() -> None:
    text = run("--max-examples", "60").output
    assert "torch.reference_cpu on cpu: 60 Cases drawn with seed 0" in text
    for part in ("queries at the tile", "never drawn:", "pairs of declared features:", "pairs that no Case had:", "rarest pairs"):
        assert part in text
    assert "packing ragged" not in text.split("in all of them:")[1].splitlines()[0]
    assert "dtype float32" in text.split("in all of them:")[1].splitlines()[0]


def test_the_json_has_every_count() -> None:
    content = printed("--max-examples", "60", "--seed", "3")
    assert (content["kernel"], content["cases"], content["seed"], content["lines"]) == (KERNEL, 60, 3, None)
    assert sum(content["drawn"]["causal"].values()) == 60
    assert 0 < content["pairs"]["share"] < content["pairs"]["share_of_declared"] <= 1
    assert {"features", "case"} == set(content["pairs"]["missing"][0])
    assert content == {**printed("--max-examples", "60", "--seed", "3"), "seconds_to_draw": content["seconds_to_draw"]}


def test_a_beginning_of_several_names_is_refused_in_words() -> None:
    result = CliRunner().invoke(main, ["coverage", "triton", "--device", "cpu"])
    assert result.exit_code == 2
    assert "kernel='triton': it is the beginning of several names; give one of triton.flex, " in result.output


def test_the_cases_are_those_of_a_run() -> None:
    settings = Settings(device="cpu", seed=5, max_examples=12, out=None, replay=False, in_process=True)
    tried: list[str] = []
    run_campaign([registry.get(KERNEL)], settings, lambda e: tried.append(e.case.id) if isinstance(e, TrialFinished) else None)
    kernel = registry.get(KERNEL)
    plan = measuring.plan_of(kernel, settings)
    assert [each.id for each in measuring._drawn(kernel, plan, settings)] == tried


def test_lines_of_a_kernel_without_an_interpreter() -> None:
    result = run("--max-examples", "20", "--lines", "3")
    assert result.exit_code == 0
    assert "lines of device code: unknown: no source file of it has Triton functions" in result.output


def test_lines_that_never_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    row = FunctionCoverage("f", 3, 5, True, (8,), ((6, True),), ((9, "load", False),))
    lines = LineCoverage(3, 1, {__file__: (row, FunctionCoverage("g", 20, 2, False, (), (), ()))})
    monkeypatch.setattr(measuring, "lines_of", lambda *_: lines)
    text = run("--max-examples", "20", "--lines", "3").output
    assert "lines of device code after 3 Cases; 1 failed" in text
    assert "4 of 5 statements of 1 called function ran" in text
    for line in (":8: never ran: ", ":6: always true: ", ":9: no element passed the mask of load: ", ":20: never called: "):
        assert line in text
    assert printed("--max-examples", "20", "--lines", "3")["lines"]["failed"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-examples", "0"], "max-examples"),
        (
            ["--max-examples", "5", "--lines", "9"],
            "lines=9: only 5 Cases are drawn; give a larger --max-examples",
        ),
        (["--seed", "-1"], "seed=-1: must not be negative; give 0 or more"),
        (["--profile", "long"], "profile='long': there is no such profile; use one of quick"),
        (["--device", "tpu"], "device='tpu'"),
    ],
)
def test_wrong_use(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_kernel_that_cannot_be_drawn_here() -> None:
    result = CliRunner().invoke(main, ["coverage", "torch.flash", "--device", "cpu"])
    assert result.exit_code == 2
    assert "kernel='torch.flash': nothing to draw on cpu" in result.output
    result = CliRunner().invoke(main, ["coverage", "no.such", "--device", "cpu"])
    assert result.exit_code == 2
