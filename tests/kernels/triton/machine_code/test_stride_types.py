"""Strides are int64 in the strided functions of triton.varlen, so that huge ones need no compile of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnfuzz.kernels.triton.machine_code import lower

STRIDES = {"forward": 6, "preprocess": 3, "backward": 9}
"""How many strides each function has; they are its last arguments."""
SCRIPT = """
import json
from attnfuzz.kernels.problem import Layout, Problem
from attnfuzz.kernels.triton.machine_code import lower
from attnfuzz.kernels.triton.varlen import KERNEL, BuiltVarlen
STRIDES = {strides!r}

def compiled(function, call, stride):
    own = (*call.arguments[: -STRIDES[call.name]], *[stride] * STRIDES[call.name])
    with lower._target(90):
        code = lower.Call(call.name, function, own, call.constants).compile()
    return code, [type for name, type in code.src.signature.items() if name.endswith(("_token", "_head", "_dim"))]

of = Problem(seqlens_q=(4,), seqlens_k=(4,), dim_qk=16, dim_v=16, layout_q=Layout(pitch=8))
module = KERNEL._loaded("cuda")
result = {{}}
for call in BuiltVarlen(module, of, KERNEL.configs(of)[2]).calls():
    for name in (call.name, call.name + "_strided"):
        codes, types = zip(*(compiled(getattr(module, name), call, stride) for stride in (8, 0, 1, 2**31 - 1, 2**31, 2**40)))
        result[name] = len(set(map(id, codes))), sorted(set(sum(types, [])))
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How many compiled codes small and huge strides need, and the types of strides in them, by the function's name."""
    if reason := lower.cannot_lower():
        pytest.skip(reason)
    script: Path = tmp_path_factory.mktemp("strides") / "script.py"
    script.write_text(SCRIPT.format(strides=STRIDES))
    done = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", STRIDES)
def test_small_and_huge_strides_have_one_code(name: str, compiled: dict[str, Any]) -> None:
    assert compiled[f"{name}_strided"] == [1, ["i64"]]


@pytest.mark.parametrize("name", STRIDES)
def test_without_the_annotation_they_have_two(name: str, compiled: dict[str, Any]) -> None:
    """The functions for contiguous inputs never have huge strides."""
    assert compiled[name] == [2, ["i32", "i64"]]
