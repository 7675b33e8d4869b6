"""Foreign text in pytest: reports, summary, JUnit XML and usage errors hold nothing that is obeyed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch._dynamo  # and so Triton, whose library aborts the process when it is loaded twice
from support.foreign_text import EVERYTHING, MARK, obeyed

from attnfuzz.harness import plugin
from attnfuzz.harness.campaign import campaign
from attnfuzz.kernels import registry

# pytester forgets modules that are first imported inside: what must be imported once only is imported here.
assert campaign
assert plugin
assert torch._dynamo

TESTS = """
import sys
import pytest
from attnfuzz.harness.plugin import fuzz
from support.report import Spoilt, right

TEXT = {text}


class Talkative(Spoilt):
    def __init__(self, name, **says):
        super().__init__(right, name)
        self.says = says

    def unavailable(self, device):
        return self.says.get("unavailable")

    def configs(self, problem):
        if text := self.says.get("configs"):
            sys.stdout.write(text)
            raise RuntimeError(text)
        return super().configs(problem)

    def build(self, problem, config, device):
        if text := self.says.get("build"):
            raise RuntimeError(text)
        return super().build(problem, config, device)


test_message = fuzz(Talkative("a.message", build=TEXT), max_examples=1, shards=1)
test_skipped = fuzz(Talkative("a.skip", unavailable=TEXT), max_examples=1, shards=1)
test_error = fuzz(Talkative("a.error", configs=TEXT), max_examples=1, shards=1)
test_case = fuzz("torch.reference_cpu", max_examples=1, shards=1, cases=["case.json"])
"""


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(__file__).parents[1]), prepend=os.pathsep)
    return pytester


def pytest_here(folder: pytest.Pytester, *arguments: str) -> str:
    result = folder.runpytest_inprocess("-p", "no:cacheprovider", "--attnfuzz-device", "cpu", "--attnfuzz-in-process", *arguments)
    return f"{result.stdout.str()}\n{result.stderr.str()}"


@pytest.mark.parametrize("test", ["message", "skipped", "error", "case"])
def test_reports(folder: pytest.Pytester, test: str) -> None:
    folder.makepyfile(test_foreign=TESTS.format(text=ascii(EVERYTHING)))
    Path("case.json").write_text(json.dumps({"format": 1, "kernel": EVERYTHING.replace(":", "."), "problem": {}, EVERYTHING: 1}))
    output = pytest_here(folder, "-rA", "-k", f"test_{test}", "--junit-xml", "junit.xml")
    assert MARK in output, output
    assert not obeyed(output), output
    assert not obeyed(Path("junit.xml").read_text(), on_page=True)


def test_a_name_that_cannot_be_printed(folder: pytest.Pytester) -> None:
    """The module of its test is not collected; a text in it is not obeyed either."""
    named = "test_name = fuzz(Talkative(TEXT), max_examples=1, shards=1)\n"
    folder.makepyfile(test_foreign=TESTS.format(text=ascii(EVERYTHING)) + named)
    output = pytest_here(folder, "--junit-xml", "junit.xml")
    assert "must be printable text" in output
    assert MARK in output
    assert not obeyed(output), output
    assert not obeyed(Path("junit.xml").read_text(), on_page=True)


@pytest.mark.parametrize("option", ["case", "device", "kernel", "budget", "out"])
def test_usage_errors(folder: pytest.Pytester, option: str) -> None:
    folder.makepyfile(test_foreign="from attnfuzz.harness.plugin import fuzz\ntest_k = fuzz('torch.reference_cpu', shards=1)")
    value = EVERYTHING.replace("\0", "") if option != "out" else f"{EVERYTHING.replace(chr(0), '')}/x" * 20
    output = pytest_here(folder, f"--attnfuzz-{option}", value)
    assert MARK in output, output
    # pytest's own header shows the arguments as they are.
    assert not obeyed(output), output
