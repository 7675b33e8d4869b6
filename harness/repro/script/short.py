"""Write a Case as a script of at most 40 lines for an issue tracker: tensors in plain torch, the call, a float64 reference.

A script is run before it is written. Random values come first; the Case's own values follow where those do not show the failure.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from attnfuzz.harness.campaign.corpus import CaseFile
from attnfuzz.harness.judge.failure import OUTPUT_TITLES, Kind
from attnfuzz.harness.judge.truth import Truth, Truths
from attnfuzz.harness.report.describe import needs_earlier
from attnfuzz.harness.repro.script.lines import GRADIENTS, head
from attnfuzz.harness.repro.script.script import Script
from attnfuzz.harness.repro.script.short_call import imported_from, needs_interpreter
from attnfuzz.harness.repro.script.short_text import LINES, Values, body, once_of, turned
from attnfuzz.harness.repro.script.trying import Ran, run_script
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.supports import with_config
from attnfuzz.harness.trial.trial import check_runnable
from attnfuzz.kernels.contract import Device, Inputs, Kernel
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.blockwise import is_large
from attnfuzz.oracles.formats import Format, rounded
from attnfuzz.strategies.case import CALLS, RELATIONS, STREAMS

__all__ = ["DEADLINE", "ShortScript", "short_script", "why_not_short"]

DEADLINE = 60.0
"""Seconds that a run of the script may take by default."""
SEEDS = (0, 1, 2)
"""Of random values, tried in this order."""
_WIDTH = 118
_MOST_TEXT = 16 << 10
"""Characters of a script: an issue tracker takes 65,536."""
_MOST_SEQUENCES = _MOST_TEXT // 6
"""Of a ragged batch: each one's ends of queries and keys take at least six characters, such as "1, 2, "."""
_EXACT = "write the exact script instead: add --exact"
_NUMERIC: tuple[Kind, ...] = ("mismatch", "nonfinite", "unwritten")
_RAISED: tuple[Kind, ...] = (
    "exception", "compile-error", "illegal-access", "out-of-bounds", "outside-view", "duplicate-store", "race", "masked-load",
    "uninitialised",
)  # fmt: skip
_WHY_NOT_KIND: dict[Kind, str] = {
    "aggregate": "no element is beyond its own budget, only all of them together",
    "contract": "the form of an output is wrong; a short script compares values",
    "guard": "memory beside a tensor is written to; a short script does not look there",
    "nondeterministic": "equal calls differ; a short script makes one",
    "relation": "related calls are compared; a short script makes one",
    "out-of-memory": "it takes all memory, and a short script has no limit",
}


@dataclass(frozen=True, slots=True)
class ShortScript(Script):
    """A script that failed when it was tried. `random`: with values from `torch.randn`, else with the Case's own."""

    random: bool


def short_script(
    stored: CaseFile, device: Device, deadline: float = DEADLINE, run: Callable[[str, float], Ran] = run_script
) -> ShortScript:
    """Write the short script of a case file, and run it until one shows the failure.

    Args:
        stored: the case file.
        device: where it runs.
        deadline: seconds of one run; five are made at most, ten of a kernel in Triton on the CPU.
        run: runs a text for that many seconds.

    Raises:
        BadArgument: the kernel does not take the Case or cannot be imported by a script, a short script cannot show the failure,
            or none did when it was run. The text says why, and what to do.
    """
    kernel = check_runnable(stored.case, device)
    stored = replace(stored, case=with_config(kernel, stored.case))
    if reason := why_not_short(stored):
        raise _refused(stored, reason)
    tried = []
    modes = (True, False) if needs_interpreter(kernel, device) and _can_be_alone(stored) else (False,)
    for alone, values in itertools.product(modes, _candidates(kernel, stored)):
        limits = _limits(kernel, stored, values.inputs, device)
        if not limits:
            tried.append("no output can be judged")
            continue
        text = body(kernel, stored.case.config, values, limits, device, alone=alone)
        if reason := _too_long(text):
            tried.append(reason)
            continue
        script = f"{_head(stored, kernel, values)}\n{text}"
        if shows(stored, ran := run(script, deadline)):
            return ShortScript(script, None, values.random)
        tried.append(_in_words(ran, values))
    reason = f"no short script shows its failure: {'; '.join(dict.fromkeys(tried))}"
    raise reject("script", stored.case.id, reason, f"see whether it still fails, by attnfuzz repro CASE; if so, {_EXACT}")


def _refused(stored: CaseFile, reason: str) -> BadArgument:
    return reject("script", stored.case.id, reason, "run it by attnfuzz repro CASE" if stored.case.after else _EXACT)


def _can_be_alone(stored: CaseFile) -> bool:
    """Whether Triton's own interpreter may show the failure: it is wrong in bfloat16, and has no memory checker."""
    identity = stored.finding.identity
    return stored.case.problem.dtype != "bfloat16" and (identity is None or identity.kind in (*_NUMERIC, "exception"))


