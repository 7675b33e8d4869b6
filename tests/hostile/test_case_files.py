"""Case files and blobs of which somebody else chose every byte."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.hostile_files import CODE, NO_FILES, PROBLEM, apart, attnfuzz, case, digits, nested, problem, refused, written

from attnfuzz.harness.campaign.blob import blob_of, stored_case
from attnfuzz.harness.plugin import options
from attnfuzz.strategies.case import BadCase, case_from_object


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with apart(tmp_path, monkeypatch):
        yield


def blob(content: bytes) -> str:
    return f"AF1-{base64.urlsafe_b64encode(zlib.compress(content, 9)).decode()}"


def usage_error(argument: str) -> str:
    """What pytest says of --attnfuzz-case."""
    values = {"device": "cpu", "case": [argument]}
    option = SimpleNamespace(**{options._attribute(name): values.get(name) for name in options._OPTIONS})
    config = SimpleNamespace(
        option=option,
        getoption=lambda name: getattr(option, options._attribute(name.removeprefix("--attnfuzz-"))),
        rootpath=Path.cwd(),
        stash=pytest.Stash(),
    )
    with pytest.raises(pytest.UsageError) as caught:
        options.pytest_configure(config)  # type: ignore[arg-type]
    return str(caught.value)


CODE_KEY = f"x=1) if {CODE} else dict(y"
GOOD = blob_of(case_from_object(case()))
FILES: dict[str, tuple[Any, str]] = {
    "empty": (b"", "not JSON"),
    "a NUL": (b"\0", "not JSON"),
    "cut off": (written(case())[:60], "not JSON"),
    "twice": (written(case()) * 2, "not JSON"),
    "JSON with comments": (b"// case\n" + written(case()), "not JSON"),
    "Python": (CODE.encode(), "not JSON"),
    "a pickle": (b"cposix\nsystem\n(S'touch EXECUTED'\ntR.", "not JSON"),
    "a byte order mark": (b"\xef\xbb\xbf" + written(case()), "not JSON"),
    "UTF-16": (written(case()).decode().encode("utf-16"), "not JSON"),
    "bytes that are not UTF-8": (b'{"format": 1, "kernel": "\xff"}', "not JSON"),
    "a lone surrogate": (b'{"format": 1, "kernel": "\\ud800x"}', "not JSON"),
    "NaN": (b'{"format": NaN}', "not JSON"),
    "infinity": (b'{"format": 1, "kernel": "x", "problem": {"softmax_scale": 1e999}}', "out of range"),
    "200,000 brackets": (b"[" * 200_000, "nested too deeply"),
    "200,000 objects": (b'{"a":' * 200_000, "nested too deeply"),
    "900 levels in the problem": (problem(score_mod=nested(900)), "nested too deeply"),
    "900 levels in what was found": (case(found={"message": nested(900, "{}")}), "nested too deeply"),
    "900 levels in an unknown part": (case(colour=nested(900)), "nested too deeply"),
    "150 levels in a config": (case(config={"a": nested(150)}), "case.config: Expected `bool | int | str`, got `array`"),
    "a version of 5,000 digits": (case(format=digits(5000)), "out of range"),
    "a version of 400 digits": (case(format=digits(400)), "this attnfuzz reads format 1"),
    "a length of 5,000 digits": (problem(seqlens_q=[digits(5000)]), "out of range"),
    "a length of 4,000 digits": (problem(seqlens_q=[digits(4000)]), "does not fit cu_seqlens, which is int32"),
    "a seed of 400 digits": (case(recipe={"seed": digits(400)}), "recipe.seed="),
    "a scale of 400 digits": (case(recipe={"q_scale": digits(400)}), "case.recipe: "),
    "heads of 400 digits": (problem(kv_heads=digits(400)), "it does not divide heads=1"),
    "true for a number": (problem(heads=True), "Expected `int`, got `bool`"),
    "a version in words": (case(format="1"), "case.format='1'"),
    "true for a version": (case(format=True), "case.format=True"),
    "a list of cases": ([case()], "not a JSON object"),
    "a kernel to import": (case(kernel="os:system"), "a kernel's own name is expected"),
    "a kernel that is an object": (case(kernel={"name": "x"}), "case.kernel: Expected `str`"),
    "code for a choice": (case(config={CODE_KEY: 1}), "case.config="),
    "a keyword for a choice": (case(config={"lambda": 1}), "case.config='lambda': a choice is named as a Python argument is"),
    "None for a choice": (case(config={"None": 1}), "case.config='None'"),
    "no name for a choice": (case(config={"": 1}), "case.config=''"),
    "a choice in another normal form": (case(config={"\ufb01": 1}), "case.config='\ufb01'"),
    "a choice with a NUL": (case(config={"x\0": 1}), "case.config='x\\x00'"),
    "a choice on two lines": (case(config={"x\n": 1}), "case.config='x\\n'"),
    "a choice with an escape": (case(config={"\x1b[2J": 1}), "case.config='\\x1b[2J'"),
    "a choice of a million letters": (case(config={"x" * 1_000_000: 1}), "give a Python identifier"),
    "a choice that is a fraction": (case(config={"a": 1.5}), "case.config: Expected"),
    "a choice that is null": (case(config={"a": None}), "case.config: Expected"),
    "a part of a million letters": (case(**{"x" * 1_000_000: 1}), "no such part"),
    "a part with an escape": (case(**{"\x1b]52;c;QQ==\x07": 1}), "case.\\x1b]52;c;QQ==\\x07: no such part"),
    "an unknown field of the problem": (problem(__class__="x"), "case.problem: Object contains unknown field `__class__`"),
    "an unknown check": (case(check="__import__"), "case.check: Invalid enum value"),
    "an object for a check": (case(check={}), "case.check: "),
}  # fmt: skip
"""Content of a file, and why it is refused."""
BLOBS: dict[str, tuple[str, str]] = {
    "a version of 5,000 digits": (f"AF{'9' * 5000}-x", "a blob of version 999999999..., and this attnfuzz reads version 1"),
    "version 0": (f"AF0-{GOOD[4:]}", "a blob of version 0"),
    "version 01": (f"AF01-{GOOD[4:]}", "a blob of version 01"),
    "nothing": ("AF1-", "the blob is cut or changed"),
    "half": (GOOD[:60], "the blob is cut or changed"),
    "not base64": ("AF1-%%%%", "the blob is cut or changed"),
    "base64 of nothing": ("AF1-QUFB", "the blob is cut or changed"),
    "a letter changed": (f"{GOOD[:30]}{'A' if GOOD[30] != 'A' else 'B'}{GOOD[31:]}", "the blob is cut or changed"),
    "more behind it": (f"AF1-{base64.urlsafe_b64encode(zlib.compress(written(case())) + b'x' * 10).decode()}", "cut or changed"),
    "a gigabyte of zeros": (
        f"AF1-{base64.urlsafe_b64encode(zlib.compress(bytes(1 << 24), 9)).decode()}", "the blob is cut or changed"
    ),
    "200,000 brackets": (blob(b"[" * 200_000), "nested too deeply"),
    "900 levels": (blob(written(problem(score_mod=nested(900)))), "nested too deeply"),
    "a length of 5,000 digits": (blob(written(problem(seqlens_k=[digits(5000)]))), "out of range"),
    "bytes that are not UTF-8": (blob(b'{"format": 1, "kernel": "\xff"}'), "not JSON"),
    "a lone surrogate": (blob(b'{"format": 1, "kernel": "\\ud800x"}'), "not JSON"),
    "a list": (blob(b"[]"), "not a JSON object"),
    "a kernel to import": (blob(written(case(kernel="os:system"))), "a kernel's own name is expected"),
    "code for a choice": (blob(written(case(config={CODE_KEY: 1}))), "case.config="),
}  # fmt: skip
"""What is pasted, and why it is refused."""


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_case_file_is_refused(name: str) -> None:
    content, reason = FILES[name]
    Path("case.json").write_bytes(content if isinstance(content, bytes) else written(content))
    for command in ("show", "repro"):
        text = refused(attnfuzz(command, "case.json"), "case='case.json'", reason)
        assert text.count("case.json") == 1, "the message stands in itself"
    assert reason in json.loads(attnfuzz("show", "case.json", "--json").stdout)["error"]
    assert reason in usage_error("case.json")


@pytest.mark.parametrize("name", BLOBS)
def test_a_hostile_blob_is_refused(name: str) -> None:
    text, reason = BLOBS[name]
    for command in ("show", "repro"):
        assert len(refused(attnfuzz(command, text), reason)) < 1000
    assert reason in usage_error(text)


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_is_refused_as_a_case(name: str) -> None:
    make, reason = NO_FILES[name]
    make(Path.cwd() / "case.json")
    for command in (("show",), ("repro",), ("repro", "--script", "script.py"), ("compile", "--case")):
        first, *more = command
        text = refused(attnfuzz(first, *more, "case.json"), reason)
        assert text.count("case.json") == 1, "the message stands in itself"
    assert reason in usage_error("case.json")


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero", "/", "x\0y", "x" * 5000, "no\nsuch"], ids=repr)
def test_a_path_that_is_no_case_is_named_once(path: str) -> None:
    for command in ("show", "repro"):
        text = refused(attnfuzz(command, path), "case=")
        assert text.count("case=") == 1


FOUND: dict[str, Any] = {
    "a list": [1],
    "a number of 400 digits": {"seed": digits(400)},
    "a rate of zeros": {"rate": [0, 0]},
    "a rate of 400 digits": {"rate": [1, digits(400)]},
    "a negative rate": {"rate": [-5, -1]},
    "an identity of another type": {"identity": {"kernel": 1, "kind": [], "output": {}}},
    "an identity of no kind": {"identity": {"kernel": "x", "kind": "no such kind", "check": "x", "message": "x"}},
    "a message of a megabyte": {"message": "x" * 1_000_000},
    "a message of control characters": {"message": "".join(map(chr, range(256)))},
    "a target of code": {"target": f"os:system('{CODE}')"},
    "versions of objects": {"versions": {"torch": {"a": 1}}},
    "150 levels": {"pattern": nested(150)},
    "a device in a list": {"device": ["cpu"]},
    "places of infinity": {"place": {"got": "inf", "expected": "nan", "allowed": "-inf"}},
}


@pytest.mark.parametrize("name", FOUND)
def test_what_a_file_says_of_its_failure_spoils_no_case(name: str) -> None:
    Path("case.json").write_bytes(written(case(found=FOUND[name])))
    assert attnfuzz("show", "case.json").exit_code == 0
    assert json.loads(attnfuzz("show", "case.json", "--json").stdout)["case"] == {**case(), "config": {}, "recipe": {}}


def test_the_unsupported_is_refused_with_the_reason_first() -> None:
    tree: Any = ["score"]
    for number in range(90):
        tree = ["add", tree, ["const", float(number)]]
    Path("case.json").write_bytes(written(problem(score_mod=tree, dim_qk=7000)))
    for more in ((), ("--script", "script.py"), ("--shrink",), ("--repeat", "2")):
        text = refused(attnfuzz("repro", "case.json", "--device", "cpu", *more))
        assert text.index("does not support it: dim_qk, dim_v=(7000, 16)") < 100, text
        assert text.startswith("error: case.json: case='")
        assert "ERROR" not in text
    assert not Path("script.py").exists()


@pytest.mark.parametrize("name", ["tile_m", "_", "größe", "self", "values", "q_idx", "print", "case", "type", "x" * 100])
def test_a_config_with_odd_but_right_names_is_read_and_its_repr_is_code_for_itself(name: str) -> None:
    from attnfuzz.kernels.contract import Config

    config = case_from_object(case(config={name: 1, "other": "'\"\\\n\0\ud800"})).config
    assert eval(repr(config), {"Config": Config}) == config


@pytest.mark.parametrize("content", [b"[" * 200_000, b"{", b"\xff", b'"\\ud800"', b"[]", b"9" * 5000])
def test_a_case_between_processes_is_refused_alike(content: bytes) -> None:
    from attnfuzz.strategies.case import case_from_json

    with pytest.raises(BadCase):
        case_from_json(content)


def test_a_good_blob_is_read() -> None:
    assert stored_case(GOOD).case.problem.dim_qk == PROBLEM["dim_qk"]
