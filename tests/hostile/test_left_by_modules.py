"""What a module leaves behind in its process: exit handlers, threads, defaults of torch. Codes and Verdicts stay right."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hostile import HARMLESS

from attnfuzz.harness.campaign.journal import left_behind
from attnfuzz.harness.trial.batch import run_batch
from attnfuzz.harness.trial.defaults import of_kernel, of_torch
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.torch.reference_cpu import ReferenceCpu
from attnfuzz.strategies.case import Case, Recipe

WRONG = (
    HARMLESS.format(name="ev.left")
    + """
    def build(self, problem, config, device):
        raise ValueError("planted")


KERNEL = Harmless()
"""
)
LEFT = {
    "an exit handler that ends the process": "import atexit, os\natexit.register(lambda: os._exit(0))\n",
    "an exit handler that waits": "import atexit, time\natexit.register(time.sleep, 1000)\n",
    "a thread without end": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n",
    "another sys.exit": "import os, sys\nsys.exit = lambda *_: os._exit(0)\n",
    "another os._exit": "import os\nos._exit = lambda *_: None\n",
    "an exit handler that fails": "import atexit\natexit.register(lambda: 1 / 0)\n",
}
QUICK = ("an exit handler that ends the process", "a thread without end")


@pytest.mark.parametrize("name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in LEFT])
def test_the_exit_code_is_that_of_the_command(name: str, tmp_path: Path) -> None:
    (tmp_path / "ev_left.py").write_text(LEFT[name] + WRONG)
    command = [sys.executable, "-m", "attnfuzz.harness.cli", "run", "ev_left:KERNEL", "--device", "cpu", "--max-examples", "2"]
    environment = {each: value for each, value in os.environ.items() if each != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [*command, "--out", "out", "--workers", "1"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failure in " in done.stdout.splitlines()[-1]
    assert len(list((tmp_path / "out" / "cases").iterdir())) == 1
    assert not list(left_behind(tmp_path / "out"))


# --- torch's defaults


class Sets(ReferenceCpu):
    """Sets a default of torch in one of its calls, which it does not mind itself."""

    name = "ev.sets"

    def __init__(self, where: str, act: Any) -> None:
        super().__init__()
        self._where, self._act = where, act

    def build(self, *arguments: Any) -> Any:
        built = super().build(*arguments)
        if self._where == "build":
            self._act()
            return built
        inner, act = getattr(built, self._where), self._act

        class Acting:
            forward, backward = staticmethod(built.forward), staticmethod(built.backward)

        def acts(*given: Any) -> Any:
            result = inner(*given)
            act()
            return result

        acting = Acting()
        setattr(acting, self._where, acts)
        return acting


DEFAULTS = {
    "device": lambda: torch.set_default_device("meta"),
    "dtype": lambda: torch.set_default_dtype(torch.float16),
}


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def cases() -> list[Case]:
    problem = Problem(seqlens_q=(5, 3), seqlens_k=(7, 3), dim_qk=16, dim_v=16, dtype="float32", packing="ragged")
    return [Case(kernel=Sets.name, problem=problem, recipe=Recipe(seed=seed)) for seed in range(3)]


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("what", DEFAULTS)
@pytest.mark.parametrize("where", ["build", "forward", "backward"])
def test_defaults_of_torch_that_a_kernel_sets_do_not_reach_the_oracle(where: str, what: str) -> None:
    registry.register(Sets(where, DEFAULTS[what]))
    for case in cases():
        verdict = run_trial(case, "cpu")
        assert verdict.status == "pass", verdict.failures
    assert [each.status for each in run_batch(cases(), "cpu")] == ["pass"] * 3


@pytest.mark.usefixtures("defaults")
def test_a_kernel_keeps_the_defaults_that_its_module_has_set() -> None:
    """A module may count on them in every call."""
    there: list[torch.dtype] = []
    torch.set_default_dtype(torch.float64)
    registry.register(Sets("forward", lambda: there.append(torch.get_default_dtype())))
    assert run_trial(cases()[0], "cpu").status == "pass"
    assert there == [torch.float64]
    assert torch.get_default_dtype() == torch.float64


@pytest.mark.usefixtures("defaults")
def test_between_a_kernels_calls_torch_has_its_own_defaults() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    with of_torch():
        assert (torch.get_default_dtype(), torch.get_default_device().type) == (torch.float32, "cpu")
        with contextlib.suppress(ValueError), of_kernel():
            assert (torch.get_default_dtype(), torch.get_default_device().type) == (torch.float64, "meta")
            torch.set_default_dtype(torch.float16)
            raise ValueError("planted")
        with of_torch():
            assert (torch.get_default_dtype(), torch.get_default_device().type) == (torch.float32, "cpu")
    assert (torch.get_default_dtype(), torch.get_default_device().type) == (torch.float16, "meta")
