"""The compile service: breadth first over kernels, each key once, and marks of what earlier runs have compiled."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from support.engine import Compiling
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign import compiles as compiles_module
from attnfuzz.harness.campaign.compiles import CompileService, Wanted
from attnfuzz.harness.campaign.journal import left_behind
from attnfuzz.harness.campaign.marks import Marks
from attnfuzz.harness.isolation.executors import Compiled, Compiler, SerialCompiler
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.process_setup import ProcessSetup
from attnfuzz.strategies.case import Case, Recipe

DESCRIBED = {"device": "cpu", "versions": {"torch": "2.9"}}
REFUSED = Failure(kernel="a", kind="compile-error", check="build", message="refused")


def case(kernel: str, number: int) -> Case:
    return Case(kernel=kernel, problem=Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=8, dim_v=8), recipe=Recipe(seed=number))


class Compilers(FunctionExecutor):
    """Compilers whose result a function makes, one compile in each poll."""

    def __init__(self, result: Callable[[Case], Compiled] = lambda each: Compiled(each, 0.5)) -> None:
        super().__init__(lambda _: Verdict(status="pass"))
        self.result = result
        self.compilers: list[Compiler] = []

    def compiler(self) -> Compiler:
        self.compilers.append(SerialCompiler(self.result))
        return self.compilers[-1]


class Service(CompileService):
    """A service that remembers what it reports."""

    def __init__(self, executor: FunctionExecutor, width: int | None = 1, out: Path | None = None, marks: Marks | None = None):
        self.done: list[tuple[str, str, bool]] = []
        self.known: list[tuple[str, str]] = []
        self.not_kept: list[OSError] = []
        super().__init__(
            executor,
            width,
            str(out) if out else None,
            finished=self._add,
            known=lambda kernel, key: self.known.append((kernel, key)),
            not_written=lambda _, error: self.not_kept.append(error),
            marks=marks or Marks("cpu", {}),
        )

    def _add(self, wanted: Wanted, done: Compiled) -> None:
        self.done.append((wanted.kernel, wanted.key, done.failure is None and done.error is None))

    def all(self) -> list[tuple[str, str]]:
        """Compile until nothing is pending; returns the order."""
        while self.pending():
            self.poll(0.01)
        return [each[:2] for each in self.done]


def test_every_kernels_first_comes_before_any_kernels_second() -> None:
    service = Service(Compilers())
    for kernel in "abc":
        service.want(kernel, {str(number): case(kernel, number) for number in range(3)})
    # Later ones of a kernel wait behind its own, not behind those of the others.
    service.want("d", {"0": case("d", 0)})
    assert service.pending() == 10
    assert service.pending("a") == 3
    order = service.all()
    assert order[:4] == [("a", "0"), ("b", "0"), ("c", "0"), ("d", "0")]
    assert order[4:] == [(kernel, key) for key in "12" for kernel in "abc"]


def test_the_code_of_a_kernel_without_any_trial_comes_before_its_own_second_and_one_before_any() -> None:
    seconds = {"a": 8.0, "b": 1.0, "c": 1.0}
    service = Service(Compilers(lambda each: Compiled(each, seconds[each.kernel])))
    for kernel in "abc":
        service.want(kernel, {str(number): case(kernel, number) for number in range(4)})
    # Its own variants wait like the others; its Cases need other code.
    service.want("a", {f"drawn {number}": case("a", 10 + number) for number in range(5)}, drawn=True, soon=True)
    order = service.all()
    assert order[:4] == [*((kernel, "0") for kernel in "abc"), ("a", "drawn 0")]
    drawn = [f"drawn {number}" for number in range(5)]
    assert [key for kernel, key in order if kernel == "a"] == ["0", *drawn[:3], "1", "2", "3", *drawn[3:]]
    # The others have as much time meanwhile.
    assert {kernel for kernel, _ in order[4:10]} == {"b", "c"}


def test_variants_and_the_other_code_that_cases_need_come_in_turn() -> None:
    """That of sinks, say, came after all variants, of which a long run has 96."""
    service = Service(Compilers())
    service.want("a", {f"variant {number}": case("a", number) for number in range(6)})
    service.poll()
    # Once a Case can run, none comes before the second variants of kernels.
    drawn = {f"drawn {number}": case("a", 10 + number) for number in range(4)}
    service.poll(0.01)
    assert service.want("a", {"variant 0": case("a", 0), **drawn}, drawn=True, soon=True)["variant 0"] == "ready"
    names = [key.replace("variant ", "v").replace("drawn ", "d") for _, key in service.all()]
    assert names == ["v0", "v1", "v2", "v3", "v4", "d0", "v5", "d1", "d2", "d3"]


def test_what_an_earlier_run_has_compiled_changes_no_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnfuzz.harness.campaign.marks.cache.folder", lambda name: tmp_path / name)
    marks = Marks("cpu", DESCRIBED)
    for key in ("v0", "v1", "v2", "d0", "d1"):
        marks.add("torch.reference_cpu", key)

    def cases(of: str) -> dict[str, Case]:
        return {f"{of}{number}": case(of, number) for number in range(6)}

    service = Service(Compilers(), marks=marks)
    service.want("torch.reference_cpu", cases("v"))
    service.want("torch.reference_cpu", cases("d"), drawn=True)
    assert [key for _, key in service.all()] == ["v3", "v4", "v5", "d2", "d3", "d4", "d5"]


def test_all_but_the_first_compiles_share_the_time_of_the_compilers() -> None:
    seconds = {"slow": 40.0, "fast": 8.0}
    service = Service(Compilers(lambda each: Compiled(each, seconds[each.kernel])))
    for kernel in seconds:
        service.want(kernel, {str(number): case(kernel, number) for number in range(12)})
    order = [kernel for kernel, _ in service.all()]
    # 40 s of one kernel, then as much of the other, five compiles, before the second of the first, and so on.
    assert order[:12] == ["slow", *["fast"] * 5] * 2


def test_a_kernel_whose_cases_all_need_other_code_gets_it_soon_though_one_case_can_run() -> None:
    """It is the simplest, of the variant's own code: torch.flex_modified has 4 such Cases in 99."""
    names = {}
    for count in (7, 8):
        service = Service(Compilers())
        service.want("a", {f"variant {number}": case("a", number) for number in range(4)})
        service.poll()
        service.poll(0.01)
        drawn = {f"drawn {number}": case("a", 10 + number) for number in range(count - 1)}
        service.want("a", {"variant 0": case("a", 0), **drawn}, drawn=True, soon=True)
        names[count] = [key.split()[0] for _, key in service.all()][:6]
    assert names == {7: ["variant"] * 4 + ["drawn"] * 2, 8: ["variant"] * 2 + ["drawn"] * 3 + ["variant"]}


