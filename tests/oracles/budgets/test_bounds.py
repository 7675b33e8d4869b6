"""Budgets do not depend on how the work is cut: frames of several sequences, blocks of rows, one head at a time."""

from __future__ import annotations

import pytest
import torch
from support.emulated.kernel import KERNEL, kernel_named
from support.emulated.whole import Emulated
from support.verdict.cases import drawn_case
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.harness.judge import intervals as measure
from attnfuzz.harness.judge.judge import judge
from attnfuzz.harness.judge.truth import is_tiny, truth
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.contract import Deviations, Outputs
from attnfuzz.kernels.problem import Dtype, Problem
from attnfuzz.oracles import attention, blockwise
from attnfuzz.oracles.budgets.bounds import budgets
from attnfuzz.oracles.formats import Format, half_ulp
from attnfuzz.oracles.frames import CHUNK, Placed, frames, key_range, tokens_of
from attnfuzz.strategies.case import Pattern, Recipe

PLAIN = Problem(seqlens_q=(70,), seqlens_k=(90,), dim_qk=16, dim_v=24, heads=4, kv_heads=2)
PROBLEMS = {
    "ragged": Problem(
        seqlens_q=(5, 0, 33, 70, 4), seqlens_k=(6, 3, 40, 9, 0), heads=6, kv_heads=2, dim_qk=16, dim_v=8, causal="bottom_right"
    ),
    "dense": Problem(seqlens_q=(40,) * 3, seqlens_k=(50,) * 3, packing="dense", heads=3, dim_qk=8, dim_v=8, causal="top_left"),
    "slack": Problem(seqlens_q=(7, 20), seqlens_k=(9, 30), heads=2, dim_qk=8, dim_v=16, slack_q=3, slack_k=2),
    "one": PLAIN,
    "window": Problem(seqlens_q=(60, 30), seqlens_k=(64, 20), dim_qk=8, dim_v=8, window=(5, 3)),
    "float32": Problem(seqlens_q=(30, 8), seqlens_k=(44, 8), dim_qk=8, dim_v=8, dtype="float32", causal="bottom_right"),
}


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        self._held = {key: (ref, size) for key, (ref, size) in self._held.items() if not ref.expired()}
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._held.values()))
        return result


def parts_of(budgets_) -> dict[str, torch.Tensor]:
    return {"lse": budgets_.lse, **{name: budget.allowed for name, budget in budgets_.outputs.items()}}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("ties", [False, True])
