"""PyTorch's CUDA attention as subjects: what is declared, and the adapters around stand-ins; on a GPU, the ops themselves."""

from __future__ import annotations

import importlib
import itertools
from contextlib import suppress
from dataclasses import replace as with_parts
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from attnfuzz.harness.campaign.settings import PROFILES
from attnfuzz.harness.core.clock import Clock
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report.describe import describe_case, describe_verdict
from attnfuzz.harness.trial.bands import Bands
from attnfuzz.harness.trial.bench import Bench
from attnfuzz.harness.trial.poison import PoisonEmpty
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Capabilities, Config, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.torch import ops, varlen_attn
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.cases import cases
from attnfuzz.strategies.variants import all_variants

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

PEERS = ("torch.cudnn", "torch.cudnn_varlen", "torch.efficient", "torch.flash", "torch.flex", "torch.varlen_attn")
LENGTHS = ((17, 5, 33, 1, 140, 2), (30, 19, 33, 64, 7, 2))


def problems(can: Capabilities) -> list[Problem]:
    """For each packing, dtype and mask that is declared: several sequences, grouped heads, unequal dims, slack, empty ones."""
    result = []
    for packing, dtype, causal in itertools.product(can.packings, can.dtypes, can.causal):
        common: dict[str, Any] = {"packing": packing, "dtype": dtype, "causal": causal}
        common |= {"slack_q": 3, "slack_k": 5} if can.slack else {}
        groups = 3 if can.groups is None or 3 in can.groups else 1
        if packing == "dense":
            lengths = [((33, 33), (50, 50)), ((130,), (70,)), ((1, 1, 1), (9, 9, 9))]
        else:
            empty_q, empty_k = (((0,), (4,)) if can.zero_q else ((), ())), (((6,), (0,)) if can.zero_k else ((), ()))
            lengths = [(LENGTHS[0] + empty_q[0] + empty_k[0], LENGTHS[1] + empty_q[1] + empty_k[1]), ((1, 1), (3, 200))]
        for (seqlens_q, seqlens_k), (dim_qk, dim_v), scale in zip(
            lengths, can.dims[: len(lengths)], (None, 0.25, None), strict=False
        ):
            shape: dict[str, Any] = {"dim_qk": dim_qk, "dim_v": dim_v, "heads": 2 * groups, "kv_heads": 2, "softmax_scale": scale}
            result.append(Problem(seqlens_q=seqlens_q, seqlens_k=seqlens_k, **shape, **common))
    for dim_qk, dim_v in can.dims[3:]:
        packing = can.packings[0]
        result.append(
            Problem(seqlens_q=(40,), seqlens_k=(41,), dim_qk=dim_qk, dim_v=dim_v, packing=packing, dtype=can.dtypes[-1])
        )
    return result


def declared(only: tuple[str, ...] = PEERS) -> list[Any]:
    params = []
    for name in only:
        kernel = registry.get(name)
        for problem in problems(kernel.capabilities):
            problem = within(kernel, problem)
            if kernel.supports(problem, kernel.configs(problem)[0], "cuda") is not None and name == "torch.flex":
                continue
            for config in kernel.configs(problem):
                params.append(pytest.param(Case(kernel=name, problem=problem, config=config), id=case_id(name, problem, config)))
    return params


def within(kernel: Kernel, problem: Problem) -> Problem:
    """`problem`, or where the kernel leaves out what is known to be wrong, one with fewer queries and keys."""
    reason = kernel.supports(problem, kernel.configs(problem)[0], "cuda")
    if reason is None or not any(word in reason for word in ("seqlen", "queries")):
        return problem
    pairs = [
        (min(n_q, n_k, problem.dim_qk), min(n_k, 192)) for n_q, n_k in zip(problem.seqlens_q, problem.seqlens_k, strict=True)
    ]
    queries = (max(2, pairs[0][0]), *(pair[0] for pair in pairs[1:]))
    shorter = replace(problem, seqlens_q=queries, seqlens_k=tuple(pair[1] for pair in pairs))
    assert kernel.supports(shorter, kernel.configs(shorter)[0], "cuda") is None
    return shorter


def case_id(name: str, p: Problem, config: Config) -> str:
    lengths = "+".join(f"{n_q}x{n_k}" for n_q, n_k in zip(p.seqlens_q, p.seqlens_k, strict=True))
    return f"{name}-{p.packing}-{p.dtype}-{p.causal}-{p.dim_qk}/{p.dim_v}-{lengths}-{config or 'plain'}"


def described(case: Case, verdict: Verdict) -> str:
    """All that is needed to see what went wrong, and to do it again."""
    lines = [f"{name:<20} {value}" for name, value in describe_case(case)]
    lines += describe_verdict(verdict)
    lines += [f"{each.kind} {each.output or each.check}: {each.message}\n{each.detail}" for each in verdict.failures]
    return "\n".join(["", *lines, f"versions: {verdict.versions}", case.canonical()])


