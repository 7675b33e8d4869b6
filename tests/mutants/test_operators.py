"""Mutants made by operators: each operator's changes, ids that stay, equivalent mutants that are still those, and campaigns."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.mutants import SUBJECTS, module_of

from attnfuzz.kernels.faults.planted import planted_source

pytest.importorskip("libcst")

from support.detection import Attempt, attempt
from support.operators import bank
from support.operators.changes import OPERATORS

KERNELS = [kernel for kernel in SUBJECTS if kernel.startswith("triton.v") or kernel == "tilelang.varlen"]
"""One of each language: the others have the same operators."""
OF_AN_OPERATOR = {
    "compare": ("if start_m >= seqlen_q:\n        x = a == b", {"start_m > seqlen_q", "a != b"}),
    "bound": ("for i in range(begin, n):\n        y = i < n", {"begin + 1", "begin - 1", "n + 1", "n - 1"}),
    "swap": ("f(seqlen_q, seqlen_k, DIM, PAD, x)", {"seqlen_k, seqlen_q", "PAD, DIM"}),
    "drop": ("a = b\n    a = c\n    tl.store(p, a)", {"pass"}),
    "constant": ("x = 2 * (scale * LOG2_E) + 0.0", {"4", "(scale * 1.01)", "(LOG2_E * 1.01)", "1.0"}),
    "guard": ("x = tl.load(p, mask=a & b, other=0.0)", {"tl.load(p)", "a", "b"}),
    "narrow": ("acc = acc + p.to(tl.float32)",
               {"(acc + p.to(tl.float32)).to(tl.float16).to(tl.float32)", "tl.float16",
                "(acc + p.to(tl.float32)).to(tl.bfloat16).to(tl.float32)", "tl.bfloat16"}),
    "sign": ("a -= b + c", {"a += b + c", "b - c"}),
    "extreme": ("x = tl.minimum(a, tl.max(b, 1))", {"tl.maximum(a, tl.max(b, 1))", "tl.min(b, 1)"}),
}  # fmt: skip


def changes(body: str) -> dict[str, str]:
    """New texts by ids, of a function with that body."""
    text = f"@triton.jit\ndef f(p):\n    {body}\n"
    return {id_: change.new for id_, change in bank.changes_of(text).items()}


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_makes_these_changes_and_no_others(operator: str) -> None:
    body, expected = OF_AN_OPERATOR[operator]
    assert {new for id_, new in changes(body).items() if id_.split(".")[1] == operator} == expected


def test_a_guard_keeps_the_value_that_is_computed() -> None:
    """The other side of a choice is a constant: with it alone nothing would be computed."""
    assert changes("x = tl.where(dead, 0.0, y)")["f.guard.1"] == "y"
    assert changes("x = T.if_then_else(i < n, y + z, 0.0)")["f.guard.1"] == "(y + z)"


def test_no_first_value_of_a_name_is_dropped() -> None:
    assert "f.drop.1" not in changes("a = b\n    c = a")
    assert "f.drop.1" in changes("p = p + 1")


def test_plain_functions_annotations_and_hints_are_left_alone() -> None:
    assert not bank.changes_of("def f(a: T < 1):\n    return a < 1\n")
    assert not changes("with T.Kernel(n, threads=min(2 * a, b)) as c:\n        pass")


def test_ids_depend_on_their_function_alone() -> None:
    function = "@triton.jit\ndef f(a, n):\n    x = a < n\n    return x < n\n"
    other = "# A comment.\n@triton.jit\ndef g(a, n):\n    return a < n\n\n\n"
    before, after = bank.changes_of(function), bank.changes_of(other + function)
    assert set(before) == {"f.compare.1", "f.compare.2", "f.bound.1", "f.bound.2"}
    assert {id_: each.new for id_, each in before.items()} == {
        id_: each.new for id_, each in after.items() if id_.startswith("f.")
    }


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_mutant_is_python_with_one_change(kernel: str) -> None:
    module = module_of(kernel, "device")
    original = ast.dump(ast.parse(planted_source(module, [])[1]))
    mutants = bank.operator_mutants(kernel)
    for id_ in bank.sample(mutants, 9):
        mutant = bank.operator_mutant(id_)
        assert mutant == mutants[id_]
        _, source = planted_source(module, mutant.edits("device"))
        assert ast.dump(ast.parse(source)) != original, id_


def test_a_sample_is_spread_and_always_the_same() -> None:
    mutants = bank.operator_mutants("triton.varlen")
    chosen = bank.sample(mutants, 60)
    assert chosen == bank.sample(reversed(mutants), 60)
    assert chosen[:20] == bank.sample(mutants, 20)
    assert {each.split(".")[-2] for each in chosen[:9]} == set(OPERATORS)
    assert {each.split(".")[-3] for each in chosen} >= {"forward", "preprocess", "backward", "_backward_keys", "_last_key"}
    assert sorted(bank.sample(mutants, 10**6)) == sorted(mutants)


@pytest.mark.parametrize("path", sorted(bank.FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_equivalent_mutants_are_still_those(path: Path) -> None:
    """A kernel that changes may make them others, or none."""
    assert path.stem in SUBJECTS
    reasons = bank.equivalents(path.stem)
    assert reasons
    assert all(len(each) > 20 for each in reasons.values())


STALE = {
    "another change": ('"f" = "a -> b"', "f: it is 'no mutant', not 'a -> b'; look again"),
    "a line that changed": (
        '"_kv_head.bound.1" = "1 -> 2"',
        "_kv_head.bound.1: it is 'head // (heads // kv_heads) -> (head // (heads // kv_heads)) + 1, in: return",
    ),
}


@pytest.mark.parametrize(("line", "text"), list(STALE.values()), ids=list(STALE))
def test_a_list_of_equivalents_that_does_not_fit_is_refused(
    line: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "triton.varlen.toml").write_text(f'[[groups]]\nreason = "none"\n[groups.mutants]\n{line}\n')
    monkeypatch.setattr(bank, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"triton\.varlen\.toml: ") as caught:
        bank.equivalents("triton.varlen")
    assert text in str(caught.value)


def test_an_unknown_kernel_and_an_unknown_id_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no bugs are planted in it; it is one of triton\.varlen"):
        bank.operator_mutants("triton.nothing")
    with pytest.raises(ValueError, match=r"no operator makes it of triton\.varlen"):
        bank.operator_mutant("triton.varlen.forward.compare.99")


@pytest.mark.parametrize("id_", ["_scores.guard.1", "forward.drop.5", "_diagonal.bound.1", "_offsets.sign.1"])
def test_a_campaign_finds_a_mutant_of_an_operator(id_: str) -> None:
    pytest.importorskip("triton")
    one = attempt(Attempt(f"triton.varlen.{id_}", 0, 40, 0.01))
    assert one.cases is not None
    assert one.cases <= 40
    assert one.runs


def test_a_mutant_that_does_not_run_is_called_so() -> None:
    pytest.importorskip("triton")
    one = attempt(Attempt("triton.varlen._last_key.guard.1", 0, 3, 0.01))
    assert (one.kind, one.cases) == ("exception", 1)
    assert not one.runs