def why_not_short(stored: CaseFile) -> str | None:
    """Say why a short script cannot show the failure of a case file, or None."""
    case, identity = stored.case, stored.finding.identity
    problem = case.problem
    if case.after:
        return f"the Case {needs_earlier(case)}; a short script makes one call"
    if case.check in RELATIONS:
        return f"the Case compares related calls (check {case.check}); a short script makes one"
    if case.check == "protocol":
        return "the Case runs as warp roles under a schedule; a short script makes a plain call"
    if case.check in STREAMS:
        return f"the call is made elsewhere than on the default stream (check {case.check}); a short script makes a plain one"
    if case.check in CALLS:
        return f"the failure needs calls before (check {case.check}); a short script makes one"
    if identity is not None and identity.kind in _WHY_NOT_KIND:
        return f"a failure of kind {identity.kind}: {_WHY_NOT_KIND[identity.kind]}"
    if stored.rate is not None:
        return f"it fails in {stored.rate[0]} of {stored.rate[1]} runs; a short script makes one"
    if problem.score_mod is not None or problem.mask_mod is not None:
        return "a score_mod or mask_mod is not written into a short script"
    if problem.page_size:
        return "a paged cache is not written into a short script"
    if problem.sinks:
        return "sinks are not written into a short script"
    if problem.needs.dlse:
        return "the gradient of LSE is given; a short script has that of O only"
    if problem.packing == "dense" and (problem.slack_q or problem.slack_k):
        return "rows beyond the sequences of a dense batch are not written into a short script"
    if problem.packing == "ragged" and (count := len(problem.seqlens_q)) > _MOST_SEQUENCES:
        return f"it has {count} sequences, and {_MOST_SEQUENCES} is the limit; shrink it first: attnfuzz repro CASE --shrink"
    if is_large(problem):
        return "the batch is too large for a float64 reference in one piece; shrink it first: attnfuzz repro CASE --shrink"
    return None


def shows(stored: CaseFile, ran: Ran) -> bool:
    """Whether a script's end is the failure of the case file; any failure where the file names none."""
    identity = stored.finding.identity
    last = ran.err.rstrip().rpartition("\n")[2]
    failed = ran.code not in (0, None)
    raised = failed and _TRACEBACK in ran.err and not last.startswith(_NOT_FOUND)
    wrong = _wrong_outputs(ran)
    if identity is None:
        return bool(wrong) or raised or (ran.code is not None and ran.code < 0)
    if identity.kind in _NUMERIC:
        return OUTPUT_TITLES[identity.output] in wrong if identity.output else bool(wrong)
    if identity.kind == "hang":
        return ran.code is None
    if identity.kind == "crash":
        compared = any(_COMPARED.fullmatch(line) for line in ran.out.splitlines())
        return ran.code is not None and ran.code != 1 and not (ran.code == 0 and compared)
    # The exception's type is in the finding's message, or is a memory fault of the interpreter.
    name = last.partition(":")[0].rpartition(".")[2]
    return raised and identity.kind in _RAISED and (identity.kind != "exception" or name in stored.finding.message)


def _wrong_outputs(ran: Ran) -> list[str]:
    """The outputs that a script says are wrong."""
    if ran.code != 1 or _TRACEBACK in ran.err:
        return []
    lines = [line for line in ran.out.splitlines() if _COMPARED.fullmatch(line)]
    return [line.partition(":")[0] for line in lines if len(lines) == 1 or line.endswith(" WRONG")]


_COMPARED = re.compile(r"(O|LSE|dQ|dK|dV): max error \S+, at most \S+ is expected( WRONG)?")
_TRACEBACK = "Traceback (most recent call last)"
_NOT_FOUND = ("ModuleNotFoundError", "ImportError", "SyntaxError")


def _in_words(ran: Ran, values: Values) -> str:
    which = "random values" if values.random else "the Case's own values"
    if ran.code is None:
        return f"with {which} it did not end"
    if ran.code == 0 and any(_COMPARED.fullmatch(line) for line in ran.out.splitlines()):
        return f"with {which} it passes"
    if ran.code == 0:
        return f"with {which} the script was ended with exit code 0 before it compared anything"
    last = ran.err.strip().rpartition("\n")[2][:200]
    end = f"exit code {ran.code}" if ran.code > 0 else f"signal {-ran.code}"
    return f"with {which} it fails in another way ({last or end})"


# --- values


