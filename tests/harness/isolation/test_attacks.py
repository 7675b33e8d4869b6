"""What kernels might do that no list of faults thinks of: the campaign goes on, and no correct kernel suffers for another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import attacks
from support.paths import TESTS

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.journal import left_behind
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation import reaper
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

# Attack, and the kinds of failure that may be found: None where nothing is wrong with what it returns.
ATTACKS: tuple[tuple[Any, set[str] | None], ...] = (
    (attacks.raises_interrupt, {"exception"}),
    (attacks.raises_unheard, {"exception"}),
    (attacks.raises_unspeakable, {"exception"}),
    (attacks.resizes, {"guard", "contract"}),
    (attacks.returns_sparse, {"contract"}),
    (attacks.returns_odd, {"contract"}),
    (attacks.limits_memory, None),
    (attacks.writes_garbage, {"crash", "hang"}),
    (attacks.answers_nonsense, {"crash"}),
    (attacks.leaves_an_unmarked_child, None),
    (attacks.exits_later, {"crash"}),
    (attacks.crashes_later, {"crash"}),
    (attacks.returns_twice, None),
    (attacks.eats_in_another_session, {"out-of-memory"}),
)


SLOW = (
    attacks.limits_memory,
    attacks.crashes_later,
    attacks.answers_nonsense,
    attacks.returns_odd,
    attacks.writes_garbage,
)
"""Run only when asked for: children that die one after the other, and what others in the list do alike."""


@pytest.fixture(scope="module")
def executor() -> Iterator[Isolated]:
    made = Isolated("cpu", backends=["torch"], deadline=4.0, memory=1 << 30)
    yield made
    made.close()
    assert not reaper.processes(made.run)
    assert (
        attacks.seconds_of(made.run)
        not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    )


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.mark.parametrize(
    ("happens", "kinds"),
    [pytest.param(*each, id=each[0].__name__, marks=[pytest.mark.slow] * (each[0] in SLOW)) for each in ATTACKS],
)
def test_the_campaign_goes_on_and_the_next_kernel_is_right(
    happens: Any, kinds: set[str] | None, executor: Isolated, tmp_path: Path
) -> None:
    kernels = [registry.register(attacks.Attack(each)) for each in (happens, None)]
    settings = Settings(max_examples=8, max_failures=1, out=str(tmp_path), seed=1)
    start = time.monotonic()
    done = run_campaign(kernels, settings, lambda _: None, executor)
    assert time.monotonic() - start < 120
    assert not done.broken
    bad, good = done.summaries
    assert (good.cases, good.findings) == (8, ())
    if kinds is not None:
        assert {each.identity.kind for each in bad.findings} <= kinds
        assert bad.findings or happens in (attacks.exits_later, attacks.crashes_later)
    elif happens is not attacks.limits_memory:
        assert not bad.findings


@pytest.mark.slow
def test_a_kernel_may_kill_what_its_process_was_forked_from(executor: Isolated) -> None:
    cases = []
    for happens in (attacks.kills_its_parent, None):
        kernel = registry.register(attacks.Attack(happens))
        problem = Problem(seqlens_q=(1,), seqlens_k=(3,), dim_qk=16, dim_v=16, dtype="float32")
        cases.append(Case(kernel=kernel.name, problem=problem, config=kernel.configs(problem)[0]))
    verdicts = [executor.trial(case) for case in (*cases, *cases)]
    assert [each.status for each in verdicts] == ["fail", "pass", "fail", "pass"]
    assert verdicts[0].failures[0].kind == "crash"


def test_a_module_that_only_a_child_cannot_import_ends_its_own_turn(tmp_path: Path, executor: Isolated, monkeypatch: Any) -> None:
    text = "import os\nfrom support.attacks import Attack\nif os.environ.get('ATTNFUZZ_RUN'):\n    raise OSError('not here')\n"
    (tmp_path / "only_here.py").write_text(text + "class Mine(Attack):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    only_here = __import__("only_here")
    kernels = [registry.register(only_here.Mine(attacks.raises_unheard)), registry.register(attacks.Attack(None))]
    done = run_campaign(kernels, Settings(max_examples=5, out=str(tmp_path / "out")), lambda _: None, executor)
    [broken] = done.broken
    assert broken.kernel == "attack.raises_unheard"
    assert "a child process cannot import it: OSError: not here" in broken.error
    assert (done.summaries[1].cases, done.findings) == (5, ())
    [left] = left_behind(tmp_path / "out")
    assert (left.case.kernel, left.deaths) == ("attack.raises_unheard", 0), "its Case comes first in the next run"


def test_closing_waits_for_no_stranger() -> None:
    forkserver = Forkserver(["json"])
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    start = time.monotonic()
    forkserver.close()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_a_case_that_kills_every_run_is_given_up(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1]); from support import attacks\n"
        "from attnfuzz.harness.campaign.campaign import run_campaign\n"
        "from attnfuzz.harness.campaign.settings import Settings\n"
        "from attnfuzz.kernels import registry\n"
        "def dies(made): os.kill(os.getpid(), signal.SIGKILL)\n"
        "kernel = registry.register(attacks.Attack(dies))\n"
        "settings = Settings(max_examples=int(sys.argv[3]), in_process=True, out=sys.argv[2])\n"
        "done = run_campaign([kernel], settings, lambda _: None)\n"
        "print('done', done.summaries[0].cases)"
    )
    out, here = tmp_path / "out", str(TESTS)

    def run(cases: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", program, here, str(out), str(cases)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    for _ in range(2):
        assert run(200).returncode == -9
        assert len(list((out / "inflight").iterdir())) == 1
    third = run(1)
    assert third.returncode == 0, third.stderr
    assert not list((out / "inflight").iterdir())
    [path] = (out / "cases").iterdir()
    assert "2 runs died while this Case was in flight" in path.read_text()
