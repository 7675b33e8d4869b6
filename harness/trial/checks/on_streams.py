"""Checks of a call elsewhere than on torch's default stream: it must be as right there as a plain call.

other_stream: the call is made on another stream, whose work the host holds back. The inputs get their values there, behind that,
and are NaN before: whatever runs on a stream that does not wait reads NaN. Its outputs are read there at once.
two_streams: two calls with other values are held back on two streams, and let go together. What they keep between calls, such as
a workspace, is used by both at once.
graph: the call is captured into a CUDA graph with other values in its inputs, and replayed with the Case's.

A plain call comes first, so that nothing is compiled later. It is judged by the oracle, and so is the last one where its bits
differ.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import _disable_current_modes

from attnfuzz.harness.core.text import counted
from attnfuzz.harness.judge.batch import Judged
from attnfuzz.harness.judge.contract import valid_rows
from attnfuzz.harness.judge.failure import OUTPUT_TITLES, Failure
from attnfuzz.harness.judge.together import Launched
from attnfuzz.harness.trial.bands import Bands, memory
from attnfuzz.harness.trial.bench import Bench, Steps, WentWrong
from attnfuzz.harness.trial.checks.calls import alike, cloned, compared, plain
from attnfuzz.harness.trial.launch import copied, split
from attnfuzz.harness.trial.runs import differing
from attnfuzz.harness.trial.side_streams import Streams, streams_of
from attnfuzz.harness.trial.unwritten import name_unwritten
from attnfuzz.kernels.contract import Built, Gradients, Inputs, Outputs
from attnfuzz.kernels.problem import OutputName
from attnfuzz.strategies.case import Check, Recipe

__all__ = ["STREAM_CHECKS", "beside"]

_T = TypeVar("_T")
_Results = TypeVar("_Results", bound=tuple[Any, ...])
_FLOATING = ("q", "k", "v", "d_o", "d_lse", "k_pages", "v_pages")
"""Inputs whose values change: with other lengths or pages, a kernel might never end."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAN = 0xFF
"""A byte that makes NaN of every floating point number."""
_FACTOR = -0.5
_SAYS: dict[Check, str] = {
    "other_stream": "on another stream than torch's default one",
    "two_streams": "at the same time as another one, on another stream",
    "graph": "in a CUDA graph, replayed with other values",
}


def on_streams(bench: Bench) -> Steps:
    """Make a plain call, then the same as the Case's check says; judge the first, and the last where it differs."""
    case, ready, inputs = bench.case, bench.ready(), bench.inputs()
    first = bench.launch(ready, inputs)
    # A kernel may return the same memory every time.
    captured = tuple(x.detach().clone() if x is not None and plain(x) else x for x in first.d_captured)
    kept = dataclasses.replace(cloned(first), d_captured=captured)
    judged = yield Launched(case.kernel, inputs, first, case.config)
    verdict = name_unwritten(bench, ready, inputs, first, judged.verdict)
    if verdict.status == "fail":
        return verdict
    try:
        elsewhere = _LAUNCHES[case.check](bench, inputs)
    except WentWrong as error:
        raise WentWrong(_said(bench, error.failure)) from error
    equal, early = _compared(bench, kept, elsewhere)
    failures = [_said(bench, each) for each in early]
    if not equal:
        judged = yield Launched(case.kernel, inputs, elsewhere.outputs, case.config)
        differing = yield from compared(bench, judged.verdict, first, kept, elsewhere.outputs, judged.truths)
        # An output that differs from that of a right call is one failure, and no numeric one.
        named = {each.output for each in differing} - {None}
        rest = [each for each in judged.verdict.failures if each.output not in named]
        failures += [_said(bench, each) for each in (*differing, *rest)]
    if elsewhere.beside is not None:
        failures += yield from _of_other(bench, elsewhere.beside)
    return replace(verdict, status="fail", failures=tuple(failures)) if failures else verdict


STREAM_CHECKS: dict[Check, Callable[[Bench], Steps]] = dict.fromkeys(_SAYS, on_streams)


def beside(recipe: Recipe) -> Recipe:
    """Return that of the other of two calls at once."""
    return replace(recipe, seed=recipe.seed - 1 if recipe.seed else 1)