def emulated(case: Case) -> Verdict:
    """The Case with stand-ins for the ops, on the CPU, judged as usual."""
    bench = Bench(case, registry.get(case.kernel), "cpu", Clock())
    ready = bench.kernel.build(case.problem, case.config, "cuda")
    inputs = bench.inputs()
    return bench.judge(inputs, bench.launch(ready, inputs), bench.truth(inputs))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    from support import torch_ops as support_torch_ops

    # The first tensor in such a mode imports modules that look at torch's real ops, and so does varlen_attn, where there is one.
    with torch.no_grad(), PoisonEmpty(Bands()):
        torch.empty(1)
    with suppress(ImportError):
        importlib.import_module("torch.nn.attention.varlen")

    from attnfuzz.kernels.torch import flex

    support_torch_ops.install(monkeypatch)
    # The first call on zeros, on the CPU.
    zeros = flex._zeros
    monkeypatch.setattr(flex, "_zeros", lambda problem, device: zeros(problem, "cpu"))
    monkeypatch.setattr(flex, "_warmed", set())
    # Wider dims need a newer cuDNN than a CPU has.
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91100)


@pytest.mark.parametrize("name", PEERS)
def test_fulfils_the_contract(name: str) -> None:
    kernel = registry.get(name)
    assert isinstance(kernel, Kernel)
    assert (kernel.name, kernel.backend, kernel.capabilities.devices) == (name, "torch", ("cuda",))
    assert kernel.unavailable("cpu") == f"device='cpu': {name} runs on CUDA only"
    problem = within(kernel, problems(kernel.capabilities)[0])
    assert kernel.supports(problem, kernel.configs(problem)[0], "cuda") is None
    assert "runs on cuda only" in str(kernel.supports(problem, kernel.configs(problem)[0], "cpu"))
    assert "config=Config(tile_m=16)" in str(kernel.supports(problem, Config(tile_m=16), "cuda"))
    with pytest.raises(BadArgument, match="does not take it"):
        kernel.build(replace(problem, softcap=30.0), kernel.configs(problem)[0], "cuda")
    assert all_variants(kernel, "cuda")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
@pytest.mark.parametrize("name", PEERS)
def test_says_why_it_cannot_run_without_cuda(name: str) -> None:
    assert registry.get(name).unavailable("cuda") == f"torch {torch.__version__} was built without CUDA"


@pytest.mark.parametrize("name", PEERS)
def test_says_why_it_cannot_run_without_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert registry.get(name).unavailable("cuda") == "no CUDA device: torch.cuda.is_available() is False"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if name.startswith("torch.cudnn"):
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
        assert str(registry.get(name).unavailable("cuda")).startswith(f"torch {torch.__version__} finds no cuDNN: install ")
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    # This torch's ops have the arguments that the adapters pass.
    assert registry.get(name).unavailable("cuda") is None


def test_an_op_of_another_torch_is_told_with_its_arguments() -> None:
    assert ops.Op("_no_such_attention", "query").why_not() == (
        f"torch {torch.__version__} has no aten::_no_such_attention; install torch 2.11 or newer"
    )
    reason = ops.Op("_flash_attention_backward", "grad_out query").why_not()
    assert reason is not None
    assert reason.startswith(f"aten::_flash_attention_backward of torch {torch.__version__} takes (grad_out, query, key, ")
    assert reason.endswith("), not (grad_out, query); use torch 2.11")
    assert "takes no scale" in str(ops.Op("relu", "self").why_not())


@pytest.mark.parametrize("name", PEERS)
def test_what_is_drawn_is_supported(name: str) -> None:
    kernel = registry.get(name)
    drawn_problems = []

    @settings(max_examples=150, database=None, deadline=None, derandomize=True)
    @given(case=cases(kernel, device="cuda", limits=PROFILES["quick"].limits["cuda"]))
    def draw(case: Case) -> None:
        assert kernel.supports(case.problem, case.config, "cuda") is None
        drawn_problems.append(case.problem)

    draw()
    least = kernel.capabilities.min_seqlen_k
    assert min(n for p in drawn_problems for n in p.seqlens_k if n) == least
    assert any(1 in p.seqlens_q for p in drawn_problems)


def test_a_single_key_is_too_few_for_cudnn() -> None:
    kernel = registry.get("torch.cudnn")
    problem = Problem(seqlens_q=(4, 4), seqlens_k=(1, 1), dim_qk=64, dim_v=64, packing="dense")
    assert kernel.supports(problem, Config(), "cuda") == "seqlens_k=(1, 1): at least 2 keys a sequence"


