"""A run that is given no seed draws one, prints it, and is repeated by it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from attnfuzz.harness.campaign.options import OPTIONS, drawn_seed, settings_from
from attnfuzz.harness.cli.main import main
from attnfuzz.kernels.errors import BadArgument


@pytest.fixture(autouse=True)
def in_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    sys.argv = ["attnfuzz", "run", "torch.reference_cpu", *arguments]
    given = ["run", "torch.reference_cpu", "--device", "cpu", "--in-process", "--plain", "--max-examples", "4", *arguments]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 0, result.output
    return result


def result_of(*arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run("--json", *arguments).stdout)
    return result


def test_runs_differ_and_a_seed_repeats_one() -> None:
    one, other = result_of(), result_of()
    assert one["seed"] != other["seed"]
    again = result_of("--seed", str(one["seed"]))
    assert again["seed"] == one["seed"]
    assert again["kernels"][0]["drawn"] == one["kernels"][0]["drawn"]
    assert again["kernels"][0]["outputs"] == one["kernels"][0]["outputs"]
    assert other["kernels"][0]["outputs"] != one["kernels"][0]["outputs"]
    seeds = [json.loads(each.read_text())["settings"]["seed"] for each in sorted(Path(".attnfuzz/runs").iterdir())]
    assert seeds == [one["seed"], other["seed"], one["seed"]]


def test_the_seed_stands_in_the_first_line_the_header_and_the_last_line() -> None:
    lines = run().stdout.splitlines()
    [seed] = re.findall(r"^attnfuzz \S+ runs torch\.reference_cpu with seed (\d+) \.\.\.$", lines[0])
    assert any(line.endswith(f"; seed: {seed}") for line in lines)
    assert lines[-1].endswith(f"; the same cases again: --seed {seed}")


def test_the_command_of_a_table_has_the_drawn_seed() -> None:
    result = result_of("--table", "table.md")
    assert f"--seed {result['seed']} --device cpu`" in Path("table.md").read_text()


def test_json_has_what_was_drawn_and_what_was_not() -> None:
    [row] = result_of("--seed", "1")["kernels"]
    assert sum(row["drawn"]["dtype"].values()) == 4
    assert row["never_drawn"]["dim_qk x dim_v"]
    assert (row["replayed"], row["not_replayed"]) == (0, 0)


@pytest.mark.parametrize("option", ["-q", "--quiet"])
def test_quiet_is_one_line(option: str) -> None:
    assert re.fullmatch(r"no failures in 4 cases, \d+\.\d s; the same cases again: --seed \d+\n", run(option).output)


def test_the_last_line_of_a_shard_has_its_option() -> None:
    assert run("-q", "--seed", "5", "--shard", "1/1").output.endswith("; the same cases again: --seed 5\n")
    for shard in ("1/2", "2/2"):
        assert run("-q", "--seed", "5", "--shard", shard).output.endswith(f"; the same cases again: --seed 5 --shard {shard}\n")


@pytest.mark.parametrize("command", ["run", "fleet", "gate"])
def test_quiet_and_verbose_exclude_each_other(command: str) -> None:
    more = ["--base", "main"] if command == "gate" else []
    result = CliRunner().invoke(main, [command, "-q", "-v", *more])
    assert result.exit_code == 2
    assert "quiet=True: --verbose is given as well; leave one of the two out" in result.output


def values(**changed: Any) -> dict[str, Any]:
    return {**{each.key: each.default for each in OPTIONS}, "workers": "1", **changed}


def test_parts_of_a_run_need_a_common_seed() -> None:
    with pytest.raises(BadArgument) as caught:
        settings_from(values(shard="1/2"), "cpu")
    assert str(caught.value) == (
        "shard='1/2': each part would draw a seed of its own, and the parts would try some Cases twice and others never; "
        "give the same --seed N to all parts"
    )
    with pytest.raises(BadArgument, match="shard='3/2': it is not I/N with I from 1 to N"):
        settings_from(values(shard="3/2"), "cpu")
    settings = settings_from(values(shard="2/2", seed=0), "cpu")
    assert (settings.seed, settings.shard, settings.shards) == (0, 1, 2)


def test_drawn_seeds_are_short_and_differ() -> None:
    seeds = {drawn_seed() for _ in range(50)}
    assert len(seeds) > 45
    assert all(0 <= each < 10**9 for each in seeds)
    assert settings_from(values(), "cpu").seed != settings_from(values(), "cpu").seed


@pytest.mark.parametrize("command", [("gate",), ("demo",), ("selftest", "memory")], ids=" ".join)
def test_what_must_be_the_same_each_time_keeps_seed_0(command: tuple[str, ...]) -> None:
    group: Any = main
    for name in command:
        group = group.commands[name]
    [option] = [each for each in group.params if each.name == "seed"]
    assert option.default == 0
