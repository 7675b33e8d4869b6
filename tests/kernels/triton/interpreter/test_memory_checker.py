"""The memory checker: each misuse of memory raises, named with its kind and source line, and its clean twin passes."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from support.triton_mode import loaded, marks

from attnfuzz.harness.core import environment
from attnfuzz.kernels import registry
from attnfuzz.kernels.support import memory
from attnfuzz.kernels.support.memory import MemoryFault

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
    pytest.importorskip("numpy")

pytestmark = marks()

triton = loaded()

import triton.language as tl  # noqa: E402 - after the mode is fixed
from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402 - after the mode is fixed

from attnfuzz.harness.trial.bands import Bands  # noqa: E402 - imports torch
from attnfuzz.harness.trial.poison import PoisonEmpty  # noqa: E402 - imports torch
from attnfuzz.harness.trial.trial import run_trial  # noqa: E402 - imports torch
from attnfuzz.kernels.faults.memory import FAULTS  # noqa: E402 - beside the others
from attnfuzz.kernels.problem import Problem  # noqa: E402 - beside the others
from attnfuzz.kernels.triton.interpreter.views import View  # noqa: E402 - beside the others
from attnfuzz.kernels.triton.varlen import TritonVarlen  # noqa: E402 - beside the others
from attnfuzz.strategies.case import Case  # noqa: E402 - beside the others


@triton.jit
def copy(source, target, shift, count, step, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    value = tl.load(source + at * step + shift, mask=at < count, other=0)
    tl.store(target + at, value, mask=at < count)


@triton.jit(
    do_not_specialize=["count"],
)
def decorated(
    source,
    target,
    count,
    size: tl.constexpr,
):
    """A docstring, and a statement of several lines."""
    at = tl.arange(0, size)
    if count > 0:
        value = tl.load(
            source + at,
            mask=at < count,
            other=0.0,
        )
    tl.store(target + at, value)


@triton.jit
def _read(source, at):
    return tl.load(source + at)


@triton.jit
def nested(sources, target, index, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(target + at, _read(sources[1], at + index) + tl.load(sources[0]))


@triton.jit
def spread(target, step, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(target + at // step, at)


@triton.jit
def overlapping(target, step, size: tl.constexpr):
    at = tl.program_id(0) * step + tl.arange(0, size)
    tl.store(target + at, at)


@triton.jit
def neighbours(buffer, out, shift, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    around = at + shift
    inside = (around >= 0) & (around < tl.num_programs(0) * size)
    value = tl.load(buffer + around, mask=inside, other=0)
    tl.store(buffer + at, value + 1)
    tl.store(out + at, value)


@triton.jit
def add(total, plain, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.atomic_add(total + at, 1.0, mask=at < size - 1)
    if plain:
        tl.store(total + at, 0.0)


@triton.jit
def ticket(partial, counter, out):
    program = tl.program_id(0)
    tl.store(partial + program, program.to(tl.float32))
    if tl.atomic_add(counter, 1) == tl.num_programs(0) - 1:
        tl.store(out, tl.load(partial) + tl.load(partial + 1))


@triton.jit
def by_blocks(source, target, count, size: tl.constexpr):
    read = tl.make_block_ptr(source, (count,), (1,), (0,), (size,), (0,))
    write = tl.make_block_ptr(target, (count,), (1,), (0,), (size,), (0,))
    tl.store(write, tl.load(read, boundary_check=(0,), padding_option="zero"), boundary_check=(0,))


@triton.jit
def hidden(source, target, count, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(target + at, tl.load(source + at, mask=at < count))


@triton.jit
def zero_for_one(source, target, count):
    tl.store(target, tl.load(source, mask=count > 0, other=0.0))


@triton.jit
def chosen(a, b, target, first, size: tl.constexpr):
    at = tl.arange(0, size)
    pointers = tl.where(at < first, a + at, b + at)
    tl.store(target + at, tl.load(pointers))


@triton.jit
def through_a_number(source, target, shift, size: tl.constexpr):
    at = tl.arange(0, size)
    address = (source + at).to(tl.int64) + shift
    tl.store(target + at, tl.load(address.to(tl.pointer_type(tl.float32))))


@triton.jit
def as_bits(source, target, size: tl.constexpr):
    at = tl.arange(0, size)
    bits = source.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(target + at, tl.load(bits + at))


def floats(count: int) -> torch.Tensor:
    return torch.arange(float(count))


def refused(kind: str, text: str, function: Any, run: Callable[[], object]) -> MemoryFault:
    """The fault that `run` raises, which must be of `kind` and name the line of `function` that begins with `text`."""
    with pytest.raises(MemoryFault) as raised:
        run()
    fault = raised.value
    lines, first = inspect.getsourcelines(function.fn)
    number = next(first + i for i, line in enumerate(lines) if line.strip().startswith(text))
    assert fault.kind == kind, str(fault)
    assert (fault.site.file, fault.site.line) == ("test_memory_checker.py", number)
    assert fault.site.text.startswith(text)
    assert str(fault).startswith(f"test_memory_checker.py:{number}: {text}")
    return fault


def test_one_element_past_the_end_and_before_the_start() -> None:
    x, out = floats(16), torch.zeros(16)
    copy[(2,)](x, out, 0, 16, 1, size=8)
    assert torch.equal(x, out)
    line = "value = tl.load(source"
    fault = refused("out-of-bounds", line, copy, lambda: copy[(2,)](x, out, 1, 16, 1, size=8))
    assert "reads element 1 past the end of source (16,) float32 (1 element in all); program (1, 0, 0) of copy" in str(fault)
    fault = refused("out-of-bounds", line, copy, lambda: copy[(2,)](x, out, -1, 16, 1, size=8))
    assert "element 1 before the start of source" in str(fault)
    copy[(2,)](x, out, 1, 15, 1, size=8)
    fault = refused("out-of-bounds", "tl.store", copy, lambda: copy[(2,)](x, out[:15], 0, 16, 1, size=8))
    assert "writes element 1 past the end of target (15,) float32" in str(fault)
    assert fault.check == "store in copy"
    refused("out-of-bounds", line, copy, lambda: copy[(1,)](x[:0], out, 0, 1, 1, size=8))


def test_a_pointer_is_good_for_its_own_tensor_alone() -> None:
    both = floats(32)
    refused("out-of-bounds", "value = tl.load", copy, lambda: copy[(2,)](both[:16], both[16:], 16, 16, 1, size=8))


@pytest.mark.parametrize("dtype", ["int32", "int64", "float16", "bfloat16", "bool"])
def test_every_dtype_counts_in_its_own_elements(dtype: str) -> None:
    x, out = torch.ones(8, dtype=getattr(torch, dtype)), torch.zeros(8, dtype=getattr(torch, dtype))
    copy[(1,)](x, out, 0, 8, 1, size=8)
    assert torch.equal(x, out)
    refused("out-of-bounds", "value = tl.load", copy, lambda: copy[(1,)](x, out, 1, 8, 1, size=8))


def test_between_the_elements_of_a_strided_view() -> None:
    x, out = floats(40), torch.zeros(16)
    every_other = x[:32:2]
    copy[(2,)](every_other, out, 0, 16, 2, size=8)
    assert torch.equal(every_other, out)
    fault = refused("outside-view", "value = tl.load", copy, lambda: copy[(2,)](every_other, out, 0, 16, 1, size=8))
    assert "memory between elements of source (16,) float32, 1 element after its first" in str(fault)
    refused("out-of-bounds", "value = tl.load", copy, lambda: copy[(2,)](every_other, out, 2, 16, 2, size=8))
    rows = x.view(4, 10)[:, :8]
    refused("outside-view", "value = tl.load", copy, lambda: copy[(2,)](rows, out, 0, 9, 1, size=8))
    copy[(1,)](rows, out, 10, 8, 1, size=8)
    assert torch.equal(rows[1], out[:8])


def test_expanded_and_permuted_inputs() -> None:
    out = torch.zeros(16)
    one = torch.ones(1).expand(16)
    copy[(2,)](one, out, 0, 16, 0, size=8)
    assert torch.equal(one, out)
    refused("out-of-bounds", "value = tl.load", copy, lambda: copy[(2,)](one, out, 0, 16, 1, size=8))
    turned = floats(16).view(2, 8).T
    assert View(turned).dense
    copy[(2,)](turned, out, 0, 16, 1, size=8)
    assert torch.equal(floats(16), out)


@pytest.mark.parametrize(
    ("shape", "strides"), [((3, 4), (10, 2)), ((2, 3, 2), (1, 20, 4)), ((2, 2, 2), (1, 1, 5)), ((3, 3), (2, 3)), ((5,), (0,))]
)
def test_a_view_holds_exactly_its_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    import numpy as np

    x = torch.zeros(100, dtype=torch.int16).as_strided(shape, strides, 7)
    offsets = {sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)}
    addresses = np.arange(x.data_ptr() - 8, x.data_ptr() + 200, dtype=np.uint64)
    expected = [(int(each) - x.data_ptr()) % 2 == 0 and (int(each) - x.data_ptr()) // 2 in offsets for each in addresses]
    assert View(x).holds(addresses, 2).tolist() == expected


def test_a_view_too_wide_for_a_table_is_counted() -> None:
    import numpy as np

    x = torch.empty(1, dtype=torch.int16).expand(3, 4)
    view = View(x)
    view._steps, view.begin, view.end, view.dense = [(1 << 30, 3), (2, 4)], 1000, 1000 + 2 * ((2 << 30) + 7), False
    inside = [view.begin + 2 * (row * (1 << 30) + 2 * column) for row in range(3) for column in range(4)]
    assert view.holds(np.array(inside, np.uint64), 2).all()
    assert not view.holds(np.array(inside, np.uint64) + np.uint64(2), 2).any()
    assert view._map is None


def test_the_line_of_a_function_with_a_long_decorator() -> None:
    x, out = floats(8), torch.zeros(8)
    decorated[(1,)](x, out, 8, size=8)
    refused("out-of-bounds", "value = tl.load(", decorated, lambda: decorated[(1,)](x[:7], out, 8, size=8))
    refused("out-of-bounds", "tl.store(target + at, value)", decorated, lambda: decorated[(1,)](x, out[:7], 8, size=8))


def test_tuples_of_tensors_and_nested_functions() -> None:
    scalar, table, out = torch.ones(1, dtype=torch.int32), torch.arange(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    nested[(1,)]((scalar, table), out, 1, size=8)
    assert torch.equal(table[1:] + 1, out)
    fault = refused("out-of-bounds", "return tl.load", _read, lambda: nested[(1,)]((scalar, table), out, 2, size=8))
    assert "of sources[1] (9,) int32" in str(fault)
    assert fault.check == "load in _read"
    assert [each.function for each in fault.callers] == ["nested"]
    assert "nested: test_memory_checker.py:" in fault.trail


def test_duplicate_addresses_in_one_store() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    spread[(1,)](out, 1, size=8)
    fault = refused("duplicate-store", "tl.store", spread, lambda: spread[(1,)](out, 2, size=8))
    assert "writes [0] of target (8,) int32 more than once" in str(fault)


def test_two_programs_write_one_element() -> None:
    out = torch.zeros(24, dtype=torch.int32)
    overlapping[(3,)](out, 8, size=8)
    # Other launches may write it again.
    overlapping[(2,)](out, 8, size=8)
    fault = refused("race", "tl.store", overlapping, lambda: overlapping[(3,)](out, 7, size=8))
    assert "[7] of target (24,) int32 is written here and was written by program (0, 0, 0) of the same launch" in str(fault)


def test_reads_of_what_another_program_writes() -> None:
    buffer, out = torch.zeros(24, dtype=torch.int32), torch.zeros(24, dtype=torch.int32)
    neighbours[(3,)](buffer, out, 0, size=8)
    fault = refused("race", "value = tl.load", neighbours, lambda: neighbours[(3,)](buffer, out, -1, size=8))
    assert "is read here and was written by program (0, 0, 0)" in str(fault)
    # The one that reads comes first.
    fault = refused("race", "tl.store(buffer", neighbours, lambda: neighbours[(3,)](buffer, out, 1, size=8))
    assert "[8] of buffer (24,) int32 is written here and was read by program (0, 0, 0)" in str(fault)


def test_the_same_memory_under_two_names_races_as_well() -> None:
    base = torch.zeros(32, dtype=torch.int32)
    copy[(2,)](base[:16], base[16:], 0, 16, 1, size=8)
    refused("race", "value = tl.load", copy, lambda: copy[(2,)](base[:16], base[8:24], 0, 16, 1, size=8))
    refused("race", "tl.store", copy, lambda: copy[(2,)](base[8:24], base[:16], 0, 16, 1, size=8))
    # Elements of another size: the second program's begin where the first one's end.
    shorts = base.view(torch.int16)
    copy[(1,)](base[:8], shorts[16:24], 0, 8, 1, size=8)
    refused("race", "value = tl.load", copy, lambda: copy[(2,)](base[:16], shorts[16:32], 0, 16, 1, size=8))


def test_atomics_race_with_plain_accesses_only() -> None:
    total = torch.zeros(8)
    add[(4,)](total, 0, size=8)
    assert total.tolist() == [4.0] * 7 + [0.0]
    add[(1,)](total, 1, size=8)
    fault = refused("race", "tl.atomic_add", add, lambda: add[(2,)](total, 1, size=8))
    assert "[0] of total (8,) float32 is changed here and was written by program (0, 0, 0)" in str(fault)
    assert fault.check == "atomic in add"


def test_a_counter_orders_programs() -> None:
    partial, counter, out = torch.zeros(2), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    ticket[(2,)](partial, counter, out)
    assert out.item() == 1.0


def test_masked_loads_without_other() -> None:
    x, out = floats(8), torch.zeros(8)
    hidden[(1,)](x, out, 8, size=8)
    fault = refused("masked-load", "tl.store(target + at, tl.load", hidden, lambda: hidden[(1,)](x, out, 7, size=8))
    assert "1 of 8 elements is masked and there is no other=: it holds anything" in str(fault)
    # The interpreter itself forgets an `other` that is one 0.
    zero_for_one[(1,)](x, out, 0)


@pytest.mark.skipif(not hasattr(InterpreterBuilder, "create_tensor_pointer_load"), reason="Triton 3.9 has no block pointers")
def test_block_pointers() -> None:
    x, out = floats(8), torch.zeros(8)
    by_blocks[(1,)](x, out, 7, size=8)
    assert out.tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    refused("out-of-bounds", "tl.store(write, tl.load", by_blocks, lambda: by_blocks[(1,)](x[:6], out, 7, size=8))
    refused("out-of-bounds", "tl.store(write, tl.load", by_blocks, lambda: by_blocks[(1,)](x, out[:6], 7, size=8))


def test_pointers_of_several_tensors_or_of_none() -> None:
    a, b, out = floats(8), -floats(8), torch.zeros(8)
    chosen[(1,)](a, b, out, 4, size=8)
    assert out.tolist() == [0, 1, 2, 3, -4, -5, -6, -7]
    refused("out-of-bounds", "tl.store(target + at, tl.load", chosen, lambda: chosen[(1,)](a, b[:7], out, 4, size=8))
    through_a_number[(1,)](a, out, 0, size=8)
    assert torch.equal(a, out)
    far = 1 << 40
    fault = refused("out-of-bounds", "tl.store", through_a_number, lambda: through_a_number[(1,)](a, out, far, size=8))
    assert "which is in no tensor of the launch" in str(fault)
    bits = torch.zeros(8, dtype=torch.int32)
    as_bits[(1,)](a, bits, size=8)
    assert torch.equal(a.view(torch.int32), bits)
    as_bits[(1,)](a[:4].double(), bits, size=8)
    refused("out-of-bounds", "tl.store", as_bits, lambda: as_bits[(1,)](a[:7], bits, size=8))


def watched(run: Callable[[], object], fill: float = float("nan")) -> None:
    """Run as the harness runs a kernel."""
    watch = memory.Watch()
    with torch.no_grad(), memory.watching(watch), PoisonEmpty(Bands(), fill=fill, watch=watch):
        run()


def _unwritten(dtype: torch.dtype, count: int = 8) -> None:
    copy[(1,)](torch.empty(8, dtype=dtype), torch.empty(8, dtype=dtype), 0, count, 1, size=8)


@pytest.mark.parametrize("fill", [float("nan"), 0.34375])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "uint8", "int64"])
def test_memory_that_nobody_has_written(dtype: str, fill: float) -> None:
    chosen_dtype = getattr(torch, dtype)
    fault = refused("uninitialised", "value = tl.load", copy, lambda: watched(lambda: _unwritten(chosen_dtype), fill))
    assert f"reads [0] of source (8,) {dtype}, which was never written (8 elements in all)" in str(fault)
    watched(lambda: _unwritten(chosen_dtype, 0), fill)
    # Nobody knows of memory that was there before.
    _unwritten(chosen_dtype)


def _by_a_launch(x: torch.Tensor) -> None:
    copy[(1,)](torch.full((8,), float("nan")), x, 0, 8, 1, size=8)


WRITERS: dict[str, Callable[[torch.Tensor], object]] = {
    "fill": lambda x: x.fill_(float("nan")),
    "copy": lambda x: x.copy_(torch.full((8,), float("nan"))),
    "part by part": lambda x: [x[::2].fill_(float("nan")), x[1::2].zero_()],
    "out": lambda x: torch.add(torch.full((8,), float("nan")), 1, out=x),
    "index": lambda x: x.__setitem__(slice(None), float("nan")),
    "numpy": lambda x: x.numpy().fill(1.0),
    "bytes": lambda x: x.view(torch.uint8).fill_(255),
    "another launch": _by_a_launch,
}


@pytest.mark.parametrize("way", WRITERS)
def test_whoever_writes_memory_has_written_it(way: str) -> None:
    def run() -> None:
        x = torch.empty(8)
        WRITERS[way](x)
        copy[(1,)](x, torch.empty(8), 0, 8, 1, size=8)

    watched(run)


def test_part_of_memory_written() -> None:
    def run() -> None:
        x = torch.empty(8)
        x[:7].fill_(float("nan"))
        copy[(1,)](x, torch.empty(8), 0, 8, 1, size=8)

    fault = refused("uninitialised", "value = tl.load", copy, lambda: watched(run))
    assert "reads [7] of source (8,) float32, which was never written (1 element in all)" in str(fault)


def test_adding_to_memory_that_nobody_has_written() -> None:
    refused("uninitialised", "tl.atomic_add", add, lambda: watched(lambda: add[(1,)](torch.empty(8), 0, size=8)))
    watched(lambda: add[(1,)](torch.zeros(8), 0, size=8))


def test_a_workspace_of_bytes() -> None:
    def run(written: bool) -> None:
        workspace = torch.empty(64, dtype=torch.uint8)
        part = workspace[32:].view(torch.float32)
        if written:
            copy[(1,)](torch.zeros(8), part, 0, 8, 1, size=8)
        copy[(1,)](part, torch.empty(8), 0, 8, 1, size=8)

    watched(lambda: run(True))
    refused("uninitialised", "value = tl.load", copy, lambda: watched(lambda: run(False)))


def test_switched_off_it_checks_nothing() -> None:
    whole = floats(16)
    memory.check(False)
    try:
        copy[(1,)](whole[:8], torch.zeros(8), 1, 8, 1, size=8)
    finally:
        memory.check(True)
    refused("out-of-bounds", "value = tl.load", copy, lambda: copy[(1,)](whole[:8], torch.zeros(8), 1, 8, 1, size=8))


def test_another_interpreter_is_left_unchecked_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnfuzz.kernels.triton.interpreter import memory as checker

    def renamed(self: Any, pointer: Any, mask: Any) -> None: ...

    monkeypatch.setattr(memory, "_unchecked", None)
    monkeypatch.setattr(checker._Builder, "create_masked_load", renamed)
    expected = r"does not know the interpreter of Triton .*create_masked_load takes self, pointer, mask; launches are not checked"
    with pytest.warns(RuntimeWarning, match=expected):
        checker.install()
    assert "are not checked" in environment.describe("cpu")["unchecked"]


class Swallowing(TritonVarlen):
    """Its host code hides what its launches raise."""

    def build(self, problem: Problem, config: Any, device: Any) -> Any:
        built = super().build(problem, config, device)
        inner = built._forward

        class Quiet:
            def __getitem__(self, grid: object) -> Callable[..., None]:
                def run(*args: object, **kwargs: object) -> None:
                    try:
                        inner[grid](*args, **kwargs)
                    except Exception:
                        args[3].zero_(), args[4].zero_()  # type: ignore[attr-defined]

                return run

        built._forward = Quiet()
        return built


def test_a_fault_that_the_kernels_own_code_catches_is_told() -> None:
    planted = registry.get("fault.memory.duplicate")
    kernel = Swallowing(name="test.swallowing", device_code=planted._device_code)  # type: ignore[attr-defined]
    registry.register(kernel)
    try:
        problem = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=16, dim_v=16)
        verdict = run_trial(Case(kernel=kernel.name, problem=problem, config=kernel.configs(problem)[0]), "cpu")
    finally:
        registry.unregister(kernel.name)
    assert verdict.failures[0].kind == "duplicate-store"


def test_failures_of_a_trial_keep_their_identity() -> None:
    kernel = registry.get("fault.memory.load")
    failures = []
    for lengths in ((3,), (20, 5)):
        problem = Problem(seqlens_q=lengths, seqlens_k=lengths, dim_qk=16, dim_v=16)
        verdict = run_trial(Case(kernel=kernel.name, problem=problem, config=kernel.configs(problem)[0]), "cpu")
        failures.append(verdict.failures[0])
    assert failures[0].identity == failures[1].identity
    assert failures[0].message != failures[1].message
    assert str(failures[0].identity) == "fault.memory.load: out-of-bounds in load in _sequence"
    assert failures[0].detail.startswith("forward: varlen_device.py:")


@pytest.mark.slow
def test_the_selftest_finds_every_fault_and_no_other(tmp_path: Any) -> None:
    command = [sys.executable, "-m", "attnfuzz.harness.cli", "selftest", "memory", "--cases", "40", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    message = json.loads(done.stdout)
    assert message["right"], done.stdout + done.stderr
    assert done.returncode == 0
    assert {row["fault"]: row["got"] for row in message["rows"]} == {each.slug: each.kind for each in FAULTS}
    assert {"out-of-bounds", "outside-view", "duplicate-store", "race", "unwritten", "uninitialised", "masked-load"} == {
        row["got"] for row in message["rows"]
    }
    assert all(row["cases"] == 40 and not row["alarms"] for row in message["clean"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["nothing"], "fault='nothing': no such fault; use some of load, store"), (["--cases", "0"], "cases=0")],
)
def test_the_selftest_refuses_wrong_use(arguments: list[str], expected: str) -> None:
    from click.testing import CliRunner

    from attnfuzz.harness.cli.main import main

    result = CliRunner().invoke(main, ["selftest", "memory", *arguments])
    assert result.exit_code == 2
    assert expected in result.output
