"""Case and Recipe: everything needed to do one trial again, as data that survives JSON and refuses what is broken."""

from __future__ import annotations

import json
import keyword
import os
import pickle
import subprocess
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.expressions.tree import Captured
from attnfuzz.kernels.problem import Layout, Needs, Problem
from attnfuzz.strategies.case import FORMAT, PATTERNS, BadCase, Case, Recipe, case_from_json, case_from_object

PLAIN: dict[str, Any] = {"seqlens_q": [1], "seqlens_k": [1], "dim_qk": 8, "dim_v": 8}
WRITTEN: dict[str, Any] = {"format": 1, "kernel": "acme.flash", "problem": PLAIN, "recipe": {}, "config": {}}


def case(**changed: Any) -> Case:
    return Case(kernel="acme.flash", problem=Problem(**{**PLAIN, **changed}))


def written(**changed: Any) -> str:
    return json.dumps({**WRITTEN, **changed})


POWERS = st.integers(-40, 40).map(lambda exponent: 2.0**exponent)


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    lengths = st.lists(st.integers(0, 9999), min_size=2, max_size=2).map(tuple)
    problem = Problem(
        seqlens_q=draw(lengths),
        seqlens_k=draw(lengths),
        dim_qk=draw(st.integers(1, 256)),
        dim_v=draw(st.integers(1, 256)),
        heads=draw(st.sampled_from((2, 6))),
        kv_heads=draw(st.sampled_from((1, 2))),
        dtype=draw(st.sampled_from(("float16", "bfloat16", "float32"))),
        causal=draw(st.sampled_from((None, "bottom_right", "top_left"))),
        window=draw(st.none() | st.tuples(st.none() | st.integers(0, 9), st.integers(0, 9))),
        softmax_scale=draw(st.none() | st.floats(-1e30, 1e30)),
        mask_mod=draw(st.none() | st.just(("le", ("q_idx",), ("int", 3)))),
        layout_k=Layout(pitch=draw(st.integers(0, 8))),
        needs=draw(st.sampled_from((Needs(), Needs(dlse=True), Needs(outputs=("o",))))),
        slack_k=draw(st.integers(0, 9)),
    )
    recipe = Recipe(
        pattern=draw(st.sampled_from(PATTERNS)),
        q_scale=draw(POWERS),
        v_scale=draw(POWERS),
        do_scale=draw(POWERS),
        seed=draw(st.integers(0, 2**63 - 1)),
    )
    texts = st.text(max_size=8).map(lambda text: unicodedata.normalize("NFKC", text))
    names = texts.filter(lambda name: name.isidentifier() and not keyword.iskeyword(name))
    values = st.integers(-(2**53), 2**53) | st.booleans() | st.text(max_size=8)
    config = draw(st.dictionaries(names | st.sampled_from(("tile_m", "_", "été")), values))
    kernel = draw(st.text(st.characters(codec="utf-8", exclude_characters=":"), max_size=20))
    return Case(kernel=kernel, problem=problem, recipe=recipe, config=Config(config))


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(any_case())
def test_json_keeps_the_case_its_hash_and_its_id(case_: Case) -> None:
    for text in (case_.canonical(), json.dumps(case_.to_object()), json.dumps(case_.to_object(), indent=4)):
        again = case_from_json(text)
        assert again == case_
        assert hash(again) == hash(case_)
        assert again.id == case_.id
        assert again.canonical() == case_.canonical()


@pytest.mark.parametrize(
    "needs", [Needs(), Needs(dlse=True), Needs(outputs=("o", "lse")), Needs(outputs=("o", "lse", "dq", "dk", "dv"))]
)
def test_a_case_that_another_process_sent_has_the_same_json(needs: Needs) -> None:
    layout = Layout(order="htd", offset=3)
    problem = Problem(seqlens_q=(3, 0), seqlens_k=(5, 2), dim_qk=4, dim_v=3, window=(2, None), layout_q=layout, needs=needs)
    one = Case(kernel="acme.flash", problem=problem, after=(Case(kernel="acme.flash", problem=problem),))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        other = pickle.loads(pickle.dumps(one, protocol))
        assert (other, hash(other), other.canonical(), other.id) == (one, hash(one), one.canonical(), one.id)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(any_case())
def test_canonical_json_leaves_defaults_out(case_: Case) -> None:
    plain = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=8, dim_v=8)
    data = json.loads(case_.canonical())
    assert data == json.loads(json.dumps(case_.to_object()))
    assert list(data) == sorted(data) == ["config", "format", "kernel", "problem", "recipe"]
    for name in data["problem"]:
        assert name in PLAIN or getattr(case_.problem, name) != getattr(plain, name)
    for name in data["recipe"]:
        assert getattr(case_.recipe, name) != getattr(Recipe(), name)


