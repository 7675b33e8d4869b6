"""The pytest plugin: a kernel team's five-line test file, the options, and one GPU per xdist worker."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnfuzz.harness import campaign, plugin
from attnfuzz.kernels import registry

# pytester forgets modules that are first imported inside: what must be imported once only is imported here.
assert campaign

KERNEL_FILE = """
import torch
from attnfuzz.kernels.contract import Capabilities, Config, why_unsupported
from attnfuzz.oracles import attention


class Kernel:
    name, backend, files = "acme.flash", "acme", ()
    capabilities = Capabilities(dims=((8, 8),), unequal=True, zero_q=True, devices=("cpu",), compiles_on=())
    longest = 999

    def configs(self, problem):
        return (Config(tile_m=6, tile_n=6),)

    def unavailable(self, device):
        return None

    def supports(self, problem, config, device):
        return why_unsupported(self.capabilities, problem, device)

    def compile_key(self, problem, config):
        return problem.dtype

    def build(self, problem, config, device):
        return self

    def forward(self, inputs):
        if max(inputs.problem.seqlens_k) > self.longest:
            raise ValueError(f"more than {self.longest} keys")
        return self.computed(inputs)[:2]

    def backward(self, inputs, o, lse):
        return self.computed(inputs)[2:]

    def computed(self, inputs):
        p = inputs.problem
        with torch.enable_grad():
            found = [attention.reference(p, data) for data in attention.sequences(inputs)]
        joined = {name: torch.cat([getattr(each, name) for each in found], 1) for name in ("o", "lse", "dq", "dk", "dv")}
        lse = joined.pop("lse").float()
        o, dq, dk, dv = (each.transpose(0, 1).to(inputs.q.dtype) for each in joined.values())
        return o, lse, dq, dk, dv


class Faulty(Kernel):
    name, longest = "acme.faulty", 5
"""
PASSING = "from attnfuzz.harness.plugin import fuzz\nfrom acme import Kernel\n\ntest_kernel = fuzz(Kernel(), max_examples=12)\n"
FAILING = "from attnfuzz.harness.plugin import fuzz\nfrom acme import Faulty\n\ntest_kernel = fuzz(Faulty(), max_examples=40)\n"


@pytest.fixture
def acme(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with the kernels of a team named acme, as importable as an installed package."""
    pytester.makepyfile(acme=KERNEL_FILE)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(pytester.path)
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return pytester


