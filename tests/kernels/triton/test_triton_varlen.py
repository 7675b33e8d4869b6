"""`triton.varlen` in the interpreter against float64, and what it must leave alone."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from support.triton_mode import interpreted

from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels.contract import Config, Inputs, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import OUTPUT_NAMES, Layout, Problem
from attnfuzz.kernels.triton.varlen import KERNEL, TritonVarlen
from attnfuzz.strategies.case import SINK_VALUES, Case, Recipe

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 5e-6}

RAGGED = Problem(
    seqlens_q=(17, 0, 33, 5, 40),
    seqlens_k=(30, 19, 33, 0, 7),
    dim_qk=40,
    dim_v=72,
    heads=6,
    kv_heads=2,
    slack_q=3,
    slack_k=5,
)


def changed(problem: Problem, **changes: Any) -> Problem:
    fields = {name: getattr(problem, name) for name in problem.__struct_fields__}
    return Problem(**{**fields, **changes})


def inputs_of(problem: Problem, seed: int = 1) -> Inputs:
    """Random tensors whose slack rows are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def rows(total: int, slack: int, heads: int, dim: int) -> torch.Tensor:
        tensor = torch.randn(total + slack, heads, dim, generator=generator).to(getattr(torch, problem.dtype))
        tensor[total:] = math.nan
        return tensor

    def cu_seqlens(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

    return Inputs(
        problem=problem,
        q=rows(problem.total_q, problem.slack_q, problem.heads, problem.dim_qk),
        k=rows(problem.total_k, problem.slack_k, problem.kv_heads, problem.dim_qk),
        v=rows(problem.total_k, problem.slack_k, problem.kv_heads, problem.dim_v),
        d_o=rows(problem.total_q, problem.slack_q, problem.heads, problem.dim_v),
        cu_seqlens_q=cu_seqlens(problem.seqlens_q),
        cu_seqlens_k=cu_seqlens(problem.seqlens_k),
        max_seqlen_q=max(problem.seqlens_q),
        max_seqlen_k=max(problem.seqlens_k),
    )


def reference(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """`o, lse, dq, dk, dv` in float64, slack rows left out."""
    problem = inputs.problem
    wide: Any = {"dtype": torch.float64}
    o = torch.zeros(problem.total_q, problem.heads, problem.dim_v, **wide)
    lse = torch.full((problem.heads, problem.total_q), -math.inf, **wide)
    dq = torch.zeros(problem.total_q, problem.heads, problem.dim_qk, **wide)
    dk = torch.zeros(problem.total_k, problem.kv_heads, problem.dim_qk, **wide)
    dv = torch.zeros(problem.total_k, problem.kv_heads, problem.dim_v, **wide)
    for seq, (seqlen_q, seqlen_k) in enumerate(zip(problem.seqlens_q, problem.seqlens_k, strict=True)):
        begin_q, begin_k = int(inputs.cu_seqlens_q[seq]), int(inputs.cu_seqlens_k[seq])
        at_q, at_k = slice(begin_q, begin_q + seqlen_q), slice(begin_k, begin_k + seqlen_k)
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        if problem.causal is not None:
            visible = visible.tril(seqlen_k - seqlen_q)
        for head in range(problem.heads):
            kv_head = head // problem.groups
            q, k, v = inputs.q[at_q, head].double(), inputs.k[at_k, kv_head].double(), inputs.v[at_k, kv_head].double()
            d_o = inputs.d_o[at_q, head].double()
            scores = (problem.scale * (q @ k.T)).masked_fill(~visible, -math.inf)
            row_lse = scores.logsumexp(1)
            p = (scores - row_lse.nan_to_num(neginf=0.0)[:, None]).exp()
            o[at_q, head], lse[head, at_q] = p @ v, row_lse
            ds = p * (d_o @ v.T - (d_o * (p @ v)).sum(1, keepdim=True))
            dq[at_q, head] = problem.scale * (ds @ k)
            dk[at_k, kv_head] += problem.scale * (ds.T @ q)
            dv[at_k, kv_head] += p.T @ d_o
    return o, lse, dq, dk, dv


def run(kernel: Kernel, inputs: Inputs, config: Config | None = None) -> tuple[torch.Tensor, ...]:
    """All five outputs, slack rows cut off."""
    problem = inputs.problem
    built = kernel.build(problem, config or kernel.configs(problem)[0], "cpu")
    o, lse = built.forward(inputs)
    assert lse is not None
    dq, dk, dv = built.backward(inputs, o, lse)
    total_q, total_k = problem.total_q, problem.total_k
    return o[:total_q], lse[:, :total_q], dq[:total_q], dk[:total_k], dv[:total_k]


def worst(expected: torch.Tensor, got: torch.Tensor) -> float:
    """The largest error over the largest value; infinite where -inf or NaN do not agree."""
    if not torch.equal(expected.isfinite(), got.isfinite()):
        return math.inf
    error = (expected - got.double()).nan_to_num(0.0).abs()
    return float(error.max() / expected.nan_to_num(0.0, neginf=0.0).abs().max().clamp(min=1e-3)) if error.numel() else 0.0


def errors(kernel: Kernel, inputs: Inputs, config: Config | None = None) -> dict[str, float]:
    actual = run(kernel, inputs, config)
    return {name: worst(e, g) for name, e, g in zip(OUTPUT_NAMES, reference(inputs), actual, strict=True)}


def assert_right(kernel: Kernel, inputs: Inputs, config: Config | None = None) -> None:
    actual = errors(kernel, inputs, config)
    assert actual.pop("lse") <= 2e-6
    assert max(actual.values()) <= TOLERANCE[inputs.problem.dtype], actual


@interpreted
@pytest.mark.parametrize("causal", [None, "bottom_right"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ragged_groups_against_float64(dtype: str, causal: Any) -> None:
    assert_right(KERNEL, inputs_of(changed(RAGGED, dtype=dtype, causal=causal)))


@interpreted
@pytest.mark.parametrize("index", range(7))
def test_every_config(index: int) -> None:
    problem = Problem(seqlens_q=(70, 1), seqlens_k=(85, 129), dim_qk=16, dim_v=16, causal="bottom_right")
    assert_right(KERNEL, inputs_of(problem), KERNEL.configs(problem)[index])


@interpreted
@pytest.mark.parametrize("dims", [*KERNEL.capabilities.dims, (1, 3), (17, 256)])
def test_dims(dims: tuple[int, int]) -> None:
    assert_right(
        KERNEL, inputs_of(Problem(seqlens_q=(35,), seqlens_k=(37,), dim_qk=dims[0], dim_v=dims[1], causal="bottom_right"))
    )


@interpreted
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.7, 1])
def test_any_scale(scale: float) -> None:
    assert_right(KERNEL, inputs_of(changed(RAGGED, softmax_scale=scale, causal="bottom_right")))


@interpreted
def test_rows_without_keys_are_exact() -> None:
    problem = changed(RAGGED, causal="bottom_right")
    expected, actual = reference(inputs_of(problem)), run(KERNEL, inputs_of(problem))
    dead = expected[1] == -math.inf
    assert dead.any()
    assert (actual[1][dead] == -math.inf).all()
    for name, output in (("o", actual[0]), ("dq", actual[2])):
        assert (output.transpose(0, 1)[dead] == 0).all(), name
    # Keys of the sequence without queries.
    for output in actual[3:]:
        assert (output[30:49] == 0).all()


@interpreted
@pytest.mark.parametrize(("seqlens_q", "seqlens_k"), [((0, 0), (0, 0)), ((0, 0), (9, 40)), ((9, 40), (0, 0)), ((0,), (1,))])
def test_empty_batches(seqlens_q: tuple[int, ...], seqlens_k: tuple[int, ...]) -> None:
    problem = Problem(seqlens_q=seqlens_q, seqlens_k=seqlens_k, dim_qk=16, dim_v=32, heads=2, kv_heads=1, slack_q=1)
    actual = run(KERNEL, inputs_of(problem))
    assert [tuple(output.shape) for output in actual] == [tuple(output.shape) for output in reference(inputs_of(problem))]
    assert (actual[1] == -math.inf).all()
    for output in (actual[0], *actual[2:]):
        assert (output == 0).all()


@interpreted
def test_slack_rows_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(math.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(math.nan))
    problem = changed(RAGGED, causal="bottom_right")
    inputs = inputs_of(problem)
    built = KERNEL.build(problem, KERNEL.configs(problem)[0], "cpu")
    o, lse = built.forward(inputs)
    dq, dk, dv = built.backward(inputs, o, lse)
    for name, output, total in (("o", o, problem.total_q), ("lse", lse.T, problem.total_q), ("dq", dq, problem.total_q)):
        assert output[total:].isnan().all(), name
        assert not output[:total].isnan().any(), name
    for name, output in (("dk", dk), ("dv", dv)):
        assert output[problem.total_k :].isnan().all(), name
        assert not output[: problem.total_k].isnan().any(), name


def copied(text: str, folder: Path) -> ModuleType:
    """The device module of source `text`, as a module of its own."""
    path = folder / "varlen_device_copy.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"varlen_device_copy_{abs(hash(text))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@interpreted
def test_a_fault_in_a_copy_shows_and_stays_there(tmp_path: Path) -> None:
    source = Path(KERNEL.files[1]).read_text()
    old, new = "cols[None, :] <= last[:, None]", "cols[None, :] < last[:, None]"
    assert source.count(old) == 1
    faulty = TritonVarlen(name="triton.mask_off_by_one", device_code=lambda: copied(source.replace(old, new), tmp_path))
    inputs = inputs_of(changed(RAGGED, causal="bottom_right"))
    assert max(errors(faulty, inputs).values()) > 0.1
    assert_right(KERNEL, inputs)


@interpreted
def test_a_poisoned_sequence_stays_alone_and_quiet(recwarn: pytest.WarningsRecorder) -> None:
    inputs = inputs_of(changed(RAGGED, seqlens_q=(17, 20), seqlens_k=(30, 20)))
    right = run(KERNEL, inputs)
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.d_o):
        tensor[int(inputs.cu_seqlens_k[1] if tensor.shape[1] == 2 else inputs.cu_seqlens_q[1]) :] = math.nan
    poisoned = run(KERNEL, inputs)
    assert not recwarn.list
    for name, expected, got in zip(OUTPUT_NAMES, right, poisoned, strict=True):
        rows = 30 if name in ("dk", "dv") else 17
        if name == "lse":
            expected, got = expected.T, got.T
        assert torch.equal(expected[:rows], got[:rows]), name
        if name != "lse":
            assert got[rows:].isnan().all(), name


def test_fulfils_the_contract() -> None:
    assert isinstance(KERNEL, Kernel)
    assert all(Path(file).is_file() for file in KERNEL.files)
    default = KERNEL.configs(RAGGED)[0]
    for config in KERNEL.configs(RAGGED):
        assert KERNEL.supports(RAGGED, config, "cpu") is None
    assert "causal" in str(KERNEL.supports(changed(RAGGED, causal="top_left"), default, "cpu"))
    with pytest.raises(BadArgument, match="ask supports"):
        KERNEL.build(changed(RAGGED, causal="top_left"), default, "cpu")
    unknown = Config(tile_m=48, tile_n=32)
    assert "not among" in str(KERNEL.supports(RAGGED, unknown, "cpu"))


def test_compile_key_depends_on_dims_causal_dtype_config_and_whether_all_is_contiguous() -> None:
    def key(**changes: Any) -> str:
        problem = changed(RAGGED, **changes)
        return KERNEL.compile_key(problem, KERNEL.configs(RAGGED)[0])

    same: list[dict[str, Any]] = [
        {},
        {"seqlens_q": (1, 2, 3, 4, 5)},
        {"heads": 2, "kv_heads": 1},
        {"softmax_scale": -1.0},
        {"slack_k": 0},
    ]
    other: list[dict[str, Any]] = [{"dim_qk": 48}, {"dim_v": 40}, {"causal": "bottom_right"}, {"dtype": "bfloat16"}]
    other += [{"layout_q": Layout(pitch=8)}]
    strided: list[dict[str, Any]] = [{"layout_q": Layout(pitch=8)}, {"layout_do": Layout(expanded=True)}]
    assert len({key(**changes) for changes in strided}) == 1
    assert len({key(**changes) for changes in same}) == 1
    assert len({key(**changes) for changes in [{}, *other]}) == 1 + len(other)
    assert len({KERNEL.compile_key(RAGGED, config) for config in KERNEL.configs(RAGGED)}) == len(KERNEL.configs(RAGGED))


# --- sinks


@interpreted
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "changes", [{}, {"causal": "bottom_right"}, {"layout_q": Layout(pitch=8), "layout_do": Layout(order="htd")}]
)
def test_sinks_are_judged_in_every_config(dtype: str, changes: dict[str, Any]) -> None:
    problem = changed(RAGGED, dtype=dtype, sinks=True, **changes)
    for number, config in enumerate(KERNEL.configs(problem)):
        recipe = Recipe(seed=number, sinks=SINK_VALUES[number % len(SINK_VALUES)])
        verdict = run_trial(Case(kernel=KERNEL.name, problem=problem, recipe=recipe, config=config), "cpu")
        assert verdict.status == "pass", verdict.failures


@interpreted
def test_the_gradient_of_sinks_is_the_same_from_run_to_run_and_zero_without_queries() -> None:
    problem = changed(RAGGED, dtype="float32", sinks=True)
    built, inputs = KERNEL.build(problem, KERNEL.configs(problem)[0], "cpu"), materialise(problem, Recipe(), "cpu")
    o, lse = built.forward(inputs)
    first, second = (built.backward(inputs, o, lse) for _ in range(2))
    assert torch.equal(first[3][0], second[3][0])
    empty = changed(problem, seqlens_q=(0,), seqlens_k=(4,), slack_q=0, slack_k=0)
    none = materialise(empty, Recipe(), "cpu")
    built = KERNEL.build(empty, KERNEL.configs(empty)[0], "cpu")
    assert built.backward(none, *built.forward(none))[3][0].tolist() == [0.0] * 6


def test_sinks_have_code_of_their_own() -> None:
    problem, config = changed(RAGGED, sinks=True), KERNEL.configs(RAGGED)[0]
    assert KERNEL.compile_key(problem, config) != KERNEL.compile_key(RAGGED, config)
