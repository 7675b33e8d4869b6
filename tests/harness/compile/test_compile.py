"""`attnfuzz compile` from end to end: planted bad Configs, what is worse than a baseline, missing compilers, broken files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.compile import Compilable

from attnfuzz.harness.cli import main as cli
from attnfuzz.kernels import registry
from attnfuzz.kernels.tilelang.lower import cannot_lower

NO_NVCC = cannot_lower()


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(tmp_path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["compile", "--jobs", "2", "--out", str(tmp_path / "out"), *arguments])


def rows_of(result: Result) -> dict[tuple[str, str, str], dict[str, Any]]:
    found = json.loads(result.stdout)
    return {(each["kernel"], each["config"]["plant"], each["arch"]): each for each in found["rows"]}


def test_planted_configs_fail_with_the_compilers_own_words(tmp_path: Path) -> None:
    registry.register(Compilable("acme.product", plants=("none", "shared", "api", "sum"), architectures=("sm_80", "sm_90a")))
    result = run(tmp_path, "acme.product", "--json")
    assert result.exit_code == 1, result.output
    rows = rows_of(result)

    good = rows["acme.product", "none", "sm_90a"]
    assert (good["ok"], good["error"], good["function"], good["races"]) == (True, None, "product", [])
    assert (good["tensor_core"], good["spills"], good["shared_limit"]) == ("wgmma", 0, 232448)
    assert 16 <= good["registers"] <= 255
    assert 2 * 64 * 64 * 2 <= good["shared"] < 100_000
    assert rows["acme.product", "none", "sm_80"]["tensor_core"] == "mma"
    assert rows["acme.product", "none", "sm_80"]["shared_limit"] == 166912
    assert rows["acme.product", "sum", "sm_90a"]["tensor_core"] is None

    large = rows["acme.product", "shared", "sm_90a"]
    assert not large["ok"]
    assert large["shared"] > large["shared_limit"]
    assert large["error"] == (
        f"out of resource: shared memory, Required: {large['shared']}, Hardware limit: 232448. "
        "Reducing block sizes or `num_stages` may help."
    )
    lines = rows["acme.product", "api", "sm_90a"]["error"].splitlines()
    assert re.fullmatch(r"CompilationError at line \d+ of the function:", lines[0])
    assert "acc += tl.no_such_product(x, y)" in map(str.strip, lines)
    assert lines[-1].startswith("AttributeError")
    assert "no_such_product" in lines[-1]
    assert len(lines) <= 6


@pytest.mark.skipif(NO_NVCC is not None, reason=str(NO_NVCC))
@pytest.mark.slow
def test_planted_tilelang_configs_fail_with_the_compilers_own_words(tmp_path: Path) -> None:
    plants = ("race", "shared", "api", "extern")
    registry.register(Compilable("acme.copy", "tilelang", plants=plants, architectures=("sm_90a",)))
    result = run(tmp_path, "acme.copy", "--json")
    assert result.exit_code == 1, result.output
    rows = {plant: row for (_, plant, _), row in rows_of(result).items()}
    assert rows["shared"]["error"] == (
        "a block needs 524288 bytes of shared memory, and sm_90a has 232448: no launch is possible"
    )
    assert rows["api"]["error"] == "TypeError: tcgen05_gemm() missing 1 required keyword-only argument: 'mbar'"
    assert 'error: identifier "no_such_function" is undefined' in rows["extern"]["error"]
    assert rows["extern"]["error"].startswith("nvcc ended with exit code ")
    assert len(rows["extern"]["error"].splitlines()) <= 6
    assert rows["shared"]["races"] == []
    assert rows["race"]["ok"]
    (race,) = rows["race"]["races"]
    assert re.fullmatch(r"`B\(i // 2,\)` is written by multiple threads in loop \(i,\) at compile_tilelang.py:\d+", race)
    # A second time nothing is compiled, and nothing else is said.
    second = run(tmp_path, "acme.copy", "--json")
    cached = {plant: row for (_, plant, _), row in rows_of(second).items()}
    assert [plant for plant, row in cached.items() if row["cached"]] == ["race", "shared"]
    assert {**cached["race"], "cached": False} == rows["race"]


@pytest.mark.slow
def test_a_baseline_fails_for_what_is_worse(tmp_path: Path) -> None:
    names = ("acme.a", "acme.b", "acme.c", "acme.d")
    table, baseline = str(tmp_path / "table.md"), str(tmp_path / "baseline.json")

    def register(*hidden: str | None) -> None:
        for name, plant in zip(names, hidden, strict=True):
            registry.register(Compilable(name, hidden=plant, architectures=("sm_90a",)))

    register(None, None, None, "api")
    first = run(tmp_path, *names, "--write", baseline, "--markdown", table)
    assert first.exit_code == 1, first.output
    assert "| acme.a | sm_90a | float16 | 64, 64 | 1 | 1 | 0 |" in Path(table).read_text()
    assert "no_such_product" in Path(table).read_text()

    # What failed before may fail on.
    register("sum", "spill", "api", "api")
    worse = run(tmp_path, *names, "--baseline", baseline, "--json")
    assert worse.exit_code == 1, worse.output
    compared = json.loads(worse.stdout)["compared"]
    assert [each["kernel"] for each in compared["lost_tensor_core"]] == ["acme.a"]
    assert (compared["lost_tensor_core"][0]["before"], compared["lost_tensor_core"][0]["now"]) == ("wgmma", "none")
    assert [each["kernel"] for each in compared["new_spills"]] == ["acme.b"]
    assert [each["kernel"] for each in compared["new_failures"]] == ["acme.c"]
    assert "no_such_product" in compared["new_failures"][0]["now"]
    assert compared["worse"] is True


def test_a_compiler_that_dies_or_hangs_is_a_failure_and_a_case(tmp_path: Path) -> None:
    registry.register(Compilable("acme.dying", "planted", plants=("abort", "hang", "refuse"), architectures=("sm_90a",)))
    result = run(tmp_path, "acme.dying", "--json", "--deadline", "8s")
    assert result.exit_code == 1, result.output
    rows = rows_of(result)
    aborted, hung = (rows["acme.dying", plant, "sm_90a"] for plant in ("abort", "hang"))
    assert (aborted["kind"], aborted["function"]) == ("crash", "dying")
    assert aborted["error"].startswith("the compiler: SIGABRT")
    assert (hung["kind"], hung["error"]) == ("hang", "the compiler: compile did not end within 8 s")
    assert rows["acme.dying", "refuse", "sm_90a"]["error"] == "it refuses"

    # A failure is a case like others.
    again = CliRunner().invoke(cli.main, ["show", hung["case"], "--json"])
    assert json.loads(again.stdout)["found"]["identity"]["kind"] == "hang"
    one = run(tmp_path, "--case", rows["acme.dying", "refuse", "sm_90a"]["case"])
    assert one.exit_code == 1, one.output
    assert "FAILED" in one.output
    assert "it refuses" in one.output


def test_a_missing_compiler_is_said_and_the_rest_compiled(tmp_path: Path) -> None:
    registry.register(Compilable("acme.without", missing="no nvcc: pip install it", architectures=("sm_90a",)))
    registry.register(Compilable("acme.other", "planted", plants=("nothing",), architectures=("sm_90a",)))
    result = run(tmp_path, "acme.without", "acme.other", "torch.cudnn", "torch.reference_cpu", "--arch", "sm_90a")
    assert result.exit_code == 2, result.output
    assert "acme.without: not lowered: no nvcc: pip install it" in result.output
    assert "torch.cudnn: not lowered: it has no `lower`" in result.output
    assert "torch.reference_cpu: it does not run on CUDA" in result.output
    assert "0 functions compiled, 0 failed" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "sm_91"), "arch='sm_91': it is not known how much shared memory it has"),
        (("--arch", ","), "arch=',': it names no architecture"),
        (("--arch", "hopper"), "arch='hopper'"),
        (("--baseline", "missing.json"), "baseline='missing.json': it cannot be read"),
        (("--baseline", "{tmp}/broken.json"), "it is broken"),
        (("--baseline", "{tmp}/other.json"), "its format is 7, and this attnfuzz reads 1"),
        (("--write", "{tmp}"), "it is a folder"),
        (("--write", "/proc/no/where.json"), "it cannot be written"),
        (("--out", "/proc/no"), "failing Cases could not be written there"),
        (("--case", "missing.json"), "case='missing.json': it names its own kernel"),
        (("--kernel", "no.kernel"), "no kernel of that name"),
        (("--deadline", "soon"), "deadline='soon'"),
        (("no.kernel",), "no kernel of that name"),
        (("--by-config",), "by-config=True: it is how --markdown has its lines, and there is none; give --markdown FILE too"),
    ],
)
def test_wrong_use_is_known_before_anything_is_compiled(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "broken.json").write_text('{"format": 1, "versions": {}, "rows": [{"kernel": 3}]}')
    (tmp_path / "other.json").write_text('{"format": 7, "versions": {}, "rows": []}')
    registry.register(Compilable("acme.product"))
    result = run(tmp_path, *(each.replace("{tmp}", str(tmp_path)) for each in arguments), "torch.cudnn")
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_an_architecture_that_a_kernel_does_not_declare_is_left_out(tmp_path: Path) -> None:
    registry.register(Compilable("acme.hopper", architectures=("sm_90a",)))
    result = run(tmp_path, "acme.hopper", "--arch", "sm_80")
    assert result.exit_code == 2, "a gate must not pass on nothing"
    assert "nothing was compiled" in result.stderr
    assert "acme.hopper: it declares sm_90a only" in result.output
