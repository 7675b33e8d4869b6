"""What torch can do is what torch itself says, whether it is asked or only its files."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.libcuda import library

from attnfuzz.kernels.support import driver as driver_module
from attnfuzz.kernels.support.installed_torch import built_with, has_op, sees_cuda

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
