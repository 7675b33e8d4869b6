"""Problem: what is impossible cannot be built, and the error names argument, value, reason and remedy."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.expressions.named import MASKS, SCORES
from attnfuzz.kernels.expressions.tree import to_data
from attnfuzz.kernels.problem import ORDERS, Layout, Needs, Problem


def problem(**changed: Any) -> Problem:
    return Problem(**{"seqlens_q": (3, 0), "seqlens_k": (5, 7), "dim_qk": 64, "dim_v": 48, **changed})


def decoded(text: str) -> Problem:
    return msgspec.json.decode(text, type=Problem)


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "no sequence": (
        {"seqlens_q": (), "seqlens_k": ()},
        "seqlens_q=(): a batch has at least one sequence; give one length per sequence",
    ),
    "fewer key lengths": (
        {"seqlens_k": (5,)},
        "seqlens_k=(5,): it has 1 lengths and seqlens_q has 2; give both one length per sequence",
    ),
    "more key lengths": (
        {"seqlens_k": (5, 7, 9)},
        "seqlens_k=(5, 7, 9): it has 3 lengths and seqlens_q has 2; give both one length per sequence",
    ),
    "negative query length": (
        {"seqlens_q": (3, -1)},
        "seqlens_q=(3, -1): a length cannot be negative; use 0 for an empty sequence",
    ),
    "negative key length": (
        {"seqlens_k": (-5, 7)},
        "seqlens_k=(-5, 7): a length cannot be negative; use 0 for an empty sequence",
    ),
    "total of queries beyond int32": (
        {"seqlens_q": (2**30, 2**30)},
        "seqlens_q=(1073741824, 1073741824): the total does not fit cu_seqlens, which is int32; use shorter sequences",
    ),
    "total of keys beyond int32": (
        {"seqlens_k": (2**31 - 1, 1)},
        "seqlens_k=(2147483647, 1): the total does not fit cu_seqlens, which is int32; use shorter sequences",
    ),
    "dense batch of unlike query lengths": (
        {"packing": "dense"},
        "seqlens_q=(3, 0): a dense batch has one length for all sequences; use packing='ragged'",
    ),
    "dense batch of unlike key lengths": (
        {"packing": "dense", "seqlens_q": (3, 3)},
        "seqlens_k=(5, 7): a dense batch has one length for all sequences; use packing='ragged'",
    ),
    "negative query slack": ({"slack_q": -1}, "slack_q=-1: rows cannot be negative; give 0 or more"),
    "negative key slack": ({"slack_k": -8}, "slack_k=-8: rows cannot be negative; give 0 or more"),
    "no heads": ({"heads": 0}, "heads=0: it must be positive; give 1 or more"),
    "negative key/value heads": ({"kv_heads": -2}, "kv_heads=-2: it must be positive; give 1 or more"),
    "no key/value heads": ({"kv_heads": 0}, "kv_heads=0: it must be positive; give 1 or more"),
    "no dim_qk": ({"dim_qk": 0}, "dim_qk=0: it must be positive; give 1 or more"),
    "negative dim_v": ({"dim_v": -64}, "dim_v=-64: it must be positive; give 1 or more"),
    "uneven groups": (
        {"heads": 7, "kv_heads": 2},
        "kv_heads=2: it does not divide heads=7; every group has the same number of query heads: give a divisor of heads",
    ),
    "more key/value heads than heads": (
        {"heads": 2, "kv_heads": 4},
        "kv_heads=4: it does not divide heads=2; every group has the same number of query heads: give a divisor of heads",
    ),
    "infinite scale": (
        {"softmax_scale": float("inf")},
        "softmax_scale=inf: it must be finite; give a number, or null for dim_qk ** -0.5",
    ),
    "NaN scale": (
        {"softmax_scale": float("nan")},
        "softmax_scale=nan: it must be finite; give a number, or null for dim_qk ** -0.5",
    ),
    "negative softcap": ({"softcap": -1.0}, "softcap=-1.0: it must be finite and not negative; use 0 for no softcap"),
    "infinite softcap": ({"softcap": float("inf")}, "softcap=inf: it must be finite and not negative; use 0 for no softcap"),
    "NaN softcap": ({"softcap": float("nan")}, "softcap=nan: it must be finite and not negative; use 0 for no softcap"),
    "negative left window": (
        {"window": (-1, 0)},
        "window=(-1, 0): a side counts keys from the diagonal; give 0 or more, or null for no limit",
    ),
    "negative right window": (
        {"window": (None, -3)},
        "window=(None, -3): a side counts keys from the diagonal; give 0 or more, or null for no limit",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_problem_cannot_be_built_and_the_error_says_why(name: str) -> None:
    changed, text = IMPOSSIBLE[name]
    with pytest.raises(BadArgument) as caught:
        problem(**changed)
    assert str(caught.value) == text


IMPOSSIBLE_LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "heads of a dense batch": (
        {"layout_k": Layout(order="bhsd")},
        "layout_k.order='bhsd': packing='ragged' has no such order; use 'thd' or 'htd'",
    ),
    "heads of a ragged batch": (
        {"packing": "dense", "seqlens_q": (3,), "seqlens_k": (5,), "layout_do": Layout(order="htd")},
        "layout_do.order='htd': packing='dense' has no such order; use 'bshd' or 'bhsd' or 'sbhd'",
    ),
    "constant values": (
        {"layout_v": Layout(expanded=True)},
        "layout_v.expanded=True: q, k and v are not constants; use it for layout_do only",
    ),
    "packed gradients": (
        {"layout_do": Layout(packed=True)},
        "layout_do.packed=True: dO is not packed with q, k, v; leave it out",
    ),
    "k alone": (
        {"layout_k": Layout(packed=True)},
        "layout.packed=(False, True, False): k and v lie in one allocation, alone or with q; pack k and v, or all three",
    ),
    "q with v": (
        {"layout_q": Layout(packed=True), "layout_v": Layout(packed=True)},
        "layout.packed=(True, False, True): k and v lie in one allocation, alone or with q; pack k and v, or all three",
    ),
    "rows of two lengths": (
        {"layout_k": Layout(packed=True), "layout_v": Layout(packed=True, pitch=2)},
        "layout=(Layout(), Layout(packed=True), Layout(pitch=2, packed=True)): packed tensors lie in the same rows; "
        "give them one offset and one pitch",
    ),
    "rows of two totals": (
        {name: Layout(packed=True) for name in ("layout_q", "layout_k", "layout_v")} | {"slack_k": 1},
        "layout_q.packed=True: a packed row is one token of q, k and v; give queries and keys the same lengths and slack",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE_LAYOUTS)
def test_an_impossible_layout_cannot_be_built(name: str) -> None:
    changed, text = IMPOSSIBLE_LAYOUTS[name]
    with pytest.raises(BadArgument) as caught:
        problem(**changed)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"expanded": True, "pitch": 3}, "layout.pitch=3: an expanded tensor is one element; leave one of them out"),
        ({"expanded": True, "order": "htd"}, "layout.order='htd': an expanded tensor is one element; leave one of them out"),
        (
            {"packed": True, "expanded_heads": True},
            "layout.expanded_heads=True: a packed tensor is a part of each row; leave one of them out",
        ),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(BadArgument) as caught:
        Layout(**changed)
    assert str(caught.value) == text


def test_the_packings_own_order_needs_no_saying() -> None:
    assert problem(layout_q=Layout(order="thd", offset=2)) == problem(layout_q=Layout(offset=2))
    dense = {"packing": "dense", "seqlens_q": (3,), "seqlens_k": (5,)}
    assert problem(**dense, layout_q=Layout(order="bshd")) == problem(**dense)


@pytest.mark.parametrize("name", ["offset", "pitch"])
def test_a_negative_layout_is_refused(name: str) -> None:
    with pytest.raises(BadArgument) as caught:
        Layout(**{name: -4})
    assert str(caught.value) == f"layout.{name}=-4: elements cannot be negative; give 0 or more"


@pytest.mark.parametrize(
    "changed",
    [
        {"seqlens_q": (0,), "seqlens_k": (0,)},
        {"seqlens_q": (2**31 - 1,), "seqlens_k": (0,)},
        {"softmax_scale": 0.0},
        {"softmax_scale": -0.125},
        {"softcap": 50.0},
        {"window": (None, None)},
        {"window": (0, 0)},
        {"heads": 6, "kv_heads": 2},
        {"packing": "dense", "seqlens_q": (4, 4), "seqlens_k": (0, 0)},
        {"dim_qk": 1, "dim_v": 1},
    ],
)
def test_the_edges_of_what_is_possible_are_allowed(changed: dict[str, Any]) -> None:
    built = problem(**changed)
    assert all(getattr(built, name) == value for name, value in changed.items())


def test_derived_sizes() -> None:
    built = problem(heads=6, kv_heads=2, slack_q=9)
    assert (built.batch, built.groups, built.total_q, built.total_k) == (2, 3, 3, 12)
    assert built.scale == 64**-0.5
    assert problem(softmax_scale=0.0).scale == 0.0


def test_lists_become_tuples_so_that_a_problem_is_hashable() -> None:
    built = problem(seqlens_q=[3, 0], seqlens_k=[5, 7], score_mod=["neg", ["score"]], mask_mod=["le", ["q_idx"], ["kv_idx"]])
    assert built.seqlens_q == (3, 0)
    assert built.score_mod == ("neg", ("score",))
    assert built.mask_mod == ("le", ("q_idx",), ("kv_idx",))


def test_a_problem_is_frozen() -> None:
    with pytest.raises(AttributeError):
        problem().heads = 2  # type: ignore[misc]


MINIMAL = '"seqlens_q":[1],"seqlens_k":[1],"dim_qk":8,"dim_v":8'

BROKEN_JSON = {
    f"{{{MINIMAL},'x':1}}": "malformed",
    f'{{{MINIMAL},"haeds":4}}': "Object contains unknown field `haeds`",
    f'{{{MINIMAL},"heads":"4"}}': "Expected `int`, got `str` - at `$.heads`",
    f'{{{MINIMAL},"heads":1.5}}': "Expected `int`, got `float` - at `$.heads`",
    f'{{{MINIMAL},"heads":true}}': "Expected `int`, got `bool` - at `$.heads`",
    f'{{{MINIMAL},"heads":null}}': "Expected `int`, got `null` - at `$.heads`",
    f'{{{MINIMAL},"dtype":"float64"}}': "Invalid enum value 'float64' - at `$.dtype`",
    f'{{{MINIMAL},"causal":"up"}}': "Invalid enum value 'up' - at `$.causal`",
    f'{{{MINIMAL},"packing":"paged"}}': "Invalid enum value 'paged' - at `$.packing`",
    f'{{{MINIMAL},"window":[1]}}': "Expected `array` of length 2 - at `$.window`",
    f'{{{MINIMAL},"layout_q":{{"stride":3}}}}': "Object contains unknown field `stride` - at `$.layout_q`",
    f'{{{MINIMAL},"layout_q":{{"offset":-3}}}}': "layout.offset=-3: elements cannot be negative; give 0 or more",
    f'{{{MINIMAL},"needs":{{"outputs":["z"]}}}}': "Invalid enum value 'z' - at `$.needs.outputs[0]`",
    f'{{{MINIMAL},"needs":{{"dO":true}}}}': "Object contains unknown field `dO` - at `$.needs`",
    f'{{{MINIMAL},"kv_heads":2}}': "kv_heads=2: it does not divide heads=1",
    f'{{{MINIMAL},"softmax_scale":1e400}}': "Number out of range",
    '{"seqlens_q":5,"seqlens_k":[1],"dim_qk":8,"dim_v":8}': "Expected `array`, got `int` - at `$.seqlens_q`",
    '{"seqlens_q":[1.5],"seqlens_k":[1],"dim_qk":8,"dim_v":8}': "Expected `int`, got `float` - at `$.seqlens_q[0]`",
    '{"seqlens_q":[1],"seqlens_k":[1],"dim_qk":8}': "Object missing required field `dim_v`",
}


@pytest.mark.parametrize("text", BROKEN_JSON)
def test_json_that_is_no_problem_is_refused(text: str) -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        decoded(text)
    assert BROKEN_JSON[text] in str(caught.value)


def test_defaults_in_json() -> None:
    assert decoded(f"{{{MINIMAL}}}") == Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=8, dim_v=8)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any Problem, all fields, independent of what the project's own strategies draw."""
    packing = draw(st.sampled_from(("ragged", "dense")))
    batch = draw(st.integers(1, 4))
    if packing == "dense":
        lengths = [(draw(st.integers(0, 9)),) * batch for _ in "qk"]
    else:
        lengths = [tuple(draw(st.lists(st.integers(0, 2**28), min_size=batch, max_size=batch))) for _ in "qk"]
    kv_heads = draw(st.integers(1, 4))
    side = st.none() | st.integers(0, 99)
    place = {"offset": st.integers(0, 9), "pitch": st.integers(0, 9)}
    layout = st.builds(Layout, order=st.sampled_from((None, *ORDERS[packing])), expanded_heads=st.booleans(), **place)
    packed = draw(st.none() | st.builds(Layout, packed=st.just(True), **place))
    constant = st.builds(Layout, expanded=st.just(True), offset=st.integers(0, 9))
    needs = st.builds(Needs, outputs=st.sampled_from((("o",), ("o", "lse"), ("o", "lse", "dq", "dk", "dv"))), dlse=st.booleans())
    # No memory holds a bias of each score of sequences as long as these.
    scores = [to_data(each) for name, each in SCORES.items() if packing == "dense" or name != "bias"]
    return Problem(
        packing=packing,
        seqlens_q=lengths[0],
        seqlens_k=lengths[1],
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        dim_qk=draw(st.integers(1, 300)),
        dim_v=draw(st.integers(1, 300)),
        dtype=draw(st.sampled_from(("float16", "bfloat16", "float32"))),
        slack_q=draw(st.integers(0, 5)),
        slack_k=draw(st.integers(0, 5)),
        causal=draw(st.sampled_from((None, "bottom_right", "top_left"))),
        window=draw(st.none() | st.tuples(side, side)),
        softmax_scale=draw(st.none() | st.floats(-3e38, 3e38)),
        softcap=draw(st.floats(min_value=0, max_value=3e38)),
        score_mod=draw(st.none() | st.sampled_from(scores)),
        mask_mod=draw(st.none() | st.sampled_from([to_data(each) for each in MASKS.values()])),
        layout_q=draw(layout),
        layout_k=packed or draw(layout),
        layout_v=packed or draw(layout),
        layout_do=draw(layout | constant),
        needs=draw(needs),
    )


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(problems())
def test_json_keeps_every_field(built: Problem) -> None:
    again = decoded(msgspec.json.encode(built).decode())
    assert again == built
    assert hash(again) == hash(built)


