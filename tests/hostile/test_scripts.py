"""`repro --script` of Cases of which somebody else chose every byte: the script holds data, never their code."""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from support.hostile_files import CODE, MARK, apart, attnfuzz, case, problem, refused, written
from support.repro import register_all

from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.repro.script import runtime
from attnfuzz.harness.repro.script.short import short_script
from attnfuzz.harness.repro.script.trying import Ran
from attnfuzz.kernels import registry
from attnfuzz.kernels.expressions import named
from attnfuzz.kernels.expressions.tree import to_data

CONFIG = {"tile_m": 6, "tile_n": 6}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    register_all()
    with apart(tmp_path, monkeypatch):
        yield


def script_of(content: dict[str, Any]) -> str:
    Path("case.json").write_bytes(written(content))
    result = attnfuzz("repro", "case.json", "--device", "cpu", "--script", "script.py", "--exact")
    assert result.exit_code == 0, result.output
    return Path("script.py").read_text(encoding="utf-8")


def calls(text: str) -> set[str]:
    """What the script calls beyond the functions of its runtime, which are ours."""
    ours = {ast.dump(each) for each in ast.parse(Path(runtime.__file__).read_text()).body}
    nodes = [each for top in ast.parse(text).body if ast.dump(top) not in ours for each in ast.walk(top)]
    assert not [each for each in nodes if isinstance(each, ast.Lambda | ast.ListComp | ast.GeneratorExp | ast.NamedExpr)]
    return {ast.unparse(each.func) for each in nodes if isinstance(each, ast.Call)}


EXPECTED = {"PackedCase", "Config", "Problem", "Layout", "Needs", "Stored", "sys.exit", "run", "get"}
ANY = {**case(config=CONFIG), "kernel": "acme.right", "problem": {
    "seqlens_q": [3], "seqlens_k": [3], "dim_qk": 8, "dim_v": 8, "dtype": "float32"}}  # fmt: skip
ALL_CHARACTERS = "".join(map(chr, (*range(0x300), 0x2028, 0x2029, 0x202E, 0x2066, 0xFEFF, 0xFFFF, 0x1F600)))
FOUND: dict[str, dict[str, Any]] = {
    "code on a line of its own": {"message": f"\n{CODE}\n"},
    "code after each kind of line end": {"message": f"\r{CODE}\f{CODE}\v{CODE}\x1c{CODE}\x85{CODE}\u2028{CODE}\u2029{CODE}"},
    "a NUL": {"message": f"a\0\n{CODE}"},
    "all characters": {"message": ALL_CHARACTERS},
    "quotes": {"message": f"'''\n{CODE}\n'''\"\"\"\n{CODE}\n\"\"\""},
    "a backslash at the end": {"message": f"x\\\n{CODE}\\"},
    "an encoding": {"message": "# -*- coding: utf-7 -*-\n+AG8-"},
    "an encoding on each line": {"message": "coding=utf-7\n" * 9},
    "a target of code": {"target": f"acme:right\n{CODE}"},
    "a kind with lines": {"identity": {"kernel": "x", "kind": "crash", "check": f"x\n{CODE}", "message": f"\n{CODE}"}},
    "a rate": {"rate": [1, 1000]},
}


@pytest.mark.parametrize("name", FOUND)
def test_what_a_file_says_of_its_failure_is_a_comment(name: str) -> None:
    text = script_of({**ANY, "found": FOUND[name]})
    assert calls(text) <= EXPECTED
    head = text.partition("from __future__")[0].splitlines()
    assert all(line.startswith("#") or not line for line in head)
    assert all(each.isprintable() for line in head for each in line), "an editor or a terminal would obey it"


@pytest.mark.parametrize("name", sorted(FOUND.keys() - {"a rate"}))  # of a rate there is no short script
def test_a_short_script_says_it_in_comments_too(name: str) -> None:
    Path("case.json").write_bytes(written({**ANY, "found": FOUND[name]}))
    script = short_script(read_case("case.json"), "cpu", run=lambda text, deadline: Ran(-11, "", ""))
    lines = script.text.splitlines()
    above = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    assert all(each.isprintable() for line in above for each in line)
    assert tokenize.detect_encoding(BytesIO(script.text.encode()).readline)[0] == "utf-8", "no comment chooses it"
    shown = {ast.unparse(each.func) for each in ast.walk(ast.parse(script.text.encode())) if isinstance(each, ast.Call)}
    assert "open" not in shown, CODE


TEXTS = {
    "quotes": f"'+{CODE}+'",
    "three quotes": f'"""+{CODE}+"""\n{CODE}\n',
    "a brace": f"}}){CODE}(dict(x={{",
    "a backslash": "\\",
    "all characters": ALL_CHARACTERS,
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_of_a_config_is_data(name: str) -> None:
    config = {**CONFIG, "variant": TEXTS[name]}
    text = script_of({**ANY, "config": config})
    assert calls(text) <= EXPECTED
    [call] = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call) and ast.unparse(each.func) == "Config"]
    assert ast.literal_eval(call.args[0]) == config


@pytest.mark.parametrize(
    "name", ["q_idx", "kv_idx", "score", "torch", "print", "math", "CASE", "KERNEL", "run", "Problem", "_", "größe"]
)
def test_a_captured_tensor_may_have_any_name(name: str) -> None:
    tree = to_data(named.SCORES["bias"])
    renamed = ast.literal_eval(repr(tree).replace("'bias'", repr(name)))
    text = script_of({**ANY, "problem": {**ANY["problem"], "score_mod": renamed}})
    assert calls(text) <= EXPECTED


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "code for a choice": (case(config={f"x=1) if {CODE} else dict(y": 1}), "case.config="),
    "a choice that the kernel does not have": (case(config={"x": 1}), "torch.reference_cpu does not support it: config="),
    "a keyword for a tensor": (
        problem(score_mod=["add", ["score"], ["load", ["for", ["heads"], "normal", False], ["h"]]]), "captured.name='for'"
    ),
    "None for a tensor": (
        problem(score_mod=["add", ["score"], ["load", ["None", ["heads"], "normal", False], ["h"]]]), "captured.name='None'"
    ),
    "an unknown kernel": (case(kernel=f"{CODE}"), "no kernel of that name is installed"),
    "a kernel on two lines": (case(kernel=f"x\n{CODE}"), "no kernel of that name is installed"),
    "a kernel to import": (case(kernel="os:system"), "a kernel's own name is expected"),
    "a dtype of code": (problem(dtype=CODE), "case.problem: Invalid enum value"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_script_is_refused_and_writes_none(name: str) -> None:
    content, reason = REFUSED[name]
    Path("case.json").write_bytes(written(content))
    text = refused(attnfuzz("repro", "case.json", "--device", "cpu", "--script", "script.py"), reason)
    assert text.index(reason) < 200
    assert not Path("script.py").exists()


def test_a_script_of_a_hostile_case_runs_none_of_its_code() -> None:
    """Once in full: the file is read by Python itself."""
    found = {"message": f"\n{CODE}\r{CODE}\f{CODE}\0{CODE}", "target": CODE}
    script_of({**case(), "found": found})
    done = subprocess.run([sys.executable, "-P", "script.py"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "OK torch.reference_cpu on cpu\n"), done.stderr
    assert not Path(MARK).exists()
