"""`check`: a kernel as it is on disk at each call, tried from a program that is left as it was."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.peers import Right
from support.schema import wrong

from attnfuzz.harness import Checker, CheckResult, check
from attnfuzz.harness.audit.subject import reference
from attnfuzz.kernels import BadArgument, registry

SOURCE = """
import torch


def attend(q, k, v, softmax_scale=None):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v.float() * 1.00).to(q.dtype)
"""


def attend(q: Any, k: Any, v: Any, softmax_scale: float | None = None) -> Any:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v.float()).to(q.dtype)


def half_of_it(q: Any, k: Any, v: Any, softmax_scale: float | None = None) -> Any:
    return attend(q, k, v, softmax_scale) / 2


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    with Checker("cpu") as each:
        yield each


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel's file, whose folder is on sys.path; each test's module has a name of its own."""
    path = tmp_path / f"written_{os.getpid()}_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return path


def sentence(result: CheckResult) -> str:
    assert not list(wrong(result.to_object(), "Check"))
    return result.reason


# --- wrong use


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no name": ("no.such", {}, "kernel='no.such': no kernel of that name is installed"),
    "no seconds": (attend, {"seconds": 0}, "seconds=0: must be positive"),
    "endless": (attend, {"seconds": None}, "seconds=None: without max_examples it would not end"),
    "infinite": (attend, {"seconds": float("inf")}, "seconds=inf: it is not a finite number"),
    "seconds as text": (attend, {"seconds": "10s"}, "seconds='10s': it is not a finite number"),
    "no examples": (attend, {"max_examples": 0}, "max_examples=0: must be positive"),
    "half an example": (attend, {"max_examples": 1.5}, "max_examples=1.5: it is not a finite number; give an integer"),
    "true for a number": (attend, {"max_failures": True}, "max_failures=True: it is not a finite number"),
    "no seed": (attend, {"seed": None}, "seed=None: it is not a finite number"),
    "a negative seed": (attend, {"seed": -1}, "seed=-1: must not be negative"),
    "a class": (Right, {}, "kernel='Right': it is a class; give an instance"),
    "a number": (3, {}, "it is neither a kernel (it lacks "),
    "a lambda": (lambda q, k, v: q, {}, "write it into a module, or give in_process=True"),
    "what cannot be passed": (attend, {"backward": attend}, "it cannot be passed to another process; "),
}


@pytest.mark.parametrize(("kernel", "options", "text"), list(WRONG.values()), ids=list(WRONG))
def test_wrong_use_raises_and_starts_nothing(kernel: Any, options: dict[str, Any], text: str, checker: Checker) -> None:
    if kernel == "no.such":
        kernel, options = "no.such", {"in_process": True}
    with pytest.raises(BadArgument) as raised:
        checker.check(kernel, **options)
    assert text in str(raised.value)


def test_an_unknown_device_is_wrong_use() -> None:
    with pytest.raises(BadArgument, match="device='tpu': no such device"):
        check(attend, device="tpu")  # type: ignore[arg-type]


def test_what_another_process_imports() -> None:
    assert reference("triton.varlen") == {"name": "triton.varlen"}
    assert reference("a.b:C") == {"target": "a.b:C"}
    found = reference(attend)
    assert (found["module"], found["path"], found["file"]) == (__name__, "attend", __file__)
    assert set(reference(functools.partial(attend, softmax_scale=1.0))) == {"name", "pickle", "modules"}
    kernel = registry.get("torch.reference_cpu")
    assert reference(kernel)["path"] == "KERNEL"


# --- in this process


def sets_a_variable(q: Any, k: Any, v: Any, softmax_scale: float | None = None) -> Any:
    os.environ["ATTNFUZZ_TEST_KEPT"], os.environ["ATTNFUZZ_TEST_ADDED"] = "changed", "1"
    return attend(q, k, v, softmax_scale)


def test_in_this_process_it_restores_variables_that_the_kernel_or_torch_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNFUZZ_TEST_KEPT", "kept")
    before = dict(os.environ)
    assert check(sets_a_variable, None, device="cpu", max_examples=1, in_process=True).cases == 1
    assert dict(os.environ) == before