_Read: TypeAlias = dict[OutputName, tuple[torch.Tensor, torch.Tensor]]
"""Outputs, and what an operation behind the call read in them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Elsewhere:
    """The call that is not a plain one, what was read in its outputs, and another call beside it, to be judged as well."""

    outputs: Outputs
    read: _Read = field(default_factory=dict)
    beside: Launched | None = None


def _said(bench: Bench, failure: Failure) -> Failure:
    """Return a Failure of a call whose plain form is right."""
    return replace(failure, message=f"{failure.message} (the call was made {_SAYS[bench.case.check]}; a plain call is right)")


def _of_other(bench: Bench, launched: Launched) -> Generator[Launched, Judged, list[Failure]]:
    """Judge the call beside the Case's own; where it is wrong as a plain call as well, return the failures of that."""
    judged = yield launched
    if not judged.verdict.failures:
        return []
    alone = yield dataclasses.replace(launched, outputs=bench.checked_launch(bench.ready(), launched.inputs))
    return list(alone.verdict.failures) or [_said(bench, each) for each in judged.verdict.failures]


def _on_another(bench: Bench, inputs: Inputs) -> _Elsewhere:
    streams = streams_of(bench.device)
    late = _Late(bench.ready(), streams)
    return _Elsewhere(_launched(bench, streams, late, inputs), late.read)


def _beside_another(bench: Bench, inputs: Inputs) -> _Elsewhere:
    streams, bands = streams_of(bench.device), Bands()
    others = bench.inputs(recipe=beside(bench.case.recipe))
    pair = _Pair(bench.ready(), bench.ready(), copied(others, bands), streams)
    outputs = _launched(bench, streams, pair, inputs, bands)
    return _Elsewhere(outputs, beside=Launched(bench.case.kernel, others, pair.outputs(), bench.case.config))


def _in_graph(bench: Bench, inputs: Inputs) -> _Elsewhere:
    streams = streams_of(bench.device)
    steps = bench.kernel.capabilities.cuda_graphs
    return _Elsewhere(_launched(bench, streams, _Replayed(bench.ready(), streams, backward="backward" in steps), inputs))


_LAUNCHES: dict[Check, Callable[[Bench, Inputs], _Elsewhere]] = {
    "other_stream": _on_another,
    "two_streams": _beside_another,
    "graph": _in_graph,
}


def _launched(bench: Bench, streams: Streams, ready: Built, inputs: Inputs, bands: Bands | None = None) -> Outputs:
    """Launch on a stream of our own. Memory of one stream is used on another only after all work on the first has ended."""
    streams.synchronise()
    with streams.on(0):
        outputs = bench.checked_launch(ready, inputs, bands=bands)
    streams.synchronise()
    return outputs


class _Values:
    """The floating point numbers of a kernel's inputs, which can be taken away and given back."""

    def __init__(self, inputs: Inputs) -> None:
        names = [name for name in _FLOATING if inputs.page_table is None or name not in ("k", "v")]
        tensors = [*(getattr(inputs, name) for name in names), *inputs.captured]
        floating = [x for x in tensors if x is not None and x.is_floating_point() and x.numel()]
        with _disable_current_modes():
            self._parts = [(memory(x), x.dtype) for x in floating]
            self._kept = [part.clone() for part, _ in self._parts]

    def hide(self) -> None:
        """Make all of them NaN."""
        with _disable_current_modes():
            for part, _ in self._parts:
                part.fill_(_NAN)

    def change(self) -> None:
        """Make them others, which are finite where they are."""
        with _disable_current_modes():
            for part, dtype in self._parts:
                part.view(dtype).mul_(_FACTOR)

    def show(self) -> None:
        """Give all bytes back."""
        with _disable_current_modes():
            for (part, _), kept in zip(self._parts, self._kept, strict=True):
                part.copy_(kept)


@dataclass(slots=True)
class _Late:
    """A kernel whose stream is held back, and whose inputs have their values only behind that."""

    ready: Built
    streams: Streams
    read: _Read = field(default_factory=dict)

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(o, lse)."""
        return self._held_back(inputs, lambda: self.ready.forward(inputs), ("o", "lse"))

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:
        """Gradients."""
        return self._held_back(inputs, lambda: self.ready.backward(inputs, o, lse), ("dq", "dk", "dv"))

    def _held_back(self, inputs: Inputs, call: Callable[[], _Results], names: Sequence[OutputName]) -> _Results:
        values = _Values(inputs)
        values.hide()
        self.streams.synchronise()
        self.streams.hold()
        try:
            self.streams.request(values.show)
            results = call()
            self._read_later(results, names)
        finally:
            self.streams.let_go()
        return results

    def _read_later(self, results: Sequence[object], names: Sequence[OutputName]) -> None:
        """Request a copy of results, as a caller's next operation would read them."""
        for name, result in zip(names, results, strict=False):
            if not plain(result):
                continue
            assert isinstance(result, torch.Tensor)
            with _disable_current_modes():
                copy = torch.empty_like(result)
            self.read[name] = result, copy
            self.streams.request(functools.partial(_copy, copy, result))


def _copy(copy: torch.Tensor, result: torch.Tensor) -> None:
    with _disable_current_modes():
        copy.copy_(result)


