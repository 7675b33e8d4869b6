"""A git repository with a package of kernels, as a kernel team has one, and the gate run in it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CORE = '''
"""What the kernels of this package share: torch's flash attention for the CPU, in float32."""

import dataclasses

from attnfuzz.kernels.contract import Capabilities, Config
from attnfuzz.kernels.problem import OUTPUT_NAMES
from attnfuzz.kernels.torch.reference_cpu import ReferenceCpu


class Acme(ReferenceCpu):
    capabilities = Capabilities(
        dtypes=("float32",), dims=((16, 16),), groups=(1, 3), causal=(None, "top_left"), zero_q=True, zero_k=True,
        unequal=True, slack=True, devices=("cpu",), compiles_on=(), deterministic=OUTPUT_NAMES,
    )

    def build(self, problem, config, device):
        return Built(self, super().build(problem, config, device))

    def after_forward(self, inputs, o, lse):
        return o, lse

    def after_backward(self, inputs, dq, dk, dv):
        return dq, dk, dv


def exact_dq(inputs):
    """dQ in float64."""
    wide = dataclasses.replace(inputs, **{name: getattr(inputs, name).double() for name in ("q", "k", "v", "d_o")})
    plain = ReferenceCpu().build(inputs.problem, Config(), "cpu")
    o, lse = plain.forward(wide)
    return plain.backward(wide, o, lse.double())[0]


class Built:
    def __init__(self, kernel, plain):
        self.kernel, self.plain = kernel, plain

    def forward(self, inputs):
        return self.kernel.after_forward(inputs, *self.plain.forward(inputs))

    def backward(self, inputs, o, lse):
        return self.kernel.after_backward(inputs, *self.plain.backward(inputs, o, lse))
'''

KERNEL = '''
"""A kernel."""

import time

from acme.core import Acme, exact_dq


class Kernel(Acme):
    name = "acme.{name}"
    files = (__file__,)

    def after_forward(self, inputs, o, lse):
        # forward
        return o, lse

    def after_backward(self, inputs, dq, dk, dv):
        # backward
        return dq, dk, dv


KERNEL = Kernel()
'''

HARMLESS = ("# forward", "o = o.mul(3).div(3)  # the same but for two roundings")
BROKEN_DK = ("# backward", "dk = dk * 0.5 if inputs.problem.groups == 3 else dk")
SLOW = ("# forward", "time.sleep(0.05)")
ROUGH = ("# backward", "dq = (2 * dq.double() - exact_dq(inputs)).float()")
"""Every error of dQ twice as large."""


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, "-c", "init.defaultBranch=main", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True)
class Repository:
    """A checkout whose package `acme` has one module for each kernel, each with a `KERNEL`."""

    root: Path

    @staticmethod
    def create(root: Path, *kernels: str) -> Repository:
        made = Repository(root)
        made.write("src/acme/__init__.py", "")
        made.write("src/acme/core.py", CORE)
        for name in kernels:
            made.write(f"src/acme/{name}.py", KERNEL.replace("{name}", name))
        git(root, "init", "-q")
        made.commit("kernels")
        return made

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / "src" / "acme" / f"{name}.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def commit(self, message: str) -> str:
        git(self.root, "add", "-A")
        git(self.root, "commit", "-qm", message)
        return git(self.root, "rev-parse", "HEAD").strip()

    def environment(self, **more: str) -> dict[str, str]:
        known = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "GIT_"))}
        # Beside what is there: attnfuzz' own dependencies may be found by it.
        path = os.pathsep.join([str(self.root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**known, "PYTHONPATH": path, "COLUMNS": "200", **more}

    def gate(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """`attnfuzz gate ARGUMENTS`, in a process of its own, as a user runs it."""
        command = [sys.executable, "-P", "-m", "attnfuzz.harness.cli", "gate", "--device", "cpu", *arguments]
        return subprocess.run(
            command, cwd=self.root, env=self.environment(**variables), capture_output=True, text=True, check=False, timeout=300
        )
