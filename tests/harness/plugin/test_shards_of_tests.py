"""The shards of a `fuzz` test: how many, with which settings, and failures that several find."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from support.acme import FAILING, PASSING, pytest_alone, pytest_of
from support.pytest_config import config

from attnfuzz.harness import plugin
from attnfuzz.harness.plugin import options as plugin_options
from attnfuzz.harness.plugin import run as plugin_run


@pytest.mark.parametrize(
    ("workers", "most", "options", "expected"),
    [
        (None, 60, {}, 2),
        (2, 60, {}, 2),
        (4, 60, {}, 4),
        (16, 60, {}, 6),
        (16, 12, {}, 2),
        (16, 60, {"max_examples": 1000}, 16),
        (16, 60, {"max_examples": 5}, 2),
        (16, 60, {"budget": 30.0}, 16),
        (16, 60, {"budget": 30.0, "max_examples": 40}, 4),
    ],
)
def test_shards_follow_the_workers_but_not_below_ten_cases(
    monkeypatch: pytest.MonkeyPatch, workers: int | None, most: int, options: dict[str, Any], expected: int
) -> None:
    if workers is not None:
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
    assert plugin.default_shards(config("cpu", **options), most) == expected


@pytest.mark.slow
def test_every_worker_collects_the_same_shards_and_their_number_may_be_fixed(acme: pytest.Pytester) -> None:
    fixed = PASSING.replace("max_examples=12", "max_examples=40, shards=3").replace("test_kernel", "test_fixed")
    acme.makepyfile(test_acme=PASSING.replace("12", "40"), test_fixed=fixed)
    result = pytest_of(acme, "-n", "2", "-v", "--attnfuzz-in-process")
    result.assert_outcomes(passed=2 + 3)
    result.stdout.fnmatch_lines_random(["*test_kernel[[]1]*", "*test_fixed[[]2]*"])


@pytest.mark.parametrize(
    ("changed", "most", "shards", "expected"),
    [
        ({}, 60, 2, (None, 60)),
        ({}, 1, 4, (None, 1)),
        ({"max_examples": 10}, 60, 4, (None, 10)),
        ({"budget": "8s"}, 60, 2, (8.0, None)),
        ({"budget": "8s", "max_examples": 10}, 60, 2, (8.0, 10)),
    ],
)
def test_shards_have_the_settings_of_the_whole(
    changed: dict[str, Any], most: int, shards: int, expected: tuple[float | None, int | None]
) -> None:
    settings = plugin_options.settings_of(config("cpu", **changed), shard=1, shards=shards, most=most)
    assert (settings.seconds, settings.max_examples) == expected
    assert (settings.shard, settings.shards, settings.device) == (1, shards, "cpu")


@pytest.mark.parametrize(("workers", "tests", "share"), [(None, 1, 1.0), (None, 4, 0.25), ("2", 4, 0.5), ("8", 4, 1.0)])
def test_the_tests_of_a_session_share_its_budget(
    monkeypatch: pytest.MonkeyPatch, workers: str | None, tests: int, share: float
) -> None:
    """As many tests at once as there are workers: together they take the time that --attnfuzz-budget gives."""
    if workers:
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", workers)
    session = config("cpu", budget="8s")
    session.stash[plugin_run.COUNT] = tests
    assert plugin_run._share(session) == share


@pytest.mark.parametrize("xdist", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["one process", "two processes"])
def test_a_failure_that_two_shards_find_is_shrunk_by_one_and_named_by_the_other(
    acme: pytest.Pytester, xdist: tuple[str, ...]
) -> None:
    acme.makepyfile(test_acme=FAILING.replace("max_examples=40", "max_examples=40, shards=2"))
    result = pytest_of(acme, *xdist, "--attnfuzz-in-process", "--attnfuzz-out", "found")
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    assert text.count("1. acme.faulty: exception in forward") == 2
    result.stdout.fnmatch_lines_random(
        [
            "1. acme.faulty: exception in forward*(found after * shrunk in *",
            "1. acme.faulty: exception in forward*shrunk by test_acme.py::test_kernel[[][01]]*found/cases/*.json)",
            "   exception: forward raised ValueError: more than 5 keys",
            "   its case here:       pytest test_acme.py::test_kernel --attnfuzz-case AF1-*",
            "test_acme.py::test_kernel (acme.faulty): * cases, 1 failure; *",
        ]
    )
    assert len(list((acme.path / "found" / "cases").iterdir())) == 1
    assert not (acme.path / "found" / "shards").exists()
    # The other shard's own Case fails as well.
    blob = text.split("its case here:")[1].split("--attnfuzz-case ")[1].split()[0]
    again = pytest_of(acme, "--attnfuzz-in-process", "--attnfuzz-case", blob)
    again.assert_outcomes(failed=1, skipped=1)
    again.stdout.fnmatch_lines(["*more than 5 keys*"])


def test_the_second_shard_of_a_failure_stops_as_the_first_does(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=FAILING.replace("max_examples=40", "max_examples=40, shards=2"))
    options = ("--attnfuzz-out", "found", "--attnfuzz-max-failures", "1", "--junitxml", "junit.xml")
    pytest_alone(acme, *options).assert_outcomes(failed=2)
    tried = []
    for case in ElementTree.parse(acme.path / "junit.xml").getroot().iter("testcase"):
        properties = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        assert properties["attnfuzz.failure"].startswith("acme.faulty: exception in forward")
        tried.append([properties[f"attnfuzz.{name}"] for name in ("failures", "failures_elsewhere")])
        assert int(properties["attnfuzz.cases"]) < 20
    assert tried == [["1", "0"], ["0", "1"]]


def test_two_tests_of_one_kernel_each_shrink_its_failure(acme: pytest.Pytester) -> None:
    again = FAILING.splitlines()[-1].replace("test_kernel", "test_again").replace("=40", "=40, shards=1")
    acme.makepyfile(test_acme=FAILING.replace("=40", "=40, shards=1") + again)
    result = pytest_alone(acme, "--attnfuzz-out", "found")
    result.assert_outcomes(failed=2)
    result.stdout.no_fnmatch_line("*shrunk by*")