class _Pair:
    """Two kernels, on the current stream and on one beside it, which are held back and let go together."""

    def __init__(self, ready: Built, other: Built, others: Inputs, streams: Streams) -> None:
        self._ready, self._other, self._others, self._streams = ready, other, others, streams
        self._second: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._gradients: Gradients | None = None

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(o, lse) of the first."""
        result, self._second = self._both(lambda: self._ready.forward(inputs), lambda: self._other.forward(self._others))
        return result

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:
        """Gradients of the first."""
        assert self._second is not None
        second = self._second
        result, self._gradients = self._both(
            lambda: self._ready.backward(inputs, o, lse), lambda: self._other.backward(self._others, *second)
        )
        return result

    def _both(self, call: Callable[[], _T], other: Callable[[], _T]) -> tuple[_T, _T]:
        self._streams.synchronise()
        try:
            self._streams.hold()
            with self._streams.on(1):
                self._streams.hold()
            result = call()
            with self._streams.on(1):
                return result, other()
        finally:
            self._streams.let_go()
            self._streams.synchronise()

    def outputs(self) -> Outputs:
        """Return those of the second."""
        assert self._second is not None
        o, lse = self._second
        if self._gradients is None:
            return Outputs(o=o, lse=lse)
        (d_q, d_k, d_v), d_captured = split(self._gradients)
        return Outputs(o=o, lse=lse, dq=d_q, dk=d_k, dv=d_v, d_captured=d_captured)


class _Replayed:
    """A kernel whose calls are captured into CUDA graphs while other values are in its inputs, and replayed."""

    def __init__(self, ready: Built, streams: Streams, *, backward: bool) -> None:
        self._ready, self._streams, self._backward = ready, streams, backward
        self._graphs: list[Callable[[], None]] = []
        """Keep the outputs' memory."""

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(o, lse)."""
        return self._replayed(inputs, lambda: self._ready.forward(inputs))

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:
        """Gradients."""
        call: Callable[[], Gradients] = lambda: self._ready.backward(inputs, o, lse)  # noqa: E731
        return self._replayed(inputs, call) if self._backward else call()

    def _replayed(self, inputs: Inputs, call: Callable[[], _T]) -> _T:
        values = _Values(inputs)
        values.change()
        call()
        self._streams.synchronise()
        results, replay = self._streams.captured(call)
        self._graphs.append(replay)
        replay()
        self._streams.request(values.show)
        replay()
        return results


def _compared(bench: Bench, kept: Outputs, elsewhere: _Elsewhere) -> tuple[bool, list[Failure]]:
    """Return whether all outputs have the bits of `kept`, but for slack rows, and a Failure for each that was read too early."""
    read = {name: elsewhere.read[name] for name in bench.case.problem.needs.outputs if name in elsewhere.read}
    outputs = _pairs(bench, kept, elsewhere.outputs)
    differ = _differ([*read.values(), *(outputs or ())])
    early = [_too_early(bench, name, *pair) for (name, pair), flag in zip(read.items(), differ, strict=False) if flag]
    return outputs is not None and not any(differ[len(read) :]), early


def _too_early(bench: Bench, name: OutputName, now: torch.Tensor, then: torch.Tensor) -> Failure:
    """Return the Failure of an output that was not yet as it is now."""
    count = int((_words(now) != _words(then)).sum())
    early = "read too early, by an operation that follows on the same stream"
    message = f"{OUTPUT_TITLES[name]}: {counted(count, 'element')} {'was' if count == 1 else 'were'} {early}"
    return Failure(kernel=bench.case.kernel, kind="nondeterministic", check=bench.case.check, output=name, message=message)


def _pairs(bench: Bench, kept: Outputs, last: Outputs) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Return outputs of both calls without slack rows, and gradients of captured tensors; None: some are not alike."""
    problem, names = bench.case.problem, bench.case.problem.needs.outputs
    captured = list(itertools.zip_longest(kept.d_captured, last.d_captured))
    captured = [(one, other) for one, other in captured if one is not None or other is not None]
    every = [*((getattr(kept, name), getattr(last, name)) for name in names), *captured]
    if not all(alike(one, other) for one, other in every):
        return None
    rows = [tuple(valid_rows(problem, name, getattr(each, name)) for each in (kept, last)) for name in names]
    return [*((one, other) for one, other in rows), *captured]


def _differ(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return whether the bits of each pair differ, where that can be on a device by one wait for it."""
    flags = differing(pairs)
    if flags is None:
        return [not torch.equal(_words(one), _words(other)) for one, other in pairs]
    return [bool(each) for each in torch.cat(flags).tolist()]


def _words(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element."""
    return x.detach().contiguous().view(_INTEGERS[x.element_size()])
