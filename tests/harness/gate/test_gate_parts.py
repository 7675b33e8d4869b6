"""The gate's parts by themselves: intervals, errors, determinism, compile tables, speed, baselines."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from attnfuzz.harness.campaign.corpus import CaseFile, StoredFinding
from attnfuzz.harness.core.statistics import paired_ratio_of_medians, paired_ratio_of_rms
from attnfuzz.harness.gate.base.baseline import FromFile, read_baseline, recorded, write_baseline
from attnfuzz.harness.gate.measured import Errors, Measurement
from attnfuzz.harness.gate.parts import compiles
from attnfuzz.harness.gate.parts.accuracy import FEWEST, accuracy, determinism
from attnfuzz.harness.gate.parts.compiles import CompileTableError, NoSuchTableError, compare_tables
from attnfuzz.harness.gate.parts.correctness import replay
from attnfuzz.harness.gate.parts.sample import accuracy_cases, speed_cases
from attnfuzz.harness.gate.parts.speed import speed
from attnfuzz.harness.gate.plan import Plan
from attnfuzz.harness.gate.side import BrokenSideError
from attnfuzz.harness.gate.tasks import error_figures
from attnfuzz.harness.isolation.statistics import Statistics
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.truth import Truth
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Outputs
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.strategies.case import Case, Recipe

KERNEL = "torch.reference_cpu"
CASES = [Case(kernel=KERNEL, problem=Problem(seqlens_q=(n,), seqlens_k=(n,), dim_qk=16, dim_v=16)) for n in range(8, 24)]


def measured(factor: float, noise: float, *, seed: int, outputs: tuple[OutputName, ...] = ("o", "dq")) -> list[Measurement]:
    """Errors as a kernel makes them: of very different sizes from Case to Case, a little different from version to version."""
    sizes, drawn = random.Random(1), random.Random(seed)
    found = []
    for case in CASES:
        size = 10 ** sizes.uniform(-4, -1)
        errors = {
            name: Errors(
                elements=1000,
                square=(size * factor * (1 + noise * drawn.uniform(-1, 1))) ** 2,
                worst=4 * size * factor * (1 + 3 * noise * drawn.uniform(-1, 1)),
            )
            for name in outputs
        }
        found.append(Measurement(case, errors, digests=({"o": "a", "dq": "b"}, {"o": "a", "dq": "b"})))
    return found


def errors_of(found: list[Measurement]) -> dict[Case, dict[OutputName, Errors]]:
    return {each.case: each.errors for each in found}


@pytest.mark.parametrize("seed", range(5))
def test_noise_passes_and_twice_the_error_fails(seed: int) -> None:
    base = errors_of(measured(1.0, 0.1, seed=1000 + seed))
    assert accuracy(KERNEL, measured(1.0, 0.1, seed=seed), base, 1.25).outcome == "pass"
    worse = accuracy(KERNEL, measured(2.0, 0.1, seed=seed), base, 1.25)
    assert worse.outcome == "fail"
    assert {(each.output, each.check) for each in worse.findings} == {(o, c) for o in ("o", "dq") for c in ("rms", "worst")}
    assert "x what it was" in worse.findings[0].message


def test_only_the_output_that_is_worse_is_told() -> None:
    head = [
        Measurement(each.case, {**each.errors, "dq": rougher.errors["dq"]})
        for each, rougher in zip(measured(1.0, 0.05, seed=1), measured(2.0, 0.05, seed=2), strict=True)
    ]
    found = accuracy(KERNEL, head, errors_of(measured(1.0, 0.05, seed=3)), 1.25)
    assert {each.output for each in found.findings} == {"dq"}


def test_what_shows_with_normal_values_alone_is_found_beside_extreme_ones() -> None:
    """In every other Case the values are such that an error of another kind is all there is."""
    worse, before = measured(2.0, 0.1, seed=1), measured(1.0, 0.1, seed=2)
    mixed = []
    for number, (ours, theirs) in enumerate(zip(worse, before, strict=True)):
        extreme = msgspec.structs.replace(ours.case, recipe=Recipe(pattern="sink", seed=number))
        huge = Errors(elements=1000, square=10.0 ** -(number % 5), worst=3.0)
        one, other = (
            ((extreme, {"o": huge}), (extreme, {"o": huge}))
            if number % 2
            else ((ours.case, ours.errors), (theirs.case, theirs.errors))
        )
        mixed.append((one, other))
    head = [Measurement(case, errors) for (case, errors), _ in mixed]
    found = accuracy(KERNEL, head, dict(other for _, other in mixed), 1.25)
    (told,) = (each for each in found.findings if (each.output, each.check) == ("o", "rms"))
    assert "over the same 8 Cases of normal values" in told.message


def test_better_is_no_failure_and_too_few_cases_say_nothing() -> None:
    base = measured(1.0, 0.1, seed=1)
    assert accuracy(KERNEL, measured(0.5, 0.1, seed=2), errors_of(base), 1.25).outcome == "pass"
    few = accuracy(KERNEL, measured(2.0, 0.1, seed=2)[: FEWEST - 1], errors_of(base), 1.25)
    assert few.outcome == "skipped"
    assert "5 drawn" in few.summary


def test_errors_that_were_zero() -> None:
    assert paired_ratio_of_rms([(0.0, 0.0)] * 8).value == 1.0
    assert paired_ratio_of_rms([(1e-6, 0.0)] * 8).above(1.25)


def test_error_figures_leave_out_what_has_no_budget() -> None:
    problem = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=16, dim_v=16, dtype="float32")
    expected = torch.zeros(1, 3, dtype=torch.float64)
    expected[0, 2] = -torch.inf
    allowed = torch.tensor([[0.5, 0.0, torch.inf]], dtype=torch.float64)
    got = torch.tensor([[0.25, 7.0, -torch.inf]])
    found = error_figures(problem, Outputs(lse=got), {"lse": Truth(expected, allowed)})
    assert found == {"lse": {"elements": 1, "square": 0.25, "worst": 0.5}}


def test_two_runs_that_differ_and_a_declaration_that_is_gone() -> None:
    found = measured(1.0, 0.0, seed=1)
    assert determinism(KERNEL, found, ("o", "dq"), ("o",)).outcome == "pass"
    found[3] = Measurement(found[3].case, found[3].errors, digests=({"o": "a", "dq": "b"}, {"o": "a", "dq": "c"}))
    assert determinism(KERNEL, found, ("o",), ("o",)).outcome == "pass", "dQ is not declared"
    wrong = determinism(KERNEL, found, ("o", "dq"), ("o", "dq"))
    assert [(each.kind, each.output) for each in wrong.findings] == [("nondeterministic", "dq")]
    assert "in 1 of 16 Cases" in wrong.findings[0].message
    gone = determinism(KERNEL, found, ("o",), ("o", "dk"))
    assert [(each.check, each.output) for each in gone.findings] == [("declared", "dk")]
    assert determinism(KERNEL, found, (), ()).outcome == "skipped"


class Timed:
    """A side whose calls take so long, with noise."""

    def __init__(self, seconds: float, noise: float, seed: int, fails: bool = False) -> None:
        self.seconds, self.noise, self.drawn, self.fails = seconds, noise, random.Random(seed), fails

    def fresh(self) -> None: ...

    def ask(self, what: str, **payload: Any) -> dict[str, float]:
        assert what == "timed"
        if self.fails:
            raise BrokenSideError("SIGSEGV")
        late = 3.0 if self.drawn.random() < 0.05 else 1.0
        return {
            "forward": self.seconds * late * (1 + self.noise * self.drawn.uniform(-1, 1)),
            "backward": 2 * self.seconds * (1 + self.noise * self.drawn.uniform(-1, 1)),
        }


def timed(slower: float, seed: int, noise: float = 0.03) -> Any:
    head: Any = Timed(1e-3 * slower, noise, seed)
    base: Any = Timed(1e-3, noise, seed + 1000)
    return speed(KERNEL, head, base, CASES[:2], threshold=1.10)


@pytest.mark.parametrize("seed", range(3))
def test_twenty_per_cent_slower_fails_and_noise_does_not(seed: int) -> None:
    assert timed(1.0, seed).outcome == "pass"
    assert timed(1.0, seed, noise=0.3).outcome == "pass"
    slow = timed(1.2, seed)
    assert slow.outcome == "fail"
    assert {each.check for each in slow.findings} == {"forward", "backward"}
    assert "the limit is 1.1 x" in slow.findings[0].message


def test_a_side_that_dies_while_it_is_timed_is_an_error() -> None:
    head: Any = Timed(1e-3, 0.1, 1, fails=True)
    base: Any = Timed(1e-3, 0.1, 2)
    found = speed(KERNEL, head, base, CASES[:1], threshold=1.1)
    assert (found.outcome, found.summary) == ("error", "a run could not be timed: SIGSEGV")


def test_the_interval_of_a_ratio_holds_the_truth_and_narrows() -> None:
    drawn = random.Random(5)

    def rounds(count: int) -> list[tuple[float, float]]:
        return [(1.2 * drawn.uniform(0.9, 1.1), drawn.uniform(0.9, 1.1)) for _ in range(count)]

    few, many = paired_ratio_of_medians(rounds(10)), paired_ratio_of_medians(rounds(400))
    assert many.low < 1.2 < many.high
    assert many.high - many.low < few.high - few.low


def row(**changed: Any) -> dict[str, Any]:
    plain = {"kernel": "acme.flash", "key": "k", "config": {"tile_m": 64}, "arch": "sm_90a", "function": "forward", "ok": True}
    return {**plain, "spills": 0, "tensor_core": "wgmma", "races": 0, "error": None, **changed}


@pytest.mark.parametrize(
    ("head", "check", "told"),
    [
        (row(ok=False, error="too much shared memory\nmore"), "failed", "no longer compiles: too much shared memory"),
        (row(spills=8), "spills", "8 spills, 0 before"),
        (row(tensor_core=None), "tensor_core", "wgmma before"),
        (row(races=["a race"]), "races", "1 races, 0 before"),
    ],
)
def test_what_is_worse_in_the_compile_table(head: dict[str, Any], check: str, told: str) -> None:
    found = compare_tables("acme.flash", [head], [row()])
    assert [each.check for each in found.findings] == [check]
    assert told in found.findings[0].message
    assert "forward sm_90a tile_m=64" in found.findings[0].message
    assert found.findings[0].detail == {"failed": "too much shared memory\nmore", "races": "a race"}.get(check, "")
    assert compare_tables("acme.flash", [head], [head]).outcome == "pass", "as it was"
    assert compare_tables("acme.flash", [row()], [head]).outcome == "pass", "better"


def test_a_compile_table_without_a_base() -> None:
    assert compare_tables("acme.flash", [row(spills=3)], None).outcome == "pass"
    assert compare_tables("acme.flash", [row(ok=False)], None).outcome == "fail"


@pytest.mark.parametrize(
    ("stdout", "stderr", "error", "told"),
    [
        ("", "Error: No such command 'compile'.", NoSuchTableError, "no command"),
        ('{"error": "no ptxas here"}', "", NoSuchTableError, "no ptxas here"),
        ("", "Segmentation fault", CompileTableError, "Segmentation fault"),
        ('{"rows": [{"arch": 1}]}', "", CompileTableError, "no readable rows"),
        ("", "", CompileTableError, "exit code 3"),
    ],
)
def test_a_command_that_gives_no_table(
    stdout: str, stderr: str, error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Done:
        returncode = 3

    Done.stdout, Done.stderr = stdout, stderr  # type: ignore[attr-defined]
    monkeypatch.setattr(compiles.subprocess, "run", lambda *_, **__: Done)
    with pytest.raises(error, match=told):
        compiles.compile_table("acme.flash", ("sm_90a",), Path())


def test_the_sample_is_the_same_every_time_and_holds_large_enough_cases() -> None:
    kernel = registry.get(KERNEL)
    one, other = (accuracy_cases(kernel, "cpu", 6, 3) for _ in range(2))
    assert one == other
    assert len(one) == 6
    assert one != accuracy_cases(kernel, "cpu", 6, 4)
    assert all(case.recipe == Recipe(seed=number) for number, case in enumerate(one) if number % 2 == 0)
    assert all(kernel.supports(case.problem, case.config, "cpu") is None for case in one)


def test_the_cases_that_are_timed_are_ones_that_the_kernel_takes() -> None:
    for name in registry.names():
        kernel = registry.get(name)
        if kernel.unavailable("cpu") is None and "cpu" in kernel.capabilities.devices:
            found = speed_cases(kernel, "cpu")
            assert found, name
            assert all(kernel.supports(case.problem, case.config, "cpu") is None for case in found)


def test_a_baseline_comes_back_as_it_was_written(tmp_path: Path) -> None:
    found = measured(1.0, 0.1, seed=1)
    path = tmp_path / "base.json"
    write_baseline(path, "cpu", {"device": "cpu"}, {KERNEL: recorded("f" * 64, ("o",), found, [row()])})
    back = read_baseline(path).kernels[KERNEL]
    assert back.errors == errors_of(found)
    assert (back.deterministic, back.compile) == (("o",), [row()])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "not JSON"),
        ("[]", "Expected `object`"),
        ('{"format": 7}', "its format is 7, and this attnfuzz reads 1"),
        ('{"format": 1, "device": "cpu", "environment": {}, "kernels": {"a": {}}}', "missing required field `fingerprint`"),
        (
            json.dumps(
                {
                    "format": 1,
                    "device": "cpu",
                    "environment": {},
                    "kernels": {
                        "a": {"fingerprint": "", "deterministic": [], "measured": [{"case": {"format": 9}, "errors": {}}]}
                    },
                }
            ),
            "case.format=9",
        ),
    ],
)
def test_a_broken_baseline(content: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    path.write_text(content)
    with pytest.raises(BadArgument) as error:
        read_baseline(path)
    assert told in str(error.value)
    assert str(path) in str(error.value)


def test_a_baseline_that_is_not_there_or_of_another_device(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="cannot be read"):
        read_baseline(tmp_path / "none.json")
    write_baseline(tmp_path / "b.json", "cuda", {}, {})
    with pytest.raises(BadArgument, match="use --device cuda"):
        FromFile(tmp_path / "b.json", "cpu")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"base": None}, "give --base REF, --baseline FILE or --write FILE"),
        ({"baseline": Path("x")}, "only one can be set"),
        ({"cases": 3}, "must be 6 or more"),
        ({"speed_threshold": 0.9}, "give 1 or more"),
        ({"accuracy_threshold": float("nan")}, "give 1 or more"),
        ({"rounds": 2}, "give 5 or more"),
        ({"max_examples": 0}, "must be positive"),
        ({"seed": -1}, "must not be negative"),
    ],
)
def test_a_plan_that_makes_no_sense(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(BadArgument, match=told):
        Plan(**{"device": "cpu", "base": "main", **changed})


def test_the_profile_is_of_the_gate_unless_another_is_given() -> None:
    assert Plan(device="cpu", base="main").settings().profile == "gate"
    assert Plan(device="cpu", base="main", profile="models").settings().profile == "models"


@pytest.mark.parametrize(
    ("stored", "runs", "outputs"),
    [({}, 1, ["o"]), ({"kind": "mismatch"}, 3, ["o", "dq"]), ({"kind": "nondeterministic"}, 1, ["o"])],
    ids=["no identity", "its own failure", "nondeterministic"],
)
def test_another_failure_does_not_end_a_rates_runs(stored: dict[str, Any], runs: int, outputs: list[str]) -> None:
    shown: tuple[OutputName, ...] = ("o", "o", "dq", "dv")
    verdicts = [
        Verdict(status="fail", failures=(Failure(kernel=KERNEL, kind="mismatch", output=name, check="element", message="wrong"),))
        for name in shown
    ]

    class Executor:
        statistics, calls = Statistics(), 0

        def begin(self, case: Case, *, patient: bool) -> None:
            self.calls += 1

        def finish(self) -> Verdict:
            return verdicts[self.calls - 1]

        def forget_pasts(self) -> None:
            """Do nothing: there are none."""

    identity = {"kernel": KERNEL, "output": "dq", "check": "element", "message": "", **stored} if stored else None
    problem = Problem(seqlens_q=(8,), seqlens_k=(8,), dim_qk=64, dim_v=64, dtype="float32")
    case = CaseFile(
        Case(kernel=KERNEL, problem=problem), StoredFinding.read({"rate": [3, 12], "identity": identity}), Path("case.json")
    )
    executor = Executor()
    part = replay(registry.get(KERNEL), "cpu", [case], executor)  # type: ignore[arg-type]
    assert (executor.calls, [each.output for each in part.findings]) == (runs, outputs)


def test_a_base_without_errors_says_so() -> None:
    part = accuracy("acme.flash", [], {}, 1.1)
    assert part.outcome == "skipped"
    assert part.summary.endswith(
        "can be compared: the base has no errors of this kernel: none of its Cases was taken and right there"
    )


def test_versions_of_a_baseline_that_are_not_those_here_are_named(tmp_path: Path) -> None:
    then = {"versions": {"attnfuzz": "0.1.0", "torch": "2.11.0", "numpy": "1"}}
    write_baseline(tmp_path / "b.json", "cpu", then, {})
    base = FromFile(tmp_path / "b.json", "cpu")
    assert base.other_versions(then) is None
    assert base.other_versions({}) is None, "nothing ran here"
    note = base.other_versions({"versions": {"attnfuzz": "0.1.0", "torch": "2.13.0", "triton": "3.9.0", "numpy": "2"}})
    assert note is not None
    assert "b.json was written with torch 2.11.0 (here 2.13.0), triton none (here 3.9.0): errors may have changed" in note
