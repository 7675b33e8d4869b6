"""`attnfuzz gate` from end to end, on git repositories made here: what passes, what fails, and where it is told."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
from click.testing import CliRunner
from support.gate import BROKEN_DK, HARMLESS, ROUGH, SLOW, Repository, git

from attnfuzz.harness.campaign import corpus
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.gate.gate import gate
from attnfuzz.harness.gate.plan import Plan
from attnfuzz.kernels import registry


def kernels(*names: str) -> list[str]:
    return [each for name in names for each in ("--kernel", f"acme.{name}:KERNEL")]


def line_of(repository: Repository, name: str, edit: tuple[str, str]) -> int:
    lines = (repository.root / "src" / "acme" / f"{name}.py").read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if edit[1] in line)


def parts_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in found["parts"]}


@dataclass(frozen=True)
class Done:
    repository: Repository
    code: int
    found: dict[str, dict[str, Any]]
    whole: dict[str, Any]
    stderr: str
    summary: str
    junit: Xml.Element


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One gate of everything that may become of kernels: one change committed, the others not, on a detached HEAD."""
    names = ("harmless", "broken", "rough", "known", "slow", "old", "gone", "typo")
    repository = Repository.create(tmp_path_factory.mktemp("gated"), *names)
    repository.edit("harmless", *HARMLESS)
    repository.commit("harmless")
    git(repository.root, "checkout", "-q", "--detach")
    repository.edit("broken", *BROKEN_DK)
    repository.edit("slow", *SLOW)
    for name in ("rough", "known"):
        repository.edit(name, *ROUGH)
    fresh = (repository.root / "src/acme/old.py").read_text().replace("acme.old", "acme.fresh")
    repository.write("src/acme/fresh.py", "# a kernel of its own\n" * 60 + fresh)
    git(repository.root, "mv", "src/acme/old.py", "src/acme/moved.py")
    (repository.root / "src/acme/gone.py").unlink()
    repository.edit("typo", "return o, lse", "return o, lse)")
    days = {"rough": date.today() - timedelta(days=1), "known": date.today() + timedelta(days=30)}
    entries = [
        f'[[known]]\nkernel = "acme.{name}"\npart = "accuracy"\noutput = "dQ"\nissue = "#12"\nexpires = {day}\n'
        for name, day in days.items()
    ]
    # A CPU cannot show it: it must be neither in use nor an error.
    entries.append(
        f'[[known]]\nkernel = "acme.known"\nkind = "illegal-access"\ndevice = "cuda"\nissue = "#12"\nexpires = {days["known"]}\n'
    )
    repository.write("ledger.toml", "".join(entries))
    summary = repository.root / "summary.md"
    gated = kernels("harmless", "broken", "rough", "known", "slow", "moved", "fresh", "gone", "typo")
    ran = repository.gate(
        "--base", "HEAD~1", "--max-examples", "8", "--cases", "12", *gated, "--ledger", "ledger.toml",
        "--speed", "on", "--speed-threshold", "12", "--rounds", "5", "--json", "--junit", "out/junit.xml",
        GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary),
    )  # fmt: skip
    assert ran.stdout, ran.stderr
    whole = json.loads(ran.stdout)
    return Done(
        repository,
        ran.returncode,
        {each["kernel"]: each for each in whole["kernels"]},
        whole,
        ran.stderr,
        summary.read_text(),
        Xml.parse(repository.root / "out" / "junit.xml").getroot(),
    )


def test_a_harmless_change_passes(done: Done) -> None:
    found = done.found["acme.harmless"]
    assert found["outcome"] == "pass"
    assert found["why"] == "src/acme/harmless.py is changed"
    assert {name: part["outcome"] for name, part in parts_of(found).items()} == {
        "replay": "pass",
        "campaign": "pass",
        "accuracy": "pass",
        "determinism": "pass",
        "compile": "skipped",
        "speed": "pass",
    }
    outputs = {row["output"]: row for row in parts_of(found)["accuracy"]["figures"]["outputs"] if row["values"] == "all"}
    assert set(outputs) == {"o", "lse", "dq", "dk", "dv"}
    assert outputs["o"]["rms_ratio"] != 1, "base ran its own code"
    assert outputs["lse"]["rms_ratio"] == 1


