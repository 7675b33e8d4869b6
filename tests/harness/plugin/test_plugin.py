"""The pytest plugin: a kernel team's five-line test file, the options, and one GPU per xdist worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch._dynamo  # and so Triton, whose library aborts the process when it is loaded twice

from attnfuzz.harness import plugin
from attnfuzz.harness.campaign import campaign
from attnfuzz.harness.campaign.options import OPTIONS
from attnfuzz.harness.core import gpus as core_gpus
from attnfuzz.harness.plugin import gpus as plugin_gpus
from attnfuzz.harness.plugin import options as plugin_options
from attnfuzz.harness.plugin import run as plugin_run
from attnfuzz.kernels import registry

# pytester forgets modules that are first imported inside: what must be imported once only is imported here.
assert campaign
assert plugin
assert torch._dynamo

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


OPTIONS_OF_ALL = ("-p", "no:cacheprovider", "--attnfuzz-device", "cpu", "--attnfuzz-seed", "0")


@pytest.fixture
def acme(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with the kernels of a team named acme, as importable as an installed package."""
    pytester.makepyfile(acme=KERNEL_FILE)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(pytester.path)
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    return pytester


def pytest_here(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """The tests of `folder` in this process, which is faster."""
    return folder.runpytest_inprocess(*OPTIONS_OF_ALL, *arguments)


def pytest_alone(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """As `pytest_here`, without child processes: faster still, for what is no matter of them."""
    return pytest_here(folder, "--attnfuzz-in-process", *arguments)


def pytest_of(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """The tests of `folder` in a process of their own, where the plugin is found as users have it: by its entry point."""
    return folder.runpytest_subprocess(*OPTIONS_OF_ALL, *arguments)


def test_five_lines_gate_a_correct_kernel(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=PASSING)
    result = pytest_of(acme, "-v", "--attnfuzz-seed", "3")
    result.assert_outcomes(passed=2)
    told = "attnfuzz: acme.flash in 2 tests; device=cpu profile=quick seed=3 budget=as the tests say"
    result.stdout.fnmatch_lines(["attnfuzz: device=cpu seed=3", told, "*::test_kernel?0? PASSED*", "*::test_kernel?1? PASSED*"])
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
            "   without that file:   pytest test_acme.py::test_kernel --attnfuzz-case AF1-*",
            '   to keep it:          fuzz(..., cases=?"AF1-*"?)',
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


@pytest.mark.slow
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


def test_the_beginning_of_names_is_no_kernel(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("from attnfuzz.harness.plugin import fuzz\n\ntest_group = fuzz('torch', shards=1)\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*kernel='torch': it is no kernel, but the beginning of *; give one of torch.cudnn, *"])


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
        [
            "SKIPPED*: acme.flash cannot run on cpu here: its compiler is missing",
            "SKIPPED*: acme.flash cannot run on cpu here: it is declared for cuda only",
        ]
    )


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
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
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


# --- GPUs


def config(device: str = "auto", **changed: Any) -> Any:
    values = {f"--attnfuzz-{option.name}": option.default for option in OPTIONS} | {"--attnfuzz-device": device}
    values |= {f"--attnfuzz-{name.replace('_', '-')}": value for name, value in changed.items()}
    session = SimpleNamespace(getoption=values.__getitem__, stash=pytest.Stash())
    session.stash[plugin_options._SEED] = values["--attnfuzz-seed"] or 12345
    return session


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
    monkeypatch.setattr(plugin_gpus, "gpus", lambda: gpus)
    plugin_gpus.pin_worker(worker)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == (expected or "as before")


def test_pinning_again_in_a_child_process_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    plugin_gpus.pin_worker("gw1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    plugin_gpus.pin_worker("gw1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0,1", ["0", "1"]), ("3", ["3"]), ("", []), ("-1", []), ("GPU-8f1c,GPU-a2d0", ["GPU-8f1c", "GPU-a2d0"])],
)
def test_the_gpus_are_those_that_the_user_chose(monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert plugin_gpus.gpus() == expected


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
    assert plugin_gpus.gpus() == ["0", "1"]


def test_a_driver_that_fails_has_no_gpus(tool: Path) -> None:
    write_tool(tool, 'echo "NVIDIA-SMI has failed because it could not communicate with the driver"\nexit 9')
    assert plugin_gpus.gpus() == []


def test_a_driver_that_hangs_has_no_gpus(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    write_tool(tool, "true")
    monkeypatch.setattr(core_gpus.subprocess, "run", hang)
    assert plugin_gpus.gpus() == []


def test_a_machine_without_the_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(core_gpus.shutil, "which", lambda name: None)
    assert plugin_gpus.gpus() == []


def test_the_free_memory_is_that_of_the_fullest_gpu_chosen(tool: Path) -> None:
    write_tool(tool, '[ "$2" = 1,GPU-8f1c ] && echo "$3" | grep -q memory.free && printf "143000\\n81000\\n"')
    assert plugin_gpus.free_memory(["1", "GPU-8f1c"]) == 81_000
    assert plugin_gpus.free_memory(["0"]) is None


@pytest.mark.parametrize("text", ['echo "[N/A]"', "echo No devices were found; exit 6"])
def test_a_gpu_whose_free_memory_is_unknown_bounds_nothing(tool: Path, text: str) -> None:
    write_tool(tool, text)
    assert plugin_gpus.free_memory(["0"]) is None


@pytest.mark.parametrize(
    ("gpus", "cores", "memory", "device", "expected"),
    [
        (0, 8, None, "auto", None),
        (1, 16, 143_000, "auto", 16),
        (1, 16, None, "auto", 16),
        (1, 16, 24_000, "auto", 5),
        (1, 16, 2_000, "auto", 1),
        (1, 64, 143_000, "auto", 16),
        (8, 128, 143_000, "auto", 128),
        (8, 16, 143_000, "auto", 16),
        (8, 4, 143_000, "auto", 8),
        (8, 128, 143_000, "cuda", 128),
        (8, 128, 143_000, "cpu", None),
    ],
)
def test_automatic_workers_follow_cores_gpus_and_their_memory(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, memory: int | None, device: str, expected: int | None
) -> None:
    monkeypatch.setattr(plugin_gpus, "gpus", lambda: [str(index) for index in range(gpus)])
    monkeypatch.setattr(plugin_gpus, "free_memory", lambda usable: memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert plugin_gpus.pytest_xdist_auto_num_workers(config(device)) == expected


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
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
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


# --- settings of a shard


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
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    if workers:
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", workers)
    session = config("cpu", budget="8s")
    session.stash[plugin_run.COUNT] = tests
    assert plugin_run._share(session) == share


def test_the_header_shows_what_differs() -> None:
    values = {"kernel": ["a"], "device": "cpu", "profile": "gate", "budget": "5s", "max_examples": 3, "seed": 2, "out": "x"}
    values |= {"max_failures": 4, "jobs": 1, "memory": 2.0}
    assert plugin_options.pytest_report_header(config(**values)) == (
        "attnfuzz: kernel=['a'] device=cpu profile=gate budget=5s max-examples=3 max-failures=4 seed=2 out=x jobs=1 memory=2.0"
    )
    assert plugin_options.pytest_report_header(config(kernel=[])) is None


@pytest.mark.slow
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
    assert missing.ret == pytest.ExitCode.USAGE_ERROR
    missing.stderr.fnmatch_lines(["ERROR: case='nowhere.json': it cannot be read*"])
    (acme.path / "file").write_text("")
    unwritable = pytest_here(acme, "--attnfuzz-out", "file/found")
    assert unwritable.ret == pytest.ExitCode.USAGE_ERROR


# --- cases by blob


def blob_in(result: pytest.RunResult) -> str:
    """The blob of the line that a failing test printed: twice where CI is set, since pytest's summary is whole there."""
    [line] = {each for each in result.outlines if each.strip().startswith("without that file:")}
    return line.split()[-1]


def test_a_blob_runs_a_case_again_without_its_file_and_keeps_it(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=FAILING)
    blob = blob_in(pytest_alone(acme, "--attnfuzz-out", "found", "-k", "0"))
    again = pytest_alone(acme, "test_acme.py::test_kernel", "--attnfuzz-case", blob)
    again.assert_outcomes(failed=1, skipped=1)
    again.stdout.fnmatch_lines([f"FAILED {blob}", "   seqlen_q x seqlen_k  *6 (ragged)"])

    kept = f'test_kernel = fuzz(Faulty(), max_examples=1, cases=["{blob}"])'
    acme.makepyfile(test_acme=FAILING.splitlines()[0] + "\nfrom acme import Faulty\n\n" + kept)
    result = pytest_alone(acme, "-k", "case0")
    result.assert_outcomes(failed=1, deselected=2)
    result.stdout.fnmatch_lines([f"FAILED {blob}", "exception: forward raised ValueError: more than 5 keys"])
    acme.makepyfile(acme=KERNEL_FILE.replace('"acme.faulty", 5', '"acme.faulty", 999'))
    pytest_alone(acme, "-k", "case0").assert_outcomes(passed=1, deselected=2)


def test_a_broken_or_a_foreign_case_fails_with_a_clear_message(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=FAILING)
    blob = blob_in(pytest_alone(acme, "--attnfuzz-out", "found", "-k", "0"))
    acme.makepyfile(
        test_acme=PASSING.replace("max_examples=12", f'max_examples=1, cases=["AF1-abc", "AF7-abc", "none.json", "{blob}"]')
    )
    result = pytest_alone(acme, "-k", "case")
    result.assert_outcomes(failed=4, deselected=2)
    result.stdout.fnmatch_lines(
        [
            "*case='AF1-abc': the blob is cut or changed; paste all of it, without blanks",
            "*case='AF7-abc': a blob of version 7, and this attnfuzz reads version 1; use the attnfuzz that printed it, *",
            "*case='none.json': it cannot be read (No such file or directory); give the path of a case file",
            "*it is one of acme.faulty, not of acme.flash",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    with pytest.raises(ValueError, match="one case; give a list of cases"):
        plugin.fuzz("acme.flash", cases="AF1-abc")


# --- with pytest's own options


@pytest.mark.slow
def test_a_failure_under_xdist_is_short_and_in_junit_with_its_figures(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=FAILING, test_good=PASSING)
    result = pytest_of(acme, "-n", "2", "--junitxml", "junit.xml", "--attnfuzz-out", "found", "--attnfuzz-max-failures", "1")
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"] >= 2, outcomes["failed"] >= 1) == (True, True), outcomes
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.fnmatch_lines(
        [
            "seed 0: the same cases again by --attnfuzz-seed 0",
            "test_acme.py::test_kernel (acme.faulty): *, [1-9]* failure*",
            "test_good.py::test_kernel (acme.flash): 12 cases, 0 failures; worst error / budget 0.??*",
        ]
    )
    suite = ElementTree.parse(acme.path / "junit.xml").getroot()
    found: dict[str, list[dict[str, str]]] = {"acme.flash": [], "acme.faulty": []}
    for case in suite.iter("testcase"):
        properties = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        found[properties["attnfuzz.kernel"]].append({**properties, "failure text": case.findtext("failure") or ""})
    assert [len(each) for each in found.values()] == [2, 2]
    for properties in found["acme.flash"]:
        assert int(properties["attnfuzz.cases"]) >= 1
        assert 0 <= float(properties["attnfuzz.o.worst_error_over_budget"]) <= 1
        assert (properties["attnfuzz.failures"], properties["failure text"]) == ("0", "")
    failed = [each for each in found["acme.faulty"] if each["failure text"]]
    shrunk = [each for each in failed if each["attnfuzz.failures"] != "0"]
    assert len(shrunk) == 1
    assert all(each["attnfuzz.failures_elsewhere"] == "1" for each in failed if each not in shrunk)
    for properties in shrunk:
        assert properties["attnfuzz.failure"].startswith("acme.faulty: exception in forward")
        assert Path(acme.path / properties["attnfuzz.failure.case"]).is_file()
        assert "run it again:" in properties["failure text"]
        assert "more than 5 keys" in properties["failure text"]
        assert len(properties["failure text"].splitlines()) < 20
    assert len(failed) == outcomes["failed"]


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


def test_stop_at_first_and_last_failed(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_a=FAILING.replace("max_examples=40", "max_examples=40, shards=1"), test_b=PASSING)
    options = ("--attnfuzz-device", "cpu", "--attnfuzz-in-process", "--attnfuzz-out", "found", "--attnfuzz-seed", "0")
    first = acme.runpytest_inprocess("-x", *options)
    first.assert_outcomes(failed=1)
    first.stdout.fnmatch_lines(["*stopping after 1 failures*"])
    again = acme.runpytest_inprocess("--lf", *options)
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["*run-last-failure: rerun previous 1 failure*", "*found after 1 case,*"])


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