def test_what_waits_is_not_looked_at_whole_for_each_compile() -> None:
    """Workers of many kernels ask for tens of thousands of compiles, which one process begins between Trials."""
    service = Service(Compilers())
    for kernel in "abc":
        service.want(kernel, {str(number): case(kernel, number) for number in range(1000)})
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        for _ in range(10):
            service.poll(0.01)
    finally:
        sys.setprofile(None)
    assert (service.pending(), len(service.done)) == (2990, 10)
    assert calls < 10 * 500


def test_the_time_of_a_compile_at_work_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(compiles_module.time, "monotonic", lambda: now[0])
    started: list[tuple[str, int]] = []
    monkeypatch.setattr(SerialCompiler, "start", lambda compiler, each: _start(compiler, each))

    def _start(compiler: SerialCompiler, each: Case) -> None:
        started.append((each.kernel, each.recipe.seed))
        compiler._waiting.append(each)

    service = Service(Compilers(), width=3)
    for kernel in "ab":
        service.want(kernel, {str(number): case(kernel, number) for number in range(6)})
    service.poll()
    for _ in range(3):
        now[0] += 10.0
        service.poll(1.0)
    # After 20 s the second of "a" is at work since the beginning, that of "b" since 10 s; after 30 s only "b" has some at work.
    assert started == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]


def test_a_key_is_compiled_once_and_its_state_is_known() -> None:
    service = Service(Compilers(lambda each: Compiled(each, 0.1, REFUSED if each.recipe.seed else None)))
    assert service.state("a", "x") is None
    assert service.want("a", {"x": case("a", 0), "y": case("a", 1)}) == {"x": "waiting", "y": "waiting"}
    assert service.want("a", {"x": case("a", 5)}) == {"x": "waiting"}
    assert service.all() == [("a", "x"), ("a", "y")]
    assert service.want("a", {"x": case("a", 0), "y": case("a", 1)}) == {"x": "ready", "y": "failed"}
    assert service.want("b", {"x": case("b", 0)}) == {"x": "waiting"}, "a key is of one kernel"


def test_a_kernel_that_is_tried_no_further_is_not_compiled() -> None:
    service = Service(Compilers())
    for kernel in "ab":
        service.want(kernel, {str(number): case(kernel, number) for number in range(2)})
    service.drop("a")
    assert (service.pending("a"), service.pending("b")) == (0, 2)
    assert service.all() == [("b", "0"), ("b", "1")]