def test_a_change_that_breaks_only_dk_for_groups_of_3_fails_with_the_right_annotation(done: Done) -> None:
    found = done.found["acme.broken"]
    assert done.code == 1
    assert found["outcome"] == "fail"
    findings = [each for part in found["parts"] for each in part["findings"]]
    assert {each["output"] for each in findings} == {"dk"}
    assert all("groups of 3" in each["described"]["heads"] for each in findings)
    line = line_of(done.repository, "broken", BROKEN_DK)
    marked = [each for each in done.stderr.splitlines() if each.startswith("::error file=src/acme/broken.py")]
    assert len(marked) == len(findings)
    assert marked[0].startswith(f"::error file=src/acme/broken.py,line={line},title=acme.broken%3A ")
    assert "groups of 3" in marked[0]
    # The Case is kept, and later parts were not run on values that are wrong.
    case = done.repository.root / findings[0]["case"]
    assert json.loads(case.read_text())["kernel"] == "acme.broken"
    assert parts_of(found)["speed"]["summary"].startswith("not run")


def test_twice_the_rms_error_inside_the_budgets_fails_accuracy(done: Done) -> None:
    found = done.found["acme.rough"]
    parts = parts_of(found)
    assert (parts["campaign"]["outcome"], parts["accuracy"]["outcome"]) == ("pass", "fail")
    assert {each["output"] for each in parts["accuracy"]["findings"]} == {"dq"}
    row, normal = (each for each in parts["accuracy"]["figures"]["outputs"] if each["output"] == "dq")
    assert 1.9 < row["rms_ratio"] < 2.1
    assert 1.9 < normal["rms_ratio"] < 2.1
    assert row["worst_head"] < 0.5, "far inside the budget"
    assert parts["determinism"]["outcome"] == "pass", "the parts after accuracy are run all the same"


def test_the_summary_and_junit_tell_the_same(done: Done) -> None:
    assert "## attnfuzz gate: FAIL" in done.summary
    assert "`acme.rough`" in done.summary
    outcomes = {suite.get("name"): suite.get("failures") for suite in done.junit}
    assert {name: count for name, count in outcomes.items() if count != "0"} == {
        "attnfuzz.acme.broken": "1",
        "attnfuzz.acme.rough": "1",
        "attnfuzz.acme.slow": "1",
        "attnfuzz.acme.typo:KERNEL": "1",
        "attnfuzz.ledger": "1",
    }
    assert done.whole["against"].endswith("(HEAD~1)")


def test_nothing_is_left_behind(done: Done) -> None:
    assert git(done.repository.root, "worktree", "list").count("\n") == 1


def test_a_slower_kernel_fails_the_speed_part(done: Done) -> None:
    parts = parts_of(done.found["acme.slow"])
    assert (parts["accuracy"]["outcome"], parts["speed"]["outcome"]) == ("pass", "fail")
    assert {each["check"] for each in parts["speed"]["findings"]} == {"forward"}
    assert all(row["low"] > 12 for row in parts["speed"]["figures"]["rows"] if row["direction"] == "forward")


def test_an_entry_in_force_lets_a_failure_through_and_an_expired_one_does_not(done: Done) -> None:
    known = done.found["acme.known"]
    assert known["outcome"] == "known"
    assert {each["waiver"]["issue"] for each in parts_of(known)["accuracy"]["findings"]} == {"#12"}
    (error,) = done.whole["ledger_errors"]
    assert error["error"].startswith("entry 1 (acme.rough: accuracy in dQ, #12): it expired on ")
    assert "::notice file=src/acme/known.py" in done.stderr
    assert "::error file=ledger.toml,line=1,title=attnfuzz ledger::entry 1" in done.stderr


def test_a_renamed_kernel_is_compared_with_the_file_that_it_was(done: Done) -> None:
    # The name is the kernel's own, and that is still acme.old.
    found = done.found["acme.old"]
    assert found["why"] == "src/acme/moved.py is renamed"
    assert parts_of(found)["accuracy"]["outcome"] == "pass"
    assert parts_of(found)["accuracy"]["figures"]["outputs"]


