"""The plugin's options: their table, the header of pytest, wrong values, and settings of the project."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest
from support.acme import PASSING
from support.pytest_config import config

from attnfuzz.harness.campaign.options import OPTIONS
from attnfuzz.harness.plugin import options as plugin_options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attnfuzz-profile", "x"], "*profile='x': there is no such profile; use one of quick, gate, nightly, models"),
        (
            ["--attnfuzz-budget", "banana"],
            "*budget='banana': it is not a duration; give a number and a unit*",
        ),
        (["--attnfuzz-budget", "0s"], "*budget='0s': must be positive; give a positive duration, such as 60s"),
        (["--attnfuzz-device", "tpu"], "*device='tpu': no such device; use auto, cpu or cuda"),
        (["--attnfuzz-max-examples", "few"], "*argument --attnfuzz-max-examples: invalid int value: 'few'"),
        (["--attnfuzz-max-failures", "0"], "*max_failures=0: must be positive; give 1 or more"),
        (["--attnfuzz-max-examples", "0"], "*max_examples=0: must be positive; give 1 or more"),
        (["--attnfuzz-jobs", "0"], "*jobs=0: must be positive; give 1 or more"),
        (["--attnfuzz-memory", "0.1"], "*memory=0.1: a child needs 1 GiB or more; give GiB, such as 8"),
        (["--attnfuzz-memory", "nan"], "*memory=nan: a child needs 1 GiB or more; give GiB, such as 8"),
        (["--attnfuzz-out", ""], "*out='': it is empty, so failing Cases could not be written; give a folder"),
        (["--attnfuzz-deadline", "x"], "*deadline='x': it is not a duration; give a number and a unit, such as 60s, 5m or 1h"),
        (["--attnfuzz-sead", "1"], "*unrecognized arguments: --attnfuzz-sead*"),
    ],
)
def test_a_wrong_option_is_a_usage_error_before_anything_runs(
    pytester: pytest.Pytester, arguments: list[str], message: str
) -> None:
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR == 4
    result.stderr.fnmatch_lines([message])


def test_the_options_are_shown_in_help(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--help")
    for option in OPTIONS:
        if option.only != "click":
            result.stdout.fnmatch_lines([f"*--attnfuzz-{option.name}{'' if option.type is bool else '='}*"])
        else:
            result.stdout.no_fnmatch_line(f"*--attnfuzz-{option.name}*")


def test_one_table_makes_the_options_of_the_command_line_and_of_pytest() -> None:
    from attnfuzz.harness.cli.run import run_command

    declared = {option.removeprefix("--"): each for each in run_command.params for option in each.opts}
    for option in OPTIONS:
        if option.only != "pytest":
            assert declared[option.name].default == option.default
            assert declared[option.name].name == option.key


def test_the_table_of_options_imports_neither_torch_nor_hypothesis() -> None:
    program = "import sys, attnfuzz.harness.plugin.options\nprint({'torch', 'hypothesis', 'click', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == "set()\n"


def test_other_peoples_sessions_are_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*attnfuzz:*")


def test_the_header_shows_what_differs() -> None:
    values = {"kernel": ["a"], "device": "cpu", "profile": "gate", "budget": "5s", "max_examples": 3, "seed": 2, "out": "x"}
    values |= {"max_failures": 4, "jobs": 1, "memory": 2.0}
    assert plugin_options.pytest_report_header(config(**values)) == (
        "attnfuzz: kernel=['a'] device=cpu profile=gate budget=5s max-examples=3 max-failures=4 seed=2 out=x jobs=1 memory=2.0"
    )
    assert plugin_options.pytest_report_header(config(kernel=[])) is None


PROJECT = (
    '[tool.pytest.ini_options]\n[tool.attnfuzz]\ndevice = "cpu"\nmax-examples = 3\nin-process = true\nseed = 5\nout = "kept"\n'
)


def test_the_projects_settings_hold_for_pytest_too_and_its_options_beat_them(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=PASSING)
    acme.makepyprojecttoml(PROJECT)
    result = acme.runpytest_inprocess("-p", "no:cacheprovider", "--attnfuzz-seed", "7", "--junitxml=out.xml", "-k", "0")
    result.assert_outcomes(passed=1, deselected=1)
    path = acme.path / "pyproject.toml"
    result.stdout.fnmatch_lines(
        ["attnfuzz: seed=7", f"attnfuzz, from {path}: device=cpu max-examples=3 out=kept in-process=True", "*seed=7*"]
    )
    found = ElementTree.parse(acme.path / "out.xml").iter("property")
    assert {each.get("name"): each.get("value") for each in found}["attnfuzz.cases"] in ("1", "2")
    assert (acme.path / "kept" / "runs").exists()


@pytest.mark.parametrize("lines", ['devise = "cpu"', 'budget = "soon"', "seed = -1"])
def test_a_wrong_setting_of_the_project_is_a_usage_error(acme: pytest.Pytester, lines: str) -> None:
    acme.makepyfile(test_acme=PASSING)
    acme.makepyprojecttoml(f"[tool.pytest.ini_options]\n[tool.attnfuzz]\n{lines}\n")
    result = acme.runpytest_inprocess("-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {acme.path / 'pyproject.toml'}: *tool.attnfuzz* {lines.split(' ')[0]}=*"])


def test_options_have_their_defaults_where_pytest_is_only_configured(acme: pytest.Pytester) -> None:
    config = acme.parseconfigure("--attnfuzz-device", "cpu")
    assert config.getoption("--attnfuzz-profile") == "quick"
    assert config.getoption("--attnfuzz-kernel") == []
    assert config.getoption("--attnfuzz-in-process") is False
    assert config.getoption("--attnfuzz-budget") is None
