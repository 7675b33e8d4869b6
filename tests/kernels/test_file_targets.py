"""Kernels in files named by path: FILE.py:OBJECT, and FILE.py:FUNCTION with the adapter that it is called by."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnfuzz.harness.campaign.corpus import StoredFinding, repro_line
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters.adapted import Adapted
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.support.file_module import importable_name
from attnfuzz.kernels.support.file_target import FileTarget, as_options, file_target, read_like

SOURCE = """
import torch

from attnfuzz.kernels import dense


def attention(q, k, v, softmax_scale=None, is_causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=softmax_scale)
    return o.transpose(1, 2)


def ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    return q


def decode(q, k, v, block_table, cache_seqlens):
    return q


def two(q, k):
    return q


class Holder:
    pass


KERNEL = dense(attention, name="mine.own", devices=("cpu",))
NUMBER = 3
"""


@pytest.fixture(autouse=True)
def in_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A current folder with a file; what is imported from it is forgotten, with the names of its kernels."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNFUZZ_IMPORT_SECONDS", "0")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("_loaded", "_origins"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    before = set(sys.modules)
    Path("softmax.py").write_text(SOURCE)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if name not in before and str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("a/b.py:f", FileTarget("a/b.py", "f")),
        ("a/b.py:f:dense", FileTarget("a/b.py", "f", "dense")),
        ("/a b/06-x.py:C.f:varlen(groups=None)", FileTarget("/a b/06-x.py", "C.f", "varlen(groups=None)")),
        ("b.py:", FileTarget("b.py", "")),
        ("package.module:OBJECT", None),
        ("package.py", None),
        ("triton.varlen", None),
    ],
)
def test_a_target_is_split(text: str, target: FileTarget | None) -> None:
    assert file_target(text) == target
    if target is not None:
        assert target.text == text


def test_a_kernel_is_called_by_stem_and_function() -> None:
    assert FileTarget("a/06-fused attention.py", "f").name == "06-fused_attention.f"
    assert FileTarget("a:b.py", "Class.f").name == "a_b.Class.f"


def test_like_has_literals_for_keywords() -> None:
    like = read_like("dense( groups=None, dims=((64, 64),), layout='bhsd')")
    assert like.keywords == {"groups": None, "dims": ((64, 64),), "layout": "bhsd"}
    assert read_like(like.text) == like
    assert read_like("varlen").text == "varlen"


@pytest.mark.parametrize(
    "text", ["", "dance", "dense(", "dense(1)", "dense(**{})", "dense(x=f())", "dense.x", "a=1", "dense()()"]
)
def test_what_names_no_adapter_is_refused(text: str) -> None:
    with pytest.raises(BadArgument, match=r"^like="):
        read_like(text)


def test_a_function_becomes_the_plainest_kernel(tmp_path: Path) -> None:
    kernel = registry.get("softmax.py:attention:dense")
    assert isinstance(kernel, Adapted)
    assert kernel.name == "softmax.attention"
    can = kernel.capabilities
    assert (can.devices, can.causal, can.groups, can.outputs) == (
        ("cpu", "cuda"),
        (None, "bottom_right"),
        (1,),
        ("o", "dq", "dk", "dv"),
    )
    assert kernel.files == (str(tmp_path / "softmax.py"),)
    # The same file by another path is the same kernel.
    assert registry.get(f"{tmp_path}/softmax.py:attention:dense") is kernel
    assert registry.get("softmax.attention") is kernel
    line = "attnfuzz repro case.json --kernel softmax.py:attention --like dense"
    assert repro_line("case.json", kernel.name) == line


def test_keywords_go_to_the_adapter() -> None:
    kernel = registry.get("softmax.py:attention:dense(groups=None, name='other', devices=('cpu',), gradients=False)")
    assert (kernel.name, kernel.capabilities.groups, kernel.capabilities.outputs) == ("other", None, ("o",))
    assert as_options("a b.py:f:dense(groups=None)") == "--kernel 'a b.py:f' --like 'dense(groups=None)'"
    assert as_options("package.module:KERNEL") == "--kernel package.module:KERNEL"


def test_a_file_may_hold_a_kernel() -> None:
    kernel = registry.get("softmax.py:KERNEL")
    assert kernel.name == "mine.own"
    assert repro_line("case.json", "mine.own").endswith("--kernel softmax.py:KERNEL")


REFUSED = {
    "softmax.py:attention": "attention is a function, not a kernel; say how it is called: add --like dense",
    "softmax.py:ragged": "ragged is a function, not a kernel; say how it is called: add --like varlen",
    "softmax.py:decode": "decode is a function, not a kernel; say how it is called: add --like paged",
    "softmax.py:KERNEL:dense": "KERNEL is a kernel already; leave --like out",
    "softmax.py:attentoin:dense": "the module 'softmax' has no 'attentoin'; did you mean 'attention'?",
    "softmax.py:xyz:dense": "the module 'softmax' has no 'xyz'; functions there: attention, ragged, decode, two",
    "softmax.py:": "it names no object of the file; give softmax.py:FUNCTION --like dense",
    "softmax.py:a-b": "'a-b' is no name; give softmax.py:FUNCTION",
    "softmax.py": "it names a file; give a function of it, softmax.py:FUNCTION --like dense",
    "none.py:f:dense": "{folder}/none.py is not there; give the path of a Python file",
    "folder.py:f:dense": "{folder}/folder.py is a folder; give the path of a Python file",
    "broken.py:f:dense": "/broken.py failed with ModuleNotFoundError: No module named 'acme_absent' (broken.py:2)",
    "package/inner.py:f:dense": "importing {folder}/package/inner.py failed with ImportError",
    "softmax.py:two:dense": "--like dense does not fit: function='two(q, k)': q, k and v come first",
    "softmax.py:NUMBER:dense": "NUMBER is of type int, which cannot be called; name a function of q, k and v",
    "softmax.py:Holder:dense": "Holder is a class; name a function of q, k and v",
    "softmax.py:attention:varlen": "--like varlen does not fit: function='attention': it has no parameter "
    "cu_seqlens_q; wrap it in a def that has, or use adapters.dense; did you mean --like dense?",
    "softmax.py:ragged:dense(none=1)": "--like dense(none=1) does not fit: ",
}


@pytest.mark.parametrize("target", REFUSED)
def test_what_cannot_be_had_is_refused_in_words(target: str, tmp_path: Path) -> None:
    Path("broken.py").write_text("import json\nimport acme_absent\n")
    Path("folder.py").mkdir()
    Path("package").mkdir()
    Path("package/__init__.py").write_text("raise ImportError('not today')\n")
    Path("package/inner.py").write_text("def f(q, k, v): return q\n")
    with pytest.raises(BadArgument) as caught:
        registry.get(target)
    text = str(caught.value)
    assert text.startswith("kernel=")
    assert REFUSED[target].format(folder=tmp_path) in text


def test_a_file_that_ends_its_process_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNFUZZ_IMPORT_SECONDS", "60")
    Path("ends.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(BadArgument) as caught:
        registry.get("ends.py:f:dense")
    assert f"importing {tmp_path}/ends.py failed: it ended the process, with exit code 3; fix that" in str(caught.value)


def test_files_beside_it_and_its_package_are_found() -> None:
    Path("beside").mkdir()
    Path("beside/helper_of_tests.py").write_text("def same(x): return x\n")
    Path("beside/uses.py").write_text("from helper_of_tests import same\ndef f(q, k, v): return same(q)\n")
    assert registry.get("beside/uses.py:f:dense").name == "uses.f"
    Path("pack_of_tests/sub").mkdir(parents=True)
    for folder in ("pack_of_tests", "pack_of_tests/sub"):
        Path(folder, "__init__.py").touch()
    Path("pack_of_tests/common.py").write_text("SCALE = 2\n")
    Path("pack_of_tests/sub/inner.py").write_text("from ..common import SCALE\ndef f(q, k, v): return q\n")
    assert registry.get("pack_of_tests/sub/inner.py:f:dense").name == "inner.f"
    assert sys.modules["pack_of_tests.sub.inner"].SCALE == 2


def test_a_file_that_is_called_as_an_installed_package_replaces_nothing() -> None:
    Path("torch.py").write_text(SOURCE)
    Path("06-fused.py").write_text(SOURCE)
    assert registry.get("torch.py:attention:dense").name == "torch.attention"
    assert registry.get("06-fused.py:attention:dense").name == "06-fused.attention"
    program = (
        "from attnfuzz.kernels import registry; print(registry.get('torch.py:attention:dense').name); "
        "import torch; print(torch.__version__)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch.attention", sys.modules["torch"].__version__]
    assert importable_name(Path("torch.py").absolute())[0] is None
    assert importable_name(Path("softmax.py").absolute()) == ("softmax", Path.cwd())


def test_a_file_of_a_package_that_is_found_elsewhere_is_refused(tmp_path: Path) -> None:
    Path("click").mkdir()
    Path("click/__init__.py").touch()
    Path("click/own.py").write_text("def f(q, k, v): return q\n")
    with pytest.raises(BadArgument, match=f"is module click.own of a package, and that is not found: put {tmp_path} first in"):
        registry.get("click/own.py:f:dense")


def test_a_child_finds_it_from_another_folder(tmp_path: Path) -> None:
    registry.get("softmax.py:attention:dense")
    parcel = shipped("softmax.attention")
    assert parcel == {"name": "softmax.attention", "target": "softmax.py:attention:dense", "folder": str(tmp_path)}
    program = (
        "import json, sys; from attnfuzz.harness.isolation.kernel_ref import unpacked; "
        "print(unpacked(json.loads(sys.argv[1])).files)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, json.dumps(parcel)], capture_output=True, text=True, check=True, cwd="/"
    )
    assert str(tmp_path / "softmax.py") in done.stdout


@pytest.mark.parametrize(
    ("target", "stays"),
    [
        ("a/b.py:f:dense(groups=None)", True),
        ("a/b.py:f", True),
        ("a/b.py:f:dense; rm -r /", False),
        ("a/b.py:f --x", False),
        ("a\n/b.py:f", False),
    ],
)
def test_a_case_file_may_only_hold_a_target_of_that_form(target: str, stays: bool) -> None:
    assert (StoredFinding.read({"target": target}).target is not None) is stays
