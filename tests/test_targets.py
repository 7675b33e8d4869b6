"""benchmarks/targets.py: what counts as reached, and its table, file and exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.benchmarks import FOLDER, loaded

from attnfuzz.harness.gate import ledger


@pytest.fixture(scope="module")
def targets() -> Iterable[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield loaded("targets")


def run(targets: ModuleType, monkeypatch: pytest.MonkeyPatch, part: Any, *arguments: str) -> Result:
    """Run the command with one part in place of its own."""
    monkeypatch.setitem(targets.PARTS, "cpu", {"part": part})
    for name in ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "kept")
    return CliRunner().invoke(targets.main, ["--device", "cpu", *arguments])


def test_a_target_is_reached_within_its_limit(targets: ModuleType) -> None:
    row = targets.Row
    assert [row("p", "w", each, least=3).reached for each in (2.9, 3.0, 4.0, None)] == [False, True, True, False]
    assert [row("p", "w", each, most=3).reached for each in (2.9, 3.0, 4.0, None)] == [True, True, False, False]
    assert (row("p", "w", 1.0, least=1.7).wanted, row("p", "w", 1.0, most=135).wanted) == ("at least 1.7", "at most 135")


@pytest.mark.parametrize(("figure", "code"), [(1500.0, 0), (1499.0, 1)])
def test_the_exit_code_says_whether_all_are_reached(
    figure: float, code: int, targets: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    part = lambda _: [targets.Row("part", "Cases", figure, least=1500)]  # noqa: E731
    result = run(targets, monkeypatch, part, "--json", str(file))
    assert result.exit_code == code
    [row] = json.loads(file.read_text())
    assert (row["measured"], row["reached"]) == (figure, code == 0)
    assert "1,5" in result.output if code == 0 else "no" in result.output


def test_what_cannot_be_measured_is_not_reached(targets: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(_: object) -> Iterable[Any]:
        raise targets.NotMeasured("nothing was judged")

    result = run(targets, monkeypatch, part)
    assert (result.exit_code, "not measured: nothing was judged" in result.output) == (1, True)


def test_an_unknown_part_is_refused_with_those_there_are(targets: ModuleType) -> None:
    result = CliRunner().invoke(targets.main, ["--device", "cpu", "--only", "nothing"])
    assert result.exit_code == 2
    assert "'nothing': on cpu there are cold, rates, soak" in result.output
    for only in ([], ["--only", "cold"]):
        result = CliRunner().invoke(targets.main, ["--device", "cpu", "--options=--plain", "--options=", *only])
        assert (result.exit_code, "cold: the caches are empty once" in result.output) == (2, True)
    assert "cold: All kernels, empty caches" in CliRunner().invoke(targets.main, ["--device", "cpu", "--list"]).output


@pytest.mark.parametrize(
    ("words", "why"), [(["--options", '"a'], "No closing quotation"), (["--runs", "{file}/x"], "Not a directory")]
)
def test_wrong_words_are_refused(targets: ModuleType, words: list[str], why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [each.format(file=tmp_path / "file") for each in words]
    result = CliRunner().invoke(targets.main, ["--device", "cpu", "--only", "rates", *words])
    assert (result.exit_code, why in result.output) == (2, True)


def test_more_options_are_of_the_runs_that_are_measured_alone_and_each_in_turn(
    targets: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[float, tuple[str, ...]]] = []

    def run_command(plan: Any, kernels: tuple[str, ...], workers: str, seed: int) -> Any:
        seen.append((plan.seconds, plan.more))
        row = {"cases": 6000 * len(seen), "compiles": 1, "unreached": int(len(seen) == 1)}
        judged = tuple((2.0 + at, 100 * len(seen) * at**2) for at in range(11))
        return targets.Finished({"kernels": [row] * len(kernels), "failures": []}, first=2.0, wall=12.0, judged=judged)

    monkeypatch.setattr(targets, "run_command", run_command)
    monkeypatch.setattr(targets, "COMPILED_ALL", set())
    options, file = ("--no-share-gpu --workers 16", "--workers 12"), tmp_path / "rows.json"
    result = run(targets, monkeypatch, targets.varlen, *[f"--options={each}" for each in options], "--json", str(file))
    assert "at least 1500" in result.output
    assert seen == [(60.0, ()), (60.0, ()), (120.0, ("--no-share-gpu", "--workers", "16")), (120.0, ("--workers", "12"))]
    rows = [(row["options"], row["measured"]) for row in json.loads(file.read_text()) if row["measured"]]
    kernels = len(targets.KERNELS["cpu"])
    # 5 s and 10 s after the first Verdict there are 25 and 100 hundreds.
    assert rows == [(options[0], 1800.0 * kernels), (options[0], 4500.0), (options[1], 2400.0 * kernels), (options[1], 6000.0)]


def runs_of(targets: ModuleType, monkeypatch: pytest.MonkeyPatch, *left: int) -> list[tuple[str, ...]]:
    """The kernels of each run from now on; `left`: variants that are not compiled at the end of each, 0 after the last."""
    seen: list[tuple[str, ...]] = []

    def run_command(_: Any, kernels: tuple[str, ...], *__: Any, **___: Any) -> Any:
        seen.append(kernels)
        unreached = left[len(seen) - 1] if len(seen) <= len(left) else 0
        return targets.Finished({"kernels": [{"cases": 1, "unreached": unreached}], "failures": []}, first=2.0, wall=12.0)

    monkeypatch.setattr(targets, "run_command", run_command)
    monkeypatch.setattr(targets, "COMPILED_ALL", set())
    return seen


def test_kernels_are_compiled_once_and_with_others(targets: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, (first, *_) = runs_of(targets, monkeypatch, 3), targets.KERNELS["cuda"]
    for some in ((first,), (first,), (), (first,)):
        targets.compiled("cuda", some)
    assert seen == [(first,), (first,), tuple(targets.KERNELS["cuda"])]


def test_what_is_left_to_compile_after_four_runs_is_said(
    targets: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = runs_of(targets, monkeypatch, 9, 8, 7, 6, 5)
    targets.compiled("cuda", ("one",))
    assert len(seen) == 4
    assert "6 variants of one are left to compile" in capsys.readouterr().err
    targets.compiled("cuda", ("one",))
    assert len(seen) == 6, "tried again, and done in the second run"


def test_peers_and_soak_begin_with_nothing_left_to_compile(targets: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, first = runs_of(targets, monkeypatch), tuple(targets.KERNELS["cuda"][:1])
    done: list[int] = []

    def measured(*_: Any) -> Any:
        done.append(len(seen))
        raise targets.NotMeasured("here")

    for module in (targets.rivals, targets.soak):
        monkeypatch.setattr(module, "measure", measured)
    for part in (targets.peers, lambda device: targets.soaked(device, 1.0)):
        targets.COMPILED_ALL.clear()
        with pytest.raises(targets.NotMeasured):
            list(part("cuda"))
    assert (seen, done) == ([first, first], [1, 2])
    with pytest.raises(targets.NotMeasured):
        list(targets.soaked("cpu", 1.0))
    assert len(seen) == 2


def test_the_ragged_kernels_have_one_gpu_and_its_cores(targets: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str | None, int]] = []

    def run_command(*_: Any, **__: Any) -> Any:
        chosen.append((os.environ.get("CUDA_VISIBLE_DEVICES"), len(os.sched_getaffinity(0))))
        return targets.Finished({"kernels": [{"cases": 1, "unreached": 0}], "failures": []}, first=2.0, wall=12.0)

    before, cores = "GPU-a,GPU-b", os.sched_getaffinity(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    monkeypatch.setattr(targets, "run_command", run_command)
    monkeypatch.setattr(targets, "COMPILED_ALL", set())
    monkeypatch.setattr(targets, "CORES", 1)
    assert list(targets.varlen("cpu"))
    assert chosen == [(before, len(cores)), ("GPU-a", 1)]
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.sched_getaffinity(0)) == (before, cores)


@pytest.mark.parametrize("shared", [{"seconds": 34.2, "reason": "hang in stage judge"}, None])
def test_how_long_workers_shared_the_gpu_is_said(
    shared: dict[str, Any] | None, targets: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done = targets.Finished({"kernels": [], "failures": [], "shared_gpu": shared}, first=2.0, wall=12.0)
    monkeypatch.setattr(targets, "run_command", lambda *_, **__: done)
    targets.campaign("cpu", 1.0)
    assert ("34.2 s" in (said := capfd.readouterr().err) and "hang in stage judge" in said) == (shared is not None)


@pytest.mark.parametrize("before", [None, "GPU-a,GPU-b"])
def test_a_part_that_breaks_gives_its_gpus_and_cores_back(
    before: str | None, targets: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    monkeypatch.setattr(targets, "gpus", lambda: ["GPU-a", "GPU-b"])
    cores = os.sched_getaffinity(0)
    seen: list[str] = []

    def broken() -> None:
        with targets.one_gpu():
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
            raise targets.NotMeasured("it broke")

    with pytest.raises(targets.NotMeasured):
        broken()
    assert seen == ["GPU-a"]
    assert (os.environ.get("CUDA_VISIBLE_DEVICES"), os.sched_getaffinity(0)) == (before, cores)


def failure(kernel: str, kind: str, check: str, output: str | None = None, message: str = "m") -> dict[str, Any]:
    identity = {"kernel": kernel, "kind": kind, "check": check, "output": output, "message": ""}
    return {"identity": identity, "verdict": {"failures": [{"message": message}]}}


KNOWN = [
    failure("torch.cudnn", "nonfinite", "element", "dq"),
    failure("torch.cudnn", "relation", "shifted_scores", "dv"),
    failure("torch.flash", "exception", "forward", None, "forward raised RuntimeError: [2, 1] is invalid for input of size 3"),
]
OTHERS = [
    failure("torch.cudnn", "mismatch", "element", "dq"),
    failure("torch.cudnn", "nonfinite", "element", "o"),
    failure("torch.cudnn", "relation", "other_scale", "dv"),
    failure("torch.flash", "exception", "forward", None, "forward raised RuntimeError: CUDA error"),
    failure("triton.varlen", "nonfinite", "element", "dq"),
]


def test_known_defects_of_pytorchs_kernels_are_no_failures(targets: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    run = targets.Finished({"kernels": [], "failures": [*KNOWN, *OTHERS]}, first=1.0, wall=2.0)
    monkeypatch.setattr(targets, "run_command", lambda *_, **__: run)
    monkeypatch.setattr(targets, "say", said.append)
    monkeypatch.setattr(ledger, "_installed", lambda _: "2.11.0")
    assert targets.unknown(run) == OTHERS
    for part in (targets.cold_node, targets.warm_node, targets.cold_cpu):
        assert [row.measured for row in part("cuda") if row.what == "failures"] == [len(OTHERS)]
    assert "3 known failures of PyTorch's kernels are not counted" in said
    # They are known of one version alone.
    monkeypatch.setattr(ledger, "_installed", lambda _: "2.13.0")
    assert targets.unknown(run) == [*KNOWN, *OTHERS]
