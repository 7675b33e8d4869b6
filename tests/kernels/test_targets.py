"""Kernels from anywhere: package.module:OBJECT in the place of a name, in commands, case files' repro lines and children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attnfuzz.harness.campaign.corpus import repro_line
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument

# Packages may have come by the variable.
BARE = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
MODULE = """
from attnfuzz.kernels.torch.reference_cpu import ReferenceCpu


class Mine(ReferenceCpu):
    name = "acme.flash"
    wrong = False

    def build(self, problem, config, device):
        built = super().build(problem, config, device)
        forward = built.forward

        def shifted(inputs):
            o, lse = forward(inputs)
            return o, lse + (problem.batch > 1)

        if self.wrong:
            built.forward = shifted
        return built


class Wrong(Mine):
    wrong = True


class Reference(ReferenceCpu):
    pass


class Holder:
    inner = Mine()


def flash(q, k, v):
    return q


def failing():
    raise ZeroDivisionError("division by zero")


KERNEL, WRONG, OTHER = Mine(), Wrong(), Mine()
NUMBER = 3
"""
KNOWN = registry.get("torch.reference_cpu")


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for table in ("_registered", "_loaded", "_origins"):
        monkeypatch.setattr(registry, table, {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "acme_target.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "acme_target", raising=False)


def attnfuzz(*arguments: str) -> Result:
    if arguments[0] in ("run", "repro"):
        arguments = (*arguments, "--device", "cpu", "--in-process")
    if arguments[0] == "run" and "--seed" not in arguments:
        arguments = (*arguments, "--seed", "0")
    sys.argv = ["attnfuzz", *arguments]
    return CliRunner().invoke(cli.main, list(arguments))


@pytest.mark.parametrize("target", ["acme_target:KERNEL", "acme_target:Mine", "acme_target:Holder.inner"])
def test_an_object_a_class_and_an_attribute_are_kernels(target: str) -> None:
    kernel = registry.get(target)
    assert kernel.name == "acme.flash"
    assert registry.get(target) is kernel
    assert registry.get("acme.flash") is kernel
    assert "acme.flash" in registry.names()
    assert not registry.is_local("acme.flash")
    came = registry.origin("acme.flash")
    assert came is not None
    assert came.target == target


REFUSED = {
    "acme_target:KERNAL": "the module 'acme_target' has no 'KERNAL'; did you mean 'KERNEL'?",
    "acme_target:xyz": "the module 'acme_target' has no 'xyz'; kernels there: KERNEL, WRONG, OTHER",
    "acme_target:Holder.none": "the class 'Holder' has no 'none'; did you mean 'inner'?",
    "acme_target:flash": "flash(q, k, v, ...) is not a kernel, and needs arguments to make one; "
    "an attention function becomes one by attnfuzz.kernels.adapters.dense or varlen; name the object that they return",
    "acme_target:failing": "making it failed with ZeroDivisionError: division by zero; fix that",
    "acme_none:KERNEL": "module 'acme_none' is neither ",
    "acme_none.deeper:KERNEL": "module 'acme_none' is neither ",
    "acme_target.deeper:KERNEL": "module 'acme_target.deeper' is neither ",
    "./src/acme:KERNEL": "a module is named with dots, as for `python -m`; give src.acme:KERNEL",
    "acme target:KERNEL": "it is not of the form package.module:OBJECT; give such as mypackage.attention:KERNEL",
    "acme_target:": "it is not of the form package.module:OBJECT",
    ":KERNEL": "it is not of the form package.module:OBJECT",
    "a:b:c": "it is not of the form package.module:OBJECT",
    "acme_broken:KERNEL": "importing acme_broken failed with ModuleNotFoundError: No module named 'acme_absent' "
    "(acme_broken.py:2); fix that, or install what it needs",
    "acme_exit:KERNEL": "importing acme_exit failed with SystemExit: 3 (acme_exit.py:1)",
    "acme_syntax:KERNEL": "importing acme_syntax failed with SyntaxError",
}


@pytest.mark.parametrize("target", REFUSED)
def test_what_cannot_be_had_is_refused_in_words(target: str) -> None:
    Path("acme_broken.py").write_text("import json\nimport acme_absent\n")
    Path("acme_exit.py").write_text("raise SystemExit(3)\n")
    Path("acme_syntax.py").write_text("def (:\n")
    with pytest.raises(BadArgument) as caught:
        registry.get(target)
    assert str(caught.value).startswith(f"kernel={target!r}: {REFUSED[target]}")


def test_what_is_no_kernel_says_what_it_lacks() -> None:
    with pytest.raises(BadArgument, match="kernel=3: it lacks name, backend, files, capabilities"):
        registry.get("acme_target:NUMBER")


def test_two_kernels_of_one_name_are_told_apart() -> None:
    registry.get("acme_target:KERNEL")
    with pytest.raises(BadArgument, match=r"it calls itself 'acme.flash', as another kernel does \(acme_target:KERNEL\)"):
        registry.get("acme_target:OTHER")
    with pytest.raises(BadArgument, match=r"it calls itself 'torch.reference_cpu', as another kernel does \(attnfuzz itself\)"):
        registry.get("acme_target:Reference")
    assert registry.get("attnfuzz.kernels.torch.reference_cpu:KERNEL") is registry.get("torch.reference_cpu")


def test_a_child_finds_it_in_the_same_folder(tmp_path: Path) -> None:
    registry.get("acme_target:KERNEL", str(tmp_path))
    parcel = shipped("acme.flash")
    assert parcel == {"name": "acme.flash", "target": "acme_target:KERNEL", "folder": str(tmp_path)}
    program = (
        "import json, sys; from attnfuzz.harness.isolation.kernel_ref import unpacked; from attnfuzz.kernels import registry; "
        "kernel = unpacked(json.loads(sys.argv[1])); assert registry.get('acme.flash') is kernel; print(kernel.name)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, json.dumps(parcel)], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.strip() == "acme.flash"


@pytest.mark.parametrize("safe", [False, True], ids=["", "safe"])
def test_the_current_folder_is_looked_in_unless_python_is_told_not_to(safe: bool, tmp_path: Path) -> None:
    program = "from attnfuzz.kernels import registry; print(registry.get('acme_target:KERNEL').name)"
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(program)
    command = [sys.executable, *(["-P"] if safe else []), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=BARE)
    assert (done.returncode == 0) is not safe, done.stderr
    if safe:
        assert "where PYTHONSAFEPATH or -P forbids to look" in done.stderr


@pytest.mark.parametrize("safe", [False, True], ids=["", "safe"])
@pytest.mark.parametrize("name", ["acme_target:KERNEL", "acme.flash"])
def test_a_gate_and_its_children_look_in_the_current_folder_for_what_is_named_so(name: str, safe: bool, tmp_path: Path) -> None:
    program = """
