"""compute-sanitizer's reports are read in every form, never taken for clean, and shown; on a GPU it names a planted write."""

from __future__ import annotations

import functools
import json
import os
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from support.calls import PROBLEM, WIDE, Subject
from support.mutants import kernel_of, mutants

from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.core import environment
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.harness.repro.sanitize import sanitize
from attnfuzz.harness.repro.sanitize.log import Finding, read_log
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.faults.planted import Edit, planted_copy
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

WRITE = """
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at forward+0xec0 in varlen_device.py:143
=========     by thread (18,0,0) in block (0,0,0)
=========     Access to 0x74505bcccca0 is out of bounds
=========     and is 161 bytes after the nearest allocation at 0x74505bccc800 of size 1,024 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch [0x1be2] in __triton_launcher.cpython-312-x86_64-linux-gnu.so
=========         Host Frame: _PyEval_EvalFrameDefault [0x19a31e] in python3.12
=========
========= Invalid __global__ write of size 2 bytes
=========     at forward+0xec0 in varlen_device.py:143
=========     by thread (19,0,0) in block (0,0,0)
=========     Access to 0x74505bcccca2 is out of bounds
=========     and is 163 bytes after the nearest allocation at 0x74505bccc800 of size 1,024 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch [0x1be2] in __triton_launcher.cpython-312-x86_64-linux-gnu.so
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call to cudaFree.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: cudaFree [0x5d21] in libcudart.so.12
=========
========= Target application returned an error
========= ERROR SUMMARY: 3 errors
"""
OLD_READ = """
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at 0x150 in /src/attention/flash_bwd.cu:210:void flash::bwd_kernel<64, true>(flash::Params)
=========     by thread (3,1,0) in block (7,0,2)
=========     Address 0x7f6cb5a00800 is out of bounds
=========     and is 1 bytes before the nearest allocation at 0x7f6cb5a00900 of size 256 bytes
=========     Device Frame:/src/attention/load.h:12:load(float const *) [0x60]
=========     Device Frame:/src/attention/flash_bwd.cu:210:void flash::bwd_kernel<64, true>(flash::Params) [0x150]
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: [0x2dcdbf]
=========                in /usr/lib/x86_64-linux-gnu/libcuda.so.1
=========
========= ERROR SUMMARY: 1 error
"""
MISALIGNED = """
========= Invalid __shared__ read of size 8 bytes
=========     at main_kernel+0x4b0
=========     by thread (1,0,0) in block (0,3,0)
=========     Address 0x1004 is misaligned
=========
========= ERROR SUMMARY: 1 error
"""
INSIDE = """
========= Invalid __global__ atomic of size 4 bytes
=========     at main_kernel+0x4b0
=========     by thread (1,0,0) in block (0,3,0)
=========     Access at 0x147267fff80 is out of bounds
=========     and is inside the nearest allocation at 0x14725400000 of size 20971520 bytes
=========
========= ERROR SUMMARY: 1 error
"""
RACE = """
========= COMPUTE-SANITIZER
========= Warning: Maximum number of hazards reached. Environment variable NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS can be used.
=========
========= Error: Race reported between Write access at main_kernel+0xa70 in gqa.cu:98
=========     and Read access at main_kernel+0xd5c0 in gqa.cu:312 [16 hazards]
=========     and Write access at main_kernel+0xd5e0 in gqa.cu:313 [1,024 hazards]
=========
========= Warning: Race reported between Read access at compress(const unsigned int *, uint2 *, int)+0x260
=========     and Write access at compress(const unsigned int *, uint2 *, int)+0x200 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
HAZARD = """
========= Error: Potential WAW hazard detected at __shared__ 0x40 in block (2,0,0) :
=========     Write Thread (5,0,0) at scan_kernel+0x1ab0 in warp_scan.cuh:146
=========     Write Thread (6,0,0) at scan_kernel+0x1ab0 in warp_scan.cuh:146
=========     Current Value : 7, Incoming Value : 8
=========
========= WARN:(Warp Level Programming) Potential RAW hazard detected at __shared__ 0xf4 in block (0, 0, 0) :
=========     Write Thread (24, 0, 0) at 0x00001ab0 in /src/warp_scan.cuh:146:scan_kernel
=========     Read Thread (7, 0, 0) at 0x00001b00 in /src/warp_scan.cuh:150:scan_kernel
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
INIT = """
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at 0x150 in void count_bits<int=256>(unsigned int const *,int,int,int*)
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7fc406200400
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at preprocess+0x290 in varlen_device.py:170
=========     by thread (1,0,0) in block (0,0,0)
=========     Access to 0x7fc406200400
=========
========= Host API memory access error at host access to 0x77cfa2a7dc00 of size 3,840 bytes
=========     Uninitialized access to 0x77cfa2a7dce0 on access by cudaMemcpy source
=========     Saved host backtrace up to driver entry point at error
=========
========= ERROR SUMMARY: 3 errors
"""
UNKNOWN = """
========= Barrier error detected. Divergent thread(s) in warp
=========     at main_kernel+0x130
=========     by thread (32,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
CLEAN = """
========= COMPUTE-SANITIZER
attnfuzz says nothing of its own
========= ERROR SUMMARY: 0 errors
"""


def only(text: str) -> Finding:
    log = read_log(text)
    assert log.notes == ()
    (finding,) = log.findings
    return finding


def test_a_write_out_of_bounds_by_two_threads_is_one_finding() -> None:
    assert only(WRITE) == Finding(
        kind="invalid global write",
        kernel="forward",
        code="forward+0xec0 in varlen_device.py:143",
        size=2,
        thread="(18,0,0)",
        block="(0,0,0)",
        address="0x74505bcccca0",
        nearest="is 161 bytes after the nearest allocation at 0x74505bccc800 of size 1,024 bytes",
        count=2,
    )
    assert read_log(WRITE).errors == 2


def test_the_form_of_older_versions_names_the_kernel_not_the_helper() -> None:
    finding = only(OLD_READ)
    assert (finding.kind, finding.kernel, finding.size) == ("invalid global read", "flash::bwd_kernel", 16)
    assert finding.nearest.startswith("is 1 bytes before the nearest allocation")


def test_misaligned_and_inside_an_allocation() -> None:
    assert (only(MISALIGNED).kind, only(MISALIGNED).nearest) == ("invalid shared read", "is misaligned")
    assert only(INSIDE).kind == "invalid global atomic"
    assert only(INSIDE).nearest == "is inside the nearest allocation at 0x14725400000 of size 20971520 bytes"


def test_races() -> None:
    first, second = read_log(RACE).findings
    assert (first.kind, first.kernel, first.severity, first.count) == ("race of a write", "main_kernel", "error", 1040)
    assert first.other == "read at main_kernel+0xd5c0 in gqa.cu:312; write at main_kernel+0xd5e0 in gqa.cu:313"
    assert (second.kernel, second.severity, second.count) == ("compress", "warning", 4)


def test_hazards() -> None:
    first, second = read_log(HAZARD).findings
    assert (first.kind, first.kernel, first.thread, first.block) == ("WAW hazard", "scan_kernel", "(5,0,0)", "(2,0,0)")
    assert first.other == "write by thread (6,0,0) at scan_kernel+0x1ab0 in warp_scan.cuh:146"
    assert (second.kind, second.kernel, second.severity) == ("RAW hazard", "scan_kernel", "warning")


def test_reads_of_what_was_never_written() -> None:
    kinds = [(each.kind, each.kernel) for each in read_log(INIT).findings]
    assert kinds == [
        ("uninitialised global read", "count_bits"),
        ("uninitialised global read", "preprocess"),
        ("uninitialised host copy", ""),
    ]


def test_a_kind_that_is_not_known_is_a_finding_nevertheless() -> None:
    assert (only(UNKNOWN).kind, only(UNKNOWN).kernel) == ("Barrier error detected. Divergent thread(s) in warp", "main_kernel")


def test_nothing_in_a_clean_report() -> None:
    log = read_log(CLEAN)
    assert (log.findings, log.errors, log.notes) == ((), 0, ())


# --- the command, with a sanitizer that is a script


def fake_sanitizer(folder: Path, body: str) -> None:
    """A compute-sanitizer on PATH; `body` knows `options`, `log(text)`, `result(stage, text)` and `child()`."""
    script = folder / "compute-sanitizer"
    script.write_text(
        f"#!{sys.executable}\n"
        + textwrap.dedent(
            """
            import json, os, subprocess, sys, time
            if sys.argv[1:] == ["--help"]:
                print("--tool --padding --racecheck-report --print-limit")
                sys.exit(0)
            options = dict(each.split("=", 1) for each in sys.argv[1:] if each.startswith("--"))
            def log(text):
                open(options["--log-file"].replace("%p", str(os.getpid())), "w").write(text)
            def result(stage, text=""):
                open(sys.argv[-1], "w").write(json.dumps({"stage": stage, "text": text}))
            """
        )
        + textwrap.dedent(body)
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run `attnfuzz repro case.json --sanitize ...` on a machine with a GPU and a sanitizer that does `body`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(environment, "has_cuda", lambda: True)
    monkeypatch.setattr(Subject, "unavailable", lambda self, device: None)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    subject = registry.register(Subject(capabilities=replace(WIDE, devices=("cuda",)), name="test.sanitized"))
    monkeypatch.setattr(sanitize, "shipped", lambda name: {"name": name})
    write_case(Case(kernel=subject.name, problem=PROBLEM))

    def run(body: str | None, *arguments: str) -> Result:
        if body is not None:
            fake_sanitizer(tmp_path / "bin", body)
        return CliRunner().invoke(cli.main, ["repro", "case.json", *(arguments or ("--sanitize", "memcheck"))])

    yield run
    registry.unregister(subject.name)


def write_case(case: Case, name: str = "case.json") -> None:
    Path(name).write_text(case.canonical())


def test_a_finding_ends_with_1_and_is_named(command) -> None:
    body = f"result('launched'); log({WRITE!r}); sys.exit(int(options['--error-exitcode']))"
    result = command(body)
    assert result.exit_code == 1, result.output
    assert "FOUND case.json under memcheck on cuda" in result.stdout
    for told in ("invalid global write of 2 bytes", "forward", "thread (18,0,0)", "161 bytes after the nearest allocation"):
        assert told in result.stdout
    again = json.loads(command(body, "--sanitize", "memcheck", "--json").stdout)
    assert again["clean"] is False
    assert again["findings"][0]["kernel"] == "forward"
    assert again["case"]["kernel"] == "test.sanitized"


def test_a_sanitizer_that_does_not_answer_is_told(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "_HELP_SECONDS", 0.001)
    result = command("")
    assert result.exit_code == 2
    assert "its --help printed nothing within 0.001 s" in result.stderr


def test_a_clean_run_ends_with_0_and_has_the_right_options_and_variables(command) -> None:
    body = f"""
    result("done")
    log({CLEAN!r})
    names = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "TRITON_INTERPRET")
    open("seen.json", "w").write(json.dumps([sys.argv, [os.environ.get(name) for name in names]]))
    """
    result = command(body, "--sanitize", "memcheck", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["clean"] is True
    arguments, variables = json.loads(Path("seen.json").read_text())
    assert variables == ["1", None]
    assert {"--tool=memcheck", "--target-processes=all", "--padding=65536"} <= set(arguments)
    assert not any("report-api-errors" in each for each in arguments), "this version does not know it"
    assert arguments[-4:-2] == ["-m", "attnfuzz.harness.repro.sanitize.child"]
    assert command(body, "--sanitize", "racecheck").exit_code == 0
    assert "--racecheck-report=analysis" in json.loads(Path("seen.json").read_text())[0]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("result('done'); log('========= ERROR SUMMARY: 2 errors')", "2 errors in a form that is not known here"),
        ("result('done'); sys.exit(86)", "some errors in a form that is not known here"),
        ("result('raised', 'RuntimeError: no')", "the kernel raised RuntimeError: no"),
        ("result('launched'); os.abort()", "the process died while the kernel ran (exit code -6)"),
    ],
)
def test_nothing_is_taken_for_clean(command, body: str, told: str) -> None:
    result = command(body)
    assert result.exit_code == 1, result.output
    assert told in result.stdout


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("print('========= Error: Device not supported'); sys.exit(1)", "Error: Device not supported"),
        ("result('refused', 'kernel=1: gone')", "kernel=1: gone"),
        ("result('started'); sys.exit(1)", "ended with code 1 before test.sanitized was launched"),
        ("result('broken', 'Traceback: ...')", "Traceback: ..."),
    ],
)
def test_a_run_that_came_to_nothing_ends_with_2(command, body: str, told: str) -> None:
    result = command(body)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: case.json: ")
    assert told in result.stderr


def test_the_deadline_ends_it_with_all_that_it_started(command) -> None:
    body = """
    child = subprocess.Popen(["sleep", "1000"])
    print(child.pid, file=open("pid", "w"), flush=True)
    time.sleep(1000)
    """
    result = command(body, "--sanitize", "memcheck", "--deadline", "3s")
    assert result.exit_code == 2
    assert "deadline='3s': the Case was not done under memcheck; give more time, such as --deadline 30m" in result.stderr
    state, end = Path(f"/proc/{Path('pid').read_text().strip()}/stat"), time.monotonic() + 20

    def ended() -> bool:
        try:
            return state.read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    while not ended() and time.monotonic() < end:
        time.sleep(0.05)
    assert ended()


def test_what_was_found_before_the_deadline_is_told(command) -> None:
    result = command(f"result('launched'); log({WRITE!r}); time.sleep(1000)", "--sanitize", "memcheck", "--deadline", "3s")
    assert result.exit_code == 1
    assert "the deadline passed: there may be more to find" in result.stdout
    assert "invalid global write" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--sanitize", "valgrind"), "sanitize='valgrind': compute-sanitizer has no such tool; use one of memcheck, racecheck, "),
        (("--sanitize", "memcheck", "--device", "cpu"), "device='cpu': compute-sanitizer watches a GPU"),
        (("--sanitize", "memcheck", "--in-process"), "in_process=True: compute-sanitizer watches a process of its own"),
    ],
)
def test_wrong_use_ends_with_2(command, arguments: tuple[str, ...], told: str) -> None:
    result = command(None, *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_without_a_gpu_it_ends_with_2(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_cuda", lambda: False)
    assert "compute-sanitizer watches a GPU" in command(None).stderr
    assert "torch sees no CUDA device" in command(None, "--sanitize", "memcheck", "--device", "cuda").stderr


def test_a_case_that_the_kernel_does_not_take_ends_with_2(command) -> None:
    write_case(Case(kernel="test.sanitized", problem=replace(PROBLEM, dtype="float16")))
    assert "test.sanitized does not support it" in command(None).stderr


def test_where_the_program_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize, "_TOOLKITS", tmp_path)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BadArgument, match="install the CUDA toolkit's compute-sanitizer, or set CUDA_HOME"):
        sanitize.sanitizer_program()
    for folder in ("cuda-12.4/bin", "home/bin"):
        (tmp_path / folder).mkdir(parents=True)
        fake_sanitizer(tmp_path / folder, "")
    assert sanitize.sanitizer_program() == str(tmp_path / "cuda-12.4/bin/compute-sanitizer")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert sanitize.sanitizer_program() == str(tmp_path / "home/bin/compute-sanitizer")


# --- the child


def in_child(tmp_path: Path, case: Case) -> dict[str, Any]:
    task, result = tmp_path / "task.json", tmp_path / "result.json"
    task.write_text(json.dumps({"kernel": shipped(case.kernel), "case": case.canonical(), "device": "cpu"}))
    done = subprocess.run(
        [sys.executable, "-m", "attnfuzz.harness.repro.sanitize.child", task, result], check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def test_the_child_launches_the_case_and_what_comes_before_it(tmp_path: Path) -> None:
    problem = replace(PROBLEM, dtype="float32")
    case = Case(kernel="torch.reference_cpu", problem=problem, config=Config(), check="other_shape")
    assert in_child(tmp_path, case) == {"stage": "done", "text": ""}


def test_the_child_tells_what_the_kernel_raises(tmp_path: Path) -> None:
    case = Case(kernel="fault.raises", problem=PROBLEM, config=Config(tile_m=16, tile_n=16))
    found = in_child(tmp_path, case)
    assert found["stage"] == "raised"
    assert "planted: this kernel raises" in found["text"]


def test_the_child_tells_why_it_refuses(tmp_path: Path) -> None:
    case = Case(kernel="torch.reference_cpu", problem=replace(PROBLEM, dtype="float16"))
    assert in_child(tmp_path, case)["stage"] == "refused"


# --- on a GPU


def _on_gpu(case: Case, tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    try:
        sanitize.sanitizer_program()
    except BadArgument as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    write_case(case)
    result = CliRunner().invoke(cli.main, ["repro", "case.json", "--sanitize", tool, "--device", "cuda", "--json"])
    assert result.exit_code != 2, result.stderr[-500:]
    return result


ROW_PAST_O = Edit(
    "    lse_offsets = head.to(",
    "    past = lse_stride.to(tl.int64) * heads * DIM_V + tl.arange(0, PAD_V)\n"
    "    tl.store(o + past, tl.zeros([PAD_V], o.dtype.element_ty))\n"
    "    lse_offsets = head.to(",
)


@pytest.mark.gpu
def test_gpu_memcheck_names_a_row_written_past_o(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnfuzz.kernels.triton.varlen import TritonVarlen

    code = functools.partial(planted_copy, "attnfuzz.kernels.triton.varlen_device", [ROW_PAST_O])
    kernel = TritonVarlen(name="test.row_past_o", device_code=code)
    problem = Problem(seqlens_q=(5,), seqlens_k=(5,), dim_qk=64, dim_v=64)
    registry.register(kernel)
    try:
        case = Case(kernel=kernel.name, problem=problem, config=kernel.configs(problem)[0])
        result = _on_gpu(case, "memcheck", tmp_path, monkeypatch)
    finally:
        registry.unregister(kernel.name)
    assert result.exit_code == 1, result.output
    finding = json.loads(result.stdout)["findings"][0]
    assert finding["kind"] == "invalid global write", finding
    assert finding["kernel"] == "forward", finding
    assert "after the nearest allocation" in finding["nearest"], finding
    assert "of size 640 bytes" in finding["nearest"], "5 rows of 64 fp16"


@pytest.mark.gpu
def test_gpu_initcheck_names_a_workspace_assumed_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(mutants()["HST-30"])
    problem = Problem(seqlens_q=(5,), seqlens_k=(5,), dim_qk=64, dim_v=64)
    registry.register(kernel)
    try:
        case = Case(kernel=kernel.name, problem=problem, config=kernel.configs(problem)[0])
        result = _on_gpu(case, "initcheck", tmp_path, monkeypatch)
    finally:
        registry.unregister(kernel.name)
    assert result.exit_code == 1, result.output
    findings = json.loads(result.stdout)["findings"]
    assert ("uninitialised global read", "preprocess") in [(each["kind"], each["kernel"]) for each in findings], findings


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
def test_gpu_a_right_kernel_is_clean(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(seqlens_q=(5, 0, 70), seqlens_k=(5, 3, 33), heads=2, dim_qk=64, dim_v=64, slack_q=1, slack_k=2)
    case = Case(kernel="triton.varlen", problem=problem, config=registry.get("triton.varlen").configs(problem)[0])
    result = _on_gpu(case, tool, tmp_path, monkeypatch)
    assert result.exit_code == 0, result.output
