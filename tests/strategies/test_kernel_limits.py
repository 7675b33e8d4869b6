"""Limits that a kernel declares on shapes: every draw, relation, earlier call, shrinking step and neighbour stays within them."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import torch
from support import adapters as support
from support.runs import run_kernel
from support.subjects import LIMITS, Subject
from torch.nn.functional import scaled_dot_product_attention

from attnfuzz.harness.audit.conformance.check import Conformance, check_adapter
from attnfuzz.harness.audit.conformance.row import Row
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.executors import InProcess
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import Adapted, dense
from attnfuzz.kernels.contract import Capabilities, Config, why_unsupported
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import RELATIONS, Case
from attnfuzz.strategies.cases import cases
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.kernel_limits import Room, within_limits
from attnfuzz.strategies.models import left_out, model_variants
from attnfuzz.strategies.neighbours import neighbours
from attnfuzz.strategies.relations import relations_of
from attnfuzz.strategies.shrink_steps import simpler
from attnfuzz.strategies.trials import trial_cases
from attnfuzz.strategies.variants import all_variants

POOL = ((1, 2, 1, 16, 32), (1, 2, 2, 16, 32), (2, 2, 1, 16, 32), (1, 4, 2, 64, 64), (2, 4, 2, 64, 128))
DENSE: dict[str, Any] = {"packings": ("dense",), "slack": False}
CAN: dict[str, dict[str, Any]] = {
    "multiple of keys": {"multiple_k": 48},
    "multiples": {"multiple_q": 16, "multiple_k": 24, "layouts": True},
    "multiples, equal lengths": {"multiple_q": 16, "multiple_k": 24, "unequal": False, "zero_q": False, "zero_k": False},
    "multiples, dense": {"multiple_q": 8, "multiple_k": 16, **DENSE},
    "multiples beyond the longest": {"multiple_q": 256, "multiple_k": 256, "length_max": 300},
    "one sequence": {"batch_max": 1},
    "three heads": {"heads_max": 3},
    "one head": {"heads_max": 1},
    "default scale": {"scale_given": False, "scale_any": False},
    "windows on the left": {"window": True, "window_forms": ("left",)},
    "windows of one width, in multiples": {"window": True, "window_forms": ("equal",), "window_multiple": 16},
    "a pool of shapes": {"shapes": POOL, **DENSE, "layouts": True},
    "a pool of shapes, ragged": {"shapes": POOL, "slack": True},
    "one shape": {"shapes": ((3, 8, 2, 128, 128),), "groups": (4,), "unequal": False, **DENSE},
}


def drawn(subject: Subject, count: int = 150) -> list[Case]:
    collected: list[Case] = []
    draw_values(trial_cases(subject, device="cpu", limits=LIMITS), collected.append, seed=3, examples=count)
    return collected


@pytest.mark.parametrize("name", CAN)
def test_every_draw_step_and_neighbour_is_within_the_limits(name: str) -> None:
    subject = Subject(can=CAN[name])
    can, variants = subject.capabilities, all_variants(subject, "cpu")
    every = drawn(subject)
    assert len(every) > 140, "draws are filtered away"
    for case in every:
        assert why_unsupported(can, case.problem, "cpu") is None
    for case in every[:40]:
        steps = [each for each in simpler(case, variants, can) if subject.supports(each.problem, each.config, "cpu") is None]
        assert len(set(steps)) == len(steps) or len(steps) > 0
        assert not any(case == each for each in steps)
        assert neighbours(subject, case, "cpu")


def test_cases_are_not_filtered_by_their_limits() -> None:
    """What is drawn fits as it is: a strategy that proposes other lengths, and filters, would spend its time on them."""
    for can in CAN.values():
        subject = Subject(can=can)
        asked: list[Problem] = []

        def refuse(problem: Problem, _: Config, asked: list[Problem] = asked) -> None:
            asked.append(problem)

        counted = Subject(can=can, refuse=refuse)
        collected: list[Case] = []
        strategy = cases(counted, device="cpu", limits=LIMITS)
        asked.clear()
        draw_values(strategy, collected.append, seed=1, examples=60)
        assert len(asked) <= len(collected) + 5
        assert all(why_unsupported(subject.capabilities, each, "cpu") is None for each in asked)


def test_a_batch_of_equal_lengths_is_cut_to_the_room_once_they_are_rounded_up() -> None:
    can, room = Capabilities(multiple_q=64, multiple_k=64), Room(batch=8, length=300, tiles=4, heads=1, tile_m=64, tile_n=64)
    assert within_limits([(10, 10)] * 8, can, room) == ((64, 64),) * 4
    assert within_limits([(300, 300)] * 2, can, room) == ((256, 256),)


def test_a_pool_of_lists_is_that_of_tuples() -> None:
    assert dense(static, **SMALL, shapes=[[1, 2, 1, 8, 8]]).capabilities.shapes == ((1, 2, 1, 8, 8),)


def test_all_of_a_pool_is_drawn_and_every_multiple() -> None:
    shapes = {_shape(case.problem) for case in drawn(Subject(can=CAN["a pool of shapes"]), 300)}
    assert shapes == set(POOL)
    lengths = {n for case in drawn(Subject(can=CAN["multiples"]), 300) for n in case.problem.seqlens_k}
    assert lengths >= {0, 24, 48, 72, 96}


def _shape(p: Problem) -> tuple[int, ...]:
    return p.batch, p.heads, p.kv_heads, p.seqlens_q[0], p.seqlens_k[0]


def test_relations_of_a_pool_are_those_whose_other_launches_are_in_it() -> None:
    def applying(shapes: tuple[Any, ...]) -> set[str]:
        subject = Subject(can={"shapes": shapes, **DENSE, "layouts": True})
        return set(relations_of(subject, all_variants(subject, "cpu"), "cpu"))

    everywhere = set(RELATIONS) - {"split_batch", "repeated_heads", "split_keys", "huge_strides"}
    alone = ((1, 2, 1, 16, 32),)
    assert applying(alone) == everywhere
    assert applying((*alone, (1, 2, 2, 16, 32))) == everywhere | {"repeated_heads"}
    assert applying((*alone, (2, 2, 1, 16, 32))) == everywhere | {"split_batch"}
    assert applying((*alone, (1, 2, 1, 16, 16))) == everywhere | {"split_keys"}


def test_shrinking_ends_at_the_smallest_multiple_that_fails() -> None:
    subject = Subject(can=CAN["multiples"])
    can, variants = subject.capabilities, all_variants(subject, "cpu")
    start = next(case for case in drawn(subject, 400) if case.problem.batch > 1 and max(case.problem.seqlens_k) >= 96)

    def end(fails: Any) -> Problem:
        now = start
        while True:
            steps = (each for each in simpler(now, variants, can) if subject.supports(each.problem, each.config, "cpu") is None)
            better = next((each for each in steps if fails(each.problem)), None)
            if better is None:
                return now.problem
            now = better

    assert (end(lambda p: True).seqlens_q, end(lambda p: True).seqlens_k) == ((16,), (24,))
    assert end(lambda p: max(p.seqlens_k) >= 50).seqlens_k == (72,)


def test_shrinking_goes_to_smaller_shapes_of_the_pool_only() -> None:
    case = Case(kernel="acme.flash", problem=Problem(**_fields(POOL[-1])), config=Config(tile_m=64, tile_n=32))
    subject = Subject(can=CAN["a pool of shapes"])
    steps = [each.problem for each in simpler(case, all_variants(subject, "cpu"), subject.capabilities)]
    shapes = [_shape(each) for each in steps if _shape(each) != POOL[-1]]
    assert shapes == [POOL[0], POOL[1], POOL[2], POOL[3]]
    assert all(_shape(each) in POOL for each in steps)


def _fields(shape: tuple[int, ...]) -> dict[str, Any]:
    batch, heads, kv_heads, n_q, n_k = shape
    return {
        "seqlens_q": (n_q,) * batch, "seqlens_k": (n_k,) * batch, "heads": heads, "kv_heads": kv_heads,
        "dim_qk": 64, "dim_v": 64, "packing": "dense",
    }  # fmt: skip


def test_neighbours_of_a_shape_are_of_the_pool() -> None:
    subject = Subject(can=CAN["a pool of shapes"])
    case = Case(kernel="acme.flash", problem=Problem(**_fields(POOL[0])), config=Config(tile_m=64, tile_n=32))
    of = {name: [_shape(each.problem) for each in others] for name, others in neighbours(subject, case, "cpu").items()}
    assert of["batch"] == [POOL[2]]
    assert "seqlen_q" not in of


def test_models_that_do_not_fit_are_left_out_with_the_reason() -> None:
    few = Subject(can={"heads_max": 4, "dims": ((64, 64), (128, 128), (192, 128))})
    assert model_variants(few, "cpu", 64)
    assert left_out(few, "cpu", 64)["Falcon 7B"] == "heads=71: at most 4"
    pool = Subject(can=CAN["a pool of shapes"])
    assert set(left_out(pool, "cpu", 64).values()) == {"only the shapes that the kernel lists"}
    with pytest.raises(BadArgument, match="it takes no model's attention"):
        model_variants(pool, "cpu", 64)


# --- windows

FORMS = {"left": {(True, False)}, "right": {(False, True)}, "both": {(True, True)}, "equal": {(True, True)}}


@pytest.mark.parametrize("tiles", [(Config(tile_m=64, tile_n=32),), (Config(block=64),)], ids=["plain", "blocks"])
@pytest.mark.parametrize("step", [1, 32])
@pytest.mark.parametrize("form", FORMS)
def test_windows_are_drawn_in_their_form_and_multiples(form: Any, step: int, tiles: tuple[Config, ...]) -> None:
    subject = Subject(can={"window": True, "window_forms": (form,), "window_multiple": step}, tiles=tiles)
    windows = [each.problem.window for each in drawn(subject, 200)]
    limited = {each for each in windows if each is not None and each != (None, None)}
    assert {(left is not None, right is not None) for left, right in limited} == FORMS[form]
    assert len(limited) > 2
    assert all(side % step == 0 for each in limited for side in each if side is not None)
    assert form != "equal" or all(left == right for left, right in limited)
    assert None in windows
    assert (None, None) in windows


def test_shrinking_a_window_keeps_its_form_and_multiples() -> None:
    subject = Subject(can=CAN["windows of one width, in multiples"])
    can, variants = subject.capabilities, all_variants(subject, "cpu")

    def shrunk(case: Case, fails: Any) -> Any:
        while True:
            steps = (each for each in simpler(case, variants, can) if subject.supports(each.problem, each.config, "cpu") is None)
            better = next((each for each in steps if fails(each.problem.window)), None)
            if better is None:
                return case.problem.window
            case = better

    problem = Problem(seqlens_q=(100,), seqlens_k=(100,), dim_qk=64, dim_v=64, window=(80, 80))
    start = Case(kernel="acme.flash", problem=problem, config=subject.tiles[0])
    assert shrunk(start, lambda window: window is not None and (window[0] or 0) > 20) == (32, 32)
    assert shrunk(start, lambda window: window is not None) == (0, 0)
    assert shrunk(start, lambda _: True) is None
    case = Case(kernel="acme.flash", problem=msgspec.structs.replace(problem, window=None), config=subject.tiles[0])
    assert [each.problem.window for each in neighbours(subject, case, "cpu")["window"]] == [(16, 16)]


def test_windows_of_models_are_rounded_to_the_multiple() -> None:
    can = {"window": True, "window_forms": ("left",), "window_multiple": 16, "softcap": True, "dims": ((128, 128),)}
    subject = Subject(can=can)
    windows = {dict(each.modifiers or ()).get("window") for each in model_variants(subject, "cpu", 200)}
    assert windows - {None} == {(112, 0)}


# --- an adapter of a kernel compiled for static shapes

SMALL: dict[str, Any] = {"dims": ((8, 8),), "dtypes": ("float32",), "devices": ("cpu",)}


def static(q: Any, k: Any, v: Any) -> Any:
    """A kernel of three shapes, always causal, with the default scale."""
    if (*q.shape[:3], k.shape[1]) not in {(1, 4, 2, 4), (1, 8, 2, 16), (2, 8, 2, 16)}:
        raise RuntimeError(f"not compiled for {tuple(q.shape)}")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def static_with_a_fault(q: Any, k: Any, v: Any) -> Any:
    o = static(q, k, v)
    return torch.cat([o[:, :-1], o[:, -1:] * 1.5], 1) if q.shape[1] == 8 else o


SHAPES = ((1, 2, 2, 4, 4), (1, 2, 1, 8, 16), (2, 2, 1, 8, 16))


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_loaded", {})


def tried(kernel: Adapted) -> Any:
    registry.register(kernel)
    return run_kernel(kernel, Settings(device="cpu", max_examples=60, out=None), InProcess("cpu"))


def test_a_kernel_of_static_shapes_is_fuzzed_within_them() -> None:
    kernel = dense(static, name="theirs.static", shapes=SHAPES, causal=("bottom_right",), **SMALL)
    assert (kernel.capabilities.groups, kernel.capabilities.unequal) == ((1, 2), True)
    assert not kernel.capabilities.scale_given
    state = tried(kernel)
    assert state.findings.count == 0


def test_a_fault_of_one_static_shape_is_found_and_shrunk_within_the_pool() -> None:
    kernel = dense(static_with_a_fault, name="theirs.faulty", shapes=SHAPES, causal=("bottom_right",), **SMALL)
    state = tried(kernel)
    assert state.findings.count
    for each in state.findings.closed.values():
        assert _shape(each.case.problem) == SHAPES[1]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"shapes": ((1, 2, 3),)}, "each is five integers; give tuples"),
        ({"shapes": ((1, 3, 2, 8, 8),)}, "kv_heads divides heads"),
        ({"shapes": 5}, "shapes=5: each is five integers; give tuples"),
        ({"multiple_q": 0}, "multiple_q=0: it is 1 or more; correct it"),
        ({"multiple_k": "64"}, "multiple_k='64': expected `int`, got `str`; give what Capabilities.multiple_k is declared as"),
        ({"batch_max": 1.5}, r"batch_max=1\.5: expected `int | null`, got `float`"),
        ({"heads_max": -1}, "heads_max=-1: it is 1 or more"),
        ({"page_sizes": 16}, "page_sizes=16: expected `array`, got `int`"),
        ({"causal": "bottom_right"}, "causal='bottom_right': expected `array`, got `str`"),
        ({"causal": (None, "bottom_right")}, "static has no parameter causal; name the one mask"),
        ({"scale_given": True}, "static has no parameter softmax_scale"),
    ],
)
def test_limits_that_cannot_be_are_refused_in_words(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        dense(static, **SMALL, **declared)


# --- check-adapter


def check(kernel: Any) -> Conformance:
    registry._registered[kernel.name] = kernel
    return check_adapter(kernel.name, "cpu", in_process=True)


def row(done: Conformance, name: str) -> Row:
    (found,) = [each for each in done.rows if each.check == name]
    return found


def test_rows_of_a_pool() -> None:
    done = check(dense(static, name="theirs.static", shapes=SHAPES, causal=("bottom_right",), **SMALL))
    assert [each for each in done.rows if each.status in ("wrong", "not run")] == []
    assert row(done, "shapes of the pool").found == "declared, and works"
    assert row(done, "shapes beyond the pool").status == "absent"
    wide = dense(support.flash, name="theirs.wide", shapes=SHAPES, lse=False, **SMALL)
    assert row(check(wide), "shapes beyond the pool").status == "hint"
    one_more = dense(static, name="theirs.more", shapes=(*SHAPES, (1, 2, 1, 9, 16)), causal=("bottom_right",), **SMALL)
    assert row(check(one_more), "shapes of the pool").status == "wrong"


def limited(q: Any, k: Any, v: Any, softmax_scale: Any = None) -> Any:
    if q.shape[1] % 4 or k.shape[1] % 8 or q.shape[0] > 2 or q.shape[2] > 3:
        raise RuntimeError(f"it does not take {tuple(q.shape)}")
    return support.flash(q, k, v, softmax_scale=softmax_scale)


LIMITED: dict[str, Any] = {**SMALL, "unequal": True, "multiple_q": 4, "multiple_k": 8, "batch_max": 2, "heads_max": 3}


def test_rows_of_limits() -> None:
    done = check(dense(limited, name="theirs.limited", **LIMITED))
    assert [each for each in done.rows if each.status in ("wrong", "not run")] == []
    for name in ("lengths in multiples", "batch of 2", "3 heads"):
        assert row(done, name).found == "declared, and works"
    for name in ("lengths beside multiples", "batch of 3", "4 heads"):
        assert row(done, name).status == "absent"
    done = check(dense(limited, name="theirs.limited", **LIMITED | {"multiple_q": 2, "batch_max": 3}))
    assert row(done, "lengths in multiples").status == row(done, "batch of 3").status == "wrong"


def one_sided(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1)) -> Any:
    if (window_size[1] >= 0 and not causal) or max(window_size[0], 0) % 4:
        raise RuntimeError(f"it does not take {window_size}")
    return support.flash(q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size)


def test_rows_of_windows() -> None:
    declared: dict[str, Any] = {**SMALL, "window_forms": ("left",), "window_multiple": 4}
    done = check(dense(one_sided, name="theirs.left", **declared))
    assert [each for each in done.rows if each.status in ("wrong", "not run")] == []
    assert row(done, "window").found == "declared, and works"
    for name in ("window on both sides", "window on the right", "window beside multiples"):
        assert row(done, name).status == "absent"
    done = check(dense(one_sided, name="theirs.left", **declared | {"window_forms": ("left", "right"), "window_multiple": 2}))
    assert [row(done, name).status for name in ("window", "window on the right")] == ["wrong", "wrong"]
    assert row(done, "window on the right").remedy == "fix the kernel, or do not declare 'right' in window_forms"
    done = check(dense(support.flash, name="theirs.wide", lse=False, **declared))
    for name in ("window on both sides", "window on the right", "window beside multiples"):
        assert row(done, name).status == "hint"


def without_windows(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1)) -> Any:
    return support.flash(q, k, v, softmax_scale=softmax_scale, causal=causal)


@pytest.mark.parametrize("step", [1, 4, 16, 64])
def test_rows_of_windows_show_a_kernel_that_ignores_them(step: int) -> None:
    """A window of five multiples of 64 hides nothing among 35 keys."""
    done = check(dense(without_windows, name="theirs.blind", **{**SMALL, "window_forms": ("left",), "window_multiple": step}))
    assert row(done, "window").status == "wrong"
    for name in ("window on both sides", "window on the right", *(("window beside multiples",) if step > 1 else ())):
        assert row(done, name).status == "absent"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multiple_q": 0}, "multiple_q=0: 1 or more"),
        ({"window": True, "window_multiple": 0}, "window_multiple=0: 1 or more"),
        ({"window": True, "window_forms": ()}, "window_forms is empty"),
        ({"window_forms": ("left",)}, "window=False is a kernel without windows"),
        ({"multiple_k": 64, "length_max": 32}, "length_max=32 leaves no multiple of 64"),
        ({"heads_max": 2, "groups": (4,)}, r"heads_max=2 is less than groups=\(4,\)"),
        ({"scale_any": True, "scale_given": False}, "scale_any: only the default scale is taken"),
        ({"shapes": ((1, 4, 1, 8, 8),)}, "contradicts the rest: groups=4: supports 1"),
        ({"shapes": ((1, 1, 1, 8, 9),)}, "contradicts the rest: .*only equal lengths"),
    ],
)
def test_contradicting_limits_are_wrong(changes: dict[str, Any], message: str) -> None:
    done = check(Subject(can={**_plain(), **changes}))
    assert row(done, "capabilities").status == "wrong"
    assert re.search(message, row(done, "capabilities").found)


def _plain() -> dict[str, Any]:
    return {name: getattr(Capabilities(), name) for name in Capabilities.__struct_fields__} | {"devices": ("cpu",)}
