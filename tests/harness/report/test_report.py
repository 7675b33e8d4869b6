"""What a run leaves behind, and the page that is made of it: nothing lost, nothing believed, nothing fetched."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result
from support.report import Spoilt, failure, kernel_record, record, right, spoilt_case, written

from attnfuzz.harness.campaign import events
from attnfuzz.harness.campaign import maps as gallery
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.coverage import EDGES, Tally, bin_of, drawn_values
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.core import files
from attnfuzz.harness.judge.errormap import write_maps
from attnfuzz.harness.judge.failure import Failure, Identity
from attnfuzz.harness.judge.verdict import Figures, Verdict
from attnfuzz.harness.report import runfile
from attnfuzz.harness.report.recorder import Recorder
from attnfuzz.harness.report.runfile import MOST_BYTES, RunRecord, read_run, runs_of
from attnfuzz.harness.trial.errormaps import error_maps
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.strategies.case import Case


@pytest.fixture(autouse=True)
def _only_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})


def tail_keys(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> None:
    """dK of the last key of all is off where there are more than four."""
    if "dk" in outputs and inputs.problem.total_k > 4:
        outputs["dk"].reshape(-1)[(inputs.problem.total_k - 1) * inputs.problem.kv_heads * inputs.problem.dim_qk :] += 1.0


def run(spoil: Any = tail_keys, **changed: Any) -> tuple[events.CampaignFinished, list[str]]:
    """A campaign in this process, recorded in `found`; what was said of a record that was lost."""
    kernel, said = registry.register(Spoilt(spoil)), list[str]()
    given = {"max_examples": 25, "max_failures": 1, "out": "found", "in_process": True, "plain": True, "seed": 1}
    settings = Settings(**{**given, **changed})
    with Recorder("found", said.append) as recorder:
        return run_campaign([kernel], settings, recorder), said


def the_run(folder: str = "found") -> RunRecord:
    [found] = runs_of(Path(folder))
    assert isinstance(found, RunRecord), found
    return found


# --- what a run leaves behind


def test_the_record_is_what_the_campaign_said() -> None:
    finished, said = run()
    found, [summary] = the_run(), finished.summaries
    [kernel] = found.kernels
    assert (said, found.state, kernel.ended) == ([], "finished", True)
    assert (kernel.cases, kernel.shrink_cases, kernel.features) == (summary.cases, summary.shrink_cases, summary.features)
    assert found.settings["max_examples"] == 25
    assert found.environment["versions"]["torch"] == metadata.version("torch")
    for name, worst in summary.outputs.items():
        output = kernel.outputs[name]
        assert (output.cases, output.failures) == (worst.cases, worst.failures)
        assert sum(output.histogram) == worst.cases
        assert sum(output.histogram[20:]) == worst.failures, "what is wrong lies beyond the budget, and nothing else"
    assert kernel.outputs["dk"].failures
    assert sum(kernel.drawn["dtype"].values()) == summary.cases
    assert {"inputs", "kernel", "oracle", "judge"} <= set(kernel.stages)


def test_a_failure_is_recorded_with_its_case_its_line_and_its_maps() -> None:
    finished, _ = run()
    [told], [found] = the_run().failures, finished.findings
    assert (told.title, told.kind, told.output) == ("test.spoilt: mismatch in dK", "mismatch", "dk")
    assert told.case == json.loads(json.dumps(found.case.to_object()))
    assert (told.path, told.repro) == (found.path, f"attnfuzz repro {found.path}")
    assert told.shrunk
    assert told.pattern
    assert told.messages[0].startswith("mismatch: dK: ")
    assert told.maps == f"maps/{found.case.id}.json"
    maps = json.loads(Path("found", told.maps).read_text())
    assert maps["case"] == told.case
    assert told.first_maps is not None, "it was found with a larger Case"
    assert Path("found", told.first_maps).exists()


def test_maps_can_be_left_out_and_never_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run(maps=False)
    [told] = the_run().failures
    assert (told.maps, Path("found/maps").exists()) == (None, False)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gallery, "write_maps", full)
    finished, _ = run(seed=2, replay=False)
    told = [each for each in runs_of(Path("found")) if isinstance(each, RunRecord)][-1].failures[0]
    assert finished.findings
    assert (told.maps, told.no_maps) == (None, "OSError: [Errno 28] No space left on device")


def test_where_the_record_cannot_be_written_the_cases_are_kept() -> None:
    Path("found").mkdir()
    Path("found/runs").write_text("in the way")
    finished, said = run()
    assert said == ["found/runs: the record for reports cannot be written (File exists)"]
    assert Path(str(finished.findings[0].path)).exists()


def identity(number: int) -> Identity:
    return Identity(kernel="test.spoilt", kind="exception", output=None, check="forward", message=f"{number}")


def started(recorder: Recorder, tally: Tally | None = None) -> None:
    described = {"device": "cpu (x86_64)", "cores": 2, "versions": {}}
    recorder(events.CampaignStarted({}, described, ("test.spoilt",), None))
    recorder(events.KernelStarted("test.spoilt", 3, 0, tally or Tally()))


def test_a_run_that_is_killed_has_left_what_it_had_come_to() -> None:
    recorder, case = Recorder("found"), spoilt_case(right)
    tally = Tally()
    started(recorder, tally)
    passed = Verdict(status="pass", figures={"o": Figures(elements=3, worst=0.5)})
    tally.add("generate", case, passed)
    recorder(events.TrialFinished("test.spoilt", "generate", case, passed))
    wrong = Verdict(status="fail", failures=(Failure(kernel="test.spoilt", kind="exception", check="forward", message="x"),))
    recorder(events.FailureFound(events.Finding(wrong.failures[0].identity, case, wrong, "found/cases/a.json", 1, 0.5)))
    # Nothing more is heard of it.
    found = the_run()
    assert found.state == "running"
    assert (found.kernels[0].cases, found.kernels[0].ended) == (1, False)
    assert [each.shrunk for each in found.failures] == [False]
    text = page("found")
    assert "has not ended: it was killed, or is still running" in text
    assert "Case as found: the run ended before it was shrunk" in text


@pytest.mark.parametrize(("error", "state"), [(ValueError("no"), "error"), (KeyboardInterrupt(), "interrupted")])
def test_what_ends_a_run_is_noted(error: BaseException, state: str) -> None:
    def fails() -> None:
        with Recorder("found") as recorder:
            started(recorder)
            raise error

    with pytest.raises(type(error)):
        fails()
    assert the_run().state == state


def test_a_run_that_could_not_begin_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="no"), Recorder("found"):
        raise ValueError("no")
    assert not Path("found").exists()


def test_a_record_is_bounded() -> None:
    recorder, kind = Recorder("found"), "exception"
    huge = Case(kernel="test.spoilt", problem=spoilt_case(right, seqlens_q=(1,) * 5000, seqlens_k=(1,) * 5000).problem)
    recorder._write = lambda: None  # type: ignore[method-assign]  # not at every event: it takes its time
    started(recorder)
    for number in range(600):
        long = Failure(kernel="test.spoilt", kind=kind, check="forward", message="m" * 9000, detail="d" * 9000)
        recorder(
            events.FailureFound(events.Finding(identity(number), huge, Verdict(status="fail", failures=(long,)), None, 1, 0.5))
        )
    del recorder._write
    recorder(events.CampaignFinished((), (), 1.0))
    found = the_run()
    assert (len(found.failures), found.more_failures) == (500, 100)
    assert found.failures[0].case == {}
    [path] = Path("found/runs").iterdir()
    assert path.stat().st_size < MOST_BYTES / 4


def test_the_workers_of_one_pytest_are_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Recorder("a")._run.session == Recorder("b")._run.session
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "abc")
    assert Recorder("a")._run.session == "abc"


def test_a_shrunk_failure_takes_the_place_of_what_was_found() -> None:
    recorder, case = Recorder("found"), spoilt_case(right)
    started(recorder)
    wrong = Verdict(status="fail", failures=(Failure(kernel="test.spoilt", kind="mismatch", check="element", message="x"),))
    first, last = identity(1), identity(2)
    finding = events.Finding(first, case, wrong, None, 7, 0.5)
    recorder(events.FailureFound(finding))
    shrunk = dataclasses.replace(finding, identity=last, shrunk=True, shrink_trials=4, rate=(1, 3))
    recorder(events.Shrunk(shrunk, first))
    [told] = the_run().failures
    assert (told.fingerprint, told.cases_to_find, told.shrink_trials, told.rate) == (last.fingerprint, 7, 4, (1, 3))


def test_bins() -> None:
    assert [bin_of(each) for each in (0.0, 0.05, 0.051, 1.0)] == [0, 0, 1, 19]
    assert [bin_of(each) for each in (1.0000001, 2.0, 1e3, 1e9)] == [20, 20, 24, 25]
    assert bin_of(float("inf")) == bin_of(float("nan")) == len(EDGES) + 1


def test_what_was_drawn() -> None:
    found = dict(drawn_values(spoilt_case(right, causal="top_left", seqlens_q=(0, 17), seqlens_k=(1, 300))))
    assert found["causal"] == "top_left"
    assert (found["longest queries"], found["longest keys"]) == ("17-64", "257-512")
    assert (found["groups"], found["sequences"], found["layout"]) == ("2", "2", "plain")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "it is broken (not JSON (Input data was truncated))"),
        ("[]", "it is not a record of a run"),
        ('{"format": 7}', "its format is 7, this attnfuzz reads 1"),
        ('{"format": 1}', "it is broken (Object missing required field `stamp`)"),
        ("[" * 100_000, "it is broken ("),
    ],
    ids=["empty", "list", "version", "fields", "depth"],
)
def test_a_broken_run_file_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(BadArgument) as error:
        read_run(path)
    assert f"run={str(path)!r}: {reason}" in str(error.value)


# --- the page


def attnfuzz(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def page(folder: str = "found", *arguments: str) -> str:
    done = attnfuzz("report", folder, *arguments)
    assert done.exit_code == 0, done.output
    return Path(folder, "report.html").read_text()


class Seen(HTMLParser):
    """Elements and addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "action", "data", "srcset")]
        self.handlers += [name for name, _ in attributes if name.startswith("on") or name == "style"]


