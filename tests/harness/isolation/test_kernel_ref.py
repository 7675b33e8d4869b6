"""How a child process finds a kernel that only its parent knows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnfuzz.harness.isolation.kernel_ref import shipped, unpacked
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.faults.host import fault_kernel

MODULE = """
from attnfuzz.kernels.faults.host import FaultyReference

class Mine(FaultyReference):
    pass

class Holder:
    pass

def act(problem, made):
    return None

KERNEL = Mine("acme.plain", act)
LAMBDA = Mine("acme.lambda", lambda problem, made: None)

def local():
    return Mine("acme.local", lambda problem, made: None)
"""


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def load(path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    """The module as pytest's importlib mode has it: in sys.modules, and nowhere on sys.path."""
    import importlib.util

    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def in_a_child(parcel: dict) -> str:
    program = (
        "import json, sys; from attnfuzz.harness.isolation.kernel_ref import unpacked; from attnfuzz.kernels import registry; "
        "kernel = unpacked(json.loads(sys.argv[1])); assert registry.get(kernel.name) is kernel; print(kernel.name)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, json.dumps(parcel)], capture_output=True, text=True, check=True, cwd="/"
    )
    return done.stdout.strip()


def test_an_installed_kernel_goes_by_its_name() -> None:
    assert shipped("torch.reference_cpu") == {"name": "torch.reference_cpu"}
    assert in_a_child({"name": "fault.abort"}) == "fault.abort"
    assert isinstance(unpacked({"name": "torch.reference_cpu"}), Kernel)


@pytest.mark.parametrize("which", ["KERNEL", "LAMBDA"])
def test_a_global_of_a_test_module_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    module = load(tmp_path / "test_acme.py", "tests.test_acme_of_theirs", monkeypatch)
    kernel = registry.register(getattr(module, which))
    parcel = shipped(kernel.name)
    assert parcel == shipped(kernel.name)
    assert in_a_child(parcel) == kernel.name


def test_what_cannot_be_found_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(tmp_path / "test_acme.py", "test_acme_local", monkeypatch)
    registry.register(module.local())
    with pytest.raises(BadArgument, match=r"kernel='acme.local': a child process cannot be given it .*--in-process"):
        shipped("acme.local")


def test_another_kernel_of_the_same_name_is_another_parcel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(tmp_path / "test_acme.py", "test_acme_two", monkeypatch)
    registry.register(module.KERNEL)
    first = shipped("acme.plain")
    other = module.Mine("acme.plain", module.act, compiler=print)
    registry.register(other)
    assert shipped("acme.plain") != first


def test_planted_copies_can_be_shipped() -> None:
    from support.mutants import kernel_of, mutants

    for id_ in ("MSK-30", "MSK-30-tilelang", "HST-01", "RAC-13-tilelang"):
        kernel = registry.register(kernel_of(mutants()[id_]))
        assert in_a_child(shipped(kernel.name)) == kernel.name


def test_every_fault_kernel_is_known_by_name_and_never_listed() -> None:
    from attnfuzz.harness.audit.selftest.faults import fault_names
    from attnfuzz.kernels.faults import memory

    for device in ("cpu", "cuda"):
        for name in fault_names(device):
            assert registry.get(name).name == name
    for fault in memory.FAULTS:
        assert registry.get(f"fault.memory.{fault.slug}").name == f"fault.memory.{fault.slug}"
    assert not [name for name in registry.names() if name.startswith("fault.")]
    assert fault_kernel("nothing") is None
    for name in ("fault.nothing", "fault.triton.nothing", "fault.cuda.address", "fault.memory.nothing", "fault."):
        with pytest.raises(BadArgument, match="no kernel of that name"):
            registry.get(name)
