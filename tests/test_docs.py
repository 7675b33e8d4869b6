"""Documentation is right: the reference is the code's, links and names lead somewhere, and every command block is run.

A fenced block of `console` is a session: its lines that begin with "$ " are run one after the other, in a folder of the page's
own, and end with 0, or with what "# exit N" at the line's end says. After the word `console`: `slow` and `gpu` as pytest's marks,
`elsewhere` where a command needs what no test has (a clone, a network, a hosted runner, hours): there only the options are looked
at. Lines without "$ " are output. A block of `python file=NAME`, or of any language, is written into that folder first.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.pages import ARCHITECTURE, CONTRIBUTING, PAGES, README, Block, blocks, name_of
from support.paths import ROOT
from test_architecture import PACKAGES

from attnfuzz.harness.cli.main import main

KINDS = {"slow", "gpu", "elsewhere"}
GENERATED = "<!-- Written by docs/generate.py"


def sessions(page: Path) -> list[Block]:
    return [each for each in blocks(page) if each.language == "console"]


def marked() -> Iterator[pytest.ParameterSet]:
    for page in PAGES:
        kinds = {kind for each in sessions(page) for kind in each.words if kind in ("slow", "gpu")} or {""}
        if not any("elsewhere" not in each.words for each in sessions(page)):
            continue
        for kind in sorted({""} | kinds):
            if any(wanted(each, kind) for each in sessions(page)):
                yield pytest.param(
                    page, kind, id=f"{name_of(page)} {kind}".strip(), marks=[getattr(pytest.mark, kind)] if kind else []
                )


def wanted(block: Block, kind: str) -> bool:
    """Whether a block is of `kind`, slow or gpu; an empty `kind` stands for plain blocks."""
    if block.language != "console" or "elsewhere" in block.words:
        return False
    own = {"slow", "gpu"} & set(block.words)
    return own == {kind} if kind else not own


@pytest.mark.parametrize(("page", "kind"), list(marked()))
def test_the_commands_of_a_page_do_what_it_says(page: Path, kind: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the pages' kernels need Triton")
    bin_ = Path(sys.executable).parent
    # PYTHONSAFEPATH would hide the page's own files, which lie in the current folder.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTEST_ADDOPTS")}
    environment |= {"PATH": f"{bin_}:{os.environ['PATH']}", "COLUMNS": "150"}
    for each in blocks(page):
        if each.file is not None:
            (tmp_path / each.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / each.file).write_text(each.text, encoding="utf-8")
        if not (wanted(each, kind) or (kind and wanted(each, ""))):
            continue
        for command, code in each.commands:
            where = f"{name_of(page)}:{each.line}: {command}"
            done = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
            )
            assert done.returncode == code, f"{where}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", [*PAGES, README], ids=name_of)
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    generated = GENERATED in page.read_text(encoding="utf-8")
    for each in blocks(page):
        where = f"{name_of(page)}:{each.line}"
        assert not set(each.words) - KINDS - {f"file={each.file}"}, where
        if each.language == "text" and generated:
            # Usage lines and docstrings look like sessions.
            continue
        if each.language != "console":
            lines = each.text.splitlines()
            assert not any(line.startswith(("$ ", "attnfuzz ", "pytest ", "python ")) for line in lines), f"{where}: a session"
            continue
        assert each.commands, f"{where}: no command"
        for command, _ in each.commands:
            for argv in attnfuzz_calls(command):
                parse(argv, where)


def attnfuzz_calls(command: str) -> list[list[str]]:
    """Return the arguments of each call of attnfuzz in a shell line."""
    calls = []
    for part in re.split(r"&&|\|\||;|\|", command):
        words = shlex.split(part, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if words and words[0] == "attnfuzz":
            calls.append([word for word in words[1:] if not re.match(r"\d?>", word)])
    return calls


def parse(argv: list[str], where: str) -> None:
    """Check that the options are the command's."""
    group: click.Command = main
    while isinstance(group, click.Group) and argv and not argv[0].startswith("-"):
        assert argv[0] in group.commands, f"{where}: no command {argv[0]}"
        group, argv = group.commands[argv[0]], argv[1:]
    known = {name for each in group.params for name in (*each.opts, *each.secondary_opts)} | {"--help", "-h", "--version"}
    for word in argv:
        if word.startswith("-") and not re.fullmatch(r"-\d.*|-", word):
            assert word.split("=")[0] in known, f"{where}: {group.name} has no option {word}"


@pytest.mark.parametrize("page", [*PAGES, README], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name_of(page)}: {target}"
    for name in re.findall(r"(?<![\w/.])(docs/[\w/-]+\.md)", text):
        assert (ROOT / name).exists(), f"{name_of(page)}: {name}"


def test_the_architecture_has_the_packages_in_their_order() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\| `harness/(\w+)/` \|", text, re.MULTILINE)) == PACKAGES
    assert len(text.splitlines()) <= 130


@pytest.mark.parametrize("page", [ARCHITECTURE, CONTRIBUTING], ids=name_of)
def test_files_and_names_and_environments_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for line in text.splitlines():
        paths = re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", line)
        for path in paths:
            # A line about a folder names what is in it without that folder.
            assert (ROOT / path).exists() or (ROOT / paths[0] / path).exists(), f"{page.name}: {path}"
    for path in re.findall(r"<br>([\w/.]+)", text):
        assert (ROOT / path).exists() or (ROOT / "harness" / path).exists(), f"{page.name}: {path}"
    for name, path in re.findall(r"`(\w+)`[^`|.]{0,4}\b(?:of|in) `([\w/]+\.py)`", text):
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), f"{page.name}: {name} in {path}"
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    for name in re.findall(r"tox -e ([\w-]+)", text):
        assert f"[testenv:{name}]" in tox, f"{page.name}: tox -e {name}"
    for block in sessions(page):
        assert all((ROOT / path).exists() for path in re.findall(r"\btests/[\w/.]+", block.text)), f"{page.name}:{block.line}"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions write signatures otherwise")
def test_the_reference_is_the_codes() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("signatures are those of a machine with Triton")
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