import importlib.util, os, subprocess, sys
from pathlib import Path
from attnfuzz.harness.gate.subjects import importing_from

def found():
    here = subprocess.run([sys.executable, "-c", "import acme_target"], cwd="/", capture_output=True).returncode == 0
    return here and importlib.util.find_spec("acme_target") is not None

sys.path[:] = [each for each in sys.path if each not in ("", os.getcwd())]
with importing_from(Path.cwd(), [sys.argv[1]]):
    print(found())
print(found(), os.environ.get("PYTHONPATH"))
"""
    command = [sys.executable, *(["-P"] if safe else []), "-c", program, name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=BARE)
    assert done.stdout.splitlines() == [str(":" in name and not safe), f"False {BARE.get('PYTHONPATH')}"]


def test_a_failure_of_it_is_found_listed_shown_and_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    result = attnfuzz("run", "--kernel", "acme_target:WRONG", "--max-examples", "40", "--max-failures", "1", "--json")
    assert result.exit_code == 1, result.output
    [failure] = json.loads(result.stdout)["failures"]
    path = failure["path"]
    assert failure["repro"] == f"attnfuzz repro {path} --kernel acme_target:WRONG"
    stored = json.loads(Path(path).read_text())
    assert (stored["kernel"], stored["found"]["target"]) == ("acme.flash", "acme_target:WRONG")

    # As another process meets the file.
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setattr(registry, "_origins", {})
    assert f"run it again         {failure['repro']}\n" in attnfuzz("show", path).stdout
    alone = attnfuzz("repro", path)
    assert alone.exit_code == 2
    assert "it was found at acme_target:WRONG: add --kernel acme_target:WRONG" in alone.stderr
    assert attnfuzz("repro", path, "--kernel", "acme_target:WRONG").exit_code == 1
    other = attnfuzz("repro", path, "--kernel", "torch.reference_cpu")
    assert other.exit_code == 2
    assert "it calls itself 'torch.reference_cpu', and " in other.stderr
    rows = json.loads(attnfuzz("list", "acme.flash", "--json").stdout)["kernels"]
    assert [row["kernel"] for row in rows] == ["acme.flash"]


def test_a_line_for_an_installed_kernel_names_no_place() -> None:
    assert repro_line("a b.json", "torch.reference_cpu") == "attnfuzz repro 'a b.json'"


def test_a_folder_that_looks_like_an_option_is_none_in_the_line() -> None:
    assert repro_line("-found/cases/a.json", "torch.reference_cpu") == "attnfuzz repro ./-found/cases/a.json"