def test_a_real_run_becomes_a_page_of_its_own() -> None:
    finished, _ = run()
    done = attnfuzz("report", "found")
    assert done.exit_code == 0
    assert done.stdout == f"found/report.html: 1 failure in {finished.summaries[0].cases} cases of 1 kernel, 1 picture\n"
    text = Path("found/report.html").read_text()
    assert "1 failure in 1 of 1 kernel" in text
    assert f"attnfuzz repro {finished.findings[0].path}" in text
    assert text.count("data:image/png;base64,") == 2, "the minimal Case, and the Case as it was found"
    seen = Seen(text)
    assert all(each.startswith(("#", "data:")) for each in seen.addresses)
    assert not seen.handlers
    assert seen.elements.count("script") == 1
    assert "url(" not in text
    assert "@import" not in text


def test_whatever_a_kernel_says_is_text() -> None:
    evil = "</title></style><script>alert(1)</script><img src=//example.org/x onerror=alert(2)>{{ 7 * 7 }}'\""
    bad = failure(kernel=evil, title=evil, kind="exception", output=None, check=evil, messages=[evil], pattern=evil, detail=evil,
                  told=[(evil, evil)], case={evil: evil}, path=evil, repro=evil, no_maps=evil)  # fmt: skip
    refused = [runfile.Refused(what=evil, reason=evil)]
    told = kernel_record(evil, features={evil: 1}, drawn={evil: {evil: 3, "b": 1}}, stages={evil: 1.0})
    where = {"settings": {evil: evil}, "environment": {"device": evil, "unchecked": evil}, "state": "error", "error": evil}
    lists = dict.fromkeys(("skipped", "broken", "not_tried"), refused)
    everywhere = record(failures=[bad], kernels=[told], lost=evil, **where, **lists)
    clean = Seen(page(str(written(Path("clean"), record(failures=[failure()])))))
    seen = Seen(page(str(written(Path("found"), everywhere))))
    assert set(seen.elements) <= set(clean.elements) | {"pre", "small", "table", "caption", "svg", "rect"}
    assert seen.elements.count("script") == 1
    assert all(each.startswith(("#", "data:")) for each in seen.addresses)
    assert not seen.handlers
    assert "alert(1)&lt;/script&gt;" in Path("found/report.html").read_text()
    assert ">49<" not in Path("found/report.html").read_text()