def test_a_pickle_keeps_every_field_and_checks_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign reads thousands of them a second."""
    plain = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=1, dim_v=1)
    full = Problem(
        seqlens_q=(3, 3), seqlens_k=(5, 5), dim_qk=4, dim_v=3, heads=4, kv_heads=2, dtype="bfloat16", packing="dense",
        slack_q=1, slack_k=2, causal="top_left", window=(1, 2), softmax_scale=-2.0, softcap=3.0, sinks=True,
        score_mod=to_data(SCORES["bias"]), mask_mod=to_data(next(iter(MASKS.values()))), layout_q=Layout(offset=1),
        layout_k=Layout(offset=2), layout_v=Layout(pitch=8), layout_do=Layout(order="bhsd"), needs=Needs(dlse=True),
    )  # fmt: skip
    default = {name: getattr(plain, name) for name in Problem.__struct_fields__ if name != "page_size"}
    assert all(getattr(full, name) != value for name, value in default.items())
    contents = [pickle.dumps(each) for each in (full, plain)]
    monkeypatch.setattr(Problem, "_check_types", lambda _: pytest.fail("checked"))
    copies = [pickle.loads(content) for content in contents]
    for read, each in zip(copies, (full, plain), strict=True):
        assert (read, hash(read), read is each) == (each, hash(each), False)
        assert all(type(getattr(read, name)) is type(getattr(each, name)) for name in Problem.__struct_fields__)


def test_reject_names_argument_value_reason_and_remedy() -> None:
    error = reject("heads", "four", "it is not a number", "give an integer")
    assert isinstance(error, ValueError)
    assert str(error) == "heads='four': it is not a number; give an integer"
