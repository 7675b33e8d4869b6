"""Plain words: messages, docstrings and documentation hold none of the words that once hid what they meant, nor do names.

A short list, for words that come back by habit; CONTRIBUTING.md has the rules. A word that is right somewhere has a line in
`ALLOWED`, with the reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages import PAGES, README, name_of
from support.paths import ROOT
from test_architecture import PACKAGES, TOPS

PLAIN = {
    "told": "reported, named, shown, passed",
    "tells?": "says, shows, reports",
    "nobody|somebody": "name who, or use the passive",
    "anew": "again",
    "besides": "also, in addition",
    "mended": "fixed, corrected",
    "by turns": "alternately",
    "for ever": "forever, or without end",
    "in no time": "must be positive",
    "as ever": "leave it out",
    "like any other": "leave it out",
    "is no positive": "must be positive",
    "last words": "last output",
    "hunt(s|ed|ing)?": "search, campaign",
    "sight(ed|ings?)": "finding",
    "barren": "without new Cases",
    "gallery": "maps",
    "nursery|zygote": "forkserver",
    "guardian": "reaper",
    "forsak(e|es|en)": "discard",
    "pleas?": "ledger entry",
    "rivals?": "other rule, peer",
    "strangers?": "third party",
    "the house": "the repository",
}
"""Words that are banned, each with what to say instead."""
NAMES = {"told", "made", "found"}
"""Past participles say that something happened; a name says what a value is."""
ALLOWED: dict[tuple[str, str], str] = {}
BANNED = re.compile("|".join(rf"\b(?:{words})\b" for words in PLAIN).replace(" ", r"\s+"), re.IGNORECASE)
FOLDERS = [f"harness/{name}" for name in PACKAGES] + [name for name in TOPS if name != "harness"]
GENERATED = {"docs/reference/api.md", "docs/reference/cli.md"}


def banned_in(text: str, where: str, first: int = 1) -> Iterator[str]:
    """Each banned word of `text`, with file, line and what to say instead."""
    for match in BANNED.finditer(text):
        word = " ".join(match[0].lower().split())
        if (where, word) not in ALLOWED:
            plain = next(plain for words, plain in PLAIN.items() if re.fullmatch(words, word))
            yield f"{where}:{first + text[: match.start()].count(chr(10))}: {word!r} ({plain})"


def names_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names of functions, classes, arguments and variables with their lines, without fields of structs: files may hold those."""
    fields = {id(each.target) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body
              if isinstance(each, ast.AnnAssign)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.lineno, node.id


def files_of(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_messages_and_docstrings_are_plain(folder: str) -> None:
    wrong = []
    for path in files_of(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                wrong += banned_in(node.value, name_of(path), node.lineno)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_say_what_they_hold(folder: str) -> None:
    wrong = []
    for path in files_of(folder):
        for line, name in names_of(ast.parse(path.read_text())):
            word = name.strip("_").lower()
            if word in NAMES and (name_of(path), word) not in ALLOWED:
                wrong.append(f"{name_of(path)}:{line}: {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", [*PAGES, README, ROOT / "CHANGELOG.md"], ids=name_of)
def test_pages_are_plain(page: Path) -> None:
    if name_of(page) in GENERATED:
        pytest.skip("written from docstrings")
    text = page.read_text(encoding="utf-8")
    code = r"^```.*?^```$|`[^`\n]*`"
    prose = re.sub(code, lambda match: re.sub(r"\S", "-", match[0]), text, flags=re.MULTILINE | re.DOTALL)
    wrong = list(banned_in(prose, name_of(page)))
    assert not wrong, "\n".join(wrong)


def test_a_banned_word_and_a_banned_name_are_noticed() -> None:
    assert list(banned_in("It is\ntold as\never.", "x.py", 5)) == [
        "x.py:6: 'told' (reported, named, shown, passed)",
        "x.py:6: 'as ever' (leave it out)",
    ]
    source = "class A:\n    found: int\n    def told(self, made):\n        found = made"
    assert [name for _, name in names_of(ast.parse(source)) if name in NAMES] == ["told", "made", "found"]