def test_no_failures() -> None:
    text = page(str(written(Path("found"), record())))
    assert "No failures in 10 Cases of 1 kernel" in text
    assert '<header class="good">' in text


def test_five_hundred_failures_are_listed_and_most_folded() -> None:
    case = spoilt_case(right)
    maps = error_maps(case, "cpu")
    assert not isinstance(maps, str)
    write_maps(Path("found/maps/a.json"), maps)
    failures = [failure(number, f"kernel.{number % 40}", maps="maps/a.json") for number in range(500)]
    kernels = [kernel_record(f"kernel.{number}", wrong=3, worst="inf") for number in range(40)]
    written(Path("found"), record(kernels=kernels, failures=failures))
    start = time.process_time()
    done = attnfuzz("report", "found", "--pictures", "2", "--json")
    assert time.process_time() - start < 20
    told = json.loads(done.stdout)
    assert (told["failures"], told["pictures"]) == (500, 2)
    text = Path("found/report.html").read_text()
    assert "500 failures in 40 of 40 kernels" in text
    assert text.count('<details class="failure"') == 500
    assert text.count(" open>\n<summary><h3>") == 10
    assert text.count("data:image/png") == 2
    assert len(text) < 3_000_000


def test_shards_are_put_together() -> None:
    one = record("20260101T000000Z-1-a", kernels=[kernel_record(cases=10)], failures=[failure(1, shrunk=False), failure(2)])
    two = record("20260101T000001Z-2-b", kernels=[kernel_record(cases=5, worst="inf", wrong=2)], failures=[failure(1)])
    told = json.loads(attnfuzz("report", str(written(Path("found"), one, two)), "--json").stdout)
    assert (told["runs"], told["kernels"], told["cases"], told["failures"]) == ([one.stamp, two.stamp], 1, 15, 2)
    text = Path("found/report.html").read_text()
    assert "✗ ∞" in text
    assert "Case as found" not in text, "the shrunk one is shown"