def test_sequences_side_by_side_have_the_budgets_of_each_alone(name: str, ties: bool) -> None:
    problem = PROBLEMS[name]
    inputs = materialise(problem, Recipe(seed=3), "cpu")
    together = parts_of(budgets(inputs, Deviations(), "cpu", ties=ties))
    tokens = tokens_of(inputs)
    alone = parts_of(budgets(inputs, Deviations(), "cpu", ties=ties, chunk=1 if not ties else 1 << 20))
    assert tokens.q.shape[0] == problem.total_q
    for output, allowed in together.items():
        if ties or output in ("o", "lse", "dq"):
            torch.testing.assert_close(allowed, alone[output], rtol=1e-9, atol=1e-35)
        else:
            # A block of rows knows no more than its part of the sums: never less, hardly more.
            assert (alone[output] >= allowed * (1 - 1e-9)).all()
            torch.testing.assert_close(allowed, alone[output], rtol=0.02, atol=1e-35)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_blockwise_oracle_is_the_oracle(name: str) -> None:
    problem = PROBLEMS[name]
    for data in attention.sequences(materialise(problem, Recipe(seed=5), "cpu")):
        whole, blocks = attention.reference(problem, data), blockwise.reference(problem, data, chunk=200)
        for output in ("o", "lse", "dq", "dk", "dv"):
            torch.testing.assert_close(getattr(blocks, output), getattr(whole, output), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("ties", [False, True])
def test_budgets_of_a_long_sequence_take_little_memory(ties: bool) -> None:
    # At 131,072 keys of dim 128 a tensor of keys is 134 MB, and one of a chunk's scores 67 MB: less than 4 GB in all.
    keys, dim, chunk = 4096, 64, 1 << 15
    problem = Problem(seqlens_q=(24,), seqlens_k=(keys,), dim_qk=dim, dim_v=dim)
    inputs = materialise(problem, Recipe(), "cpu")
    with Live() as live:
        budgets(inputs, Deviations(), "cpu", lean=True, ties=ties, chunk=chunk)
    assert live.peak <= (22 if ties else 18) * 8 * keys * dim + (26 if ties else 20) * 8 * chunk


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_score_is_in_one_frame(name: str) -> None:
    problem = PROBLEMS[name]
    inputs = materialise(problem, Recipe(), "cpu")
    for chunk in (1, 300, 5000, 1 << 20):
        counts = {i: torch.zeros(n_q, n_k) for i, (n_q, n_k) in enumerate(zip(problem.seqlens_q, problem.seqlens_k, strict=True))}
        for frame in frames(problem, chunk):
            Placed(tokens_of(inputs), frame)
            for i in frame.sequences:
                counts[i][frame.rows.start : frame.rows.stop, frame.keys.start : frame.keys.stop] += len(frame.kv_heads)
        for i, count in counts.items():
            visible = attention.visible_keys(problem, i)
            assert (count[visible] == problem.kv_heads).all()
            assert (count <= problem.kv_heads).all()


def test_a_block_of_rows_gets_the_keys_that_it_sees() -> None:
    for problem in PROBLEMS.values():
        for i, n_q in enumerate(problem.seqlens_q):
            visible = attention.visible_keys(problem, i)
            for start in range(0, n_q, 7):
                rows = range(start, min(start + 7, n_q))
                keys = key_range(problem, i, rows)
                outside = visible[rows.start : rows.stop].clone()
                outside[:, keys.start : keys.stop] = False
                assert not outside.any()


def test_a_long_batch_is_judged_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures and the failure's place are those of the whole."""
    kernel, problem = Emulated(), PROBLEMS["ragged"]
    inputs = materialise(problem, Recipe(seed=1), "cpu")
    o, lse = kernel.forward(inputs)
    dq, dk, dv = kernel.backward(inputs, o, lse)
    outputs = Outputs(o=o, lse=lse, dq=dq, dk=dk, dv=dv)
    whole = judge("k", inputs, outputs, truth(inputs, Deviations(), "cpu"))
    monkeypatch.setattr(blockwise, "is_large", lambda _: True)
    assert judge("k", inputs, outputs, truth(inputs, Deviations(), "cpu")).status == whole.status == "pass"
    dk[8, 1, 3] += 1.0
    dq[20, 4, 2] = torch.nan
    monkeypatch.undo()
    whole = judge("k", inputs, outputs, truth(inputs, Deviations(), "cpu"))
    monkeypatch.setattr(blockwise, "is_large", lambda _: True)
    heads = judge("k", inputs, outputs, truth(inputs, Deviations(), "cpu"))
    assert [repr(each.place) for each in heads.failures] == [repr(each.place) for each in whole.failures]
    for one, other in zip(whole.failures, heads.failures, strict=True):
        assert one.message.partition(". ")[0] == other.message.partition(". ")[0]
        assert other.pattern is not None
        assert other.message.endswith(" in that head alone")
    assert heads.figures["dk"].over == whole.figures["dk"].over == 1


def test_large_outputs_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, problem = Emulated(), PROBLEMS["ragged"]
    inputs = materialise(problem, Recipe(seed=1), "cpu")
    o, lse = kernel.forward(inputs)
    dq, dk, dv = kernel.backward(inputs, o, lse)
    o[7, 2, 1] += 1.0
    lse[4, 12] = torch.inf
    outputs = Outputs(o=o, lse=lse, dq=dq, dk=dk, dv=dv)
    whole = judge("k", inputs, outputs, truth(inputs, Deviations(), "cpu"))
    monkeypatch.setattr(measure, "_AT_ONCE", 100)
    pieces = judge("k", inputs, outputs, truth(inputs, Deviations(), "cpu"))
    assert [each.message for each in pieces.failures] == [each.message for each in whole.failures]
    for name, figures in whole.figures.items():
        assert pieces.figures[name] == figures


def test_equal_rows_in_many_frames_are_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame sees a part of the rows; those that are equal to them elsewhere are rounded alike too."""
    kernel = Emulated()
    problem = Problem(seqlens_q=(200,), seqlens_k=(200,), dim_qk=16, dim_v=16, heads=7)
    for seed in range(3):
        inputs = materialise(problem, Recipe(pattern="ties_q", seed=seed), "cpu")
        o, lse = kernel.forward(inputs)
        dq, dk, dv = kernel.backward(inputs, o, lse)
        outputs = Outputs(o=o, lse=lse, dq=dq, dk=dk, dv=dv)
        monkeypatch.setitem(CHUNK, "cpu", 6000)
        verdict = judge("k", inputs, outputs, truth(inputs, Deviations(), "cpu"))
        assert verdict.status == "pass", [each.message for each in verdict.failures]
        dv[17, 0, 3] *= 1.02
        assert judge("k", inputs, outputs, truth(inputs, Deviations(), "cpu")).failure is not None


def test_a_huge_sequence_blinds_no_other() -> None:
    problem = Problem(seqlens_q=(20, 20), seqlens_k=(30, 30), dim_qk=16, dim_v=16, dtype="bfloat16")
    inputs = materialise(problem, Recipe(seed=4), "cpu")
    plain = parts_of(budgets(inputs, Deviations(), "cpu"))
    for x in (inputs.v[:30], inputs.d_o[:20], inputs.k[:30]):
        x *= 2.0**60
    huge = parts_of(budgets(inputs, Deviations(), "cpu"))
    for output, allowed in plain.items():
        rows = slice(20, 40) if output in ("o", "lse", "dq") else slice(30, 60)
        torch.testing.assert_close(huge[output][:, rows], allowed[:, rows], rtol=1e-9, atol=0.0)


@pytest.mark.parametrize(("fault", "output"), [(1.1, "dv"), (1.1, "o"), (0.5, "o")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_near_overflow_hide_no_wrong_output(fault: float, output: str, dtype: str) -> None:
    problem = Problem(seqlens_q=(256,), seqlens_k=(256,), dim_qk=32, dim_v=32, dtype=dtype)
    kernel = KERNEL
    inputs = materialise(problem, Recipe(pattern="near_overflow", v_scale=16.0), "cpu")
    built = kernel.build(problem, kernel.configs(problem)[0], "cpu")
    o, lse = built.forward(inputs)
    outputs = Outputs(o, lse, *built.backward(inputs, o, lse))
    expected = truth(inputs, Deviations(), "cpu")
    assert judge("emulated", inputs, outputs, expected).status == "pass"
    getattr(outputs, output).mul_(fault)
    verdict = judge("emulated", inputs, outputs, expected)
    assert {each.output for each in verdict.failures} == {output}
    assert verdict.figures[output].over > 128 * 32


@pytest.mark.parametrize("n_q", [1, 2, 3, 7, 24])
def test_no_part_of_one_row(n_q: int) -> None:
    problem = Problem(seqlens_q=(n_q,), seqlens_k=(40,), dim_qk=8, dim_v=8, heads=8, kv_heads=1)
    parts = list(frames(problem, 100))
    assert [i for frame in parts for i in frame.rows] == list(range(n_q))
    assert all(len(frame.rows) >= min(2, n_q) for frame in parts)


def test_equal_rows_are_no_alarm_in_the_smallest_parts() -> None:
    case = drawn_case("correct", 902, 143).case
    kernel = kernel_named(case.kernel)
    inputs = materialise(case.problem, case.recipe, "cpu")
    built = kernel.build(case.problem, case.config, "cpu")
    o, lse = built.forward(inputs)
    outputs = Outputs(o, lse, *built.backward(inputs, o, lse))
    expected = truth(inputs, kernel.capabilities.deviations, "cpu")
    batch = budgets(inputs, kernel.capabilities.deviations, "cpu", ties=True, chunk=1)
    for name in ("dk", "dv"):
        excess = (getattr(outputs, name).double().transpose(0, 1) - expected[name].expected).abs()
        cell = half_ulp(expected[name].expected, Format.of(case.problem.dtype))
        assert (excess <= batch.outputs[name].allowed + cell).all()


def test_only_small_problems_are_tiny() -> None:
    assert is_tiny(Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=256, dim_v=256))
    assert is_tiny(Problem(seqlens_q=(16, 3), seqlens_k=(20, 5), heads=2, dim_qk=64, dim_v=64))
    assert not is_tiny(Problem(seqlens_q=(64,), seqlens_k=(64,), dim_qk=64, dim_v=64))
    assert not is_tiny(Problem(seqlens_q=(4096,), seqlens_k=(0,), dim_qk=16, dim_v=16))
    assert not is_tiny(Problem(seqlens_q=(1,) * 64, seqlens_k=(1,) * 63 + (40,), dim_qk=64, dim_v=64))


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(5, 9), (200, 300)])
def test_the_judge_says_the_same_on_host_and_device(seqlens: tuple[int, int]) -> None:
    problem = Problem(seqlens_q=(seqlens[0],), seqlens_k=(seqlens[1],), dim_qk=32, dim_v=32, heads=2, slack_q=2)
    verdicts = []
    for device in ("cpu", "cuda"):
        inputs = materialise(problem, Recipe(), device)
        expected = truth(inputs, Deviations(), device)
        assert expected["o"].expected.device.type == ("cpu" if is_tiny(problem) else device)
        outputs = {name: each.expected.to(device) for name, each in expected.items()}
        rows = {name: 2 if name in ("o", "lse", "dq") else 0 for name in outputs}
        outputs = {name: torch.nn.functional.pad(x, (0,) * (2 * x.ndim - 4) + (0, rows[name])) for name, x in outputs.items()}
        outputs = {name: x.float() if name == "lse" else x.transpose(0, 1).half() for name, x in outputs.items()}
        assert judge("test", inputs, Outputs(**outputs), expected).status == "pass"
        outputs["dk"][3, 0, 7] += 1
        verdicts.append(judge("test", inputs, Outputs(**outputs), expected))
    host, device_ = verdicts
    assert [(x.kind, x.output, x.place.position, x.place.dim) for x in host.failures] == [("mismatch", "dk", 3, 7)]
    assert [(x.kind, x.output, x.place.position, x.place.dim) for x in device_.failures] == [("mismatch", "dk", 3, 7)]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("pattern", ["sparse", "normal", "huge_logits"])
def test_no_budget_is_nan_where_scores_are_lost(pattern: Pattern, ties: bool) -> None:
    """Values of 2^40: P may be off by e^80, whose square times that of the values is endless."""
    problem = Problem(seqlens_q=(5,), seqlens_k=(4,), dim_qk=16, dim_v=8, dtype="bfloat16", softcap=2.0)
    huge = {f"{name}_scale": 2.0**40 for name in ("q", "k", "v", "do")}
    result = budgets(materialise(problem, Recipe(pattern=pattern, **huge), "cpu"), Deviations(), "cpu", ties=ties)
    for output, budget in result.outputs.items():
        assert not budget.allowed.isnan().any(), output
        assert budget.random is not None
        assert not budget.random.isnan().any(), output


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_factor_of_all_of_o_may_move_its_roundings_together(dtype: Dtype) -> None:
    """One key has all of the weight, and scores so large that exp is inexact: O = rd(V (1 + r)) with one r in all dims.

    The rows are those of 200,000 with normal values in which that moves D most, as rarely as a campaign has one.
    """
    kind, u = getattr(torch, dtype), Format.of(dtype).u
    generator, worst = torch.Generator().manual_seed(0), [181241, 163081, 41812, 72091, 173796, 25457]
    v, d_o = (torch.randn(200_000, 64, generator=generator)[worst].to(kind) for _ in range(2))
    problem = Problem(seqlens_q=(6,), seqlens_k=(6,), dim_qk=64, dim_v=64, dtype=dtype, softmax_scale=1.0)
    inputs = materialise(problem, Recipe(), "cpu")
    inputs.q[:, 0], inputs.k[:, 0] = 240 * torch.eye(6, 64), 120 * torch.eye(6, 64)
    inputs.v[:, 0], inputs.d_o[:, 0] = v, d_o
    errors = [((v.double() - (v * (1 + r * u)).to(kind).double()) * d_o.double()).sum(1) for r in (-0.9, -0.8, 0.8, 0.9)]
    allowed = budgets(inputs, Deviations(), "cpu").outputs["dq"].allowed[0].diagonal()
    ratio = float((torch.stack(errors).abs().amax(0) * 120 / allowed).max())
    assert 0.5 < ratio < 0.8
