"""What caches of compiled code are keyed by, for kernels with and without a planted bug; no GPU is needed.

Run as a process of its own, in which Triton is compiled, with a backend and a step: prints JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

from support.mutants import Mutant, kernel_of, module_of, mutants

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.faults.planted import planted_copy
from attnfuzz.kernels.triton import runtime

ARCH = "sm_90"


def triton_keys(mutant: Mutant) -> dict[str, list[str]]:
    """Return Triton's keys of the device functions whose text the bug changes: with the bug, and without."""
    from triton.runtime.jit import JITFunction

    def functions(edits: Any) -> dict[str, Any]:
        module = planted_copy(module_of(mutant.kernel, "device"), edits)
        return {name: each for name, each in vars(module).items() if isinstance(each, JITFunction)}

    bug, right = functions(mutant.edits("device")), functions([])
    changed = [name for name in bug if name in right and bug[name].src != right[name].src]
    return {name: [bug[name].cache_key, right[name].cache_key] for name in changed}


def tilelang_keys(mutant: Mutant) -> dict[str, list[str]]:
    """Return digests of what TileLang's cache is keyed by: a device function as text, with the bug, and without."""
    bug, right = units(mutant, kernel_of(mutant)), units(mutant, registry.get(mutant.kernel))
    texts = {name: [str(bug[name].identity()), str(right[name].identity())] for name in right}
    return {name: [hashlib.sha256(each.encode()).hexdigest() for each in pair] for name, pair in texts.items()}


def units(mutant: Mutant, kernel: Any) -> dict[str, Any]:
    """Return the device functions of the Case that shows the bug, to be compiled."""
    case = mutant.direct_case(mutant.kernel)
    assert isinstance(kernel, Kernel)
    return {each.function: each for each in kernel.lower(case.problem, case.config, ARCH)}  # type: ignore[attr-defined]


def of_device(backend: str) -> list[Mutant]:
    """Return the mutants whose bug is in device code that a GPU can run."""
    return [each for each in mutants().values() if each.backend == backend and each.edits("device") and not each.not_on_gpu]


def main(name: str, step: str) -> None:
    """Print the keys of every `step`-th mutant of a backend."""
    runtime.load("cuda")
    keys = triton_keys if name == "triton" else tilelang_keys
    print(json.dumps({each.id: keys(each) for each in of_device(name)[:: int(step)]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
