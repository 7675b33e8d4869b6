"""Test files of a kernel team named acme, and pytest on them."""

from __future__ import annotations

import pytest

KERNEL_FILE = """
import torch
from attnfuzz.kernels.contract import Capabilities, Config, why_unsupported
from attnfuzz.oracles import attention


class Kernel:
    name, backend, files = "acme.flash", "acme", ()
    capabilities = Capabilities(dims=((8, 8),), unequal=True, zero_q=True, devices=("cpu",), compiles_on=())
    longest = 999

    def configs(self, problem):
        return (Config(tile_m=6, tile_n=6),)

    def unavailable(self, device):
        return None

    def supports(self, problem, config, device):
        return why_unsupported(self.capabilities, problem, device)

    def compile_key(self, problem, config):
        return problem.dtype

    def build(self, problem, config, device):
        return self

    def forward(self, inputs):
        if max(inputs.problem.seqlens_k) > self.longest:
            raise ValueError(f"more than {self.longest} keys")
        return self.computed(inputs)[:2]

    def backward(self, inputs, o, lse):
        return self.computed(inputs)[2:]

    def computed(self, inputs):
        p = inputs.problem
        with torch.enable_grad():
            found = [attention.reference(p, data) for data in attention.sequences(inputs)]
        joined = {name: torch.cat([getattr(each, name) for each in found], 1) for name in ("o", "lse", "dq", "dk", "dv")}
        lse = joined.pop("lse").float()
        o, dq, dk, dv = (each.transpose(0, 1).to(inputs.q.dtype) for each in joined.values())
        return o, lse, dq, dk, dv


class Faulty(Kernel):
    name, longest = "acme.faulty", 5
"""
PASSING = "from attnfuzz.harness.plugin import fuzz\nfrom acme import Kernel\n\ntest_kernel = fuzz(Kernel(), max_examples=12)\n"
FAILING = "from attnfuzz.harness.plugin import fuzz\nfrom acme import Faulty\n\ntest_kernel = fuzz(Faulty(), max_examples=40)\n"
OPTIONS_OF_ALL = ("-p", "no:cacheprovider", "--attnfuzz-device", "cpu", "--attnfuzz-seed", "0")


def pytest_here(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """The tests of `folder` in this process, which is faster."""
    return folder.runpytest_inprocess(*OPTIONS_OF_ALL, *arguments)


def pytest_alone(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """As `pytest_here`, without child processes: faster still, for what is no matter of them."""
    return pytest_here(folder, "--attnfuzz-in-process", *arguments)


def pytest_of(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """The tests of `folder` in a process of their own, where the plugin is found as users have it: by its entry point."""
    return folder.runpytest_subprocess(*OPTIONS_OF_ALL, *arguments)
