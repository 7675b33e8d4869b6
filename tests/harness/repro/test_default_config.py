"""A Case without a Config has the kernel's default one, wherever it is read and run (docs/reference/case-file.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs
from support.adapters import flash
from support.triton_mode import interpreted

from attnfuzz.harness.campaign.blob import blob_of
from attnfuzz.harness.campaign.corpus import CaseFile, StoredFinding
from attnfuzz.harness.campaign.journal import Journal, left_behind
from attnfuzz.harness.cli.main import main
from attnfuzz.harness.gate.parts.correctness import replay
from attnfuzz.harness.isolation.executors import InProcess
from attnfuzz.harness.repro.reproduce import Where, map_errors, repeat, reproduce
from attnfuzz.harness.repro.script.script import script_of
from attnfuzz.harness.trial.batch import run_batch
from attnfuzz.harness.trial.supports import with_config
from attnfuzz.harness.trial.trial import check_runnable, run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import dense
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

HERE = Where(device="cpu", in_process=True)
SMALL: dict[str, Any] = {
    "dims": ((8, 8),),
    "dtypes": ("float32",),
    "devices": ("cpu",),
    "configs": ({"tile_m": 4}, {"tile_m": 8}),
}


def tiles(q, k, v, softmax_scale=None, causal=False, tile_m=0):
    assert tile_m == 4, f"tile_m={tile_m} is not the default"
    return flash(q, k, v, softmax_scale=softmax_scale, causal=causal)


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_registered", {"acme.tiles": dense(tiles, name="acme.tiles", **SMALL)})
    monkeypatch.chdir(tmp_path)


def case(kernel: str = "acme.tiles", **config: Any) -> Case:
    packing: Any = "ragged" if kernel in ("triton.varlen", "torch.reference_cpu") else "dense"
    problem = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=8, dim_v=8, dtype="float32", packing=packing)
    if kernel == "acme.tiles":
        problem = structs.replace(problem, needs=structs.replace(problem.needs, outputs=("o", "dq", "dk", "dv")))
    return Case(kernel=kernel, problem=problem, config=Config(config))


def attnfuzz(*arguments: str) -> Any:
    result = CliRunner().invoke(main, list(arguments))
    assert "Traceback" not in result.output
    return result


@interpreted
@pytest.mark.parametrize("kernel", ["triton.varlen", "triton.flex"])
@pytest.mark.parametrize("config", [{}, None], ids=["empty", "absent"])
def test_repro_runs_a_file_without_a_config(kernel: str, config: dict[str, Any] | None) -> None:
    if registry.get(kernel).unavailable("cpu"):
        pytest.skip("Triton cannot run here")
    data = {name: value for name, value in case(kernel).to_object().items() if name != "config"}
    Path("case.json").write_text(json.dumps(data if config is None else {**data, "config": config}))
    result = attnfuzz("repro", "case.json", "--device", "cpu", "--in-process", "--json")
    assert result.exit_code == 0, result.output
    done = json.loads(result.stdout)
    default = registry.get(kernel).configs(case(kernel).problem)[0]
    assert (done["outcome"], done["case"]["config"]) == ("FIXED", dict(default))


def test_each_way_to_run_a_case_takes_the_default() -> None:
    assert reproduce(case(), HERE).outcome == "FIXED"
    assert repeat(case(), 2, HERE).failed == 0
    assert not isinstance(map_errors(case(), HERE), str)
    assert run_trial(case(), "cpu").failures == ()
    assert [each.failures for each in run_batch([case(), case()], "cpu")] == [(), ()]
    assert check_runnable(case(), "cpu").name == "acme.tiles"


@pytest.mark.parametrize("more", [(), ("--repeat", "2"), ("--shrink",), ("--plot", "map.png")], ids=repr)
def test_each_command_takes_the_default(more: Sequence[str]) -> None:
    blob = blob_of(case())
    result = attnfuzz("repro", blob, "--device", "cpu", "--in-process", "--json", *more)
    assert result.exit_code == 0, result.output


@interpreted
def test_a_script_has_the_default() -> None:
    if registry.get("triton.varlen").unavailable("cpu"):
        pytest.skip("Triton cannot run here")
    text = script_of(CaseFile(case("triton.varlen"), StoredFinding(), Path("case.json")), "cpu").text
    assert "config=Config({'num_stages': 1, 'num_warps': 4, 'tile_m': 32, 'tile_n': 32})" in text


def test_a_stored_case_of_a_run_takes_the_default() -> None:
    folder = Path("out/cases")
    folder.mkdir(parents=True)
    (folder / "acme.tiles-o-mismatch-0.json").write_text(json.dumps(case().to_object()))
    result = attnfuzz("run", "acme.tiles", "--device", "cpu", "--in-process", "--max-examples", "1", "--out", "out")
    assert "not tried again" not in result.output


def test_a_case_in_flight_takes_the_default() -> None:
    journal = Journal("out")
    journal.launch(case())
    journal.leave()
    assert [each.case for each in left_behind("out")] == [case()]
    result = attnfuzz("run", "acme.tiles", "--device", "cpu", "--in-process", "--max-examples", "1", "--out", "out")
    assert "was in flight when a run died" in result.output
    assert "not tried again" not in result.output


def test_a_gate_replays_a_case_with_the_default() -> None:
    stored = CaseFile(case(), StoredFinding(), Path("case.json"))
    part = replay(registry.get("acme.tiles"), "cpu", [stored], InProcess("cpu"))
    assert (part.outcome, part.figures) == ("pass", {"cases": 1, "skipped": []})
    other = replace(stored, case=case(tile_m=8))
    assert replay(registry.get("acme.tiles"), "cpu", [other], InProcess("cpu")).outcome == "fail"


def test_a_named_config_stays_and_so_does_an_empty_one_that_is_a_choice() -> None:
    kernel = registry.get("acme.tiles")
    assert with_config(kernel, case(tile_m=8)) == case(tile_m=8)
    assert with_config(kernel, case()) == case(tile_m=4)
    plain = registry.get("torch.reference_cpu")
    assert with_config(plain, case("torch.reference_cpu")) == case("torch.reference_cpu")
    with pytest.raises(BadArgument, match=r"acme\.tiles does not support it: config=Config\(tile_m=5\)"):
        check_runnable(case(tile_m=5), "cpu")


def test_a_kernel_is_not_asked_for_configs_of_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        capabilities = registry.get("acme.tiles").capabilities

        def configs(self, problem: Problem) -> tuple[Config, ...]:
            raise AssertionError("asked")

    unsupported = structs.replace(case(), problem=structs.replace(case().problem, dim_qk=16))
    assert with_config(Asked(), unsupported) == unsupported  # type: ignore[arg-type]