def test_the_plainest_case_in_json() -> None:
    assert case().canonical() == (
        '{"config":{},"format":1,"kernel":"acme.flash","problem":{"dim_qk":8,"dim_v":8,"seqlens_k":[1],"seqlens_q":[1]},"recipe":{}}'
    )


def test_defaults_that_are_written_out_change_nothing() -> None:
    spelled = case(
        heads=1,
        kv_heads=1,
        dtype="float16",
        packing="ragged",
        slack_q=0,
        causal=None,
        softmax_scale=None,
        softcap=0.0,
        layout_q=Layout(offset=0),
        needs=Needs(outputs=("o", "lse", "dq", "dk", "dv")),
    )
    assert spelled == case()
    assert spelled.canonical() == case().canonical()
    assert spelled.id == case().id
    read = case_from_json(written(problem={**PLAIN, "heads": 1, "needs": {"dlse": False}, "layout_q": {}}, recipe={"seed": 0}))
    assert read.id == case().id


def test_the_order_of_config_names_changes_nothing() -> None:
    one = Case(kernel="x", problem=case().problem, config=Config(tile_m=64, tile_n=32))
    other = Case(kernel="x", problem=case().problem, config=Config(tile_n=32, tile_m=64))
    assert one == other
    assert one.canonical() == other.canonical()


def test_every_part_is_part_of_the_identity() -> None:
    variants = [
        case(),
        Case(kernel="acme.other", problem=case().problem),
        case(seqlens_k=[2]),
        Case(kernel="acme.flash", problem=case().problem, recipe=Recipe(seed=1)),
        Case(kernel="acme.flash", problem=case().problem, config=Config(stages=2)),
    ]
    assert len({each.id for each in variants}) == len(set(variants)) == len(variants)


def test_the_id_is_ten_hex_digits_and_the_same_in_every_process() -> None:
    case_ = Case(kernel="x", problem=case(causal="top_left").problem, recipe=Recipe(seed=7), config=Config(tile_m=64, split=True))
    code = "import sys; from attnfuzz.strategies.case import case_from_json; print(case_from_json(sys.argv[1]).id)"
    for seed in ("0", "1"):
        command = [sys.executable, "-P", "-c", code, case_.canonical()]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        assert done.stdout.strip() == case_.id
    assert len(case_.id) == 10
    assert int(case_.id, 16) >= 0


