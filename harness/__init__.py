"""The run: draw a case, try it, judge it, shrink it, keep it, report it. Public are the names below."""

from typing import TYPE_CHECKING

from attnfuzz.kernels.support.lazy import lazy

if TYPE_CHECKING:
    from attnfuzz.harness.audit.check import CheckedOutput, Checker, CheckFailure, CheckResult, check
    from attnfuzz.harness.campaign.blob import stored_case
    from attnfuzz.harness.campaign.campaign import run_campaign
    from attnfuzz.harness.campaign.events import (
        CampaignFinished,
        CampaignStarted,
        Event,
        FailureFound,
        Finding,
        KernelFinished,
        KernelSummary,
        Listener,
        Shrunk,
        TrialFinished,
    )
    from attnfuzz.harness.campaign.settings import Settings
    from attnfuzz.harness.judge.failure import Failure, Identity
    from attnfuzz.harness.judge.verdict import Verdict
    from attnfuzz.harness.plugin import fuzz, fuzz_calls
    from attnfuzz.harness.repro.reproduce import Reproduction, Where, reproduce
    from attnfuzz.kernels.problem import Problem
    from attnfuzz.strategies.case import Case, Recipe

__all__ = [
    "CampaignFinished",
    "CampaignStarted",
    "Case",
    "CheckFailure",
    "CheckResult",
    "CheckedOutput",
    "Checker",
    "Event",
    "Failure",
    "FailureFound",
    "Finding",
    "Identity",
    "KernelFinished",
    "KernelSummary",
    "Listener",
    "Problem",
    "Recipe",
    "Reproduction",
    "Settings",
    "Shrunk",
    "TrialFinished",
    "Verdict",
    "Where",
    "check",
    "fuzz",
    "fuzz_calls",
    "reproduce",
    "run_campaign",
    "stored_case",
]

# Type checkers would take any name for exported if they saw `__getattr__`.
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "attnfuzz.harness.audit.check": "CheckFailure CheckResult CheckedOutput Checker check",
            "attnfuzz.harness.campaign.blob": "stored_case",
            "attnfuzz.harness.campaign.campaign": "run_campaign",
            "attnfuzz.harness.campaign.events": "CampaignFinished CampaignStarted Event FailureFound Finding"
            " KernelFinished KernelSummary Listener Shrunk TrialFinished",
            "attnfuzz.harness.campaign.settings": "Settings",
            "attnfuzz.harness.judge.failure": "Failure Identity",
            "attnfuzz.harness.judge.verdict": "Verdict",
            "attnfuzz.harness.plugin": "fuzz fuzz_calls",
            "attnfuzz.harness.repro.reproduce": "Reproduction Where reproduce",
            "attnfuzz.kernels.problem": "Problem",
            "attnfuzz.strategies.case": "Case Recipe",
        },
    )
