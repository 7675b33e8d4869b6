"""Gradients of sinks and of captured tensors in a run's table, in its JSON and Markdown, and in what is kept for reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from support.schema import wrong

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.coverage import Tally, Worst
from attnfuzz.harness.campaign.events import CampaignFinished, Event
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.cli.main import main
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Figures, Verdict
from attnfuzz.harness.report.figures import WHOLE
from attnfuzz.harness.report.figures import Figures as Table
from attnfuzz.harness.report.machine import campaign_object
from attnfuzz.harness.report.recorder import Recorder
from attnfuzz.harness.report.terminal import summary_table
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import dense
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

CASE = Case(kernel="theirs.sinks", problem=Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=8, dim_v=8))


@pytest.fixture(autouse=True)
def _only_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})


def half_the_gradient(q: Any, k: Any, v: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """O by its definition, with half the gradient of the sinks."""
    s = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * q.shape[-1] ** -0.5
    if sinks is not None:
        halved = sinks * 0.5 + (sinks * 0.5).detach()
        s = torch.cat([s, halved.float()[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", p, v.float()).to(q.dtype)


def printed(done: CampaignFinished) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(summary_table(done.summaries))
    return captured.get()


def test_a_wrong_gradient_of_sinks_has_a_row_everywhere() -> None:
    kernel = registry.register(dense(half_the_gradient, name="theirs.sinks", dims=((8, 8),), devices=("cpu",)))
    table = Table()
    with Recorder("kept") as recorder:

        def listen(event: Event) -> None:
            recorder(event)
            table(event)

        settings = Settings(device="cpu", max_examples=30, in_process=True, out="kept", maps=False, seed=0)
        done = run_campaign([kernel], settings, listen)
    (row,) = done.summaries
    assert [each.identity.check for each in row.findings] == ["d sinks"]
    figures = row.captured["sinks"]
    assert 0 < figures.failures <= figures.cases < row.cases
    assert figures.worst > 1
    assert not any(each.failures for each in row.outputs.values())

    (line,) = (each for each in printed(done).splitlines() if "d sinks" in each)
    assert [each.strip() for each in line.split("│")[2:-1]][:2] == ["d sinks", str(figures.cases)]
    assert line.split("│")[-2].strip() == str(figures.failures)
    assert campaign_object(done)["kernels"][0]["captured"]["sinks"]["failures"] == figures.failures
    assert table.of("theirs.sinks") == {"sinks": {"wrong": figures.failures, "known": 0}}
    assert f"| d sinks | {figures.cases} | 0 | {figures.failures} | 0 |" in table.markdown(done, "attnfuzz run", ())

    merged = CliRunner().invoke(main, ["merge", "all", "kept", "--json"])
    assert merged.exit_code == 1, merged.output
    assert not list(wrong(json.loads(merged.stdout)["kernels"][0], "KernelRow"))
    [of_merge], [of_run] = (each["kernels"] for each in (json.loads(merged.stdout), campaign_object(done)))
    assert of_merge["captured"]["sinks"] == of_run["captured"]["sinks"]

    pytest.importorskip("jinja2")
    page = CliRunner().invoke(main, ["report", "kept", "--output", "page.html"])
    assert page.exit_code == 0, page.output
    text = Path("page.html").read_text(encoding="utf-8")
    assert '<button type="button">d sinks</button>' in text
    title = f"d sinks of theirs.sinks: worst error [0-9.]+ x its budget, wrong in {figures.failures} of {figures.cases} Cases"
    assert re.search(title, text)
    assert '<button type="button">d captured</button>' not in text, "no kernel has other captured tensors"


def failure(check: str, kind: Any = "mismatch", output: Any = None) -> Failure:
    return Failure(kernel="theirs.sinks", kind=kind, check=check, output=output, message="it is wrong")


def test_tensors_other_than_sinks_share_a_row_and_a_case_counts_once() -> None:
    captured = {"sinks": Figures(elements=4, worst=0.5), "bias": Figures(elements=4, worst=3.0), "slope": Figures(elements=4)}
    tally, table = Tally(), Table()
    tally.add("generate", CASE, Verdict(status="pass", captured={"sinks": Figures(elements=4, worst=0.25)}))
    tally.add(
        "generate",
        CASE,
        Verdict(status="fail", captured=captured, failures=(failure("d bias"), failure("d slope"))),
    )
    tally.add("generate", CASE, Verdict(status="fail", failures=(failure("d captured", "contract"),)))
    for each in (failure("element", output="dq"), failure("forward", "crash")):
        tally.add("generate", CASE, Verdict(status="fail", failures=(each,)))
    assert tally.captured == {"sinks": Worst(cases=2, worst=0.5), "captured": Worst(cases=1, worst=3.0, failures=2)}
    counts = table.counts.setdefault("theirs.sinks", {})
    table._count(counts, Verdict(status="fail", failures=(failure("d bias"), failure("forward", "crash"))))
    assert set(counts) == {"captured", WHOLE}


def test_a_kernel_without_such_gradients_has_no_such_rows() -> None:
    def plain(q: Any, k: Any, v: Any) -> torch.Tensor:
        return half_the_gradient(q, k, v)

    kernel = registry.register(dense(plain, name="theirs.plain", dims=((8, 8),), devices=("cpu",)))
    done = run_campaign([kernel], Settings(device="cpu", max_examples=3, in_process=True, out=None), lambda _: None)
    assert done.summaries[0].captured == {}
    assert "d sinks" not in printed(done)
    assert "d captured" not in printed(done)