def test_in_this_process_it_leaves_everything_as_it_was(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = (torch.get_num_threads(), dict(os.environ), registry.names(), list(sys.path), os.getcwd())  # noqa: PTH109
    result = check(attend, None, device="cpu", max_examples=4, in_process=True)
    assert result.ok, sentence(result)
    assert result.cases == 4
    assert set(result.outputs) == {"o", "dq", "dk", "dv"}
    assert all(0 < each.worst <= 1 for each in result.outputs.values())
    after = (torch.get_num_threads(), dict(os.environ), registry.names(), list(sys.path), os.getcwd())  # noqa: PTH109
    assert after == before
    assert capfd.readouterr() == ("", "")


def test_a_failure_has_all_that_a_program_needs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "max_examples": 4, "in_process": True}
    result = check(half_of_it, None, **options, out=tmp_path / "kept")
    assert not result.ok
    (failure,) = result.failures
    assert failure.id == "half_of_it/mismatch/o/element"
    assert failure.case is not None
    assert failure.case.problem.seqlens_q == (1,)
    assert failure.blob is not None
    assert failure.blob.startswith("AF1-")
    assert failure.path is not None
    assert Path(failure.path).is_file()
    assert "Everywhere: the values expected, times 0.5" in failure.text
    assert failure.minimal
    assert sentence(result) == f"1 failure: {failure.id}"
    again = check(half_of_it, None, **options, seed=1)
    assert [each.id for each in again.failures] == [failure.id]
    assert again.failures[0].path is None


def test_a_result_has_no_truth_value() -> None:
    result = check(attend, None, device="cpu", max_examples=1, in_process=True)
    with pytest.raises(TypeError, match=r"ask result\.ok"):
        bool(result)
    assert "causal" not in result.never_drawn
    assert set(result.never_drawn["dtype"]) < {"float16", "bfloat16", "float32"}
    assert not list(wrong(result.to_object(), "Check"))


def test_only_some_configs_are_tried() -> None:
    tiles = {"tile_m": 32, "tile_n": 16}
    result = check(half_of_it, None, device="cpu", max_examples=3, in_process=True, configs=[tiles])
    assert result.failures[0].case is not None
    assert dict(result.failures[0].case.config) == tiles
    with pytest.raises(BadArgument, match="nothing would be tried"):
        check("torch.reference_cpu", None, device="cpu", max_examples=3, in_process=True, configs=[])


def test_what_a_function_declares_is_drawn() -> None:
    result = check(attend, None, device="cpu", max_examples=3, in_process=True, dims=((16, 16),), unequal=True)
    assert result.ok, sentence(result)
    with pytest.raises(BadArgument, match="Capabilities have no such field"):
        check(attend, None, device="cpu", max_examples=3, in_process=True, dimensions=3)
    with pytest.raises(BadArgument, match="declares its capabilities itself"):
        check("torch.reference_cpu", None, device="cpu", max_examples=3, in_process=True, unequal=True)


# --- as it is on disk


