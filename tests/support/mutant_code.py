"""Code for a GPU of kernels with a planted bug: what caches of it are keyed by, and whether it compiles; no GPU is needed.

Run as a process of its own, in which Triton is compiled, with "keys", a backend and a step, or "errors" and mutants: prints JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.mutants import Mutant, kernel_of, module_of, mutants
from support.paths import TESTS

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import BuildError, Kernel
from attnfuzz.kernels.faults.planted import planted_copy
from attnfuzz.kernels.triton import runtime
from attnfuzz.strategies.variants import all_variants

ARCH = "sm_90a"


def said(folder: Path, *arguments: str, seconds: float = 500) -> Any:
    """What this module prints in a process of its own, with caches of its own."""
    caches = {f"{name}_CACHE_DIR": str(folder / name) for name in ("TRITON", "TILELANG")}
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = [str(TESTS), *(each for each in sys.path if each)]
    run = subprocess.run(
        [sys.executable, "-P", "-m", "support.mutant_code", *arguments],
        env={**variables, **caches, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


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
    """Return the mutants of the bank whose bug is in device code that a GPU can run."""
    bank = [each for each in mutants().values() if not each.held_out and not each.not_on_gpu]
    return [each for each in bank if each.backend == backend and each.edits("device")]


def errors(mutant: Mutant) -> list[str]:
    """Why functions do not compile, of the Case that shows the bug and of the first one that a campaign tries."""
    kernel: Any = kernel_of(mutant)
    case, first = mutant.direct_case(mutant.kernel), all_variants(kernel, "cuda")[0]
    direct = (case.problem, case.config or kernel.configs(case.problem)[0])
    refused = []
    for problem, config in (direct, (first.problem(kernel.capabilities), first.config)):
        for unit in kernel.lower(problem, config, ARCH):
            try:
                unit.compile()
            except BuildError as error:
                refused.append(f"{unit.function} {problem}: {error}")
    return refused


def keys_of(name: str, step: str) -> dict[str, dict[str, list[str]]]:
    """Return the keys of every `step`-th mutant of a backend."""
    keys = triton_keys if name == "triton" else tilelang_keys
    return {each.id: keys(each) for each in of_device(name)[:: int(step)]}


def main(what: str, *arguments: str) -> None:
    """Print keys, or errors of mutants."""
    runtime.load("cuda")
    result = keys_of(*arguments) if what == "keys" else {each: errors(mutants()[each]) for each in arguments}
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
