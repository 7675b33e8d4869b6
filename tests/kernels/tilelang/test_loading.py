"""Warps that load: in every kernel whose warps TileLang divides into roles, only the one that copies waits."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

pytest.importorskip("tilelang")

import tilelang
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, post_order_visit

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import BuildError
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.tilelang import build, loading, lower
from attnfuzz.kernels.tilelang.build import cuda_passes
from attnfuzz.kernels.tilelang.loading import MARK, copying_warp_waits, marked
from attnfuzz.kernels.tilelang.roles import lowering
from attnfuzz.kernels.tilelang.roles.lowering import lowered
from attnfuzz.kernels.tilelang.subject import Function, TileLangKernel

KERNELS = ("tilelang.mha", "tilelang.mha_pipelined", "tilelang.gqa.split", "tilelang.gqa_varlen.atomic", "tilelang.modified")
FORMS: tuple[dict[str, Any], ...] = (
    {"dim_qk": 64, "dim_v": 64, "dtype": "bfloat16", "causal": "bottom_right"},
    {"dim_qk": 192, "dim_v": 128, "dtype": "float16", "causal": None},
)


def functions(name: str, form: dict[str, Any]) -> tuple[TileLangKernel, list[Function]]:
    """The forward and the backward of a kernel's default Config."""
    kernel = registry.get(name)
    assert isinstance(kernel, TileLangKernel)
    problem = Problem(seqlens_q=(64,), seqlens_k=(64,), heads=2, kv_heads=2, **form)
    made = kernel.functions(problem, kernel.configs(problem)[0], "cuda")
    return kernel, [each for each in made.values() if each.factory in ("forward", "backward")]


def branches(func: Any) -> list[Any]:
    """What the warps for loading do, wherever a function has them."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.AttrStmt) and node.attr_key == "kWarpSpecializationScope":
            found.append(node.body.then_case)

    post_order_visit(func.body, visit)
    return found


@pytest.mark.parametrize("form", FORMS, ids=("64", "192"))
@pytest.mark.parametrize("name", KERNELS)
def test_only_the_warp_that_copies_waits(name: str, form: dict[str, Any]) -> None:
    kernel, made = functions(name, form)
    assert made
    for factory, options in made:
        module = kernel.device_code()
        (branch,) = branches(lowered(getattr(module, factory)(**options), cuda_passes(module, options)))
        assert isinstance(branch, tirx.IfThenElse)
        assert str(branch.condition).endswith("< 32")
        assert branch.else_case is None


def test_what_runs_on_a_gpu_is_lowered_with_the_guard() -> None:
    kernel, ((factory, options), *_) = functions("tilelang.mha", FORMS[0])
    unit = lower._Unit("forward", kernel.device_code(), factory, options, "sm_90a")
    assert unit._lowered(unit._traced).kernel_source.count("if (((int)threadIdx.x) < 32) {") == 1


def test_what_runs_on_a_gpu_is_compiled_with_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, ((factory, options), *_) = functions("tilelang.mha", FORMS[0])
    own = tilelang.cuda.transform.ProducerConsumerWarpSpecialized
    seen: list[tuple[bool, bool]] = []

    def compiles(func: Any, **_: Any) -> None:
        seen.append((MARK in func.attrs, tilelang.cuda.transform.ProducerConsumerWarpSpecialized is not own))

    monkeypatch.setattr(tilelang, "compile", compiles)
    build._for_cuda(getattr(kernel.device_code(), factory)(**options), {})
    assert seen == [(True, True)]


def test_functions_of_others_are_compiled_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no mark, and may be lowered by another thread meanwhile."""
    kernel, ((factory, options), *_) = functions("tilelang.mha", FORMS[0])
    module = kernel.device_code()
    func, passes = getattr(module, factory)(**options), cuda_passes(module, options)
    monkeypatch.setattr(lowering, "marked", lambda of_others: of_others)
    inside = lowered(func, passes)
    monkeypatch.setattr(lowering, "copying_warp_waits", contextlib.nullcontext)
    assert inside.script() == lowered(func, passes).script()
    (branch,) = branches(inside)
    assert not isinstance(branch, tirx.IfThenElse)


def test_warps_for_loading_that_do_more_are_refused() -> None:
    kernel, ((factory, options), *_) = functions("tilelang.mha", FORMS[0])
    module = kernel.device_code()
    guarded = lowered(getattr(module, factory)(**options), cuda_passes(module, options))
    more = tirx.Evaluate(tirx.call_extern("int32", "more"))

    def add(node: Any) -> Any:
        if node.attr_key != "kWarpSpecializationScope":
            return None
        branch = tirx.IfThenElse(node.body.condition, tirx.SeqStmt([node.body.then_case, more]), node.body.else_case)
        return tirx.AttrStmt(node.node, node.attr_key, node.value, branch)

    func = guarded.with_body(ir_transform(guarded.body, None, add, ["tirx.AttrStmt"]))
    with pytest.raises(BuildError, match="do something else than to wait and copy"):
        loading._guarded(func)


def test_the_mark_is_part_of_what_tilelang_knows_code_by() -> None:
    kernel, ((factory, options), *_) = functions("tilelang.mha", FORMS[0])
    func = getattr(kernel.device_code(), factory)(**options)
    assert MARK not in func.script(show_meta=True)
    assert MARK in marked(func).script(show_meta=True)
    # Code with the mark 1 has no fences, and may be in TileLang's cache on disk.
    assert int(marked(func).attrs[MARK]) == 2


def test_tilelang_is_as_before_afterwards() -> None:
    own = tilelang.cuda.transform.ProducerConsumerWarpSpecialized
    with contextlib.suppress(BuildError), copying_warp_waits():
        assert tilelang.cuda.transform.ProducerConsumerWarpSpecialized is not own
        raise BuildError("refused")
    assert tilelang.cuda.transform.ProducerConsumerWarpSpecialized is own


def test_several_threads_leave_tilelang_as_before() -> None:
    own = tilelang.cuda.transform.ProducerConsumerWarpSpecialized
    entered, done = threading.Event(), threading.Event()

    def other() -> None:
        entered.set()
        with copying_warp_waits():
            done.set()

    with copying_warp_waits():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
        assert not done.wait(0.2)
    thread.join(10)
    assert done.is_set()
    assert tilelang.cuda.transform.ProducerConsumerWarpSpecialized is own


def test_a_tilelang_without_the_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tilelang.cuda.transform, "ProducerConsumerWarpSpecialized")
    with pytest.raises(BuildError, match=r"has no pass ProducerConsumerWarpSpecialized.*install 0\.1\.15"), copying_warp_waits():
        pass
