"""The mode that poisons memory neither imports Dynamo nor lets it compile what the mode does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from attnfuzz.harness.trial.bands import Bands
from attnfuzz.harness.trial.poison import PoisonEmpty

TRIAL = """
import sys
from attnfuzz.harness.isolation import tasks
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case
tasks.load_torch_for_cpu()
before = "torch._dynamo" in sys.modules
problem = Problem(seqlens_q=(5,), seqlens_k=(7,), dim_qk=16, dim_v=16, dtype="float32")
verdict = run_trial(Case(kernel="torch.reference_cpu", problem=problem), "cpu")
print(verdict.status, before, "torch._dynamo" in sys.modules)
"""


def test_neither_a_template_process_nor_a_trial_imports_dynamo() -> None:
    done = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == ["pass", "False", "False"]


@pytest.mark.filterwarnings("error:Dynamo")
@pytest.mark.parametrize("compiled_before", [False, True])
def test_dynamo_compiles_nothing_of_the_mode(compiled_before: bool) -> None:
    """A kernel may import Dynamo before the mode is on or meanwhile; its compiled functions run uncompiled in the mode."""
    graphs = []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    x = torch.ones(4)
    compiled = torch.compile(kernel, backend=backend) if compiled_before else None
    with PoisonEmpty(Bands()):
        compiled = compiled or torch.compile(kernel, backend=backend)
        assert compiled(x).isnan().all()
    assert not graphs
    assert not torch._C._dynamo.eval_frame._debug_get_cache_entry_list(PoisonEmpty.__torch_dispatch__.__code__)
    torch._dynamo.reset()


def test_a_torch_that_cannot_mark_code_wraps_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")

    class Again(PoisonEmpty):
        def __torch_dispatch__(self, *arguments: object) -> object:
            return super().__torch_dispatch__(*arguments)

    assert Again._should_skip_dynamo()
    assert "__wrapped__" in vars(Again.__torch_dispatch__)
    with Again(Bands()):
        assert torch.empty(3).isnan().all()