def test_the_latest_session_is_shown_or_all() -> None:
    old = record("20250101T000000Z-1-a", session="old", failures=[failure()])
    written(Path("found"), old, record())
    assert json.loads(attnfuzz("report", "found", "--json").stdout)["failures"] == 0
    assert json.loads(attnfuzz("report", "found", "--json", "--all").stdout)["failures"] == 1


def test_a_moved_folder_still_has_its_cases_and_maps() -> None:
    run()
    Path("found").rename("elsewhere")
    text = page("elsewhere")
    assert "attnfuzz repro elsewhere/cases/" in text
    assert "data:image/png" in text


@pytest.mark.parametrize("as_json", [False, True])
def test_what_cannot_be_reported_ends_with_2(as_json: bool) -> None:
    Path("empty").mkdir()
    Path("file").write_text("")
    Path("broken/runs").mkdir(parents=True)
    Path("broken/runs/a.json").write_text("{")
    more = ["--json"] if as_json else []
    remedy = "run `attnfuzz run --out DIR` first, or give its DIR"
    for folder, reason in (
        ("none", "report='none': no such folder; give the folder that `attnfuzz run --out DIR` wrote to"),
        ("file", "report='file': it is not a folder; give the folder that `attnfuzz run --out DIR` wrote to"),
        ("empty", f"report='empty': no run is recorded there; {remedy}"),
        ("broken", "run='broken/runs/a.json': it is broken (not JSON (Input data was truncated)); "
         "remove it, or report with the version that wrote it"),
    ):  # fmt: skip
        done = attnfuzz("report", folder, *more)
        assert (done.exit_code, done.stderr) == (2, f"error: {reason}\n")
        assert not as_json or json.loads(done.stdout) == {"format": 1, "error": reason}
        assert not Path(folder, "report.html").exists()


def test_a_broken_run_file_is_named_and_left_out() -> None:
    written(Path("found"), record())
    Path("found/runs/z.json").write_text("{")
    done = attnfuzz("report", "found", "--json")
    assert done.exit_code == 0
    assert "warning: left out: run='found/runs/z.json': it is broken" in done.stderr
    assert [each["path"] for each in json.loads(done.stdout)["broken"]] == ["found/runs/z.json"]
    assert "Left out, since it cannot be read: run=" in Path("found/report.html").read_text()


def test_a_broken_map_costs_its_picture_only() -> None:
    written(Path("found"), record(failures=[failure(maps="maps/a.json"), failure(2, maps="../../etc/passwd")]))
    Path("found/maps").mkdir()
    Path("found/maps/a.json").write_text("{")
    text = page("found")
    assert "No picture: maps=&#39;found/maps/a.json&#39;: it is broken" in text
    assert "No picture: maps=&#39;found/maps/passwd&#39;: it cannot be read" in text


def test_what_the_page_needs_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "No picture: matplotlib: it is not installed" in page("found")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done = attnfuzz("report", "found", "--output", "other.html")
    assert done.exit_code == 2
    assert done.stderr == "error: jinja2: it is not installed, and the page needs it; pip install 'attnfuzz[report]'\n"


def test_the_page_goes_where_it_is_sent() -> None:
    written(Path("found"), record())
    assert attnfuzz("report", "found", "--output", "a/b.html").exit_code == 0
    assert Path("a/b.html").stat().st_mode & 0o777 == 0o666 & ~_umask()
    done = attnfuzz("report", "found", "--output", "found/runs")
    assert (done.exit_code, done.stderr) == (2, "error: output='found/runs': it is a folder; give a file\n")


def _umask() -> int:
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_records_survive_json() -> None:
    made = record(kernels=[kernel_record(worst="nan", wrong=1)], failures=[failure(rate=(1, 3))])
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(made))), RunRecord) == made


def test_a_page_that_cannot_be_written_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    written(Path("found"), record())
    monkeypatch.setattr(files, "write_whole", full)
    Path("old.html").write_text("old")
    for name in ("old.html", "new.html"):
        done = attnfuzz("report", "found", "--output", name)
        reason = "it cannot be written (No space left on device); give a file elsewhere"
        assert (done.exit_code, done.stderr) == (2, f"error: output='{name}': {reason}\n")
    assert (Path("old.html").read_text(), Path("new.html").exists()) == ("old", False)
