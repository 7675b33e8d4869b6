"""The kernel under the fuzzer, and the fuzzer under a kernel that is wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import my_attention
import pytest
from my_attention.subject import KERNEL

from attnfuzz.harness.plugin import fuzz

test_kernel = fuzz(KERNEL, max_examples=20)

# What the fault is, the line that has it, what becomes of the line, and the output in which it must show.
FAULTS = {
    "the mask begins at the first key": (
        "keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q",
        "keys[None, :] <= rows[:, None]",
        "o",
    ),
    "only the first head of a group reaches dK and dV": ("for member in range(0, groups):", "for member in range(0, 1):", "dk"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_shrunk_and_reproduced(fault: str, tmp_path: Path) -> None:
    line, wrong, output = FAULTS[fault]
    folder = tmp_path / "broken_attention"
    shutil.copytree(Path(my_attention.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in folder.glob("*.py"):
        text = (
            file.read_text().replace("from my_attention", "from broken_attention").replace('name="my_attention"', 'name="broken"')
        )
        file.write_text(text.replace(line, wrong))
    assert wrong in (folder / "kernels.py").read_text()

    done = attnfuzz("run", "--kernel", "broken_attention.subject:KERNEL", "--device", "cpu", "--max-examples", "150",
                    "--max-failures", "1", "--json", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1, done.stderr
    failure = json.loads(done.stdout)["failures"][0]
    assert failure["identity"]["output"] in (output, "dv"), failure["identity"]
    assert failure["repro"].endswith("--kernel broken_attention.subject:KERNEL")

    command = failure["repro"].split()
    again = attnfuzz(*command[1:], "--device", "cpu", cwd=tmp_path)
    assert again.returncode == 1, again.stderr
    assert again.stdout.startswith("FAILED ")
    # Mended, the same case is FIXED.
    (folder / "kernels.py").write_text((folder / "kernels.py").read_text().replace(wrong, line))
    again = attnfuzz(*command[1:], "--device", "cpu", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.startswith("FIXED ")


def attnfuzz(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [str(Path(sys.executable).with_name("attnfuzz")), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)
