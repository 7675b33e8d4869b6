"""score_mod and mask_mod from a case file: trees that are deep, wide, malformed, or named like code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostile_files import CODE, apart, attnfuzz, digits, nested, problem, refused, written


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with apart(tmp_path, monkeypatch):
        yield


def chain(depth: int, op: str = "neg") -> Any:
    tree: Any = ["score"]
    for _ in range(depth):
        tree = [op, tree]
    return tree


def wide(levels: int) -> Any:
    """2^levels leaves."""
    tree: Any = ["score"]
    for _ in range(levels):
        tree = ["add", tree, tree]
    return tree


def load(name: Any = "bias", sizes: Any = ("heads",), fill: Any = "normal", gradient: Any = False, index: Any = (["h"],)) -> Any:
    return ["add", ["score"], ["load", [name, list(sizes) if isinstance(sizes, tuple) else sizes, fill, gradient], *index]]


NAME = "captured.name="
SCORES: dict[str, tuple[Any, str]] = {
    "code": (CODE, "Expected `array | null`, got `str`"),
    "code as an operation": ([CODE, ["score"]], "no operation on (float)"),
    "a dunder as an operation": (["__import__", ["score"]], "no operation on (float)"),
    "an attribute as an operation": (["os.system", ["score"]], "no operation on (float)"),
    "an operation that is a number": ([1, ["score"]], "a node is (op, ...)"),
    "an operation that is a list": ([["add"], ["score"]], "a node is (op, ...)"),
    "an object": ([{"op": "score"}], "a dict has no place in it"),
    "nothing": ([], "a node is (op, ...)"),
    "null for an argument": (["neg", None], "an argument is a node"),
    "a number for an argument": (["add", ["score"], 1], "an argument is a node"),
    "code for a constant": (["add", ["score"], ["const", CODE]], "expression.const="),
    "true for a constant": (["add", ["score"], ["const", True]], "expression.const=True"),
    "a constant of 400 digits": (["add", ["score"], ["const", digits(400)]], "expression.const="),
    "a constant of 4,000 digits": (["add", ["score"], ["const", digits(4000)]], "expression.const="),
    "a constant beyond float32": (["add", ["score"], ["const", 1e300]], "a constant is a finite float32"),
    "an integer beyond int32": (["add", ["score"], ["float", ["int", 2**40]]], "an index is an int32"),
    "too few arguments": (["add", ["score"]], "no operation on (float)"),
    "too many arguments": (["neg", *[["score"]] * 1000], "no operation on (float, float"),
    "another kind": (["le", ["q_idx"], ["kv_idx"]], "it is of kind bool"),
    "a division by zero": (["add", ["score"], ["float", ["mod", ["q_idx"], ["int", 0]]]], "no operation on (int, int)"),
    "101 deep": (chain(101), "it lies more than 100 nodes deep in its tree"),
    "150 deep": (chain(150), "nested more than 100 deep"),
    "32,768 leaves": (wide(15), "its tree has more than 32768 nodes"),
    "5,000 deep": (nested(5000), "nested too deeply"),
    "a keyword for a name": (load("for"), NAME),
    "None for a name": (load("None"), NAME),
    "code for a name": (load(f"x), {CODE}, (y"), NAME),
    "two lines for a name": (load("x\nimport os"), NAME),
    "a NUL in a name": (load("x\0"), NAME),
    "a name in another normal form": (load("\u1d431"), NAME),
    "a name of a million letters": (load("x" * 1_000_000), NAME),
    "no name": (load(""), NAME),
    "a number for a name": (load(1), "a tensor is (name, sizes, fill, gradient)"),
    "two tensors of one name": (
        ["add", load(), load(sizes=("kv_heads",), index=(["int", 0],))[2]], "two different tensors have it"
    ),
    "code for a fill": (load(fill=CODE), "captured.fill="),
    "code for a size": (load(sizes=(CODE,)), "captured.sizes="),
    "a size of 400 digits": (load(sizes=(digits(400),)), "is the limit"),
    "a size of zero": (load(sizes=(0,)), "captured.sizes="),
    "no size": (load(sizes=(), index=()), "captured.sizes="),
    "a thousand sizes": (load(sizes=(2,) * 1000, index=(["h"],) * 1000), "is the limit"),
    "an index outside": (load(index=(["q_idx"],)), "bias[q_idx]: q_idx is 0 to 2, and the size is 1"),
    "an index from the data": (load(index=(["score"],)), "no operation on (float)"),
    "a gradient of whole numbers": (load(fill="documents", gradient=True), "captured."),
    "gradient in words": (load(gradient="yes"), "a tensor is (name, sizes, fill, gradient)"),
}  # fmt: skip
MASKS: dict[str, tuple[Any, str]] = {
    "one that reads the score": (["le", ["score"], ["const", 0.0]], "it reads the score"),
    "a float": (["score"], "it is of kind float"),
    "code": (["eval", ["bool", True]], "no operation on (bool)"),
    "a truth in words": (["bool", "True"], "expression.bool='True'"),
    "a truth of 4,000 digits": (["bool", digits(4000)], "expression.bool="),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_hostile_score_mod_is_refused(name: str) -> None:
    tree, reason = SCORES[name]
    Path("case.json").write_bytes(written(problem(score_mod=tree)))
    for command in ("show", "repro"):
        assert len(refused(attnfuzz(command, "case.json"), reason)) < 2000


@pytest.mark.parametrize("name", MASKS)
def test_a_hostile_mask_mod_is_refused(name: str) -> None:
    tree, reason = MASKS[name]
    Path("case.json").write_bytes(written(problem(mask_mod=tree)))
    for command in ("show", "repro"):
        refused(attnfuzz(command, "case.json"), reason)


RIGHT: dict[str, Any] = {
    "100 deep": chain(99),
    "16,384 leaves": wide(14),
    "a tensor named like an index": load("q_idx"),
    "a tensor named like a function": load("print"),
    "a tensor named like torch": load("torch"),
    "a tensor named self": load("self"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_odd_but_right_tree_is_shown_and_refused_by_a_kernel_that_takes_none(name: str) -> None:
    Path("case.json").write_bytes(written(problem(score_mod=RIGHT[name])))
    assert attnfuzz("show", "case.json").exit_code == 0
    text = refused(attnfuzz("repro", "case.json", "--device", "cpu"), "does not support it: score_mod=")
    assert len(text) < 2000
