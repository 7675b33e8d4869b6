"""The second bank of mutants: those that operators make of a kernel's device source, without those known to be equivalent.

An id is kernel, function, operator, and n: the n-th change of that operator in that function.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator

import libcst as cst
import msgspec
from support.mutants import SUBJECTS, Mutant, Patch, module_of
from support.operators.changes import HINTS, OPERATORS, Change, Source
from support.paths import TESTS

from attnfuzz.kernels.faults.planted import planted_source

__all__ = ["FOLDER", "changes_of", "equivalents", "operator_mutant", "operator_mutants", "sample"]

FOLDER = TESTS / "mutants" / "equivalents"
"""Equivalent mutants, a file for each kernel."""
_DEVICE = {"triton.jit", "T.prim_func"}
_KINDS = ("crash", "hang", "exception", "compile-error")
"""Kinds of failures that a mutant may cause, in addition to wrong values."""


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mutants that are equivalent for one reason: their changes by their ids without the kernel's name."""

    reason: str
    mutants: dict[str, str]


class _Equivalents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    groups: tuple[Group, ...]


def changes_of(text: str) -> dict[str, Change]:
    """Return all changes of the device functions in a module's source by ids: function, operator, number."""
    source = Source(text)
    changes = {}
    for function in _device_functions(source):
        numbers: dict[str, int] = defaultdict(int)
        known = set()
        for node in _nodes(function):
            for operator, changes_at in OPERATORS.items():
                for each in changes_at(source, node):
                    if (each.start, each.new) not in known:
                        known.add((each.start, each.new))
                        numbers[operator] += 1
                        changes[f"{function.name.value}.{operator}.{numbers[operator]}"] = each
    return changes


@functools.cache
def operator_mutants(kernel: str) -> dict[str, Mutant]:
    """Return all mutants of a kernel's device source by id, those that are equivalent among them.

    Raises:
        ValueError: no bugs are planted in a kernel of that name.
    """
    if kernel not in SUBJECTS:
        raise ValueError(f"kernel={kernel!r}: no bugs are planted in it; it is one of {', '.join(SUBJECTS)}")
    _, text = planted_source(module_of(kernel, "device"), [])
    return {f"{kernel}.{id_}": _mutant(kernel, id_, text, each) for id_, each in changes_of(text).items()}


def operator_mutant(id_: str) -> Mutant:
    """Return the mutant of that id.

    Raises:
        ValueError: there is none.
    """
    kernel = ".".join(id_.split(".")[:-3])
    try:
        return operator_mutants(kernel)[id_]
    except KeyError:
        raise ValueError(f"id={id_!r}: no operator makes it of {kernel}; `operator_mutants` has those of a kernel") from None


def equivalents(kernel: str) -> dict[str, str]:
    """Return the reasons why mutants of a kernel cannot change any result that is judged, by their ids.

    Raises:
        ValueError: the file has another text than the mutant, or a mutant that does not exist; the text says which.
    """
    path = FOLDER / f"{kernel}.toml"
    if not path.exists():
        return {}
    reasons: dict[str, str] = {}
    mutants = operator_mutants(kernel)
    for group in msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Equivalents).groups:
        for short, change in group.mutants.items():
            id_ = f"{kernel}.{short}"
            if id_ not in mutants or mutants[id_].mechanism != change:
                now = mutants[id_].mechanism if id_ in mutants else "no mutant"
                raise ValueError(f"{path.name}: {short}: it is {now!r}, not {change!r}; look again whether it is equivalent")
            if id_ in reasons:
                raise ValueError(f"{path.name}: {short}: it is listed twice; give one reason")
            reasons[id_] = group.reason
    return reasons


def sample(ids: Iterable[str], size: int) -> list[str]:
    """Return `size` of the ids, or all if there are fewer: spread over operators and functions, and always the same ones."""
    by_operator: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for each in sorted(ids, key=lambda each: hashlib.sha256(each.encode()).hexdigest()):
        function, operator, _ = each.split(".")[-3:]
        by_operator[operator][function].append(each)
    queues = [list(_alternately(functions.values())) for functions in by_operator.values()]
    return list(itertools.islice(_alternately(queues), size))


def _alternately(queues: Iterable[list[str]]) -> Iterator[str]:
    for row in itertools.zip_longest(*queues):
        yield from (each for each in row if each is not None)


def _mutant(kernel: str, id_: str, text: str, change: Change) -> Mutant:
    return Mutant(
        id=f"{kernel}.{id_}", source="no released kernel: made by an operator", mechanism=_described(text, change), kernel=kernel,
        outputs=(), kinds=_KINDS, patches=(_patch(text, change),), case="{}",
    )  # fmt: skip


def _described(text: str, change: Change) -> str:
    """Return the old and the new text, and the line where it begins if that has more."""
    old, new = (" ".join(each.split()) for each in (change.old, change.new))
    line = text[text.rfind("\n", 0, change.start) + 1 : text.find("\n", change.start)].strip()
    return f"{old} -> {new}" if old.startswith(line) else f"{old} -> {new}, in: {line}"


def _patch(text: str, change: Change) -> Patch:
    """Return the patch of whole lines around a change, as few as occur only once."""
    lines = 0
    while True:
        start, end = text.rfind("\n", 0, change.start) + 1, text.find("\n", change.end)
        for _ in range(lines):
            start, end = text.rfind("\n", 0, max(0, start - 1)) + 1, text.find("\n", end + 1)
        old = text[start:end]
        if text.count(old) == 1:
            return Patch("device", old, text[start : change.start] + change.new + text[change.end : end])
        lines += 1


def _device_functions(source: Source) -> Iterator[cst.FunctionDef]:
    """Yield the functions that run on the device, in the order of the source."""
    pending: list[cst.CSTNode] = [source.module]
    while pending:
        node = pending.pop()
        if isinstance(node, cst.FunctionDef) and any(_decorator(source, each) in _DEVICE for each in node.decorators):
            yield node
        elif isinstance(node, (cst.Module, cst.FunctionDef, cst.IndentedBlock)):
            pending += reversed(node.children)


def _decorator(source: Source, node: cst.Decorator) -> str:
    return source.of(node.decorator.func if isinstance(node.decorator, cst.Call) else node.decorator)


def _nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the nodes of a function in the order of the source, without parameters, annotations, docstrings and hints."""
    yield node
    for each in node.children:
        hint = isinstance(each, cst.Arg) and each.keyword is not None and each.keyword.value in HINTS
        if not hint and not isinstance(each, (cst.Parameters, cst.Annotation, cst.Decorator)):
            yield from _nodes(each)
