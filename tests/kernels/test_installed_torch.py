"""What torch can do is what torch itself says, whether it is asked or only its files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attnfuzz.kernels.support.installed_torch import built_with, has_op, sees_cuda

OP = "_scaled_dot_product_flash_attention_for_cpu"
TORCH = """
from types import SimpleNamespace
from . import version
cuda = SimpleNamespace(is_available=lambda: True)
ops = SimpleNamespace(aten=SimpleNamespace(asked=1))
"""


def answers(folder: Path | None = None, driver: bool = True) -> dict[str, Any]:
    """What a fresh process says of the torch in `folder`, or of the installed one, and whether it imported torch for that."""
    program = f"""
import ctypes, json, sys
def load(name):
    if not {driver}: raise OSError(name)
{"sys.path.insert(0, " + repr(str(folder)) + "); ctypes.CDLL = load" if folder else ""}
from attnfuzz.kernels.support import installed_torch as it
said = {{"built": it.built_with(), "header": it.has_op("declared"), "cuda": it.sees_cuda()}}
print(json.dumps(said | {{"imported": "torch" in sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("cuda", "hip", "driver", "imported"),
    [(None, None, True, False), ("13.0", None, False, False), ("13.0", None, True, True), (None, "7.0", False, True)],
    ids=["for the CPU", "without a driver", "for CUDA", "for ROCm"],
)
def test_torch_is_imported_only_where_its_files_do_not_say(
    tmp_path: Path, cuda: str | None, hip: str | None, driver: bool, imported: bool
) -> None:
    headers = tmp_path / "torch" / "include" / "ATen" / "ops"
    headers.mkdir(parents=True)
    (headers / "declared.h").touch()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '9.9+x'\ncuda, hip = {cuda!r}, {hip!r}\n")
    said = answers(tmp_path, driver)
    assert said == {"built": ["9.9+x", cuda], "header": True, "cuda": imported, "imported": imported}


def test_a_torch_of_unknown_files_is_asked(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        TORCH.replace("from . import version", "version = SimpleNamespace(__version__='1', cuda=None)")
    )
    assert answers(tmp_path) == {"built": ["1", None], "header": False, "cuda": True, "imported": True}


def test_it_says_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = answers()
    assert said["built"] == [torch.__version__, torch.version.cuda] == list(built_with())
    assert said["cuda"] == torch.cuda.is_available() == sees_cuda()
    assert has_op(OP)
    assert not has_op("no_such_op")
    for answer in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda answer=answer: answer)
        assert sees_cuda() is answer
