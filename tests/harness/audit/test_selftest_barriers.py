"""`attnfuzz selftest barriers`: what it says of faults that are found, missed or misplaced, and of functions without one."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from click.testing import CliRunner
from rich.console import Console

pytest.importorskip("tilelang")
pytest.importorskip("torch")

from attnfuzz.harness.audit.selftest import barriers as selftest
from attnfuzz.harness.audit.selftest.barriers import BarriersTried, barriers
from attnfuzz.harness.audit.selftest.barriers_report import show_barriers
from attnfuzz.harness.cli.main import main
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.faults.barriers import FAULTS


class OneConfig:
    """A kernel with the last of its Configs whose functions have roles."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernel, name)

    def configs(self, problem: object) -> tuple[object, ...]:
        """Tiles of 64 keys, 128 threads where they are a choice."""
        chosen = [each for each in self._kernel.configs(problem) if each["tile_n"] == 64 and each.get("threads", 128) == 128]  # type: ignore[arg-type]
        return tuple(chosen[:1])


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel of each architecture."""
    kernels = [OneConfig(registry.get(name)) for name in ("tilelang.mha", "tilelang.sm100.wasp")]
    monkeypatch.setattr(selftest, "_kernels", lambda: kernels)


def text_of(done: BarriersTried) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    show_barriers(console, done)
    return console.export_text()


@pytest.mark.usefixtures("few")
def test_all_is_right() -> None:
    heard: dict[str, int] = {}

    def advance(name: str, schedules: int) -> None:
        heard[name] = heard.get(name, 0) + schedules

    done = barriers(advance, count=60)
    assert done.right
    assert [(row.fault, row.got) for row in done.rows] == [
        (each.slug, row.expected) for each, row in zip(FAULTS, done.rows, strict=True)
    ]
    functions = {f"{each.kernel} {each.function}": each for each in done.clean}
    assert set(functions) == {
        "tilelang.mha dense_forward", "tilelang.mha dense_backward",
        "tilelang.sm100.wasp sm100_forward_wasp", "tilelang.sm100.wasp sm100_backward",
    }  # fmt: skip
    assert {heard[name] for name in functions} == {60}
    for each in done.clean:
        assert (each.schedules, each.with_numbers, each.alarms, each.complete) == (60, 2, (), True)
        roles = {"sm100_forward_wasp": 3, "sm100_backward": 1}
        assert len(each.roles) == roles.get(each.function, 2)
        assert float(each.interleavings) > 1e10
    assert "every fault is found, and no false alarm" in text_of(done)


def test_blackwell_functions_of_one_role_are_taken_too() -> None:
    kernels = [OneConfig(registry.get(f"tilelang.sm100.{variant}")) for variant in ("ss", "ts", "wasp")]
    found = [(each.kernel, each.program.name, len(each.program.roles)) for each in selftest._functions(kernels)]
    assert found == [
        ("tilelang.sm100.ss", "sm100_forward_ss", 1), ("tilelang.sm100.ss", "sm100_backward", 1),
        ("tilelang.sm100.ts", "sm100_forward_ts", 1), ("tilelang.sm100.ts", "sm100_backward", 1),
        ("tilelang.sm100.wasp", "sm100_forward_wasp", 3),
    ]  # fmt: skip


@pytest.mark.usefixtures("few")
def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    first = dataclasses.replace(FAULTS[0], iteration=7)
    none = dataclasses.replace(FAULTS[1], slug="none", edits=())
    monkeypatch.setattr(selftest, "FAULTS", (first, none))
    done = barriers(lambda *_: None, count=3)
    assert not done.right
    assert [row.wrong for row in done.rows] == [
        ("another kind, role, barrier, stage or iteration is named",),
        ("not found under 3 schedules",),
    ]
    text = text_of(done)
    assert "2 of 2 rows are wrong" in text
    assert "got nothing" in text


@pytest.mark.usefixtures("few")
def test_a_false_alarm_and_an_architecture_that_is_missing_are_wrong() -> None:
    done = barriers(lambda *_: None, only=["priming"], count=2)
    assert done.right
    alarm = dataclasses.replace(done.clean[0], alarms=("early-read: x",))
    assert not dataclasses.replace(done, clean=(alarm, *done.clean[1:])).right
    assert "false alarms" in text_of(dataclasses.replace(done, clean=(alarm, *done.clean[1:])))
    hopper = tuple(each for each in done.clean if "sm100" not in each.kernel)
    assert not dataclasses.replace(done, clean=hopper).right
    partly = dataclasses.replace(done.clean[0], complete=False)
    assert not dataclasses.replace(done, clean=(partly, *done.clean[1:])).right


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(BadArgument, match="no such fault"):
        barriers(lambda *_: None, only=["none"])
    with pytest.raises(BadArgument, match="must be positive"):
        barriers(lambda *_: None, count=0)


@pytest.mark.usefixtures("few")
def test_the_command_prints_json_and_its_exit_code() -> None:
    done = CliRunner().invoke(main, ["selftest", "barriers", "phase", "--schedules", "2", "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["right"] is True
    assert [row["fault"] for row in data["rows"]] == ["phase"]
    assert CliRunner().invoke(main, ["selftest", "barriers", "none"]).exit_code == 2