def test_reading_a_case_needs_neither_hypothesis_nor_torch() -> None:
    code = (
        "import sys; from attnfuzz.strategies.case import case_from_json; case_from_json(sys.argv[1]); "
        "print(sorted({'hypothesis', 'torch', 'triton', 'tilelang'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, written()], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


BROKEN: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "case: not JSON (Input data was truncated); give a file that `attnfuzz run` wrote"),
    "half": ('{"format": 1, "kern', "case: not JSON (Input data was truncated); give a file that `attnfuzz run` wrote"),
    "binary": (b"\xff\xfe\x00", "case: not JSON (JSON is malformed: "),
    "NaN": ('{"format": NaN}', "case: not JSON (JSON is malformed: "),
    "two objects": (written() + written(), "case: not JSON (JSON is malformed: "),
    "list": ("[]", "case: not a JSON object; give a file that `attnfuzz run` wrote"),
    "number": ("3", "case: not a JSON object; give a file that `attnfuzz run` wrote"),
    "no format": (
        '{"kernel": "x"}',
        "case.format=None: this attnfuzz reads format 1; reproduce it with the version that wrote it, or find it again",
    ),
    "next format": (
        written(format=2),
        "case.format=2: this attnfuzz reads format 1; reproduce it with the version that wrote it, or find it again",
    ),
    "format as text": (written(format="1"), "case.format='1': this attnfuzz reads format 1; "),
    "no kernel": (
        json.dumps({"format": 1, "problem": PLAIN}),
        "case.kernel: it is missing; a Case has format, kernel, problem, recipe, config, check, schedule and after",
    ),
    "no problem": (
        json.dumps({"format": 1, "kernel": "x"}),
        "case.problem: it is missing; a Case has format, kernel, problem, recipe, config, check, schedule and after",
    ),
    "kernel no text": (written(kernel=3), "Expected `str`, got `int`"),
    "kernel null": (written(kernel=None), "Expected `str`, got `null`"),
    "problem a list": (written(problem=[1]), "Expected `object`, got `array`"),
    "a fraction in a schedule": (
        written(check="protocol", schedule=[1.5]),
        "case.schedule: Expected `int`, got `float` - at `$[0]`; give it as `attnfuzz run` writes it",
    ),
    "problem null": (written(problem=None), "Expected `object`, got `null`"),
    "problem empty": (written(problem={}), "Object missing required field `seqlens_q`"),
    "problem of text": (written(problem={**PLAIN, "heads": "3"}), "Expected `int`, got `str` - at `$.heads`"),
    "problem with more": (written(problem={**PLAIN, "haeds": 3}), "Object contains unknown field `haeds`"),
    "problem impossible": (
        written(problem={**PLAIN, "heads": 3, "kv_heads": 2}),
        "kv_heads=2: it does not divide heads=3; every group has the same number of query heads: give a divisor of heads",
    ),
    "recipe null": (written(recipe=None), "Expected `object`, got `null`"),
    "recipe of no pattern": (written(recipe={"pattern": "wild"}), "Invalid enum value 'wild' - at `$.pattern`"),
    "recipe with more": (written(recipe={"sead": 3}), "Object contains unknown field `sead`"),
    "recipe of a bad scale": (
        written(recipe={"q_scale": 3}),
        "recipe.q_scale=3.0: only a power of two scales exactly; use a power of two, 2**-40 to 2**40",
    ),
    "recipe of sinks without sinks": (
        written(recipe={"sinks": "large"}),
        "case.recipe.sinks='large': the problem has no sinks; leave it out, or give problem.sinks=true",
    ),
    "earlier recipe of sinks without sinks": (
        written(after=[{"problem": PLAIN, "recipe": {"sinks": "zero"}}]),
        "case.after[0].recipe.sinks='zero': the problem has no sinks; leave it out",
    ),
    "recipe of a bad seed": (
        written(recipe={"seed": -1}),
        "recipe.seed=-1: it is hashed as a 64-bit integer; use 0 to 2**63 - 1",
    ),
    "config a list": (written(config=[]), "Expected `object`, got `array`"),
    "config of floats": (written(config={"a": 1.5}), "got `float`"),
    "config of objects": (written(config={"a": {}}), "got `object`"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_case_is_refused_with_a_clear_text(name: str) -> None:
    text, expected = BROKEN[name]
    with pytest.raises(BadCase) as caught:
        case_from_json(text)
    assert expected in str(caught.value)
    assert str(caught.value).startswith("case")
    assert "\n" not in str(caught.value)


def test_a_bad_case_is_a_bad_argument() -> None:
    assert issubclass(BadCase, BadArgument)


def test_recipe_and_config_may_be_missing() -> None:
    assert case_from_json(json.dumps({"format": FORMAT, "kernel": "acme.flash", "problem": PLAIN})) == case()


def test_what_was_found_with_it_is_no_part_of_a_case() -> None:
    assert case_from_object({**WRITTEN, "found": {"message": "wrong"}}) == case()


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale", "do_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, 3.0, 0.1, 2.0**41, 2.0**-41, float("inf"), float("nan")])
def test_a_scale_that_is_no_power_of_two_within_reach_is_refused(name: str, value: float) -> None:
    with pytest.raises(BadArgument) as caught:
        Recipe(**{name: value})
    assert str(caught.value) == (
        f"recipe.{name}={value!r}: only a power of two scales exactly; use a power of two, 2**-40 to 2**40"
    )


@pytest.mark.parametrize("value", [2.0**40, 2.0**-40, 1.0, 0.5])
def test_powers_of_two_are_scales(value: float) -> None:
    assert Recipe(q_scale=value).q_scale == value


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_outside_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(BadArgument, match=r"recipe\.seed="):
        Recipe(seed=seed)
    assert Recipe(seed=2**63 - 1).seed == 2**63 - 1


CODE = "x=1) if __import__('os').system('id') else dict(y"


@pytest.mark.parametrize("name", [CODE, "", "tile m", "1x", "for", "None", "a.b", "x\0"])
def test_a_choice_whose_name_is_code_is_refused(name: str) -> None:
    with pytest.raises(BadCase, match=r"case\.config=.*identifier"):
        case_from_json(written(config={name: 1}))
    with pytest.raises(BadArgument, match="identifier"):
        Config({name: 1})
    assert Config({"tile_m": 1, "größe": 2})["größe"] == 2


@pytest.mark.parametrize("name", ["for", "None", "q idx", "x=1", ""])
def test_a_captured_tensor_has_the_name_of_a_variable(name: str) -> None:
    with pytest.raises(BadArgument, match=r"captured\.name"):
        Captured(name, ("heads",))
