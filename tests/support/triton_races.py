"""Prints, as JSON, the races that the machine code of each kernel's backward has for Hopper. Run as a script: compiled Triton."""

from __future__ import annotations

import functools
import json
from typing import Any


def kernels() -> dict[str, Any]:
    """Ours, and triton.flex.prescaled as it was when it was wrong: with all its loops pipelined."""
    from attnfuzz.kernels import registry
    from attnfuzz.kernels.faults.planted import Edit, planted_copy
    from attnfuzz.kernels.triton.flex import PRESCALED, TritonFlex

    pipelined = (Edit("STAGES: tl.constexpr = 1 if PRESCALED else None", "STAGES: tl.constexpr = None"),)
    return {
        **{name: registry.get(name) for name in ("triton.flex", "triton.flex.prescaled", "triton.varlen")},
        "pipelined": TritonFlex(
            name="test.triton.pipelined",
            capabilities=PRESCALED.capabilities,
            device_code=functools.partial(planted_copy, "attnfuzz.kernels.triton.flex_device", pipelined),
        ),
    }


def main() -> None:
    """The default Config of causal float16 with dims of 64."""
    from attnfuzz.kernels.problem import Problem

    told: dict[str, list[str]] = {}
    for name, kernel in kernels().items():
        packing = "dense" if "dense" in kernel.capabilities.packings else "ragged"
        problem = Problem(seqlens_q=(256,), seqlens_k=(256,), packing=packing, dim_qk=64, dim_v=64, causal="bottom_right")
        for unit in kernel.lower(problem, kernel.configs(problem)[0], "sm_90a"):
            if unit.function.startswith("backward"):
                told.setdefault(name, []).extend(unit.compile().races)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