def test_a_kernel_that_no_child_can_load_is_an_error_of_its_own() -> None:
    """The compiler refuses to start it: the others are compiled."""

    class Refusing(SerialCompiler):
        def start(self, case: Case) -> None:
            if case.kernel == "a":
                raise BadArgument("kernel='a': a child process cannot be given it")
            super().start(case)

    class Executor(Compilers):
        def compiler(self) -> Compiler:
            return Refusing(self.result)

    service = Service(Executor())
    service.want("a", {"0": case("a", 0)})
    service.want("b", {"0": case("b", 0)})
    service.all()
    assert service.done == [("a", "0", False), ("b", "0", True)]


def test_workers_take_cores_from_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiles_module.os, "sched_getaffinity", lambda _: set(range(8)))
    service = Service(Compilers(), width=None)
    widths = []
    for workers in (0, 2, 4, 16):
        service.workers = workers
        widths.append(service.width)
    assert widths == [8, 6, 4, 2], "down to a quarter"
    assert service.room_for_workers() > 1000
    service.want("a", {str(number): case("a", number) for number in range(9)})
    assert (service.width, service.room_for_workers()) == (4, 4), "a kernel without a compiled variant: half"
    assert Service(Compilers(), width=3).width == 3


def test_a_kernel_with_code_of_an_earlier_run_waits_for_no_first_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do workers wait for it, or kernels that have nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    executor = Compilers()
    earlier = Service(executor, marks=Marks("cpu", DESCRIBED))
    earlier.want(KERNEL, {"1": case(KERNEL, 1)})
    earlier.all()
    service = Service(executor, marks=Marks("cpu", DESCRIBED))
    states = service.want(KERNEL, {"0": case(KERNEL, 0), "1": case(KERNEL, 1)})
    assert states == {"0": "waiting", "1": "ready"}
    assert service.room_for_workers() > 1000
    other = "triton.varlen"
    service.want(other, {"0": case(other, 0)})
    assert service.all() == [(other, "0"), (KERNEL, "0")]


def test_code_of_another_ptxas_is_no_code_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children would compile it in their trials."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    Marks("cpu", DESCRIBED).add(KERNEL, "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert Marks("cpu", DESCRIBED).has(KERNEL, "1"), "the mode belongs to a process, and the device is in the mark"
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/usr/local/cuda/bin/ptxas")
    marks = Marks("cpu", DESCRIBED)
    assert not marks.has(KERNEL, "1")
    marks.add(KERNEL, "1")
    assert Marks("cpu", DESCRIBED).has(KERNEL, "1")
    for name in ("CUDA_HOME", "CC"):
        monkeypatch.setenv(name, str(tmp_path))
        assert not Marks("cpu", DESCRIBED).has(KERNEL, "1"), name
        monkeypatch.delenv(name)


def test_code_with_other_variables_of_its_kernel_is_no_code_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def marks_with(path: str) -> Marks:
        process = ProcessSetup.of({"TRITON_PTXAS_PATH": path}, None)
        monkeypatch.setattr(registry, "get", lambda _: SimpleNamespace(process=process))
        return Marks("cpu", DESCRIBED)

    marks_with("/a").add(KERNEL, "1")
    assert marks_with("/a").has(KERNEL, "1")
    assert not marks_with("/b").has(KERNEL, "1")


@pytest.mark.slow
def test_later_variants_yield_to_trials(tmp_path: Path) -> None:
    """In real child processes: a kernel's first compile has the priority of this process, the others a lower one."""
    kernels = [registry.register(Compiling(f"test.compiling{number}", 0.0, tmp_path)) for number in range(2)]
    executor = Isolated("cpu", backends=["torch"])
    try:
        compiler = executor.compiler()
        for causal in (None, "top_left", "bottom_right"):
            for kernel in kernels:
                problem = replace(case(kernel.name, 0).problem, causal=causal)
                compiler.start(replace(case(kernel.name, 0), problem=problem, config=kernel.configs(problem)[0]))
            done: list[Compiled] = []
            while len(done) < 2:
                done += compiler.poll(30.0)
            assert [each.failure for each in done] == [None, None]
        compiler.close()
    finally:
        executor.close()
        for kernel in kernels:
            registry.unregister(kernel.name)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for kernel in kernels:
        priorities = [int((tmp_path / f"{kernel.name}.{causal}").read_text()) for causal in (None, "top_left", "bottom_right")]
        assert priorities == [own, max(own, 10), max(own, 10)]


# --- journals


