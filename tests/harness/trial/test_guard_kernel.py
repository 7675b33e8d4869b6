"""Bands, poison and their checks by the kernel for a GPU are those of torch, byte by byte: its source is run here."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fused_c import Compiled, generated
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.harness.trial import bands as bands_code
from attnfuzz.harness.trial.bands import Bands, Form
from attnfuzz.harness.trial.guard_kernel import Pieces, doubled
from attnfuzz.harness.trial.memory_ops import form_of_new
from attnfuzz.harness.trial.poison import POISON, PoisonEmpty
from attnfuzz.harness.trial.slack import Slack
from attnfuzz.harness.trial.writes import Writes
from attnfuzz.kernels.contract import Outputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.memory import Watch, allocating, watching

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("guard"))


def inputs() -> dict[str, torch.Tensor]:
    shared = torch.arange(3000, dtype=torch.float32).to(torch.float16)
    mixed = torch.arange(40, dtype=torch.int32)
    return {
        "q": torch.arange(105, dtype=torch.float32).reshape(3, 5, 7),
        "odd": torch.arange(8, dtype=torch.int8)[1:6],
        "one byte": torch.ones(1, dtype=torch.uint8),
        "nothing": torch.empty(0),
        "with gaps": torch.arange(200, dtype=torch.float64).view(10, 20)[:, 3:9],
        "k": shared[3:500],
        "v": shared[600:].view(8, 300).T,
        "lengths": mixed[:5],
        "behind them": mixed.view(torch.float16)[30:37],
    }


def contents(bands: Bands) -> list[bytes]:
    return [bytes(each.words.view(torch.uint8).tolist()) for each in bands._kept]


def test_copies_are_equal(compiled: Compiled) -> None:
    plain = Bands()
    theirs = plain.copies(inputs(), "its input")
    compiled.calls.clear()
    with generated(compiled):
        bands = Bands()
        ours = bands.copies(inputs(), "its input")
        assert compiled.calls == {"guarded_pieces": 1}
        assert contents(bands) == contents(plain)
        assert {name: x.tolist() for name, x in ours.items()} == {name: x.tolist() for name, x in theirs.items()}
        assert bands.broken() is None


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "half": lambda: torch.empty(3, 5, dtype=torch.float16),
    "bfloat16": lambda: torch.empty(33, dtype=torch.bfloat16),
    "float32": lambda: torch.empty(7, 3),
    "float64": lambda: torch.empty(5, dtype=torch.float64),
    "int32": lambda: torch.empty(9, dtype=torch.int32),
    "bool": lambda: torch.empty(9, dtype=torch.bool),
    "zeros": lambda: torch.zeros(3, 3, dtype=torch.bfloat16),
    "odd zeros": lambda: torch.zeros(5, dtype=torch.uint8),
    "ones": lambda: torch.ones(4),
    "transposed": lambda: torch.empty_like(torch.ones(3, 4).T),
}


@pytest.mark.parametrize("fill", [math.nan, 3.0])
@pytest.mark.parametrize("made", MADE)
def test_tensors_of_the_kernels_own_are_equal(compiled: Compiled, made: str, fill: float) -> None:
    plain, bands = Bands(), Bands()
    with PoisonEmpty(plain, fill=fill):
        theirs = MADE[made]()
    with generated(compiled), PoisonEmpty(bands, fill=fill):
        ours = MADE[made]()
    assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    if made != "bool":
        # Values of empty bools are not defined.
        assert contents(bands) == contents(plain)


def test_tensors_that_nothing_uses_yet_are_filled_by_one_launch(compiled: Compiled) -> None:
    plain, bands, watch = Bands(), Bands(), Watch()
    chosen = [each for each in MADE if each not in ("bool", "ones", "transposed")]
    with PoisonEmpty(plain):
        for each in chosen:
            MADE[each]()
    with generated(compiled):
        compiled.calls.clear()
        with watching(watch), PoisonEmpty(bands, watch=watch):
            with allocating():
                for each in chosen:
                    MADE[each]()
                assert compiled.calls == {}
            assert compiled.calls == {"guarded_pieces": 1}
            MADE["half"]()
            assert compiled.calls == {"guarded_pieces": 2}, "outside of the context each is filled at once"
        assert bands.broken() is None
    assert contents(bands)[:-1] == contents(plain)


def test_a_watch_keeps_no_memory_of_a_launch_that_has_ended() -> None:
    watch, bands = Watch(), Bands()
    with watching(watch), PoisonEmpty(bands, watch=watch), allocating():
        torch.empty(5)
    kept = weakref.ref(bands)
    del bands
    gc.collect()
    assert kept() is None


def test_a_promise_that_is_broken_changes_nothing(compiled: Compiled) -> None:
    watch = Watch()
    with generated(compiled), watching(watch), PoisonEmpty(Bands(), watch=watch), allocating():
        x, y = torch.empty(5), torch.zeros(5)
        view = y.view(5, 1)
        assert x.isnan().all()
        x.copy_(view[:, 0] + 1)
    assert x.tolist() == [1.0] * 5
    assert not y.any()


def test_a_gradient_of_one_copy_is_none_of_those_beside_it(compiled: Compiled) -> None:
    shared = torch.arange(60, dtype=torch.float32)
    with generated(compiled):
        copies = Bands().copies({"k": shared[:20], "v": shared[30:50]}, "its input")
    copies["v"].mul_(torch.ones(20, requires_grad=True))
    assert [copies[name].requires_grad for name in ("k", "v")] == [False, True]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_memory_that_is_taken_away_in_part_is_said(compiled: Compiled, left: int) -> None:
    with generated(compiled):
        bands = Bands()
        copy = bands.copies({"q": torch.ones(5)}, "its input")["q"]
        storage = copy.untyped_storage()
        storage.resize_(storage.nbytes() * left // 2 - (left == 2))
        assert bands.edges() is None
        assert str(bands.broken()).startswith("the memory was taken away from its input q")


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("number", range(6))
def test_one_word_written_outside_is_found(compiled: Compiled, number: int, side: str, place: int) -> None:
    with generated(compiled):
        bands = Bands()
        bands.copies(inputs(), "its input")
        edges = bands.edges()
        assert edges is not None
        assert edges.as_expected()
        band = bands._kept[number]
        at = (0, bands_code._HALF - 1, 17, bands_code._HALF // 2)[place]
        band.words[band.before - 1 - at if side == "before" else -1 - at] = 1
        edges = bands.edges()
        assert edges is not None
        assert not edges.as_expected()
        message = bands.broken()
        assert message is not None
        assert message.startswith(f"1 2-byte words were written {'before the start' if side == 'before' else 'past the end'} of")


@pytest.mark.parametrize("name", [each for each in inputs() if each not in ("nothing", "odd", "one byte")])
@pytest.mark.parametrize("at", [0, -1])
def test_a_write_to_an_input_is_found(compiled: Compiled, name: str, at: int) -> None:
    with generated(compiled):
        before, bands = {each: x for each, x in inputs().items() if x.element_size() > 1}, Bands()
        after = bands.copies(before, "its input")
        assert Writes("k", bands, before, after).failure() is None
        after[name][(at,) * after[name].dim()] = 9999.0
        failure = Writes("k", bands, before, after).failure()
        assert failure is not None
        assert failure.message == f"the kernel wrote to its input {name}"


def found(add: Callable[[Pieces], None]) -> list[int]:
    """What a launch finds of the checks that `add` adds."""
    pieces = Pieces(CPU)
    flag = pieces.check()
    add(pieces)
    pieces.launch()
    return list(flag.tolist())


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 31, 33, 1000, 4099])
@pytest.mark.parametrize(("ours", "theirs"), [(0, 0), (3, 3), (2, 6), (5, 0), (0, 13)])
def test_parts_of_any_alignment(compiled: Compiled, size: int, ours: int, theirs: int) -> None:
    source = torch.arange(5000, dtype=torch.int32).to(torch.uint8)
    target = torch.zeros(5000, dtype=torch.uint8)
    at, other = target.data_ptr() + ours, source.data_ptr() + theirs
    with generated(compiled):
        pieces = Pieces(CPU)
        pieces.copy(at, other, size)
        pieces.launch()
        assert torch.equal(target[ours : ours + size], source[theirs : theirs + size])
        assert not target[:ours].any()
        assert not target[ours + size :].any()
        assert found(lambda same: same.equal(at, other, size)) == [0]
        for place in {0, size // 2, size - 1}:
            target[ours + place] ^= 1
            assert found(lambda same: same.equal(at, other, size)) == [1]
            target[ours + place] ^= 1
        pieces = Pieces(CPU)
        pieces.fill(at, size, 0x7FD1A3B7)
        pieces.launch()
        assert found(lambda pattern: pattern.holds(at, size, 0x7FD1A3B7)) == [0]
        target[ours + size - 1] ^= 1
        assert found(lambda pattern: pattern.holds(at, size, 0x7FD1A3B7)) == [1]


def test_two_parts_at_once_are_those_of_two_calls(compiled: Compiled) -> None:
    target = torch.zeros(100, dtype=torch.uint8)
    first, last = (target.data_ptr() + 3, 10, 0x7FD1A3B7), (target.data_ptr() + 50, 21, 0xFF81FF81)
    with generated(compiled):
        pieces, expected = Pieces(CPU), torch.zeros_like(target)
        pieces.fill_both(first, last)
        for at, size, pattern in (first, last):
            pieces.fill(at + expected.data_ptr() - target.data_ptr(), size, pattern)
        pieces.launch()
        assert target.any()
        assert torch.equal(target, expected)
        assert found(lambda both: both.both_hold(first, last)) == [0]
        for place in (3, 12, 50, 70):
            target[place] ^= 1
            assert found(lambda both: both.both_hold(first, last)) == [1]
            target[place] ^= 1
        for place in (2, 13, 49, 71):
            target[place] ^= 1
        assert found(lambda both: both.both_hold(first, last)) == [0]


def test_more_pieces_than_one_launch_takes(compiled: Compiled) -> None:
    source, target = torch.arange(400, dtype=torch.int32), torch.zeros(400, dtype=torch.int32)
    with generated(compiled):
        pieces = Pieces(CPU)
        for at in range(0, 1600, 16):
            pieces.copy(target.data_ptr() + at, source.data_ptr() + at, 16)
        compiled.calls.clear()
        pieces.launch()
        assert compiled.calls == {"guarded_pieces": 2}
    assert torch.equal(target, source)


def test_nothing_is_launched_for_nothing(compiled: Compiled) -> None:
    compiled.calls.clear()
    with generated(compiled):
        Pieces(CPU).launch()
        pieces = Pieces(CPU)
        pieces.fill(0, 0, 1)
        pieces.launch()
    assert compiled.calls == {}


@pytest.mark.parametrize(("word", "pattern"), [(0x7E5A, 0x7E5A7E5A), (0xFF81 - (1 << 16), 0xFF81FF81), (0, 0)])
def test_a_pattern_of_16_bits_is_doubled(word: int, pattern: int) -> None:
    assert doubled(word) == pattern


@pytest.mark.parametrize("packing", ["ragged", "dense"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_slack_rows_that_a_kernel_left_are_found_changed_wherever_they_are(packing: Any, dtype: Any, compiled: Compiled) -> None:
    of = Problem(
        seqlens_q=(3, 3), seqlens_k=(2, 2), heads=4, kv_heads=2, dim_qk=3, dim_v=5, dtype=dtype, packing=packing, slack_q=2,
        slack_k=1,
    )  # fmt: skip
    rows, keys = ((2, 5), (2, 3)) if packing == "dense" else ((8,), (5,))

    def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        words, bits = POISON[dtype]
        return torch.full(shape, bits, dtype=words).view(dtype)

    kind = getattr(torch, dtype)
    heads_first = (rows[0], 4, rows[1]) if packing == "dense" else (4, rows[0])

    def outputs() -> Outputs:
        return Outputs(
            o=untouched((*rows, 4, 5), kind),
            lse=untouched(heads_first, torch.float32),
            dq=untouched((*rows, 4, 3), kind),
            dk=untouched((*keys, 2, 3), kind),
            dv=untouched((5, 2, *keys), kind).permute(*range(2, 2 + len(keys)), 1, 0),
        )

    def expected(made: Outputs) -> bool:
        return Slack("a kernel", of, made, "untouched", CPU).reading.as_expected()

    with generated(compiled):
        compiled.calls.clear()
        assert expected(outputs())
        assert compiled.calls["guarded_pieces"] == 1
    for name in ("o", "lse", "dq", "dk", "dv"):
        for at in range(getattr(outputs(), name).numel()):
            made = outputs()
            x = getattr(made, name)
            x[tuple(int(i) for i in torch.unravel_index(torch.tensor(at), x.shape))] = 1.0
            plain = expected(made)
            with generated(compiled):
                assert expected(made) == plain, (name, at)


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "of a default dtype": lambda: torch.empty(3, 4),
    "of a size": lambda: torch.empty(torch.Size([5]), dtype=torch.float16, device="cpu"),
    "a scalar": lambda: torch.empty((), dtype=torch.bfloat16),
    "without elements": lambda: torch.empty(0, 3),
    "channels last": lambda: torch.empty(2, 3, 4, 5, memory_format=torch.channels_last),
    "strided": lambda: torch.empty_strided((3, 4), (1, 3)),
    "new": lambda: torch.ones(2, 2).new_empty(3, 2),
    "new of another dtype": lambda: torch.ones(2, 2).new_empty((3, 2), dtype=torch.float16),
    "new without elements": lambda: torch.ones(2, 2).new_empty(0),
    "new and strided": lambda: torch.ones(2, 2).new_empty_strided((2, 3), (1, 2)),
    "like": lambda: torch.empty_like(torch.ones(3, 4)),
    "like a transposed one": lambda: torch.empty_like(torch.ones(3, 4).T),
    "like a transposed one, without gaps": lambda: torch.empty_like(torch.ones(3, 4).T, memory_format=torch.contiguous_format),
    "like one with gaps": lambda: torch.empty_like(torch.ones(3, 8)[:, :4]),
    "like one with other strides of a single row": lambda: torch.empty_like(torch.ones(1, 4).as_strided((1, 4), (9, 1))),
    "like a parameter": lambda: torch.empty_like(torch.nn.Parameter(torch.ones(3))),
    "like a sparse one": lambda: torch.empty_like(torch.ones(2, 2).to_sparse()),
    "zeros": lambda: torch.zeros(3, 4, dtype=torch.int64),
    "zeros like": lambda: torch.zeros_like(torch.ones(4, 3).T, dtype=torch.float16),
    "new zeros": lambda: torch.ones(2, 2).new_zeros(5),
}


@pytest.mark.parametrize("made", FORMS)
def test_a_new_tensor_lies_as_torch_makes_it(compiled: Compiled, made: str) -> None:
    expected, plain, bands = FORMS[made](), Bands(), Bands()
    with PoisonEmpty(plain):
        FORMS[made]()
    with generated(compiled), PoisonEmpty(bands):
        ours = FORMS[made]()
    assert (ours.dtype, ours.shape, ours.layout, ours.device) == (
        expected.dtype,
        expected.shape,
        expected.layout,
        expected.device,
    )
    if expected.layout is torch.strided:
        assert (ours.stride(), ours.requires_grad) == (expected.stride(), expected.requires_grad)
    assert contents(bands) == contents(plain)
    assert [each.name for each in bands._kept] == [each.name for each in plain._kept]


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (lambda: torch.empty(-1), "negative"),
        (lambda: torch.empty(1 << 62), "Storage size"),
        (lambda: torch.ones(2).new_empty(3, -2), "negative"),
    ],
)
def test_a_size_that_torch_refuses_is_refused_by_torch(compiled: Compiled, of: Callable[[], torch.Tensor], message: str) -> None:
    with generated(compiled), PoisonEmpty(Bands()), pytest.raises(RuntimeError, match=message):
        of()


def test_a_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch goes to the current stream of the device that is named."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    settings = {"dtype": torch.float16, "device": torch.device("cuda"), "pin_memory": False}
    form = form_of_new(torch.ops.aten.empty.memory_format, ([3, 4],), settings)
    assert form == Form([3, 4], [4, 1], torch.float16, torch.device("cuda", 1), 12)


def test_a_new_tensor_is_allocated_once(compiled: Compiled) -> None:
    """Together with its bands: most of what a kernel's wrapper asks torch for are new tensors."""
    asked = []

    class Count(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    like = torch.ones(3, 4)
    for made in (lambda: torch.empty(3, 4), lambda: like.new_empty(5), lambda: torch.empty_like(like), lambda: torch.zeros(2)):
        asked.clear()
        with generated(compiled), Count(), PoisonEmpty(Bands()):
            made()
        assert asked == [torch.ops.aten.empty_strided.default, torch.ops.aten.as_strided.default]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("fill", [math.nan, 3.0])
def test_a_kernel_is_offered_what_makes_the_same_tensors(compiled: Compiled, dtype: torch.dtype, fill: float) -> None:
    sizes = [(3, 5), torch.Size([7]), (), (2, 0)]
    watch, bands, plain = Watch(), Bands(), Bands()
    with PoisonEmpty(plain, fill=fill):
        theirs = [torch.empty(size, dtype=dtype, device=CPU) for size in sizes]
    with generated(compiled), watching(watch), PoisonEmpty(bands, fill=fill, watch=watch), allocating() as empty:
        ours = [empty(size, dtype=dtype, device=CPU) for size in sizes]
    assert [(x.shape, x.stride(), x.dtype) for x in ours] == [(x.shape, x.stride(), x.dtype) for x in theirs]
    assert contents(bands) == contents(plain)
    assert [each.name for each in bands._kept] == [each.name for each in plain._kept]


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        ((3, 5), {"dtype": torch.float32, "device": CPU}),
        (([3, 5],), {"dtype": torch.float32, "device": "cpu"}),
        (((3, 5),), {"device": CPU}),
        (((3, 5),), {"dtype": torch.float16}),
        ((5,), {}),
        (((2, 3, 4, 5),), {"dtype": torch.float32, "device": CPU, "memory_format": torch.channels_last}),
    ],
)
def test_a_kernel_is_offered_all_that_torch_empty_takes(compiled: Compiled, size: Any, settings: dict[str, Any]) -> None:
    watch, bands = Watch(), Bands()
    expected = torch.empty(*size, **settings)
    with generated(compiled), watching(watch), PoisonEmpty(bands, watch=watch), allocating() as empty:
        ours = empty(*size, **settings)
    assert (ours.shape, ours.stride(), ours.dtype, ours.device) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
        expected.device,
    )
    assert ours.isnan().all()
    assert len(bands._kept) == 1


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_quantised_tensor_is_torchs_own(compiled: Compiled) -> None:
    """Torch fills none, so that a kernel's call would raise."""
    for settings in ({}, {"device": "cpu"}):
        bands = Bands()
        with generated(compiled), PoisonEmpty(bands):
            assert torch.empty(3, dtype=torch.quint8, **settings).dtype is torch.quint8
        assert not bands._kept


def test_what_a_kernel_is_offered_is_torchs_own_elsewhere(compiled: Compiled) -> None:
    with allocating() as empty:
        assert empty is torch.empty
    watch, bands = Watch(), Bands()
    with watching(watch), PoisonEmpty(bands, watch=watch), allocating() as empty:
        assert empty((3,), dtype=torch.float32, device=CPU).isnan().all(), "on a device without the kernel too"
        with allocating() as inner:
            assert inner is torch.empty
    assert len(bands._kept) == 1
    with watching(watch), allocating() as empty:
        assert empty is torch.empty
