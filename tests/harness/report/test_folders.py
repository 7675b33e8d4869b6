"""`attnfuzz merge`: nothing of any shard is lost, a broken folder changes nothing, and what is missing is said."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from support.report import Spoilt, failure, kernel_record, record, right, written

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.corpus import Corpus, read_case
from attnfuzz.harness.campaign.events import CampaignFinished, Finding
from attnfuzz.harness.campaign.journal import Journal, left_behind
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report.recorder import Recorder
from attnfuzz.harness.report.runfile import runs_of
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Inputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, case_from_object


@pytest.fixture(autouse=True)
def _only_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})


def attnfuzz(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def merged(*arguments: str, code: int) -> dict[str, Any]:
    done = attnfuzz("merge", *arguments, "--json")
    assert done.exit_code == code, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def wrong_keys(inputs: Inputs, outputs: dict[str, Any]) -> None:
    if "dk" in outputs and inputs.problem.total_k > 4:
        outputs["dk"].reshape(-1)[-1] += 1.0


def shard(number: int, count: int, spoil: Any = wrong_keys, seed: int = 1) -> CampaignFinished:
    """One shard of a campaign in this process, in the folder `part-NUMBER`."""
    settings = Settings(
        max_examples=20, shard=number - 1, shards=count, out=f"part-{number}", in_process=True, plain=True, seed=seed
    )
    with Recorder(f"part-{number}") as recorder:
        return run_campaign([registry.register(Spoilt(spoil))], settings, recorder)


def snapshot(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_shards_of_a_run_become_one() -> None:
    parts = [shard(number, 2) for number in (1, 2)]
    result = merged("all", "part-1", "part-2", code=1)
    assert [row["cases"] for row in result["kernels"]] == [sum(each.summaries[0].cases for each in parts)]
    identities = {finding.identity for part in parts for finding in part.findings}
    assert len(result["failures"]) == len(identities) == result["case_files"] == len(list(Path("all/cases").iterdir()))
    assert result["incomplete"] == result["without_case"] == []
    for each in result["failures"]:
        assert read_case(each["path"]).case == case_from_object(each["case"])
        assert each["path"].startswith("all/cases/")
        assert each["repro"] == f"attnfuzz repro {each['path']}"
    page = attnfuzz("report", "all", "--json")
    assert json.loads(page.stdout)["cases"] == result["kernels"][0]["cases"], "a report shows all shards as one session"
    assert json.loads(page.stdout)["pictures"] >= 1
    text = attnfuzz("merge", "all", "part-1", "part-2")
    assert text.exit_code == 1
    assert "worst error / budget" in text.output
    assert f"{len(identities)} failure" in text.output
    assert merged("all", "part-1", "part-2", code=1) == result, "once more changes nothing"


def kept(folder: str, *, tokens: int, minimal: bool, kind: Any = "mismatch") -> Path:
    """A case file of one identity in a folder with a run."""
    problem = Problem(seqlens_q=(tokens,), seqlens_k=(tokens,), dim_qk=8, dim_v=8, heads=1, kv_heads=1, dtype="float32")
    case = Case(kernel="acme.flash", problem=problem, config=Config())
    fault = Failure(kernel="acme.flash", kind=kind, check="element", message=f"{tokens} wrong", output="dk")
    finding = Finding(fault.identity, case, Verdict(status="fail", failures=(fault,)), shrunk=True, partly=not minimal)
    path = Corpus(folder).write(finding, 0)
    failed = failure(fingerprint=fault.identity.fingerprint, case=case.to_object(), case_id=case.id, path=str(path))
    written(Path(folder), record(f"20260101T000000Z-{folder}-{kind}", kernels=[kernel_record(wrong=1)], failures=[failed]))
    return path


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "b", "a"), ("b", "a", "c")])
def test_of_one_identity_the_smallest_minimal_case_is_kept(order: tuple[str, ...]) -> None:
    kept("a", tokens=9, minimal=True)
    best = kept("b", tokens=5, minimal=True)
    kept("c", tokens=2, minimal=False)
    other = kept("c", tokens=3, minimal=True, kind="nonfinite")
    result = merged("all", *order, code=1)
    assert {path.name for path in Path("all/cases").iterdir()} == {best.name, other.name}
    numbers = {each["identity"]["kind"]: each["case"]["problem"]["seqlens_q"] for each in result["failures"]}
    assert numbers == {"mismatch": [5], "nonfinite": [3]}
    run = next(each for each in runs_of(Path("all")) if "-a-" in each.stamp)  # type: ignore[union-attr]
    assert run.failures[0].path == f"all/cases/{best.name}"  # type: ignore[union-attr]
    assert run.failures[0].repro is not None  # type: ignore[union-attr]


def test_a_smaller_case_replaces_that_of_the_result_and_a_larger_one_does_not() -> None:
    kept("a", tokens=9, minimal=True)
    smaller = kept("b", tokens=5, minimal=True)
    merged("all", "a", code=1)
    merged("all", "b", code=1)
    merged("all", "a", code=1)
    assert [path.name for path in Path("all/cases").iterdir()] == [smaller.name]


def test_a_case_in_flight_is_tried_first_by_the_next_run_of_the_result() -> None:
    shard(1, 1, right)
    case = read_case(kept("other", tokens=3, minimal=True)).case
    own = Journal("part-1")
    own.launch(case, deaths=1)
    alive = merged("all", "part-1", code=0)
    assert alive["in_flight"] == 0, "its run is alive"
    os.close(own._file)  # as a kill does
    assert merged("all", "part-1", code=0)["in_flight"] == 1
    assert [(each.case, each.deaths) for each in left_behind("all")] == [(case, 2)]
    assert [each.case for each in left_behind("part-1")] == [case], "the shard's own is as it was"


def test_many_missing_shards_are_one_line() -> None:
    def part(number: int) -> str:
        settings = {"seed": 1, "shard": number - 1, "shards": 2_000_000}
        return str(written(Path(f"part-{number}"), record(f"20260101T000000Z-{number}-a", settings=settings)))

    few = [part(number) for number in (2, 3, 7, 2_000_000)]
    (text,) = merged("all", *few, code=2)["incomplete"]
    assert text == "1,999,996 of 2,000,000 shards of seed 1 are in none of the folders: 1, 4 to 6, 8 to 1999999"
    (text,) = merged("all", *few, *(part(number) for number in range(9, 30, 2)), code=2)["incomplete"]
    assert text.endswith(": 1, 4 to 6, 8, 10, 12, 14, 16, 18, 6 more runs of them"), text


def test_a_folder_that_cannot_be_made_is_named() -> None:
    shard(1, 1, right)
    Path("file").touch()
    done = attnfuzz("merge", "file/all", "part-1")
    assert done.exit_code == 2
    assert "merge='file/all': Not a directory; give a folder that can be made and written" in done.output


def test_a_missing_shard_and_one_that_was_killed_are_no_clean_end() -> None:
    shard(1, 3, right)
    shard(3, 3, right)
    result = merged("all", "part-1", "part-3", code=2)
    assert result["incomplete"] == ["shard 2/3 of seed 1 is in none of the folders"]
    shard(2, 3, right)
    assert merged("all", "part-1", "part-2", "part-3", code=0)["incomplete"] == []
    (run,) = runs_of(Path("part-2"))
    written(Path("part-2"), replace(run, state="running"))  # type: ignore[type-var]
    (text,) = merged("all", "part-1", "part-2", "part-3", code=2)["incomplete"]
    assert text == f"run {run.stamp} (shard 2/3) did not finish: it was killed or still runs"  # type: ignore[union-attr]


def test_shards_of_different_seeds_are_no_clean_end() -> None:
    shard(1, 2, right)
    shard(2, 2, right, seed=2)
    texts = merged("all", "part-1", "part-2", code=2)["incomplete"]
    assert "the folders are of runs with different seeds or numbers of shards" in texts


def test_an_interrupted_shard_without_failures_ends_like_an_interrupted_run() -> None:
    written(Path("a"), record(state="interrupted"))
    assert merged("all", "a", code=130)["interrupted"]


def test_a_failure_without_a_case_still_counts() -> None:
    written(Path("a"), record(failures=[failure(path=None, case={})]))
    assert merged("all", "a", code=1)["without_case"] == ["acme.flash: mismatch in dK (1)"]
    written(Path("a"), record(more_failures=3))
    assert merged("all", "a", code=1)["without_case"] == ["3 failures beyond those that a run file holds"]


REMEDY = "give folders that `attnfuzz run --out DIR` wrote to"


@pytest.mark.parametrize("what", ["absent", "file", "empty", "broken run", "broken case", "same", "none", "no name"])
def test_bad_input_ends_with_2_and_changes_nothing(what: str) -> None:
    kept("a", tokens=3, minimal=True)
    merged("all", "a", code=1)
    kept("b", tokens=2, minimal=True)
    before = snapshot("all")
    Path("empty").mkdir()
    Path("file").write_text("")
    for name in ("runs", "cases"):
        shutil.copytree("b", f"broken-{name}")
        (Path(f"broken-{name}") / name / "x.json").write_text("{")
    given, message = {
        "absent": (["b", "absent"], f"error: merge='absent': no such folder; {REMEDY}"),
        "file": (["b", "file"], f"error: merge='file': it is not a folder; {REMEDY}"),
        "empty": (["b", "empty"], f"error: merge='empty': no run is recorded there; {REMEDY}"),
        "broken run": (["b", "broken-runs"], "error: run='broken-runs/runs/x.json': it is broken"),
        "broken case": (["b", "broken-cases"], "error: case='broken-cases/cases/x.json': not JSON"),
        "same": (["b", "./all"], "error: merge='all': it is OUT as well"),
        "no name": (["b", ""], "error: merge='': it is empty; give folders"),
        "none": ([], "Missing argument 'DIR...'"),
    }[what]
    done = attnfuzz("merge", "all", *given)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert snapshot("all") == before


def test_unexplained_cases_are_copied_and_a_broken_one_is_left_out() -> None:
    written(Path("part-1"), record())
    written(Path("part-2"), record(stamp="20260101T000000Z-2-b"))
    case = Case(kernel="mine", problem=Problem(seqlens_q=(1,), seqlens_k=(2,), dim_qk=16, dim_v=16))
    path = Corpus("part-2").write_unexplained(case)
    (path.parent / "mine-broken.json").write_text("{")
    result = merged("all", "part-1", "part-2", code=0)
    assert [read_case(each).case for each in Path("all/unexplained").iterdir()] == [case]
    assert any("mine-broken.json" in each for each in result["left_out"])


def test_a_file_in_place_of_the_result_is_refused() -> None:
    written(Path("part-1"), record())
    Path("all").write_text("")
    done = attnfuzz("merge", "all", "part-1")
    assert done.exit_code == 2
    assert "merge='all': OUT is a file; give a folder" in done.output