def test_wide_rows_need_a_newer_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = registry.get("torch.cudnn")
    problem = Problem(seqlens_q=(4,), seqlens_k=(4,), dim_qk=192, dim_v=128, packing="dense")
    for version, reason in ((91100, None), (91002, "91002"), (None, "none")):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        expected = reason and f"dim_qk, dim_v=(192, 128): cuDNN 91100 or newer takes them, here is {reason}"
        assert kernel.supports(problem, Config(), "cuda") == expected


def test_flex_compiles_once_for_each_thing_that_it_specialises() -> None:
    kernel = registry.get("torch.flex")
    base = Problem(seqlens_q=(40, 40), seqlens_k=(50, 50), dim_qk=64, dim_v=64, packing="dense", heads=4, kv_heads=4)
    key = kernel.compile_key(base, Config())
    assert key == kernel.compile_key(replace(base, seqlens_q=(41, 41), seqlens_k=(99, 99), slack_q=2), Config())
    assert kernel.compile_key(replace(base, softmax_scale=0.5), Config()) == kernel.compile_key(
        replace(base, softmax_scale=2.0), Config()
    )
    others: list[dict[str, Any]] = [
        {"seqlens_q": (128, 128)},
        {"seqlens_q": (1, 1)},
        {"seqlens_k": (1, 1)},
        {"seqlens_q": (40,), "seqlens_k": (50,)},
        {"heads": 8, "kv_heads": 2},
        {"dtype": "bfloat16"},
        {"causal": "top_left"},
        {"softmax_scale": 0.5},
        {"dim_v": 128},
        {"packing": "ragged"},
    ]
    assert len({key, *(kernel.compile_key(replace(base, **each), Config()) for each in others)}) == 1 + len(others)


def test_varlen_attn_is_given_the_arguments_that_it_has() -> None:
    problem = Problem(seqlens_q=(4,), seqlens_k=(4,), dim_qk=64, dim_v=64, heads=4, kv_heads=2, causal="bottom_right")
    older = varlen_attn.arguments(problem, frozenset({"scale", "is_causal"}))
    assert older == {"scale": 0.125, "is_causal": True}
    newer = varlen_attn.arguments(problem, frozenset({"scale", "window_size", "enable_gqa"}))
    assert newer == {"scale": 0.125, "window_size": (-1, 0), "enable_gqa": True}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("case", declared())
def test_the_adapter_of_a_right_op_passes(case: Case) -> None:
    verdict = emulated(case)
    assert verdict.status == "pass", described(case, verdict)
    assert set(verdict.figures) == {"o", "lse", "dq", "dk", "dv"}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", [name for name in PEERS if registry.get(name).capabilities.zero_q])
@pytest.mark.parametrize(("seqlens_q", "seqlens_k"), [((0, 0), (9, 9)), ((9, 9), (0, 0)), ((0, 0), (0, 0))])
def test_no_op_is_called_for_nothing(name: str, seqlens_q: Any, seqlens_k: Any) -> None:
    case = Case(kernel=name, problem=Problem(seqlens_q=seqlens_q, seqlens_k=seqlens_k, dim_qk=64, dim_v=64))
    case = replace(case, config=registry.get(name).configs(case.problem)[0])
    verdict = emulated(case)
    assert verdict.status == "pass", described(case, verdict)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", PEERS)
