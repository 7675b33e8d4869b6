"""What torch can do is what torch itself says, whether it is asked or only its files."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.libcuda import library

from attnfuzz.kernels.support import driver as driver_module
from attnfuzz.kernels.support.installed_torch import (
    _required_cudnn,
    built_with,
    has_name,
    has_op,
    op_arguments,
    parameters,
    sees_cuda,
)

OP = "_scaled_dot_product_flash_attention_for_cpu"
TORCH = """
from types import SimpleNamespace
from . import version
cuda = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (1, 2))
ops = SimpleNamespace(aten=SimpleNamespace(asked=1))
"""


def answers(folder: Path | None = None, driver: Path | None = None) -> dict[str, Any]:
    """What a fresh process says of the torch in `folder`, or of the installed one, and whether it imported torch for that."""
    program = f"""
import json, sys
{"sys.path.insert(0, " + repr(str(folder)) + ")" if folder else ""}
from attnfuzz.kernels.support import driver, installed_torch as it
driver._LIBRARY = {str(driver)!r} if {driver is not None} else driver._LIBRARY
said = {{"built": it.built_with(), "header": it.has_op("declared"), "cuda": it.sees_cuda()}}
said["gpu"] = it.gpu_capability() if said["cuda"] else None
print(json.dumps(said | {{"imported": "torch" in sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def torch_in(folder: Path, cuda: str | None, hip: str | None = None) -> Path:
    """Make a torch that was built with this CUDA or HIP."""
    headers = folder / "torch" / "include" / "ATen" / "ops"
    headers.mkdir(parents=True)
    (headers / "declared.h").touch()
    (folder / "torch" / "__init__.py").write_text(TORCH)
    (folder / "torch" / "version.py").write_text(f"__version__ = '9.9+x'\ncuda, hip = {cuda!r}, {hip!r}\n")
    return folder


@pytest.mark.parametrize(
    ("cuda", "hip", "driver", "gpu", "imported"),
    [
        (None, None, {}, None, False),
        ("13.0", None, None, None, False),
        ("13.1", None, {}, [9, 0], False),
        ("12.8", None, {"gpus": ((10, 3), (8, 0))}, [10, 3], False),
        ("13.0", None, {"version": 12080}, None, False),
        ("13.0", None, {"gpus": ()}, None, False),
        ("13.0", None, {"error": 100}, None, False),
        (None, "7.0", None, [1, 2], True),
    ],
    ids=["CPU", "no driver", "a newer minor version", "two GPUs", "an older driver", "no GPU", "a broken driver", "ROCm"],
)
def test_torch_is_imported_only_where_its_files_and_the_driver_do_not_say(
    tmp_path: Path, cuda: str | None, hip: str | None, driver: Any, gpu: Any, imported: bool
) -> None:
    folder = torch_in(tmp_path, cuda, hip)
    said = answers(folder, tmp_path / "none" if driver is None else library(tmp_path, **driver))
    assert said == {"built": ["9.9+x", cuda], "header": True, "cuda": gpu is not None, "gpu": gpu, "imported": imported}


def test_a_library_without_the_functions_is_no_driver(tmp_path: Path) -> None:
    made = library(tmp_path)
    made.write_bytes(made.read_bytes().replace(b"cuDeviceGetCount", b"cuDeviceGetCounx"))
    assert not answers(torch_in(tmp_path, "13.0"), made)["cuda"]


def test_a_torch_of_unknown_files_is_asked(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        TORCH.replace("from . import version", "version = SimpleNamespace(__version__='1', cuda=None)")
    )
    assert answers(tmp_path) == {"built": ["1", None], "header": False, "cuda": True, "gpu": [1, 2], "imported": True}


def test_it_says_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = answers()
    assert said["built"] == [torch.__version__, torch.version.cuda] == list(built_with())
    assert said["cuda"] == torch.cuda.is_available() == sees_cuda()
    assert has_op(OP)
    assert not has_op("no_such_op")
    for answer in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda answer=answer: answer)
        assert sees_cuda() is answer


@pytest.mark.parametrize(
    ("driver", "agrees", "flags"),
    [
        ({"gpus": ((9, 0), (9, 0))}, True, 804),
        ({"refused": 708}, False, 704),
        ({"error": 100}, False, -101),
        ({"gpus": ()}, False, -101),
        (None, False, None),
    ],
)
def test_waiting_for_every_gpu_takes_no_core(
    driver: dict[str, Any] | None, agrees: bool, flags: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "none" if driver is None else library(tmp_path, **driver)
    monkeypatch.setattr(driver_module, "_LIBRARY", str(where))
    assert driver_module.sleep_while_waiting() is agrees
    # Device 7 is the first, 8 the second; 4 is CU_CTX_SCHED_BLOCKING_SYNC.
    assert (None if driver is None else ctypes.CDLL(str(where)).last_flags()) == flags


@pytest.mark.gpu
def test_a_child_sleeps_while_it_waits_for_the_gpu() -> None:
    program = """
import ctypes, time
from attnfuzz.harness.core import environment
environment.prepare("cuda")
import torch
torch.zeros(1, device="cuda")
flags = ctypes.c_uint()
assert ctypes.CDLL("libcuda.so.1").cuCtxGetFlags(ctypes.byref(flags)) == 0
print(flags.value & 7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == ["4"]


ASKED = """
import json, sys
from attnfuzz.kernels.support import installed_torch as it
from attnfuzz.kernels.torch import cudnn, efficient, flash, flex, ops, varlen_attn
every = (*flash.OPS, *efficient._OPS, *cudnn._DENSE_OPS, *cudnn._RAGGED_OPS)
FLEX = "torch.nn.attention.flex_attention"
def said():
    return {
        **{each.name: [it.op_arguments(each.name).positional, it.op_arguments(each.name).keyword] for each in every},
        "varlen_attn": sorted(it.parameters("torch.nn.attention.varlen", "varlen_attn")),
        "flex_attention": sorted(it.parameters(FLEX, "flex_attention")),
        "names": [it.has_name(*each) for each in (("torch", "AcceleratorError"), (FLEX, "BlockMask"))],
        "missing": [ops.missing_op(every), varlen_attn._missing(), flex.missing()],
    }
files = said()
imported = "torch" in sys.modules
import torch
for each in (it.op_arguments, it.parameters):
    each.cache_clear()
print(json.dumps([files, said(), imported]))
"""


def test_what_torchs_peers_need_is_read_from_files_as_torch_itself_says_it() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True, cwd="/")
    files, torch_says, imported = json.loads(done.stdout)
    assert files == torch_says
    assert not imported
    assert files["_flash_attention_forward"][0][:3] == ["query", "key", "value"]
    assert "scale" in files["_flash_attention_forward"][1]
    assert files["names"] == [True, True]


def test_what_files_do_not_say_is_asked_of_torch() -> None:
    assert op_arguments("no_such_op") is None
    assert parameters("torch.nn.attention.varlen", "no_such_function") is None
    assert parameters("torch.nn.no_such_module", "function") is None
    assert not has_name("torch", "no_such_name")


@pytest.mark.parametrize(
    ("requires", "installed", "version"),
    [
        ("nvidia-cudnn-cu13==9.15.1.9; platform_system == 'Linux'", "9.15.1.9", 91501),
        ("nvidia-cudnn-cu12==9.1.0.70", "9.10.2.21", 91002),
        ("nvidia-cudnn-cu13==9.15.1.9", None, None),
        ("nvidia-nccl-cu13==2.28.9", "2.28.9", None),
        ("nvidia-cudnn-cu13==9", "9", None),
    ],
)
def test_the_version_of_cudnn_is_that_of_the_package_which_torch_requires(
    monkeypatch: pytest.MonkeyPatch, requires: str, installed: str | None, version: int | None
) -> None:
    def of(name: str) -> str:
        if installed is None or not requires.startswith(f"{name}="):
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["filelock", requires])
    monkeypatch.setattr(importlib.metadata, "version", of)
    assert _required_cudnn.__wrapped__() == version


FAKE = """
import json, sys
sys.path.insert(0, {folder!r})
from attnfuzz.kernels.support import installed_torch as it
said = {{
    "op": [it.op_arguments("declared").positional, it.op_arguments("declared").keyword],
    "overloads": sorted(it.parameters("torch.functions", "overloaded")),
    "name": it.has_name("torch.functions", "Thing"),
}}
said["before"] = "torch" in sys.modules
said["bound"] = sorted(it.parameters("torch.functions", "bound"))
said["cudnn"] = it.has_cudnn()
said["after"] = "torch" in sys.modules
print(json.dumps(said))
"""
SCHEMA = """
  static constexpr const char* overload_name = "";
  static constexpr const char* schema_str = "declared(Tensor query, SymInt? max_q=None, *, float? scale=None) -> (Tensor)";
"""
FUNCTIONS = """
from typing import overload
@overload
def overloaded(first): ...
@overload
def overloaded(second): ...
def overloaded(*, third): pass
class Thing: pass
bound = lambda x, y: x
"""


def test_files_are_asked_first_and_torch_where_they_do_not_say(tmp_path: Path) -> None:
    folder = torch_in(tmp_path, "13.0")
    (folder / "torch" / "include" / "ATen" / "ops" / "declared_ops.h").write_text(SCHEMA)
    (folder / "torch" / "functions.py").write_text(FUNCTIONS)
    (folder / "torch" / "__init__.py").write_text(
        TORCH + "\nbackends = SimpleNamespace(cudnn=SimpleNamespace(is_available=lambda: False))\n"
    )
    program = FAKE.format(folder=str(folder))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert json.loads(done.stdout) == {
        "op": [["query", "max_q"], ["scale"]],
        "overloads": ["third"],
        "name": True,
        "before": False,
        "bound": ["x", "y"],
        "cudnn": False,
        "after": True,
    }
