"""The module that keeps a function of a file as a kernel: what it declares, and what one trial each suggests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import attnfuzz.harness.audit.conformance.check as conformance
from attnfuzz.harness.audit.adapter_module import AdapterModule, adapter_module, with_own_gradients
from attnfuzz.harness.isolation.outcomes import ExecutionError
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Capabilities

SOURCE = """
import torch


def attention(q, k, v, softmax_scale=None, is_causal=False):
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = q.transpose(1, 2).float() @ k.float().mT * scale
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), float("-inf"))
    p = torch.softmax(s, -1).nan_to_num()
    return (p @ v.float()).to(q.dtype).transpose(1, 2)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal=False):
    a, b, o = cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), torch.zeros_like(q)
    for i, (x, y) in enumerate(zip(a, a[1:])):
        keys = slice(b[i], b[i + 1])
        o[x:y] = attention(q[None, x:y], k[None, keys], v[None, keys], None, is_causal)[0]
    return o


class Holder:
    dense = staticmethod(attention)


def plain(q, k, v):
    assert q.shape == k.shape and q.shape[-1] == 64 and q.dtype != torch.float32
    return attention(q, k, v).detach()


def ends(q, k, v):
    raise SystemExit(3)
"""


@pytest.fixture(autouse=True)
def in_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNFUZZ_IMPORT_SECONDS", "0")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("_loaded", "_origins"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    Path("acme_module.py").write_text(SOURCE)
    yield
    sys.modules.pop("acme_module", None)


def kept(target: str, seconds: float = 1000.0) -> tuple[AdapterModule, Capabilities]:
    """Return the module of a target, and what the kernel declares that it makes."""
    module = adapter_module(target, registry.get(target), "cpu", seconds, in_process=True)
    names: dict[str, Any] = {}
    exec(compile(module.text, "adapter.py", "exec"), names)
    return module, names["KERNEL"].capabilities


def test_features_that_work_are_suggested() -> None:
    module, can = kept("acme_module.py:attention:dense")
    lines = module.text.splitlines()
    assert lines[0] == "from attnfuzz.kernels import dense"
    assert lines[1] == f"from acme_module import attention  # in {Path.cwd()}"
    assert lines[3].startswith('KERNEL = dense(attention, name="acme_module.attention", devices=("cpu", "cuda")')
    assert len(lines) <= 5
    assert (can.groups, can.unequal, can.layouts, can.scale_any) == (None, True, True, True)
    assert can.dtypes == ("float16", "bfloat16", "float32")
    assert can.dims == ((64, 64), (32, 32), (96, 96), (128, 128))
    # The function has no parameters for these, and the adapter would refuse them.
    assert (can.window, can.softcap, can.packings, can.slack) == (False, False, ("dense",), False)
    assert "unequal=True" in module.suggestions
    assert module.untried == ()
    assert "groups=None" not in module.failed


def test_features_that_fail_are_not() -> None:
    module, can = kept("acme_module.py:plain:dense(gradients=False)")
    assert (can.groups, can.unequal, can.outputs, can.scale_given) == ((1,), False, ("o",), False)
    assert (can.dtypes, can.dims) == (("float16", "bfloat16"), ((64, 64),))
    assert not {"groups=None", "unequal=True"} & {*module.suggestions}
    assert {"groups=None", "unequal=True"} <= {*module.failed}


@pytest.mark.parametrize("target", ["acme_module.py:varlen:varlen", "acme_module.py:dense:dense"])
def test_a_function_with_the_name_of_its_adapter_is_imported_by_another(target: str) -> None:
    Path("acme_module.py").write_text(f"{SOURCE}\ndense = attention\n")
    module, can = kept(target, 0.0)
    assert "as function" in module.text
    assert can.packings == (("ragged",) if "varlen" in target else ("dense",))


def test_a_method_is_reached_by_its_class() -> None:
    module, can = kept("acme_module.py:Holder.dense:dense", 0.0)
    assert ("from acme_module import Holder  #" in module.text, can.packings) == (True, ("dense",))


@pytest.mark.parametrize("groups", [1, None])
def test_a_ragged_function(groups: int | None) -> None:
    module, can = kept(f"acme_module.py:varlen:varlen(groups={(groups,) if groups else None})")
    assert (can.packings, can.groups, can.unequal, can.zero_q, can.slack) == (("ragged",), None, True, True, True)
    assert ("groups=None" in module.suggestions) is (groups == 1)


def test_without_time_nothing_is_tried() -> None:
    module, can = kept("acme_module.py:attention:dense(groups=(1, 2))", 0.0)
    assert (module.suggestions, module.untried, can.groups) == ((), (), (1, 2))
    module, can = kept("acme_module.py:attention:dense(groups=(1, 2))", 1e-9)
    assert (module.suggestions, "unequal=True" in module.untried) == ((), True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ExecutionError])
def test_what_ends_the_trials_leaves_what_they_have_shown(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked = conformance._Here.ask, []

    def once(self: Any, probe: str, kernel: Any, case: Any, **more: Any) -> Any:
        asked.append(case)
        if len(asked) > 1:
            raise error
        return ask(self, probe, kernel, case, **more)

    monkeypatch.setattr(conformance._Here, "ask", once)
    module, can = kept("acme_module.py:attention:dense")
    assert (can.dtypes, can.dims, module.untried) == (("float16", "bfloat16", "float32"), ((64, 64),), ("further features",))


def test_a_file_that_no_module_can_import_is_named_by_its_path() -> None:
    Path("06-acme.py").write_text(SOURCE)
    try:
        module, can = kept("06-acme.py:attention:dense(groups=None)", 0.0)
    finally:
        sys.modules.pop("06-acme", None)
    assert 'get("06-acme.py:attention:dense(groups=None)")' in module.text
    assert can.groups is None


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("acme_module.py:plain:dense", "acme_module.py:plain:dense(gradients=False)"),
        ("acme_module.py:plain:dense(groups=None)", "acme_module.py:plain:dense(groups=None, gradients=False)"),
        ("acme_module.py:plain:dense(gradients=True)", None),
        ("acme_module.py:attention:dense", None),
        ("acme_module.py:ends:dense", None),
        ("torch.reference_cpu", None),
    ],
)
def test_a_function_without_a_graph_is_forward_only(target: str, expected: str | None) -> None:
    assert with_own_gradients(target, "cpu", in_process=True) == (expected or target, expected is not None)