def test_what_an_op_does_wrong_shows_through_its_adapter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key of each sequence left out of the forward: O and LSE are wrong, and no adapter mends it."""
    from support import torch_ops as support_torch_ops

    right = support_torch_ops.attention

    def without_a_key(q: Any, k: Any, v: Any, scale: float, shift: int | None) -> Any:
        return right(q, k[:, 1:], v[:, 1:], scale, None if shift is None else shift - 1)

    def of_flex(key: str) -> Any:
        attend = support_torch_ops.flex_function(key)
        return lambda q, k, v, *rest: attend(q, k * (torch.arange(k.shape[2]) > 0)[:, None], v, *rest)

    from attnfuzz.kernels.torch import flex

    monkeypatch.setattr(support_torch_ops, "attention", without_a_key)
    monkeypatch.setattr(flex, "function", of_flex)
    kernel = registry.get(name)
    problem = within(kernel, problems(kernel.capabilities)[0])
    verdict = emulated(Case(kernel=name, problem=problem, config=kernel.configs(problem)[0]))
    assert {"o", "lse"} <= {each.output for each in verdict.failures}, described(Case(kernel=name, problem=problem), verdict)


@pytest.mark.usefixtures("stand_ins")
def test_a_gradient_of_lse_flows_into_flex() -> None:
    from attnfuzz.harness.trial.inputs import materialise

    kernel = registry.get("torch.flex")
    problem = Problem(seqlens_q=(5, 3), seqlens_k=(7, 4), dim_qk=16, dim_v=16, dtype="float32", slack_q=2)
    problem = replace(problem, needs=replace(problem.needs, dlse=True))
    inputs = materialise(problem, Recipe(), "cpu")
    zeros = with_parts(inputs, d_o=torch.zeros_like(inputs.d_o))
    ready = kernel.build(problem, Config(), "cuda")
    dq, dk, dv = ready.backward(zeros, *ready.forward(zeros))
    assert bool((dv == 0).all())
    assert dq[:8].abs().max() > 0.1
    assert dk.abs().max() > 0.1


@pytest.mark.usefixtures("stand_ins")
def test_deterministic_mode_is_on_for_its_config_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from support import torch_ops as support_torch_ops

    modes = []
    right = support_torch_ops.Emulated.forward

    def looked(*args: Any) -> Any:
        modes.append((torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory))
        return right(*args)

    monkeypatch.setattr(support_torch_ops.Emulated, "forward", looked)
    problem = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=64, dim_v=64)
    for deterministic in (True, False):
        emulated(Case(kernel="torch.flash", problem=problem, config=Config(deterministic=deterministic)))
        assert not torch.are_deterministic_algorithms_enabled()
    assert modes == [(True, True), (False, True)]


@pytest.mark.usefixtures("stand_ins")
def test_a_backward_needs_its_forward() -> None:
    from attnfuzz.harness.trial.inputs import materialise

    kernel = registry.get("torch.flash")
    problem = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=64, dim_v=64)
    inputs = materialise(problem, Recipe(), "cpu")
    with pytest.raises(BadArgument, match="call forward on the same inputs first"):
        kernel.build(problem, kernel.configs(problem)[0], "cuda").backward(inputs, inputs.q, None)


def test_one_compile_of_flex_serves_all_lengths_masks_of_a_kind_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's part of it, which needs no GPU: the graph that it captures is run as it is."""
    import torch._dynamo
    from support import torch_ops as support_torch_ops
    from torch.utils._python_dispatch import _disable_current_modes

    from attnfuzz.harness.trial.bands import Bands
    from attnfuzz.harness.trial.inputs import materialise
    from attnfuzz.harness.trial.poison import PoisonEmpty
    from attnfuzz.kernels.torch import flex

    monkeypatch.setattr(flex, "_compiled", {})
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, backend="eager", **options))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    shape: dict[str, Any] = {"dim_qk": 16, "dim_v": 16, "heads": 6, "kv_heads": 2, "dtype": "float32", "slack_q": 2}
    for packing, rest in (("dense", ((), ())), ("ragged", ((3, 0), (0, 4)))):
        for n_q, n_k, scale in ((40, 50, 0.5), (41, 77, 0.25), (60, 20, -2.0)):
            lengths = {"seqlens_q": (n_q, *rest[0]), "seqlens_k": (n_k, *rest[1])}
            problem = Problem(**lengths, packing=packing, causal="bottom_right", softmax_scale=scale, **shape)
            part = ops.Part.of(materialise(problem, Recipe(), "cpu"))
            score_mod, mask = flex.score_of(problem, "cpu"), flex._block_mask(part)
            q, k, v = ((x if part.dense else x[None]).transpose(1, 2) for x in (part.q, part.k, part.v))
            function = flex.function(registry.get("torch.flex").compile_key(problem, Config()))
            with torch.no_grad(), PoisonEmpty(Bands()), _disable_current_modes():
                got = function(q, k, v, score_mod, mask, 1.0, True)
            with torch.enable_grad():
                expected = support_torch_ops.flex_function("")(q, k, v, score_mod, mask, 1.0, True)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs == 2


def on_gpu() -> list[Any]:
    """Each declared Case twice, with two patterns of values; of flex, where each is a compile, what differs in dtype and mask."""
    params = []
    for each in declared():
        case = each.values[0]
        p = case.problem
        flex_kinds = (
            ("float16", None, 64, "ragged"),
            ("bfloat16", "bottom_right", 128, "dense"),
            ("float32", "top_left", 16, "dense"),
        )
        slow = case.kernel == "torch.flex" and (p.dtype, p.causal, p.dim_qk, p.packing) not in flex_kinds
        for pattern in ("normal",) if case.kernel == "torch.flex" else ("normal", "needle"):
            marks = [pytest.mark.slow] if slow else []
            params.append(
                pytest.param(replace(case, recipe=Recipe(pattern=pattern, seed=3)), id=f"{each.id}-{pattern}", marks=marks)
            )
    return params


@pytest.mark.gpu
@pytest.mark.parametrize("case", on_gpu())
def test_on_a_gpu(case: Case) -> None:
    """A handful of fixed small Problems for each packing, dtype, mask, dims and Config that is declared."""
    kernel = registry.get(case.kernel)
    if reason := kernel.unavailable("cuda") or kernel.supports(case.problem, case.config, "cuda"):
        pytest.skip(reason)
    verdict = run_trial(case, "cuda")
    assert verdict.status == "pass", described(case, verdict)
