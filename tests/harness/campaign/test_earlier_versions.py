"""What earlier versions have drawn and written: the same seeds give the same Cases, and all their files are read.

tests/corpus/earlier was made by commit b399e3e. `drawn.jsonl`: campaigns of 20 Cases of three kernels and three seeds, without
the constants of local modules, as an installed attnfuzz draws. The other files:
`attnfuzz run fault.numbers fault.third --device cpu --max-examples 30`.
"""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import hypothesis
import msgspec
import pytest
from support.paths import CORPUS
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign.blob import stored_case
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.campaign.events import Event, TrialFinished
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.gate.ledger import read_ledger
from attnfuzz.harness.judge.errormap import read_maps
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report.runfile import read_run
from attnfuzz.kernels import registry

EARLIER = CORPUS / "earlier"
HEAD, *ROWS = map(json.loads, (EARLIER / "drawn.jsonl").read_text().splitlines())
CAMPAIGNS = sorted({(row["kernel"], row["seed"]) for row in ROWS})


def drawn_cases(kernel: str, seed: int) -> list[Any]:
    events: list[Event] = []
    settings = Settings(device="cpu", seed=seed, max_examples=20, out=None, replay=False, maps=False)
    run_campaign([registry.get(kernel)], settings, events.append, FunctionExecutor(lambda _: Verdict(status="pass")))
    return [json.loads(each.case.canonical()) for each in events if isinstance(each, TrialFinished)]


def renew() -> None:
    """Write `drawn.jsonl` again, where a change of the strategies is meant to change what seeds draw."""
    rows = [{"hypothesis": hypothesis.__version__}]
    for kernel, seed in CAMPAIGNS:
        rows += [{"kernel": kernel, "seed": seed, "case": case} for case in drawn_cases(kernel, seed)]
    text = "\n".join(json.dumps(row, separators=(",", ":"), sort_keys=True) for row in rows)
    (EARLIER / "drawn.jsonl").write_text(text + "\n")


@pytest.mark.skipif(hypothesis.__version__ != HEAD["hypothesis"], reason="another version of Hypothesis draws other values")
@pytest.mark.parametrize(("kernel", "seed"), CAMPAIGNS)
def test_the_same_seed_draws_the_same_cases(kernel: str, seed: int) -> None:
    if reason := registry.get(kernel).unavailable("cpu"):
        pytest.skip(reason)
    expected = [row["case"] for row in ROWS if (row["kernel"], row["seed"]) == (kernel, seed)]
    assert len(expected) == 20
    assert expected == drawn_cases(kernel, seed)


def test_case_files_are_read() -> None:
    numbers = read_case(EARLIER / "fault.numbers-o-mismatch-e67090b69e.json")
    assert (numbers.case.kernel, numbers.case.id, numbers.rate) == ("fault.numbers", "e67090b69e", None)
    third = read_case(EARLIER / "fault.third-o-nondeterministic-13959401cb.json")
    assert third.case.id == "13959401cb"
    assert third.rate is not None


def test_the_place_of_a_kernel_is_read() -> None:
    element = read_case(EARLIER / "acme.element-dv-mismatch-fad26e6b65.json")
    assert (element.finding.target, element.finding.minimal) == ("support_repro:ELEMENT", True)


def test_a_blob_is_the_case_of_its_file() -> None:
    third = read_case(EARLIER / "fault.third-o-nondeterministic-13959401cb.json")
    blob = stored_case((EARLIER / "blob.txt").read_text().strip())
    assert (third.case, third.rate) == (blob.case, blob.rate)


def test_a_run_file_is_read_whole() -> None:
    run = read_run(EARLIER / "run.json")
    assert [kernel.kernel for kernel in run.kernels] == ["fault.numbers", "fault.third"]
    assert [kernel.cases for kernel in run.kernels] == [30, 30]
    assert len(run.failures) == 6
    stored = json.loads((EARLIER / "run.json").read_text())
    assert stored["failures"][0]["case_id"] == run.failures[0].case_id
    assert set(stored) == set(msgspec.to_builtins(run)) | (set(stored) - set(run.__struct_fields__))
    assert set(stored) <= set(run.__struct_fields__)
    for before, now in zip(stored["failures"], run.failures, strict=True):
        assert set(before) <= set(now.__struct_fields__)


def test_error_maps_are_read() -> None:
    maps = read_maps(EARLIER / "maps.json")
    assert maps.id == "5fa2e63c57"


def test_a_ledger_is_read() -> None:
    entries = read_ledger(EARLIER / "ledger.toml", date(2026, 11, 23)).entries
    assert [(each.kernel, each.kind, each.part, each.output) for each in entries] == [
        ("fault.numbers", "mismatch", None, "o"),
        ("torch.reference_cpu", None, "speed", None),
    ]


if __name__ == "__main__":
    renew()
