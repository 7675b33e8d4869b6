"""A stored Case explained: which of its parts matter."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from attnfuzz.harness.campaign.blob import is_blob
from attnfuzz.harness.campaign.corpus import CaseFile, content_of
from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.campaign.explain import Explanation
from attnfuzz.harness.core.files import Unreadable, decoded, write_whole
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.repro.reproduce import Where, verdict_or_lost
from attnfuzz.harness.repro.reshrink import identity_in, minimiser_for
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.kernels.contract import Device
from attnfuzz.strategies.case import BadCase, Case

__all__ = ["Explained", "explain_stored"]

_ALL = 6.0
"""Time for shrinking of which an explanation takes all of its own."""


@dataclass(frozen=True, slots=True)
class Explained:
    """A stored Case explained. FIXED: it does not fail any more, and there is no explanation.

    `written`: whether the explanation is in the case file now; `why_not`: why it could not be written.
    """

    outcome: Literal["EXPLAINED", "FIXED"]
    device: Device
    verdict: Verdict
    explanation: Explanation
    trials: int
    seconds: float
    written: bool = False
    why_not: str = ""


def explain_stored(
    stored: CaseFile, seconds: float, where: Where, on_trial: Callable[[int, Case], None] = lambda *_: None
) -> Explained:
    """Vary each part of a stored Case for at most `seconds`, its first run apart, and add the explanation to its file.

    Args:
        stored: the Case; of a blob the explanation is only returned.
        seconds: that explaining may take.
        where: device, deadline and checks.
        on_trial: called after each trial with its number and its Case.

    Raises:
        BadArgument: the kernel is absent, cannot run here, or does not support the Problem.
    """
    device, kernel = where.device_for(stored.case)
    start = time.monotonic()
    with where.runner(device, kernel, lambda _, case, __: on_trial(runner.trials, case)) as runner:
        verdict, lost = verdict_or_lost(runner, stored.case, stored.rate)
        identity = identity_in(stored, verdict)
        if identity is None:
            return Explained("FIXED", device, verdict, Explanation(), runner.trials, time.monotonic() - start)
        explanation = Explanation(ended="the device was lost")

        def keep(finding: Finding) -> None:
            nonlocal explanation
            explanation = finding.explanation or explanation

        with contextlib.suppress(KeyboardInterrupt, DeviceLost):
            if not lost:
                finding = Finding(identity, stored.case, verdict, rate=stored.rate)
                minimiser_for(kernel, device, runner).explain(finding, seconds, _ALL * seconds, keep)
    common = stored.finding.explanation.common if stored.finding.explanation else ()
    explanation = msgspec.structs.replace(explanation, common=common)
    why_not = _write(stored, explanation)
    spent = time.monotonic() - start
    return Explained("EXPLAINED", device, verdict, explanation, runner.trials, spent, not why_not, why_not)


def _write(stored: CaseFile, explanation: Explanation) -> str:
    """Put an explanation into a case file, which otherwise stays as it is; returns why it could not be."""
    if is_blob(str(stored.path)):
        return "a blob holds no explanation"
    try:
        data = decoded(content_of(stored.path))
        if not isinstance(data, dict):
            raise Unreadable("it is no Case any more")
        finding = data.get("found")
        data["found"] = {**(finding if isinstance(finding, dict) else {}), "explanation": msgspec.to_builtins(explanation)}
        write_whole(stored.path, dumps(data) + "\n")
    except OSError as error:
        return f"{stored.path}: it cannot be written ({error.strerror})"
    except BadCase as error:
        return str(error)
    except Unreadable as error:
        return f"{stored.path}: {error}"
    return ""
