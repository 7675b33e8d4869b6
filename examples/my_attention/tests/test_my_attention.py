"""The kernel under the fuzzer, and the fuzzer under a kernel that is wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import my_attention
import pytest
from my_attention.subject import KERNEL

from attnfuzz.harness import fuzz

test_kernel = fuzz(KERNEL, max_examples=12)

# What the fault is, the line that has it, what becomes of the line, and the outputs in which it may show first.
FAULTS = {
    "the mask begins at the first key": (
        "keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q",
        "keys[None, :] <= rows[:, None]",
        {"o", "lse"},
    ),
    "only the first head of a group reaches dK and dV": (
        "for member in range(groups):",
        "for member in range(1):",
        {"dk", "dv"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    failure = first_failure(fault, tmp_path)
    assert failure["identity"]["output"] in FAULTS[fault][2], failure["identity"]
    assert failure["repro"].endswith("--kernel broken_attention.subject:KERNEL")
    assert Path(tmp_path, failure["path"]).is_file()
    if fault != next(iter(FAULTS)):
        return
    # The line that was printed runs it again; the same case is FIXED once the kernel is right again.
    line, wrong, _ = FAULTS[fault]
    command = failure["repro"].split()[1:]
    assert attnfuzz(*command, "--device", "cpu", cwd=tmp_path).stdout.startswith("FAILED ")
    kernels = tmp_path / "broken_attention/kernels.py"
    kernels.write_text(kernels.read_text().replace(wrong, line))
    assert attnfuzz(*command, "--device", "cpu", cwd=tmp_path).stdout.startswith("FIXED ")


def first_failure(fault: str, folder: Path) -> dict[str, Any]:
    """The first failure of a copy of this package, broken_attention, that has the fault."""
    line, wrong, _ = FAULTS[fault]
    copy = folder / "broken_attention"
    shutil.copytree(Path(my_attention.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file in copy.glob("*.py"):
        text = file.read_text().replace("from my_attention", "from broken_attention")
        file.write_text(text.replace('name="my_attention"', 'name="broken"').replace(line, wrong))
    assert wrong in (copy / "kernels.py").read_text()
    command = ["run", "--kernel", "broken_attention.subject:KERNEL", "--device", "cpu", "--max-examples", "150"]
    done = attnfuzz(*command, "--max-failures", "1", "--seed", "1", "--json", cwd=folder)
    assert done.returncode == 1, done.stderr
    failure: dict[str, Any] = json.loads(done.stdout)["failures"][0]
    return failure


def attnfuzz(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [str(Path(sys.executable).with_name("attnfuzz")), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)