def _candidates(kernel: Kernel, stored: CaseFile) -> Iterator[Values]:
    """Yield tensors to try: random ones of several seeds, the first with NaN in fresh memory, and the Case's own."""
    case, identity = stored.case, stored.finding.identity
    recipe = case.recipe
    scales = {"q": recipe.q_scale, "k": recipe.k_scale, "v": recipe.v_scale, "do": recipe.do_scale}
    exact = materialise(case.problem, recipe, "cpu")
    # The largest error of all elements is compared: one seed may give a wrong row values that are small beside the others.
    random = [(_randomised(kernel, case.problem, materialise(case.problem, recipe, "cpu"), scales, seed), seed) for seed in SEEDS]
    if all(bool(x.isfinite().all()) for inputs, _ in random for x in _judged(case.problem, inputs)):
        # What memory from torch.empty holds by chance would show it in one run and hide it in another.
        if identity is None or identity.kind not in ("unwritten", "uninitialised"):
            for inputs, seed in random:
                yield Values(inputs, random=True, filled=False, scales=scales, seed=seed)
        yield Values(random[0][0], random=True, filled=True, scales=scales, seed=random[0][1])
    yield Values(exact, random=False, filled=True, scales={})


def _judged(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The tensors without slack rows."""
    if problem.packing == "dense":
        return inputs.q, inputs.k, inputs.v, inputs.d_o
    rows, keys = problem.total_q, problem.total_k
    return inputs.q[:rows], inputs.k[:keys], inputs.v[:keys], inputs.d_o[:rows]


def _randomised(kernel: Kernel, problem: Problem, inputs: Inputs, scales: Mapping[str, float], seed: int) -> Inputs:
    """Put what the script's `torch.randn` will give into the tensors of `inputs`."""
    generator = torch.Generator().manual_seed(seed)
    for name, x in {"q": inputs.q, "k": inputs.k, "v": inputs.v, "do": inputs.d_o}.items():
        if name == "do" and problem.layout_do.expanded:
            continue
        seen = turned(kernel, x)
        values = torch.randn(once_of(seen).shape, dtype=x.dtype, generator=generator) * scales[name]
        once_of(x).copy_(values if seen is x else values.transpose(1, 2))
        total = problem.total_q if name in ("q", "do") else problem.total_k
        if problem.packing == "ragged" and x.shape[0] > total:
            once_of(x)[total:] = torch.nan
    return inputs


# --- errors that are expected


def _limits(kernel: Kernel, stored: CaseFile, inputs: Inputs, device: Device) -> dict[OutputName, float]:
    """Return the outputs to compare, each with the largest error that a right kernel has with these values.

    It is empty where the output that failed cannot be judged.
    """
    case, identity = stored.case, stored.finding.identity
    failing = identity.output if identity else None
    wanted: tuple[OutputName, ...] = ("o", *GRADIENTS)
    if failing is not None:
        wanted = ("o",) if failing == "o" else ("o", failing)
    truths = Truths(inputs, kernel.capabilities.deviations, device)
    truths.count_ties()
    limits = {
        name: limit for name in wanted if name in truths and (limit := _limit(case.problem, name, truths[name])) is not None
    }
    return limits if failing is None or failing in limits else {}


def _limit(problem: Problem, name: OutputName, true: Truth) -> float | None:
    """Return the largest distance of a right value from the expected one, rounded up; None: nothing can be judged."""
    finite = true.expected.isfinite() & true.allowed.isfinite()
    if not true.expected.numel() or not bool(finite.any()) or bool((true.allowed.isinf() & ~true.expected.isinf()).any()):
        return None
    expected, allowed = true.expected[finite], true.allowed[finite]
    form = Format.of("float32" if name == "lse" else problem.dtype)
    error = max(float((rounded(expected + side * allowed, form) - expected).abs().max()) for side in (-1, 1))
    return _rounded_up(error) if math.isfinite(error) else None


def _rounded_up(x: float) -> float:
    """The next larger number of two digits, which prints shortly."""
    if x <= 0:
        return 0.0
    text = f"{x:.1e}"
    if float(text) < x:
        step = 10.0 ** (math.floor(math.log10(x)) - 1)
        text = f"{float(text) + step:.1e}"
    return float(text)


# --- the head


def _too_long(text: str) -> str | None:
    lines = len(text.splitlines())
    if lines > LINES:
        return f"it would have {lines} lines, and {LINES} is the limit"
    return f"its values take {len(text)} characters, and {_MOST_TEXT} is the limit" if len(text) > _MOST_TEXT else None


def _head(stored: CaseFile, kernel: Kernel, values: Values) -> str:
    finding, case = stored.finding, stored.case
    source = "torch.randn" if values.random else "the case's own"
    message = f" found as: {finding.message}" if finding.message else ""
    title = " ".join(f"{kernel.name}:{message}".split())[:300]
    return head(
        f"Written by `attnfuzz repro CASE --script`, case {case.id}.",
        f"Exit code 1: it fails; 0: it does not. Values: {source}.",
        [
            f"An error is expected to be at most the largest that rounding in {case.problem.dtype} explains with these values.",
            *imported_from(kernel),
            *textwrap.wrap(title, _WIDTH),
        ],
    )
