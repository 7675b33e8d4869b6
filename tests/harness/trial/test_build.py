"""Who may compile and load code at the same time."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from attnfuzz.harness.trial import build
from attnfuzz.harness.trial.build import build_kernel
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import BuildError, Capabilities, Config
from attnfuzz.kernels.errors import BadArgument, WrongProcess
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.process_setup import ProcessSetup
from attnfuzz.strategies.case import Case

PROBLEM = Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=16, dim_v=16)


def is_locked(lock: Path) -> bool:
    """Whether another process could not even load."""
    with lock.open("a+") as other:
        try:
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Compiles:
    """A kernel whose `build` says which lock it holds."""

    name, backend = "test.compiles", "test"
    files: tuple[str, ...] = ()
    capabilities = Capabilities(dtypes=("float16",), dims=((16, 16),), devices=("cpu",), compiles_on=("cpu",))

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folder, self.error, self.alone = folder, error, list[bool]()

    def compile_key(self, problem: Problem, config: Config) -> str:
        return "key"

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        return (Config(),)

    def supports(self, *_: Any) -> None:
        return None

    def build(self, *_: Any) -> Any:
        if self.capabilities.compiles_on:
            self.alone.append(any(map(is_locked, (self.folder / "attnfuzz" / "locks").iterdir())))
        if self.error is not None:
            raise self.error
        return object()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_ready", set())
    return tmp_path


def built(kernel: Any) -> None:
    """Build as a process does that has not built it before."""
    build._ready.clear()
    build_kernel(kernel, PROBLEM, Config(), "cpu")


def test_only_the_first_process_compiles_alone(folder: Path) -> None:
    kernel = Compiles(folder)
    for _ in range(3):
        built(kernel)
    assert kernel.alone == [True, False, False]


def test_after_a_compile_that_failed_the_next_one_is_alone_again(folder: Path) -> None:
    kernel = Compiles(folder, ValueError("refused"))
    for _ in range(2):
        with pytest.raises(BuildError, match="refused"):
            built(kernel)
    kernel.error = None
    built(kernel)
    built(kernel)
    assert kernel.alone == [True, True, True, False]


def test_a_process_waits_while_another_compiles(folder: Path) -> None:
    kernel, entered, leave = Compiles(folder), threading.Event(), threading.Event()
    waiting = threading.Thread(target=built, args=(Compiles(folder),))

    class Slow(Compiles):
        def build(self, *arguments: Any) -> Any:
            entered.set()
            leave.wait(10)
            return super().build(*arguments)

    slow = threading.Thread(target=built, args=(Slow(folder),))
    slow.start()
    assert entered.wait(10)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    leave.set()
    for each in (slow, waiting):
        each.join(10)
        assert not each.is_alive()
    built(kernel)
    assert kernel.alone == [False]


def test_changed_sources_are_compiled_by_one_process_again(folder: Path) -> None:
    source = folder / "kernel.py"
    source.write_text("one")
    kernel = Compiles(folder)
    kernel.files = (str(source), str(folder / "gone.py"))
    built(kernel)
    source.write_text("another")
    built(kernel)
    built(kernel)
    assert kernel.alone == [True, True, False]


def test_one_process_compiles_alone_for_another_ptxas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    kernel = Compiles(folder)
    built(kernel)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    built(kernel)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/usr/local/cuda/bin/ptxas")
    built(kernel)
    built(kernel)
    assert kernel.alone == [True, False, True, False]


def test_variables_of_the_kernel_before_do_not_matter(folder: Path) -> None:
    """They are there until the next kernel is built, whose lock other processes know by its own."""
    first, second = Compiles(folder), Compiles(folder)
    first.name, second.name = "test.first", "test.second"
    cast(Any, first).process = ProcessSetup.of({"TRITON_F32_DEFAULT": "ieee"}, None)
    for kernel in (second, first, second, first):
        built(kernel)
    assert (first.alone, second.alone) == ([True, False], [True, False])


def test_a_refusal_of_what_a_kernel_supports_is_its_failure() -> None:
    class Refuses(Compiles):
        name = "test.refuses"

        def unavailable(self, _: str) -> None:
            return None

    kernel = registry.register(Refuses(Path(), BadArgument("problem: only lengths of 64; give such lengths")))
    kernel.capabilities = replace(kernel.capabilities, compiles_on=())
    try:
        verdict = run_trial(Case(kernel=kernel.name, problem=PROBLEM), "cpu")
    finally:
        registry.unregister(kernel.name)
    failure = verdict.failure
    assert failure is not None
    assert (failure.kind, failure.check) == ("compile-error", "build")
    assert "only lengths of 64" in failure.message
    assert "supports()" in failure.message


@pytest.mark.parametrize("supported", [True, False])
def test_a_request_for_another_process_is_no_failure_of_the_kernel(supported: bool, folder: Path) -> None:
    kernel = Compiles(folder, WrongProcess("device='cuda': use another process") if supported else BadArgument("dim_qk"))
    kernel.capabilities = replace(kernel.capabilities, compiles_on=())
    kernel.supports = lambda *_: None if supported else "not this one"  # type: ignore[method-assign]
    with pytest.raises(BadArgument, match="another process" if supported else "dim_qk"):
        build_kernel(kernel, PROBLEM, Config(), "cpu")
