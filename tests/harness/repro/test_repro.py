"""`attnfuzz repro` in its several ways, on case files and blobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.repro import register_all

from attnfuzz.harness.campaign.blob import blob_of, case_from_blob, is_blob
from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.core.statistics import interval
from attnfuzz.harness.isolation.executors import InProcess
from attnfuzz.harness.judge.verdict import Figures, Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import BadCase, Case

CONFIG = Config(tile_m=6, tile_n=6)


@pytest.fixture(autouse=True)
def _only_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setenv("COLUMNS", "200")
    register_all()


def case_of(kernel: str, **changed: Any) -> Case:
    problem: dict[str, Any] = {"seqlens_q": (3, 5), "seqlens_k": (4, 3), "heads": 2, "dim_qk": 8, "dim_v": 8}
    return Case(kernel=kernel, problem=Problem(**problem | changed), config=CONFIG)


def stored(kernel: str, name: str = "case.json", **found: Any) -> str:
    Path(name).write_text(json.dumps({**case_of(kernel).to_object(), "found": found}))
    return name


def repro(*arguments: str, stdin: str = "") -> Result:
    in_process = () if {"--pdb", "--script", "--sanitize"} & set(arguments) else ("--in-process",)
    return CliRunner().invoke(cli.main, ["repro", *arguments, "--device", "cpu", *in_process], input=stdin)


# --- several ways at once


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sanitize", "memcheck", "--pdb"], "pdb=True: --sanitize and --pdb are two ways to run a case; give one of them"),
        (["--script", "x.py", "--repeat", "3"], "repeat=3: --script and --repeat are two ways to run a case; give one of them"),
        (["--repeat", "3", "--shrink"], "shrink=True: --repeat and --shrink are two ways to run a case; give one of them"),
        (["--budget", "5s"], "budget='5s': it limits shrinking; give it with --shrink or --explain"),
        (["--shrink", "--explain"], "explain=True: --shrink and --explain are two ways to run a case; give one of them"),
        (["--pdb", "--json"], "as_json=True: a debugger talks to a person; leave --json out"),
        (["--pdb", "--deadline", "5s"], "deadline='5s': nothing ends what runs in a debugger; leave --deadline out"),
        (["--script", "x.py", "--in-process"], "a script runs in a process of its own; leave --in-process out"),
        (["--script", "x.py", "--no-memory-check"], "a script does not run under the harness; leave --no-memory-check out"),
        (
            ["--script", "x.py", "--exact", "--deadline", "5s"],
            "an exact script is written without running it",
        ),
        (["--exact"], "exact=True: it is a way to write a script; give it with --script FILE"),
        (["--exact", "--repeat", "2"], "exact=True: it is a way to write a script; give it with --script FILE"),
        (["--script", "-", "--json"], "the script itself would be between the JSON; give --script a file, or leave --json out"),
        (["--sanitize", "memcheck", "--in-process"], "compute-sanitizer watches a process of its own; leave --in-process out"),
        (["--repeat", "0"], "repeat=0: must be positive; give 1 or more"),
        (["--shrink", "--budget", "soon"], "budget='soon': it is not a duration"),
        (["--script", "."], "script='.': it is a folder; give a file"),
        (["--script", "case.json/x.py"], "script='case.json/x.py': it cannot be written"),
    ],
)
def test_what_makes_no_sense_together_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.main, ["repro", stored("acme.element"), "--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert sorted(each.name for each in Path().iterdir()) == ["case.json"]


# --- a script


@pytest.mark.parametrize(
    ("found", "more", "reason"),
    [
        ({"kind": "relation", "check": "split_batch"}, {}, "related calls are compared"),
        ({"kind": "aggregate"}, {}, "only all of them together"),
        ({"kind": "contract"}, {}, "the form of an output is wrong"),
        ({"kind": "guard"}, {}, "memory beside a tensor is written to"),
        ({"kind": "nondeterministic"}, {}, "equal calls differ"),
        ({"kind": "out-of-memory"}, {}, "it takes all memory"),
        ({"kind": "mismatch"}, {"check": "twice"}, "the failure needs calls before (check twice)"),
        ({"kind": "relation"}, {"check": "split_batch"}, "related calls (check split_batch)"),
        ({"kind": "mismatch"}, {"rate": [1, 3]}, "it fails in 1 of 3 runs"),
        ({"kind": "mismatch"}, {"problem": {"needs": {"dlse": True}}}, "the gradient of LSE is given"),
        ({"kind": "mismatch"}, {"problem": {"mask_mod": ["ge", ["q_idx"], ["kv_idx"]]}}, "a score_mod or mask_mod"),
        (
            {"kind": "mismatch"},
            {"problem": {"packing": "dense", "seqlens_q": [3, 3], "seqlens_k": [4, 4], "slack_q": 1}},
            "rows beyond the sequences of a dense batch",
        ),
        (
            {"kind": "mismatch"},
            {"problem": {"seqlens_q": [1 << 22], "seqlens_k": [1 << 22]}},
            "too large for a float64",
        ),
    ],
)
def test_what_no_short_script_shows_is_said_in_words_and_nothing_is_written(
    found: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    content = case_of("acme.element").to_object()
    content["problem"] |= more.get("problem", {})
    if "check" in more:
        content["check"] = more["check"]
    identity = {"kernel": "acme.element", "output": None, "check": "element", **found}
    content["found"] = {"identity": identity, **({"rate": more["rate"]} if "rate" in more else {})}
    Path("case.json").write_text(json.dumps(content))
    result = repro("case.json", "--script", "x.py")
    assert result.exit_code == 2
    assert reason in result.stderr
    assert "write the exact script instead: add --exact" in result.stderr
    assert not Path("x.py").exists()


def test_an_exact_script_is_written_to_a_file_or_to_stdout() -> None:
    path = stored("acme.element", identity={"kernel": "acme.element", "kind": "uninitialised", "output": None, "check": "load"})
    result = repro(path, "--script", "new/shown.py", "--exact")
    assert result.exit_code == 0
    assert result.stdout == "written: new/shown.py; run it by `python new/shown.py`: exit 0 is OK, 1 is FAILED\n"
    assert result.stderr.startswith("note: a failure of kind uninitialised is seen by attnfuzz's memory checker")
    assert repro(path, "--script", "-", "--exact").stdout == Path("new/shown.py").read_text()
    told = json.loads(repro(path, "--script", "new/shown.py", "--json", "--exact").stdout)
    assert (told["script"], told["device"]) == ("new/shown.py", "cpu")
    assert told["note"].startswith("a failure of kind uninitialised")


# --- many times


def test_the_rate_of_a_flaky_failure_is_told_with_its_interval() -> None:
    path = stored("fault.third")
    Path(path).write_text(
        json.dumps(
            {
                "format": 1, "kernel": "fault.third", "config": {"tile_m": 16, "tile_n": 16},
                "problem": {"seqlens_q": [1], "seqlens_k": [1], "dim_qk": 16, "dim_v": 16, "dtype": "float32"},
            }
        )
    )  # fmt: skip
    result = repro(path, "--repeat", "12")
    assert result.exit_code == 1
    assert result.stdout.startswith("FAILED case.json on cpu\n   failed in 4 of 12 runs (33.3 %, 95 % confidence: 14 to 61 %)\n")
    assert "   in 4 of 12 runs, first in run 3: mismatch: O: 16 of 16 elements are wrong; " in result.stdout
    found = json.loads(repro(path, "--repeat", "3", "--json").stdout)
    assert (found["runs"], found["asked"], found["failed"], found["interrupted"]) == (3, 3, 1, False)
    [failure] = found["failures"]
    assert (failure["identity"]["kind"], failure["runs"]) == ("mismatch", 1)
    assert found["interval"][0] < 1 / 3 < found["interval"][1]


def test_a_kernel_that_is_right_every_time_passes() -> None:
    result = repro(stored("acme.right"), "--repeat", "4")
    assert result.exit_code == 0
    assert result.stdout.startswith("PASSED case.json on cpu\n   failed in 0 of 4 runs (0 %, 95 % confidence: 0 to 49 %)\n")


def test_ctrl_c_ends_repeating_with_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    finish, runs = InProcess.finish, 0

    def interrupted(self: InProcess) -> Any:
        nonlocal runs
        runs += 1
        if runs == 3:
            raise KeyboardInterrupt
        return finish(self)

    monkeypatch.setattr(InProcess, "finish", interrupted)
    result = repro(stored("acme.right"), "--repeat", "9")
    assert result.exit_code == 130
    assert "   interrupted: 2 of 9 runs" in result.stdout


@pytest.mark.parametrize(
    ("failed", "runs", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (3, 10, 0.1078, 0.6032), (50, 100, 0.4038, 0.5962)],
)
def test_wilsons_interval(failed: int, runs: int, low: float, high: float) -> None:
    assert interval(failed, runs) == pytest.approx((low, high), abs=1e-4)


# --- shrinking further


def test_a_smaller_case_is_written_beside_the_first() -> None:
    Path("kept").mkdir()
    path = stored("acme.element", "kept/case.json", seed=3)
    result = repro(path, "--shrink")
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("SMALLER a simpler Case fails alike: kept/case.json on cpu, ")
    [smaller] = [each for each in Path("kept").iterdir() if each.name != "case.json"]
    assert f"run it again:        attnfuzz repro {smaller}\n" in result.stdout
    found = read_case(smaller)
    assert (found.case.problem.seqlens_q, found.case.problem.seqlens_k, found.case.problem.heads) == ((1,), (1,), 1)
    assert (found.finding.minimal, found.finding.seed) == (True, 3)
    assert repro(str(smaller)).exit_code == 1

    again = repro(str(smaller), "--shrink", "--json")
    assert again.exit_code == 1
    told = json.loads(again.stdout)
    assert (told["outcome"], told["path"], told["repro"], told["partly"]) == ("MINIMAL", None, None, False)
    assert len(list(Path("kept").iterdir())) == 2


def test_what_does_not_fail_any_more_is_fixed() -> None:
    result = repro(stored("acme.right"), "--shrink")
    assert result.exit_code == 0
    assert result.stdout.startswith("FIXED it does not fail any more: case.json on cpu, 1 trial in ")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("the pipe is broken")])
def test_a_smaller_case_is_kept_whatever_ends_shrinking(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, runs = InProcess.finish, 0

    def ended(self: InProcess) -> Any:
        nonlocal runs
        runs += 1
        if runs == 7:
            raise error
        return finish(self)

    monkeypatch.setattr(InProcess, "finish", ended)
    result = repro(stored("acme.element"), "--shrink")
    assert result.exit_code == (1 if error is KeyboardInterrupt else 2)
    assert "Traceback" not in result.output
    [smaller] = [each for each in Path().iterdir() if each.name != "case.json"]
    assert len(read_case(smaller).case.problem.seqlens_q) == 1
    assert read_case(smaller).finding.minimal is False


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    path = stored("acme.element")
    monkeypatch.setattr("attnfuzz.harness.repro.reshrink.tempfile.TemporaryFile", full)
    result = repro(path, "--shrink")
    assert result.exit_code == 2
    assert "folder='.': a smaller Case could not be written there (No space left on device)" in result.stderr


# --- in a debugger


def test_pdb_has_the_tensors_of_a_wrong_value_in_reach() -> None:
    commands = (
        'p sorted(error)\np round(float(error["dv"].max()), 2), inputs.q.shape, outputs.dv.shape\np verdict.failures[0].kind\nq\n'
    )
    result = repro(stored("acme.element"), "--pdb", stdin=commands)
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("FAILED case.json on cpu\n")
    assert "pdb stops with these in reach:\n   inputs, outputs " in result.stdout
    assert "reference, budget, error  by output, float64" in result.stdout
    assert "(Pdb) ['dk', 'dq', 'dv', 'lse', 'o']\n" in result.stdout
    assert "(0.25, torch.Size([8, 2, 8]), torch.Size([7, 1, 8]))\n" in result.stdout
    assert "(Pdb) 'mismatch'\n" in result.stdout


def test_pdb_stops_where_the_kernel_raised() -> None:
    result = repro(stored("acme.raises"), "--pdb", stdin="p made.keys()\nup 2\np inputs.q.shape, kernel.name\n")
    assert result.exit_code == 1, result.output
    assert "pdb stops where the kernel raised, with its own variables in reach.\n`up 3` goes to its call" in result.stdout
    assert '-> raise ValueError("planted: no such tile")' in result.stdout
    assert "dict_keys(['o', 'lse', 'dq', 'dk', 'dv', 'captured'])" in result.stdout


def test_pdb_goes_up_to_the_call_by_the_line_that_is_told() -> None:
    result = repro(stored("acme.raises"), "--pdb", stdin="up 3\np inputs.q.shape, kernel.name\nq\n")
    assert "(torch.Size([8, 2, 8]), 'acme.raises')" in result.stdout


def test_pdb_does_not_stop_where_nothing_fails() -> None:
    result = repro(stored("acme.right"), "--pdb")
    assert result.exit_code == 0
    assert result.stdout.startswith("FIXED case.json on cpu\n")
    assert "(Pdb)" not in result.stdout


# --- blobs


def test_a_blob_is_the_case() -> None:
    for kernel in ("acme.right", "acme.element"):
        case = case_of(kernel, causal="bottom_right", softmax_scale=0.3)
        blob = blob_of(case, (3, 11))
        assert is_blob(blob)
        assert blob.replace("-", "").replace("_", "").replace("=", "").isalnum()
        found = case_from_blob(f" {blob}\n")
        assert (found.case, found.rate, str(found.path)) == (case, (3, 11), blob)
        assert case_from_blob(blob_of(case)).rate is None


def test_a_blob_is_run_and_shown_as_a_file_is() -> None:
    blob = blob_of(case_of("acme.element"))
    result = repro(blob)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"FAILED {blob} on cpu\n")
    shown = CliRunner().invoke(cli.main, ["show", blob])
    assert shown.exit_code == 0
    assert f"   run it again         attnfuzz repro {blob}\n" in shown.stdout
    assert shown.stdout.splitlines()[-1] == case_of("acme.element").canonical()


def broken(kind: str) -> str:
    blob = blob_of(case_of("acme.right"))
    return {
        "cut": blob[:-9],
        "changed": blob[:30] + ("A" if blob[30] != "A" else "B") + blob[31:],
        "with blanks": f"{blob[:30]} {blob[30:]}",
        "of another version": blob.replace("AF1-", "AF2-"),
        "empty": "AF1-",
        "no blob": "XY1-abc",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "the blob is cut or changed; paste all of it, without blanks"),
        ("changed", "the blob is cut or changed; paste all of it, without blanks"),
        ("with blanks", "the blob is cut or changed; paste all of it, without blanks"),
        ("empty", "the blob is cut or changed; paste all of it, without blanks"),
        ("of another version", "a blob of version 2, and this attnfuzz reads version 1; use the attnfuzz that printed it"),
        ("no blob", "not a blob; a blob begins with AF1-"),
    ],
)
def test_a_broken_blob_gives_a_clear_message(kind: str, message: str) -> None:
    with pytest.raises(BadCase, match=message.replace("-", r"\-")):
        case_from_blob(broken(kind))
    result = repro(broken(kind))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: case='")


@pytest.mark.parametrize(("output", "outcome", "code"), [("dq", "UNJUDGED", 2), ("o", "FIXED", 0), (None, "FIXED", 0)])
def test_to_pass_unjudged_is_not_to_be_fixed(
    output: str | None, outcome: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"o": Figures(elements=3), "dq": Figures(elements=0, unjudged="the oracle needs too much memory")}
    monkeypatch.setattr(InProcess, "finish", lambda _: Verdict(status="pass", figures=figures))
    path = stored("acme.right", identity={"kernel": "acme.right", "kind": "mismatch", "check": "element", "output": output})
    result = repro(path, "--json")
    assert (json.loads(result.stdout)["outcome"], result.exit_code) == (outcome, code)
    assert repro(path).stdout.startswith(outcome)


@pytest.mark.parametrize("where", ["--in-process", pytest.param("in a child", marks=pytest.mark.slow)])
def test_the_run_for_a_plot_checks_memory_no_more_than_the_run_before(where: str) -> None:
    """The kernel refuses a process that checks memory accesses."""
    pytest.importorskip("matplotlib")
    path = stored("acme.unchecked", identity={"kernel": "acme.unchecked", "kind": "mismatch", "check": "element", "output": "dv"})
    arguments = ["repro", path, "--device", "cpu", "--plot", "a.png", "--json", *(["--in-process"] if where[0] == "-" else [])]
    unchecked = json.loads(CliRunner().invoke(cli.main, [*arguments, "--no-memory-check"]).stdout)
    assert (unchecked["outcome"], unchecked["verdict"]["failures"][0]["kind"]) == ("FAILED", "mismatch")
    assert unchecked["plot"] == "a.png", unchecked
    checked = json.loads(CliRunner().invoke(cli.main, arguments).stdout)
    assert checked["verdict"]["failures"][0]["kind"] == "exception"
    assert "memory accesses are checked" in checked["no_plot"]


# --- explained


def test_a_stored_case_is_explained_and_its_file_holds_that() -> None:
    path = stored("acme.element", seed=7, unknown="stays")
    result = repro(path, "--explain")
    assert result.exit_code == 1
    assert result.stdout.startswith("EXPLAINED: case.json on cpu, ")
    assert "   does not matter      fails alike with each value tried of " in result.stdout
    assert result.stdout.endswith("   the case file holds this explanation now\n")
    found = json.loads(Path(path).read_text())["found"]
    assert (found["seed"], found["unknown"]) == (7, "stays")
    assert found["explanation"]["trials"] > 10
    [line] = [each for each in result.stdout.splitlines() if "does not matter" in each]
    for shown in (CliRunner().invoke(cli.main, ["show", path]), repro(path)):
        assert line in shown.stdout


def test_an_explanation_as_json_and_of_a_blob() -> None:
    blob = blob_of(case_of("acme.element"))
    result = json.loads(repro(blob, "--explain", "--budget", "60s", "--json").stdout)
    assert (result["outcome"], result["written"]) == ("EXPLAINED", False)
    assert result["explanation"]["parts"]
    assert result["explanation"]["text"][0].startswith(("matters: ", "does not matter: "))
    assert "   a blob holds no explanation\n" in repro(blob, "--explain").stdout


def test_what_does_not_fail_is_not_explained() -> None:
    path = stored("acme.right")
    before = Path(path).read_text()
    result = repro(path, "--explain")
    assert (result.exit_code, Path(path).read_text()) == (0, before)
    assert result.stdout.startswith("FIXED it does not fail any more: case.json on cpu")


def test_shrinking_a_stored_case_explains_it() -> None:
    result = json.loads(repro(stored("acme.element"), "--shrink", "--json").stdout)
    assert result["explanation"]["parts"]
    assert read_case(result["path"]).finding.explanation is not None
