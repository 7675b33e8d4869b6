"""The seed of a session, and what its fuzz tests have tried, in pytest's summary."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import execnet
import pytest

from attnfuzz.harness import plugin
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.options import OPTIONS as OPTIONS_OF_RUNS
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.plugin import statistics
from attnfuzz.harness.plugin.options import session_seed
from attnfuzz.harness.plugin.statistics import keep_figures
from attnfuzz.kernels import registry

TEST_FILE = 'from attnfuzz.harness import fuzz\n\ntest_kernel = fuzz("torch.reference_cpu", max_examples=6)\n'
SEEDED = TEST_FILE.replace("=6", "=6, seed=11").replace("test_kernel", "test_seeded")
OPTIONS = ("-p", "no:cacheprovider", "--attnfuzz-device", "cpu")


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr(registry, "_registered", {})
    pytester.makepyfile(test_it=TEST_FILE)
    return pytester


def in_process(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return folder.runpytest_inprocess(*OPTIONS, "--attnfuzz-in-process", *arguments)


def seed_in(result: pytest.RunResult) -> int:
    [seed] = {each for line in result.outlines for each in re.findall(r"--attnfuzz-seed (\d+)$", line)}
    return int(seed)


def ids(folder: pytest.Pytester) -> list[dict[str, object]]:
    """What the runs of the folder had, less what differs between two runs of the same Cases."""
    import msgspec

    runs = [msgspec.json.decode(each.read_bytes()) for each in sorted((folder.path / ".attnfuzz" / "runs").iterdir())]
    for each in (folder.path / ".attnfuzz" / "runs").iterdir():
        each.unlink()
    return [{"seed": run["settings"]["seed"], "drawn": run["kernels"][0]["drawn"]} for run in runs]


def test_each_session_draws_a_seed_that_repeats_it(folder: pytest.Pytester) -> None:
    first = in_process(folder)
    first.assert_outcomes(passed=2)
    seed, drawn = seed_in(first), ids(folder)
    first.stdout.fnmatch_lines([f"attnfuzz: torch.reference_cpu in 2 tests; *seed={seed} *", f"seed {seed}: the same cases *"])
    assert [each["seed"] for each in drawn] == [seed, seed], "one seed for both shards"
    other = in_process(folder)
    assert seed_in(other) != seed
    assert ids(folder) != drawn
    again = in_process(folder, "--attnfuzz-seed", str(seed))
    assert seed_in(again) == seed
    assert ids(folder) == drawn


def test_a_test_may_have_a_seed_of_its_own(folder: pytest.Pytester) -> None:
    """The option goes before it: it repeats what another session has printed."""
    folder.makepyfile(test_it=SEEDED)
    result = in_process(folder)
    assert [each["seed"] for each in ids(folder)] == [11, 11]
    result.stdout.fnmatch_lines(["test_it.py::test_seeded (torch.reference_cpu, seed 11): 6 cases, 0 failures; *"])
    result.stdout.no_fnmatch_line("*the same cases again*")
    in_process(folder, "--attnfuzz-seed", "12")
    assert [each["seed"] for each in ids(folder)] == [12, 12]


def test_a_negative_seed_of_a_test_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed=-1: must not be negative; give 0 or more"):
        plugin.fuzz("torch.reference_cpu", seed=-1)


def test_the_controller_gives_its_seed_to_the_workers_of_xdist(tmp_path: Path) -> None:
    def session(**more: object) -> SimpleNamespace:
        options = {f"--attnfuzz-{each.name}": each.default for each in OPTIONS_OF_RUNS} | {"--attnfuzz-device": "cpu"}
        given = {name.strip("-").replace("-", "_"): value for name, value in options.items()}
        shared = {"option": SimpleNamespace(**given), "rootpath": tmp_path}
        return SimpleNamespace(getoption=options.__getitem__, stash=pytest.Stash(), **shared, **more)

    controller = session()
    plugin.pytest_configure(controller)  # type: ignore[arg-type]
    seeds = set()
    for _ in range(3):
        node = SimpleNamespace(config=controller, workerinput={})
        plugin.pytest_configure_node(node)
        worker = session(workerinput=node.workerinput)
        plugin.pytest_configure(worker)  # type: ignore[arg-type]
        seeds.add(session_seed(worker))  # type: ignore[arg-type]
    assert seeds == {session_seed(controller)}  # type: ignore[arg-type]


def test_the_figures_of_a_shard_pass_through_xdist() -> None:
    """It sends plain values only, and no subclass of them."""
    settings = Settings(max_examples=3, out=None, in_process=True, seed=5)
    done = run_campaign([registry.get("torch.reference_cpu")], settings, lambda _: None)
    item = SimpleNamespace(stash=pytest.Stash())
    keep_figures(item, done, settings)  # type: ignore[arg-type]
    report = pytest.TestReport("test_it.py::test_kernel[0]", ("", 0, ""), {}, "passed", None, "call")
    report.attnfuzz = item.stash[statistics._FIGURES]  # type: ignore[attr-defined]
    sent = execnet.loads(execnet.dumps(report._to_json()))
    assert pytest.TestReport._from_json(sent).attnfuzz == report.attnfuzz  # type: ignore[attr-defined]
    assert (sent["attnfuzz"]["seed"], sent["attnfuzz"]["cases"]) == (5, 3)


@pytest.mark.slow
def test_workers_agree_on_the_seed_and_their_figures_are_shown(folder: pytest.Pytester) -> None:
    result = folder.runpytest_subprocess(*OPTIONS, "--attnfuzz-in-process", "-n", "2", "--attnfuzz-statistics")
    result.assert_outcomes(passed=2)
    seed = seed_in(result)
    assert [each["seed"] for each in ids(folder)] == [seed, seed]
    result.stdout.fnmatch_lines(
        [
            f"seed {seed}: the same cases again by --attnfuzz-seed {seed}",
            "test_it.py::test_kernel (torch.reference_cpu):",
            "  - 6 cases, 0 failures; 2 shards, * cases/s",
            "  - worst error / budget: O *, LSE *, dQ *, dK *, dV *",
            "  - dtype: *",
            "  - declared, and in no case: *",
        ]
    )


def test_one_line_a_test_says_what_was_tried(folder: pytest.Pytester) -> None:
    result = in_process(folder)
    line = "test_it.py::test_kernel (torch.reference_cpu): 6 cases, 0 failures; worst error / budget ?.?? (*); declared, and in *"
    result.stdout.fnmatch_lines([line, "--attnfuzz-statistics shows more"])


def test_other_sessions_have_no_section(folder: pytest.Pytester) -> None:
    folder.makepyfile(test_it="def test_nothing(): pass")
    in_process(folder).stdout.no_fnmatch_line("*attnfuzz*seed*")


def test_stored_cases_that_are_not_replayed_are_counted(folder: pytest.Pytester) -> None:
    from attnfuzz.harness.core.text import dumps
    from attnfuzz.kernels.problem import Problem
    from attnfuzz.strategies.case import Case, Recipe

    kernel = registry.get("torch.reference_cpu")
    problem = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=64, dim_v=64, dtype="float32")
    cases = folder.path / ".attnfuzz" / "cases"
    cases.mkdir(parents=True)
    for number in range(9):
        case = Case(kernel=kernel.name, problem=problem, config=kernel.configs(problem)[0], recipe=Recipe(seed=number))
        (cases / f"{kernel.name}-o-mismatch-{case.id}.json").write_text(dumps(case.to_object()))
    result = in_process(folder)
    result.stdout.fnmatch_lines(["test_it.py::test_kernel (*): 6 cases, *; at most 8 stored cases not replayed; *"])


@pytest.mark.parametrize(
    ("shards", "line"),
    [
        ([(2, []), (0, ["a", "b"])], "20 cases, 2 failures"),
        ([(0, ["a", "b"]), (0, ["b"])], "20 cases, 2 failures"),
        ([(0, ["a"])], "10 cases, 1 failure"),
        ([(0, []), (0, [])], "20 cases, 0 failures"),
    ],
    ids=["kept by one shard", "its process died", "the other shard was not asked for", "none"],
)
def test_a_failure_of_several_shards_counts_once_and_is_never_left_out(shards: list[tuple[int, list[str]]], line: str) -> None:
    figures = [{"cases": 10, "failures": own, "elsewhere": elsewhere} for own, elsewhere in shards]
    assert statistics._counted(figures) == line