def test_a_compile_at_work_is_left_behind_by_a_run_that_dies(tmp_path: Path) -> None:
    service = Service(Compilers(), width=2, out=tmp_path)
    service.want("a", {str(number): case("a", number) for number in range(3)})
    service.poll(0.0)
    assert len(list((tmp_path / "inflight").iterdir())) == 2, "two are at work"
    service.poll(0.01)
    service.close(died=True)
    assert sorted((each.case.recipe.seed, each.deaths) for each in left_behind(tmp_path)) == [(1, 0), (2, 0)]


def test_ended_compiles_leave_nothing(tmp_path: Path) -> None:
    service = Service(Compilers(), width=2, out=tmp_path)
    service.want("a", {str(number): case("a", number) for number in range(3)})
    service.poll(0.01)
    service.close()
    assert service.pending() == 0
    assert not list(tmp_path.iterdir())


def test_a_journal_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    service = Service(Compilers(), out=tmp_path / "file")
    service.want("a", {str(number): case("a", number) for number in range(3)})
    assert len(service.all()) == 3
    assert len(service.not_kept) == 1


# --- marks

KERNEL = "torch.reference_cpu"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_an_earlier_run_has_compiled_is_ready_at_once(cache: Path) -> None:
    executor = Compilers(lambda each: Compiled(each, 0.1, REFUSED if each.recipe.seed == 1 else None))
    wanted = {str(number): case(KERNEL, number) for number in range(3)}
    first = Service(executor, marks=Marks("cpu", DESCRIBED))
    first.want(KERNEL, wanted)
    first.all()
    again = Service(executor, marks=Marks("cpu", DESCRIBED))
    assert again.want(KERNEL, wanted) == {"0": "ready", "1": "waiting", "2": "ready"}, "what was refused is tried again"
    assert again.known == [(KERNEL, "0"), (KERNEL, "2")]
    assert again.all() == [(KERNEL, "1")]


def test_an_error_of_attnfuzz_is_not_marked(cache: Path) -> None:
    service = Service(Compilers(lambda each: Compiled(each, 0.0, error=OSError())), marks=Marks("cpu", DESCRIBED))
    service.want(KERNEL, {"0": case(KERNEL, 0)})
    service.all()
    assert not Marks("cpu", DESCRIBED).has(KERNEL, "0")


@pytest.mark.parametrize("change", ["version", "device", "GPU", "key", "caches", "no versions"])
def test_a_mark_of_something_else_is_not_taken(change: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Marks("cpu", DESCRIBED).add(KERNEL, "x")
    assert Marks("cpu", DESCRIBED).has(KERNEL, "x")
    described, device, key = dict(DESCRIBED), "cpu", "x"
    if change == "version":
        described["versions"] = {"torch": "2.10"}
    elif change == "no versions":
        described["versions"] = {}
    elif change == "GPU":
        described["device"] = "H200"
    elif change == "device":
        device = "cuda"
    elif change == "key":
        key = "y"
    else:
        monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert not Marks(device, described).has(KERNEL, key)  # type: ignore[arg-type]


def test_a_mark_of_another_source_is_not_taken(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of a module of the user's: its file is edited, or one beside it."""
    folder = tmp_path / "acme"
    folder.mkdir()
    (folder / "flash_of_a_test.py").write_text(
        "from attnfuzz.kernels.faults.host import FaultyReference\n"
        "class Flash(FaultyReference):\n    pass\n"
        "KERNEL = Flash('test.flash', lambda *_: None)\n"
    )
    (folder / "device.py").write_text("TILE = 64\n")
    monkeypatch.syspath_prepend(str(folder))
    kernel = registry.register(__import__("flash_of_a_test").KERNEL)
    try:
        Marks("cpu", DESCRIBED).add(kernel.name, "x")
        assert Marks("cpu", DESCRIBED).has(kernel.name, "x")
        (folder / "device.py").write_text("TILE = 32\n")
        os.utime(folder / "device.py", ns=(1, 1))
        assert not Marks("cpu", DESCRIBED).has(kernel.name, "x")
    finally:
        registry.unregister(kernel.name)


def test_a_cache_that_cannot_be_written_costs_nothing(cache: Path) -> None:
    Marks("cpu", DESCRIBED).has(KERNEL, "x")
    (cache / "attnfuzz" / "compiled").rmdir()
    (cache / "attnfuzz" / "compiled").write_text("")
    service = Service(Compilers(), marks=Marks("cpu", DESCRIBED))
    service.want(KERNEL, {"0": case(KERNEL, 0)})
    assert service.all() == [(KERNEL, "0")]