def test_a_new_a_deleted_and_a_broken_kernel(done: Done) -> None:
    fresh = parts_of(done.found["acme.fresh"])
    assert done.found["acme.fresh"]["outcome"] == "pass"
    assert "nothing to compare with: it is new: in" in fresh["accuracy"]["summary"]
    deleted = done.found["acme.gone:KERNEL"]
    assert (deleted["outcome"], deleted["why"]) == ("skipped", "deleted")
    broken = done.found["acme.typo:KERNEL"]
    assert (broken["outcome"], broken["file"]) == ("fail", "src/acme/typo.py")
    assert broken["line"] == line_of(done.repository, "typo", ("", "return o, lse)"))
    assert "SyntaxError" in parts_of(broken)["load"]["summary"]


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """A repository whose package this process can import, with one kernel."""
    repository = Repository.create(tmp_path / "repository", "rough")
    monkeypatch.syspath_prepend(str(repository.root / "src"))
    for table in ("_registered", "_loaded", "_origins"):
        monkeypatch.setattr(registry, table, {})
    monkeypatch.chdir(repository.root)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    yield repository
    for name in [each for each in sys.modules if each.split(".")[0] == "acme"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("broken", "more"),
    [
        pytest.param(
            "dk, dv = (dk * 0.5, dv * 0.5) if inputs.problem.causal else (dk, dv)",
            "dv",
            id="wrong in the same Case",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            f"dk = dk * 0.5 if inputs.problem.causal else dk; {ROUGH[1]}",
            "dq",
            id="less accurate in the others",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_known_failure_of_the_sample_hides_no_other(broken: str, more: str, local: Repository) -> None:
    local.edit("rough", "# backward", broken)
    local.write(
        "attnfuzz-ledger.toml",
        f'[[known]]\nkernel = "acme.rough"\nkind = "mismatch"\noutput = "dK"\nissue = "#12"\nexpires = {date.today()}\n',
    )
    plan = Plan(device="cpu", base="HEAD", kernels=("acme.rough:KERNEL",), folder=local.root, max_examples=1, cases=20)
    done = gate(plan, lambda _: None)
    [part] = [each for each in done.kernels[0].parts if each.name == "accuracy"]
    assert (done.outcome, part.outcome) == ("fail", "fail")
    waivers = {each.output: each.waiver is not None for each in part.findings}
    assert waivers["dk"] is True
    assert waivers[more] is False


@pytest.mark.slow
def test_a_gate_that_cannot_keep_a_case_tells_it_and_ends_with_2(local: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device", "cases/x.json")

    local.edit("rough", "# forward", "o = o * 1.5")
    monkeypatch.setattr(corpus, "write_whole", no_space)
    ran = attnfuzz("--base", "HEAD", "--kernel", "acme.rough:KERNEL", "--max-examples", "4")
    assert ran.exit_code == 2, ran.output
    assert "could be kept on disk: No space left on device" in ran.output
    again = re.search(r"without that file +(attnfuzz repro AF1-\S+)", ran.output)
    assert again is not None, ran.output


@pytest.mark.slow
def test_a_ledger_entry_lets_it_through_until_it_expires(local: Repository) -> None:
    local.edit("rough", *ROUGH)
    last = date.today() + timedelta(days=30)
    local.write(
        "attnfuzz-ledger.toml",
        f'[[known]]\nkernel = "acme.rough"\npart = "accuracy"\noutput = "dQ"\nissue = "#12"\nexpires = {last}\n',
    )
    plan = Plan(device="cpu", base="HEAD", kernels=("acme.rough:KERNEL",), folder=local.root, max_examples=3, cases=12)
    through = gate(plan, lambda _: None, today=last)
    assert (through.outcome, through.kernels[0].outcome, through.stale) == ("pass", "known", ())
    assert all(each.waiver is not None and each.waiver.issue == "#12" for each in through.kernels[0].findings)
    expired = gate(plan, lambda _: None, today=last + timedelta(days=1))
    assert (expired.outcome, expired.kernels[0].outcome) == ("fail", "fail")
    assert "entry 1 (acme.rough: accuracy in dQ, #12): it expired" in expired.stale[0][0]


@pytest.mark.slow
def test_a_baseline_in_place_of_git(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path, "rough")
    few = ("--max-examples", "3", "--cases", "12", *kernels("rough"))
    ran = repository.gate("--write", "base.json", *few)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "base.json: 1 kernel written" in ran.stdout
    repository.edit("rough", *ROUGH)
    ran = repository.gate("--baseline", "base.json", *few, "--json")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    (found,) = json.loads(ran.stdout)["kernels"]
    assert found["why"] == "its files differ from the baseline's"
    assert {each["output"] for each in parts_of(found)["accuracy"]["findings"]} == {"dq"}


@pytest.mark.slow
def test_ctrl_c_leaves_no_worktree_and_no_folder(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "repository", "one")
    repository.edit("one", *HARMLESS)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-P", "-m", "attnfuzz.harness.cli", "gate", "--device", "cpu", "--base", "HEAD", *kernels("one")]
    process = subprocess.Popen(
        [*command, "--max-examples", "1", "--cases", "500"],
        cwd=repository.root,
        env=repository.environment(TMPDIR=str(temporary)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    end = time.monotonic() + 120
    while git(repository.root, "worktree", "list").count("\n") < 2 and time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "gate INTERRUPTED" in said
    assert "gate PASS" not in said
    assert git(repository.root, "worktree", "list").count("\n") == 1
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_a_kernel_that_is_wrong_gets_no_baseline(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path, "broken")
    repository.edit("broken", "# forward", "o = o * 1.5")
    ran = repository.gate("--write", "base.json", "--cases", "6", *kernels("broken"))
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "it is wrong, so that no baseline is written" in ran.stdout
    assert not (tmp_path / "base.json").exists()


def attnfuzz(*arguments: str) -> Any:
    return CliRunner().invoke(cli.main, ["gate", "--device", "cpu", *arguments])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give --base REF, --baseline FILE or --write FILE"),
        (("--base", "mian"), "git knows no such commit here"),
        (("--base", "HEAD", "--kernel", "torch.reference_cpu"), "none of its files is in the checkout"),
        (("--base", "HEAD"), "no known kernel has a file in the checkout"),
        (("--base", "HEAD", "--kernel", "no.such"), "no kernel of that name is installed"),
        (("--base", "HEAD", "--kernel", "acme.rough:KERNEL", "--corpus", "nowhere"), "corpus='nowhere': there is no such folder"),
        (("--base", "HEAD", "--kernel", "acme.rough:KERNEL", "--ledger", "none.toml"), "ledger='"),
        (("--base", "HEAD", "--kernel", "acme.rough:KERNEL", "--junit", "."), "it is a folder"),
        (("--base", "HEAD", "--kernel", "acme.rough:KERNEL", "--budget", "soon"), "it is not a duration"),
        (("--write", "new.json"), "write='new.json': no known kernel has a file in "),
        (("--baseline", "none.json"), "baseline='none.json': it cannot be read"),
    ],
)
def test_wrong_use_is_told_and_ends_with_2(arguments: tuple[str, ...], told: str, local: Repository) -> None:
    ran = attnfuzz(*arguments)
    assert ran.exit_code == 2, ran.output
    assert told in ran.output
    assert "Traceback" not in ran.output


def test_an_entry_of_an_unknown_kernel_and_a_broken_case_end_with_2(local: Repository) -> None:
    entry = '[[known]]\nkernel = "acme.gone"\nkind = "mismatch"\nissue = "#1"\nexpires = 2026-01-01\n'
    local.write("attnfuzz-ledger.toml", entry)
    ran = attnfuzz("--base", "HEAD", "--kernel", "acme.rough:KERNEL")
    assert ran.exit_code == 2
    assert "line 1: entry 1 (acme.gone: mismatch, #1): there is no such kernel here" in ran.output
    (local.root / "attnfuzz-ledger.toml").unlink()
    local.write("cases/broken.json", "{")
    ran = attnfuzz("--base", "HEAD", "--kernel", "acme.rough:KERNEL", "--corpus", "cases", "--json")
    assert ran.exit_code == 2
    assert "broken.json" in json.loads(re.sub(r"(?s)\nerror: .*", "", ran.output))["error"]


def test_not_a_checkout_ends_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = attnfuzz("--base", "main")
    assert ran.exit_code == 2
    assert "it is not in a git checkout" in ran.output


def test_no_kernel_changed_passes_at_once(local: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    from acme.rough import KERNEL  # type: ignore[import-not-found]

    registry.register(KERNEL)
    monkeypatch.setattr(registry, "names", lambda: ("acme.rough",))
    local.write("README", "words\n")
    ran = attnfuzz("--base", "HEAD")
    assert ran.exit_code == 0, ran.output
    assert "no kernel changed, 1 unchanged" in ran.output
    assert git(local.root, "worktree", "list").count("\n") == 1


GPU_KERNEL = '''
"""triton.varlen under another name, and slower by so many clock cycles a call."""

import torch
from msgspec.structs import replace

from attnfuzz.kernels.triton.varlen import TritonVarlen

CYCLES = 0


class Built:
    def __init__(self, plain):
        self.plain = plain

    def forward(self, inputs):
        found = self.plain.forward(inputs)
        if CYCLES:
            torch.cuda._sleep(CYCLES)
        return found

    def backward(self, inputs, o, lse):
        return self.plain.backward(inputs, o, lse)


class Kernel(TritonVarlen):
    """With the variants that are timed alone: to compile all of them takes minutes beside other tests."""

    _EVERY = TritonVarlen.capabilities
    capabilities = replace(_EVERY, dtypes=_EVERY.dtypes[:1], dims=_EVERY.dims[:1], dim_multiple=None)

    def configs(self, problem):
        return super().configs(problem)[:1]

    def build(self, problem, config, device):
        return Built(super().build(problem, config, device))


KERNEL = Kernel(name="acme.varlen", files=(__file__,))
'''


@pytest.mark.gpu
@pytest.mark.parametrize(("slower", "expected"), [(0.0, "pass"), (0.2, "fail")])
def test_twenty_per_cent_slower_fails_on_a_gpu_and_the_same_speed_does_not(slower: float, expected: str, tmp_path: Path) -> None:
    """The forward of the largest Case takes 20 % longer: a wait of that length on the device, behind the kernel."""
    repository = Repository.create(tmp_path)
    module = repository.write("src/acme/varlen.py", GPU_KERNEL)
    repository.commit("varlen")
    module.write_text(GPU_KERNEL.replace("CYCLES = 0", f"CYCLES = {round(slower * cycles_of_a_forward())}  # changed"))
    command = [sys.executable, "-P", "-m", "attnfuzz.harness.cli", "gate", "--device", "cuda", "--base", "HEAD"]
    ran = subprocess.run(
        [*command, "--kernel", "acme.varlen:KERNEL", "--max-examples", "5", "--cases", "6", "--compile", "off", "--json"],
        cwd=repository.root, env=repository.environment(), capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert ran.returncode == (1 if expected == "fail" else 0), ran.stdout + ran.stderr
    parts = parts_of(json.loads(ran.stdout)["kernels"][0])
    assert parts["speed"]["outcome"] == expected, parts["speed"]
    assert {each["check"] for each in parts["speed"]["findings"]} == ({"forward"} if expected == "fail" else set())


def cycles_of_a_forward() -> float:
    """Of the shortest forward that the speed part times, in the device's own clock; asked of another process, as children are."""
    program = """
import torch
from attnfuzz.harness.gate.parts.sample import speed_cases
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels import registry

kernel = registry.get("triton.varlen")

def milliseconds(call):
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 10

times = []
for case in speed_cases(kernel, "cuda"):
    inputs = materialise(case.problem, case.recipe, "cuda")
    built = kernel.build(case.problem, case.config, "cuda")
    times.append(milliseconds(lambda: built.forward(inputs)))
cycle = milliseconds(lambda: torch.cuda._sleep(10_000_000)) / 10_000_000
print(max(times) / cycle)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    return float(done.stdout)
