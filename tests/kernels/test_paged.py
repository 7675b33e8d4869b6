"""Paged key/value caches: how pages are laid out, drawn and shrunk; adapters of functions with a page table; planted faults."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from support import adapters as support
from support.runs import run_kernel
from support.subjects import LIMITS, Subject

from attnfuzz.harness.audit.conformance import probes
from attnfuzz.harness.audit.conformance.check import check_adapter
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.gate import tasks
from attnfuzz.harness.isolation.executors import InProcess
from attnfuzz.harness.repro.sanitize import child
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import Adapted, paged, varlen
from attnfuzz.kernels.contract import Config, Inputs, why_unsupported
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Layout, Needs, Problem
from attnfuzz.kernels.triton.machine_code.capture import plain_inputs
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.shrink_steps import simpler
from attnfuzz.strategies.trials import trial_cases
from attnfuzz.strategies.variants import all_variants

FORWARD = Needs(outputs=("o", "lse"))
PLAIN: dict[str, Any] = {
    "seqlens_q": (1, 3, 2, 1), "seqlens_k": (17, 40, 0, 33), "dim_qk": 8, "dim_v": 4, "heads": 4, "kv_heads": 2, "page_size": 16,
    "needs": FORWARD,
}  # fmt: skip
SMALL: dict[str, Any] = {"dims": ((8, 8),), "dtypes": ("float32",), "devices": ("cpu",), "groups": None, "unequal": True}


def gathered(problem: Problem, inputs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of each sequence, by the page table."""
    size = problem.page_size
    keys, values = [], []
    for b, n in enumerate(problem.seqlens_k):
        places = [(int(inputs.page_table[b, j // size]), j % size) for j in range(n)]
        keys.append(torch.stack([inputs.k_pages[at] for at in places]) if n else inputs.k[:0])
        values.append(torch.stack([inputs.v_pages[at] for at in places]) if n else inputs.v[:0])
    return keys, values


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [1, 16, 24, 64])
def test_pages_hold_the_keys_and_nan_in_every_other_row(seed: int, size: int) -> None:
    problem = Problem(**{**PLAIN, "page_size": size})
    inputs = materialise(problem, Recipe(seed=seed), "cpu")
    assert inputs.k_pages is not None
    assert inputs.page_table is not None
    assert inputs.seqlens_k is not None
    assert inputs.k_pages.shape[1:] == (size, 2, 8)
    assert (inputs.page_table.dtype, inputs.seqlens_k.tolist()) == (torch.int32, [17, 40, 0, 33])
    keys, values = gathered(problem, inputs)
    assert torch.equal(torch.cat(keys), inputs.k)
    assert torch.equal(torch.cat(values), inputs.v)
    used = {(int(inputs.page_table[b, j // size]), j % size) for b, n in enumerate(problem.seqlens_k) for j in range(n)}
    every = {(page, row) for page in range(inputs.k_pages.shape[0]) for row in range(size)}
    assert {at for at in every if bool(inputs.k_pages[at].isfinite().all())} == used
    assert all(bool(inputs.v_pages[at].isnan().all()) for at in every - used)
    behind = [int(x) for b, n in enumerate(problem.seqlens_k) for x in inputs.page_table[b, -(-n // size) :]]
    assert all(bool(inputs.k_pages[page].isnan().all()) for page in behind)


def test_pages_are_permuted_and_sometimes_shared() -> None:
    tables = [materialise(Problem(**PLAIN), Recipe(seed=seed), "cpu").page_table for seed in range(30)]
    firsts = [each[1, :3].tolist() for each in tables if each is not None]
    assert any(pages != sorted(pages) for pages in firsts)
    shared = [each[0, 0] == each[1, 0] for each in tables if each is not None]
    assert 3 < sum(map(bool, shared)) < 27


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": -1}, "page_size=-1: a page has tokens"),
        ({"page_size": 2.0}, "page_size=2.0: it must be an integer"),
        ({"slack_k": 3}, "pages have a layout of their own"),
        ({"layout_k": Layout(pitch=8)}, "pages have a layout of their own"),
        ({"needs": Needs()}, "a cache has no gradient"),
        ({"packing": "dense", "seqlens_q": (1, 1), "seqlens_k": (4, 4)}, "queries of a paged cache are ragged"),
    ],
)
def test_impossible_problems_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        Problem(**{**PLAIN, **changes})


# --- drawing and shrinking


@pytest.mark.parametrize("sizes", [(16,), (0, 16, 64)])
def test_drawn_cases_are_supported_and_shrink_within_the_sizes(sizes: tuple[int, ...]) -> None:
    subject = Subject(can={"page_sizes": sizes, "outputs": ("o", "lse"), "layouts": True})
    cases: list[Case] = []
    draw_values(trial_cases(subject, device="cpu", limits=LIMITS), cases.append, seed=2, examples=200)
    assert {case.problem.page_size for case in cases} == set(sizes)
    assert all(why_unsupported(subject.capabilities, case.problem, "cpu") is None for case in cases)
    decoding = [case for case in cases if case.problem.page_size and max(case.problem.seqlens_q) <= 4]
    assert len(decoding) > len(cases) / 8
    variants = all_variants(subject, "cpu")
    for case in cases[:30]:
        steps = list(simpler(case, variants, subject.capabilities))
        sizes_of = {each.problem.page_size for each in steps if subject.supports(each.problem, each.config, "cpu") is None}
        assert sizes_of <= set(sizes)


# --- an adapter


def decode(q, k_cache, v_cache, block_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, softmax_scale=None, causal=False):
    """A right kernel in plain torch."""
    o = q.new_zeros(*q.shape[:2], v_cache.shape[-1])
    size, ends = k_cache.shape[1], cu_seqlens_q.tolist()
    assert max_seqlen_q == max(b - a for a, b in pairwise(ends))
    for b, n in enumerate(cache_seqlens.tolist()):
        pages = block_table[b, : -(-n // size)].long()
        k, v = (x[pages].flatten(0, 1)[:n] for x in (k_cache, v_cache))
        o[ends[b] : ends[b + 1]] = plain(q[ends[b] : ends[b + 1]], k, v, softmax_scale, causal)
    return o


def plain(q, k, v, scale, causal):
    if not len(k):
        return q.new_zeros(*q.shape[:2], v.shape[-1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k) * scale
    if causal:
        hidden = torch.arange(len(k)) - torch.arange(len(q))[:, None] > len(k) - len(q)
        blind = hidden.all(-1)
        s = s.masked_fill(hidden & ~blind[:, None], -math.inf)
        return torch.einsum("hij,jhd->ihd", s.softmax(-1), v).masked_fill(blind[:, None, None], 0.0)
    return torch.einsum("hij,jhd->ihd", s.softmax(-1), v)


def tail_counts(q, k_cache, v_cache, block_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, causal=False):
    """It counts the rows behind the last token of the last page."""
    size = k_cache.shape[1]
    return decode(q, k_cache, v_cache, block_table, -(-cache_seqlens // size) * size, cu_seqlens_q, max_seqlen_q, causal=causal)


def one_table(q, k_cache, v_cache, block_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, causal=False):
    """It reads the first sequence's row of the table for all."""
    first = block_table[:1].expand_as(block_table)
    return decode(q, k_cache, v_cache, first, cache_seqlens, cu_seqlens_q, max_seqlen_q, causal=causal)


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def tried(kernel: Adapted) -> Any:
    registry.register(kernel)
    return run_kernel(kernel, Settings(device="cpu", max_examples=80, out=None), InProcess("cpu"))


CAN: dict[str, Any] = {**SMALL, "page_sizes": (4, 16), "zero_k": True, "scale_any": True}


def test_a_right_function_passes_and_check_adapter_says_so() -> None:
    kernel = paged(decode, name="theirs.paged", **CAN)
    assert kernel.capabilities.outputs == ("o",)
    assert tried(kernel).findings.count == 0
    done = check_adapter("theirs.paged", "cpu", in_process=True)
    assert [each for each in done.rows if each.status in ("wrong", "not run")] == []
    works = {each.check for each in done.rows if each.found == "declared, and works"}
    assert works >= {"pages of 4", "pages of 16", "sequences without keys"}


@pytest.mark.parametrize("function", [tail_counts, one_table])
def test_faults_are_found_and_shrunk(function: Any) -> None:
    state = tried(paged(function, name="theirs.faulty", **{**CAN, "scale_any": False}))
    assert state.findings.count
    for each in state.findings.closed.values():
        assert each.case.problem.page_size in (4, 16)
        assert each.case.problem.batch <= 2


class ReadsKeys:
    """triton.paged's interface around a float32 attention that takes keys and values where the oracle has them."""

    def __init__(self, uses: str) -> None:
        self.uses = uses

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        if self.uses == "shape":
            _ = inputs.k.shape
        if self.uses == "product":
            _ = inputs.q[:, :1] @ inputs.k[:, :1].mT
        if self.uses == "view":
            _ = inputs.v.view(torch.uint8)
        if self.uses == "v as an argument":
            _ = torch.zeros_like(inputs.v)
        # What it does not use may be passed on.
        copy = dataclasses.replace(inputs, q=inputs.q + 0)
        assert repr(copy.k) == "<no k beside k_pages>"
        return of_pages(copy)

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Any:
        raise AssertionError


def of_pages(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE by the page table."""
    p, size = inputs.problem, inputs.problem.page_size
    assert inputs.page_table is not None
    assert inputs.k_pages is not None
    assert inputs.v_pages is not None
    o = torch.zeros(p.total_q, p.heads, p.dim_v, dtype=inputs.q.dtype)
    lse = torch.full((p.heads, p.total_q), -torch.inf)
    at = 0
    for b, (n_q, n_k) in enumerate(zip(p.seqlens_q, p.seqlens_k, strict=True)):
        rows = slice(at, at + n_q)
        at += n_q
        if not n_k:
            continue
        pages = [int(page) for page in inputs.page_table[b, : -(-n_k // size)]]
        k, v = (x[pages].flatten(0, 1)[:n_k].repeat_interleave(p.groups, 1).float() for x in (inputs.k_pages, inputs.v_pages))
        s = torch.einsum("ihd,jhd->hij", inputs.q[rows].float(), k) * p.scale
        o[rows] = torch.einsum("hij,jhd->ihd", s.softmax(-1), v).to(o.dtype)
        lse[:, rows] = s.logsumexp(-1)
    return o, lse


@pytest.mark.parametrize("uses", ["nothing", "shape", "product", "view", "v as an argument"])
def test_keys_and_values_beside_pages_are_an_error_with_the_remedy(uses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject({"page_sizes": (16,), "outputs": ("o", "lse"), "dims": ((8, 4),)})
    monkeypatch.setattr(Subject, "build", lambda *_: ReadsKeys(uses))
    monkeypatch.setattr(registry, "_registered", {})
    registry.register(subject)
    case = Case(kernel=subject.name, problem=Problem(**PLAIN), config=subject.configs(Problem(**PLAIN))[0])
    failures = run_trial(case, "cpu").failures
    if uses == "nothing":
        assert failures == ()
        return
    [failure] = failures
    name = "v" if uses in ("view", "v as an argument") else "k"
    text = f"inputs.{name}: keys and values of this Problem are in pages; read inputs.{name}_pages, by inputs.page_table"
    assert (failure.kind, text in failure.message) == ("exception", True), failure.message


@pytest.mark.parametrize("where", ["gate", "sanitize", "check-adapter"])
def test_everything_that_runs_a_kernel_gives_it_no_keys_beside_pages(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, problem = Subject({"page_sizes": (16,), "outputs": ("o", "lse"), "dims": ((8, 4),)}), Problem(**PLAIN)
    monkeypatch.setattr(Subject, "build", lambda *_: ReadsKeys("nothing"))
    case = Case(kernel=subject.name, problem=problem, config=subject.configs(problem)[0])
    if where == "gate":
        assert "broken" not in tasks._timed(subject, case, "cpu", lambda _: None)
    elif where == "sanitize":
        child.run_launches(subject, case, "cpu", lambda _: None)
    else:
        probes._called(ReadsKeys("nothing"), materialise(problem, case.recipe, "cpu"), "cpu")


def test_what_does_not_fit_is_refused_in_words() -> None:
    with pytest.raises(BadArgument, match=r"page_sizes=\(0,\): a page has 1 token or more"):
        paged(decode, page_sizes=(0,), **SMALL)
    with pytest.raises(BadArgument, match="page_sizes=16: a page has 1 token or more"):
        paged(decode, page_sizes=16, **SMALL)  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="it has no parameter page_table"):
        paged(support.flash_varlen, page_sizes=(16,), **SMALL)
    with pytest.raises(BadArgument, match=r"this adapter passes no page table; use adapters\.paged"):
        varlen(support.flash_varlen, page_sizes=(16,), **SMALL)
    with pytest.raises(BadArgument, match=r"page_sizes=\(\): this adapter passes no page table"):
        varlen(support.flash_varlen, page_sizes=(), **SMALL)
    kernel = varlen(support.flash_varlen, **SMALL)
    problem = Problem(**{**PLAIN, "dim_v": 8, "dtype": "float32"})
    assert kernel.supports(problem, Config(), "cpu") == "page_size=16: supports 0"


def test_launches_are_captured_with_pages_and_sinks() -> None:
    inputs = plain_inputs(Problem(**{**PLAIN, "sinks": True}))
    assert inputs.k_pages is not None
    assert inputs.page_table is not None
    assert inputs.sinks is not None
    assert (tuple(inputs.k_pages.shape), tuple(inputs.page_table.shape)) == ((3, 16, 2, 8), (4, 3))
    assert inputs.sinks.tolist() == [0.0] * 4
