"""Text: what is spelled, what stays, JSON of the same data, counts in words."""

from __future__ import annotations

import json
import unicodedata

import pytest
from support.foreign_text import INVISIBLE, obeyed

from attnfuzz.harness.core.text import counted, dumps, encodable, json_line, normalised, one_line, printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("a\tb\nc", "a\tb\nc"),
        ("a\r\nb", "a\nb"),
        ("a\rb", "a\\x0db"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\x9b", "\\x9b"),
        ("\u202e", "\\u202e"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("日本語 é ∞ │ \u00a0", "日本語 é ∞ │ \u00a0"),
        ("\\x1b", "\\x1b"),
    ],
)
def test_printable(text: str, expected: str) -> None:
    assert printable(text) == expected
    assert printable(expected) == expected


def test_every_character_that_is_obeyed_is_spelled() -> None:
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    signs = [sign for sign in map(chr, range(0x110000)) if unicodedata.category(sign) in kinds or ord(sign) in INVISIBLE]
    assert len(signs) > 2000
    for sign in signs:
        assert not obeyed(printable(sign), on_page=True), hex(ord(sign))


def test_one_line_and_encodable() -> None:
    assert one_line("a\tb\nc\r\nd\x1b") == "a\\tb\\nc\\nd\\x1b"
    assert encodable("\x1b\ud800\u202e") == "\x1b\\ud800\u202e"


def test_json_holds_the_same_data() -> None:
    data = {"\x9b": ["\x7f\u202e\U000e0041##[group]", float("inf"), {"é": "::error::"}]}
    text = dumps(data)
    assert json.loads(text) == {"\x9b": ["\x7f\u202e\U000e0041##[group]", "inf", {"é": "::error::"}]}
    assert "é" in text
    assert not obeyed(text)
    assert json.loads(dumps({"a\ud800": "b\ud800"})) == {"a\\ud800": "b\\ud800"}
    line = json.dumps({"a": "\u202e"}, ensure_ascii=False)
    assert json_line(line) == '{"a": "\\u202e"}'


@pytest.mark.parametrize(
    ("count", "words", "text"),
    [(0, ("case",), "0 cases"), (1, ("case",), "1 case"), (2, ("case",), "2 cases"), (1, ("process", "processes"), "1 process"),
     (2, ("process", "processes"), "2 processes")],
)  # fmt: skip
def test_counted(count: int, words: tuple[str, ...], text: str) -> None:
    assert counted(count, *words) == text


def test_normalised() -> None:
    assert normalised("at 0xff: 3 of 4\nmore") == "at #: # of #"