def test_each_call_sees_the_file_as_it_is(module: Path, checker: Checker) -> None:
    """The new source has the size and the time of the old one, and this process has imported, and compiled, the old one."""
    target = f"{module.stem}:attend"
    old = __import__(module.stem).attend
    right = checker.check(target, None, max_examples=1)
    assert right.ok, sentence(right)
    stamp = module.stat()
    module.write_text(SOURCE.replace("1.00", "1.25"))
    os.utime(module, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    for kernel in (target, old):
        result = checker.check(kernel, None, max_examples=2)
        assert [each.id for each in result.failures] == ["attend/mismatch/o/element"], sentence(result)
    module.write_text(SOURCE)
    assert checker.check(old, None, max_examples=1).ok
    assert sys.modules[module.stem].attend is old, "this process has what it had"


def test_a_call_that_takes_a_second_is_waited_for(module: Path, checker: Checker) -> None:
    """A child that runs for longer than half a second is looked at."""
    module.write_text(
        SOURCE.replace("import torch", "import time\n\nimport torch").replace("    scale", "    time.sleep(0.7)\n    scale")
    )
    result = checker.check(f"{module.stem}:attend", None, max_examples=1)
    assert result.ok, sentence(result)


BROKEN = {
    "a syntax error": ("def attend(q, k, v:\n", "SyntaxError"),
    "an exception at its import": (f"{SOURCE}\nraise RuntimeError('not today')\n", "RuntimeError: not today"),
    "an end at its import": (f"{SOURCE}\nimport os\nos._exit(0)\n", "exit code 0 while its module was imported"),
    "sys.exit at its import": (f"{SOURCE}\nimport sys\nsys.exit(0)\n", "SystemExit"),
    "a crash at its import": (f"{SOURCE}\nimport os\nos.abort()\n", "SIGABRT"),
    "no such module there": (f"import no_such_module\n{SOURCE}", "ModuleNotFoundError: No module named 'no_such_module'"),
}


def test_a_module_that_cannot_be_imported_fails_and_the_next_call_goes_on(module: Path, checker: Checker) -> None:
    target, ids = f"{module.stem}:attend", set()
    for name, (source, text) in BROKEN.items():
        module.write_text(source)
        result = checker.check(target, None, max_examples=1)
        assert not result.ok, name
        assert text in sentence(result) + result.failures[0].message, name
        assert result.failures[0].case is None
        ids.add(result.failures[0].id)
    assert len(ids) == len(BROKEN)
    module.write_text(SOURCE.replace("attend", "attention"))
    with pytest.raises(BadArgument, match=f"module '{module.stem}' has no 'attend'"):
        checker.check(target, None, max_examples=1)
    module.write_text(SOURCE)
    assert checker.check(target, None, max_examples=1).ok


@pytest.mark.parametrize("safe", [False, True])
def test_a_module_of_the_current_folder_is_looked_for_as_python_does(
    safe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where PYTHONSAFEPATH or -P forbids it. Only what is passed to the other process is looked at: a start takes seconds."""
    (tmp_path / "ev_here.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "flags", SimpleNamespace(safe_path=safe))
    paths: list[list[str]] = []

    class Passed(Exception):
        pass

    def ready(self: Checker) -> Any:
        def run(task: Any) -> Any:
            paths.append(task.payload["path"])
            raise Passed

        return SimpleNamespace(run=run, close=lambda: None)

    monkeypatch.setattr(Checker, "_ready", ready)
    with Checker("cpu") as own, pytest.raises(Passed):
        own.check("ev_here:KERNEL", None, max_examples=1)
    assert (str(tmp_path) in paths[0]) != safe


def test_the_main_module_has_one_name_in_a_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """multiprocessing, which torch imports, lists it a second time."""
    (tmp_path / "script.py").write_text("def attend(q, k, v): ...\n")
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "script.py")
    exec((tmp_path / "script.py").read_text(), main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    assert reference(main.attend) == {"module": "__attnfuzz_main__", "file": main.__file__, "path": "attend"}


SCRIPT = """
from attnfuzz.harness import Checker
import torch


def attend(q, k, v):
    return (q.float() @ k.float().transpose(-1, -2)).softmax(-1) @ v.float()


{guard}
    try:
        with Checker("cpu") as checker:
            print(checker.check(attend, None, max_examples=1, layout="bhsd", gradients=False).cases)
    except ValueError as error:
        if __name__ != "__main__":
            raise
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guard", "stdin", "text"),
    [
        ('if __name__ == "__main__":', False, "1"),
        ("if True:", False, "calls check while it is imported; put the call under `if __name__"),
        ("if True:", True, "it is defined in a session or notebook"),
    ],
    ids=["a script", "an unguarded script", "a session"],
)
def test_a_function_of_the_main_module(guard: str, stdin: bool, text: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard=guard))
    command = [sys.executable, "-"] if stdin else [sys.executable, str(script)]
    content = script.read_text() if stdin else None
    done = subprocess.run(command, input=content, capture_output=True, text=True, check=False, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert text in done.stdout


@pytest.mark.slow
def test_a_hang_and_a_crash_of_the_kernel_are_failures_and_nothing_is_left(module: Path) -> None:
    with Checker("cpu") as checker:
        module.write_text(f"import os, time\n{SOURCE}".replace("    s = ", "    time.sleep(99)\n    s = "))
        result = checker.check(f"{module.stem}:attend", 20, deadline=1.0)
        assert [each.kind for each in result.failures] == ["hang"], sentence(result)
        module.write_text(f"import os, time\n{SOURCE}".replace("    s = ", "    os.abort()\n    s = "))
        result = checker.check(f"{module.stem}:attend", 20)
        assert [each.kind for each in result.failures] == ["crash"], sentence(result)
        assert checker._supervisor is not None
        run = checker._supervisor._forkserver.run
    marked = [each for each in Path("/proc").glob("[0-9]*/environ") if run.encode() in _content(each)]
    assert not marked


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_the_first_verdict_of_a_changed_triton_kernel_takes_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 s on an idle machine of two cores; other tests may run at the same time here."""
    example = Path(__file__).parents[3] / "examples" / "my_attention" / "src" / "my_attention"
    package = tmp_path / "changed_attention"
    package.mkdir()
    for each in example.glob("*.py"):
        (package / each.name).write_text(each.read_text().replace("from my_attention", "from changed_attention"))
    monkeypatch.syspath_prepend(tmp_path)
    with Checker("cpu") as checker:
        checker.check("changed_attention.subject:KERNEL", None, max_examples=1)
        kernels = package / "kernels.py"
        kernels.write_text(f"{kernels.read_text()}\n# Changed.\n")
        start = time.monotonic()
        result = checker.check("changed_attention.subject:KERNEL", None, max_examples=1)
        assert result.ok, sentence(result)
        assert time.monotonic() - start < 15