def pytest_here(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """The tests of `folder` in this process, which is faster."""
    return folder.runpytest_inprocess("-p", "no:cacheprovider", "--attnfuzz-device", "cpu", *arguments)


def pytest_of(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """The tests of `folder` in a process of their own, where the plugin is found as users have it: by its entry point."""
    return folder.runpytest_subprocess("-p", "no:cacheprovider", "--attnfuzz-device", "cpu", *arguments)


def test_five_lines_gate_a_correct_kernel(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=PASSING)
    result = pytest_of(acme, "-v", "--attnfuzz-seed", "3")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["attnfuzz: device=cpu seed=3", "*::test_kernel?0? PASSED*", "*::test_kernel?1? PASSED*"])
    assert [each.name for each in (acme.path / ".attnfuzz").iterdir()] == ["runs"]
    runs = [json.loads(each.read_text()) for each in (acme.path / ".attnfuzz" / "runs").iterdir()]
    assert [(each["state"], each["settings"]["seed"]) for each in runs] == [("finished", 3)] * 2
    assert len({each["session"] for each in runs}) == 1, "one report shows both shards"


def test_a_faulty_kernel_fails_with_its_minimal_case_and_how_to_run_it_again(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=FAILING)
    result = pytest_here(acme, "--attnfuzz-out", "found", "-k", "0")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(
        [
            "*1. acme.faulty: exception in forward (forward raised ValueError: more than # keys) (found after *",
            "   seqlen_q x seqlen_k  *6 (ragged)",
            "   heads                1 query, 1 key/value (groups of 1)",
            "   exception: forward raised ValueError: more than 5 keys",
            "   run it again: *pytest test_acme.py::test_kernel --attnfuzz-case found/cases/acme.faulty-forward-exception-*.json",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*_run_shard*")
    [path] = (acme.path / "found" / "cases").iterdir()
    assert path.suffix == ".json"


def test_the_shards_share_the_work_among_xdist_workers(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=PASSING)
    result = pytest_of(acme, "-n", "2", "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines_random(["*gw*PASSED*test_kernel[[]0]*", "*gw*PASSED*test_kernel[[]1]*"])


def test_only_the_named_kernels_run(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=PASSING, test_faulty=FAILING)
    result = pytest_here(acme, "-rs", "--attnfuzz-kernel", "acme.flash")
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED*: --attnfuzz-kernel names acme.flash"])


def test_a_misspelt_kernel_is_no_empty_run(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=PASSING)
    result = pytest_here(acme, "--attnfuzz-kernel", "acme.flush")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*no kernel of that name is installed; did you mean 'acme.flash'?"])


def test_a_kernel_that_cannot_run_here_is_skipped_with_the_reason(acme: pytest.Pytester) -> None:
    acme.makepyfile(
        test_acme="""
        from acme import Capabilities, Kernel
        from attnfuzz.harness.plugin import fuzz

        class Absent(Kernel):
            def unavailable(self, device):
                return "its compiler is missing"

        class Elsewhere(Kernel):
            capabilities = Capabilities(devices=("cuda",))

        test_absent = fuzz(Absent(), shards=1)
        test_elsewhere = fuzz(Elsewhere(), shards=1)
        """
    )
    result = pytest_here(acme, "-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines_random(
        ["SKIPPED*: acme.flash cannot run on cpu here: its compiler is missing", "SKIPPED*: acme.flash declares no cpu"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attnfuzz-profile", "x"], "*profile='x': no such profile; use one of quick, gate, nightly"),
        (["--attnfuzz-budget", "banana"], "*budget='banana': it is no duration; give a number and a unit, such as 60s, 5m or 1h"),
        (["--attnfuzz-budget", "0s"], "*budget='0s': nothing can be tried in no time; give a positive duration, such as 60s"),
        (["--attnfuzz-device", "tpu"], "*device='tpu': no such device; use auto, cpu or cuda"),
        (["--attnfuzz-max-examples", "few"], "*argument --attnfuzz-max-examples: invalid int value: 'few'"),
        (["--attnfuzz-sead", "1"], "*unrecognized arguments: --attnfuzz-sead*"),
    ],
)
def test_a_wrong_option_is_a_usage_error_before_anything_runs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR == 4
    result.stderr.fnmatch_lines([message])


def test_the_options_are_shown_in_help(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--help")
    for name in ("kernel", "device", "profile", "budget", "max-examples", "seed", "out"):
        result.stdout.fnmatch_lines([f"*--attnfuzz-{name}=*"])


def test_other_peoples_sessions_are_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*attnfuzz:*")


# --- GPUs


def config(device: str = "auto", **changed: Any) -> Any:
    values = {"--attnfuzz-device": device, "--attnfuzz-budget": None, "--attnfuzz-max-examples": None}
    values |= {"--attnfuzz-profile": "quick", "--attnfuzz-seed": 0, "--attnfuzz-out": ".attnfuzz"}
    values |= {"--attnfuzz-deadline": None, "--attnfuzz-in-process": False, "--attnfuzz-no-memory-check": False}
    values |= {f"--attnfuzz-{name.replace('_', '-')}": value for name, value in changed.items()}
    return SimpleNamespace(getoption=values.__getitem__)


@pytest.mark.parametrize(
    ("worker", "gpus", "expected"),
    [
        ("gw0", ["0", "1", "2"], "0"),
        ("gw2", ["0", "1", "2"], "2"),
        ("gw3", ["0", "1", "2"], "0"),
        ("gw11", ["0", "1", "2", "3", "4", "5", "6", "7"], "3"),
        ("gw1", ["4", "6"], "6"),
        ("gw1", ["GPU-8f1c", "GPU-a2d0"], "GPU-a2d0"),
        ("gw5", ["0"], "0"),
        ("gw0", [], None),
        ("master", ["0"], None),
        (None, ["0"], None),
    ],
)
def test_worker_n_gets_gpu_n_mod_gpus(
    monkeypatch: pytest.MonkeyPatch, worker: str | None, gpus: list[str], expected: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as before")
    monkeypatch.setattr(plugin, "_gpus", lambda: gpus)
    plugin._pin_worker(worker)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == (expected or "as before")


def test_pinning_again_in_a_child_process_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    plugin._pin_worker("gw1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    plugin._pin_worker("gw1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0,1", ["0", "1"]), ("3", ["3"]), ("", []), ("-1", []), ("GPU-8f1c,GPU-a2d0", ["GPU-8f1c", "GPU-a2d0"])],
)
def test_the_gpus_are_those_that_the_user_chose(monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert plugin._gpus() == expected


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A tool of the driver of our own."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "nvidia-smi"


def write_tool(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_gpus_are_those_that_the_driver_lists(tool: Path) -> None:
    write_tool(tool, 'echo "GPU 0: NVIDIA X (UUID: GPU-1)"\necho "  MIG 1g.10gb Device 0: (UUID: MIG-1)"\necho "GPU 1: NVIDIA X"')
    assert plugin._gpus() == ["0", "1"]


def test_a_driver_that_fails_has_no_gpus(tool: Path) -> None:
    write_tool(tool, 'echo "NVIDIA-SMI has failed because it could not communicate with the driver"\nexit 9')
    assert plugin._gpus() == []


def test_a_driver_that_hangs_has_no_gpus(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    write_tool(tool, "true")
    monkeypatch.setattr(plugin.subprocess, "run", hang)
    assert plugin._gpus() == []


def test_a_machine_without_the_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(plugin.shutil, "which", lambda name: None)
    assert plugin._gpus() == []


@pytest.mark.parametrize(
    ("gpus", "cores", "device", "expected"),
    [
        (0, 8, "auto", None),
        (1, 16, "auto", 4),
        (8, 128, "auto", 32),
        (8, 16, "auto", 16),
        (8, 4, "auto", 8),
        (8, 128, "cuda", 32),
        (8, 128, "cpu", None),
    ],
)
def test_automatic_workers_follow_the_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, device: str, expected: int | None
) -> None:
    monkeypatch.setattr(plugin, "_gpus", lambda: [str(index) for index in range(gpus)])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert plugin.pytest_xdist_auto_num_workers(config(device)) == expected


# --- settings of a shard


@pytest.mark.parametrize(
    ("changed", "most", "shards", "expected"),
    [
        ({}, 60, 2, (None, 30)),
        ({}, 61, 2, (None, 31)),
        ({}, 1, 4, (None, 1)),
        ({"max_examples": 10}, 60, 4, (None, 3)),
        ({"budget": "8s"}, 60, 2, (4.0, None)),
        ({"budget": "8s", "max_examples": 10}, 60, 2, (4.0, 5)),
    ],
)
def test_shards_share_budget_and_examples(
    changed: dict[str, Any], most: int, shards: int, expected: tuple[float | None, int | None]
) -> None:
    settings = plugin._settings(config("cpu", **changed), 1, shards, most)
    assert (settings.seconds, settings.max_examples) == expected
    assert (settings.shard, settings.shards, settings.device) == (1, shards, "cpu")


def test_the_header_shows_what_differs() -> None:
    values = {"kernel": ["a"], "device": "cpu", "profile": "gate", "budget": "5s", "max_examples": 3, "seed": 2, "out": "x"}
    assert plugin.pytest_report_header(config(**values)) == (
        "attnfuzz: kernel=['a'] device=cpu profile=gate budget=5s max-examples=3 seed=2 out=x"
    )
    assert plugin.pytest_report_header(config(kernel=[])) is None


def test_a_case_file_is_run_again_by_the_line_that_was_printed(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=FAILING)
    pytest_here(acme, "--attnfuzz-out", "found", "-k", "0")
    [path] = (acme.path / "found" / "cases").iterdir()
    result = pytest_here(acme, "test_acme.py::test_kernel", "--attnfuzz-case", str(path))
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        ["FAILED *.json", "   seqlen_q x seqlen_k  *6 (ragged)", "exception: forward raised ValueError: *"]
    )
    acme.makepyfile(test_acme=PASSING)
    missing = pytest_here(acme, "--attnfuzz-case", "nowhere.json")
    missing.stdout.fnmatch_lines(["*case='nowhere.json': it cannot be read*"])
