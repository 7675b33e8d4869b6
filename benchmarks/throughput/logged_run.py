"""A campaign that logs when each Case was judged: `python -P logged_run.py REQUEST`, started as a process of its own.

REQUEST is JSON: kernels, device, options (of `attnfuzz run`, by name), limits (fields of `Limits` that replace the profile's, or
null; with --workers 1), log (a file). Each line of the log is an object: {"trial": time, ...}, {"compile": time, ...}, at the end
{"campaign": object of `attnfuzz run --json`}. Times are those of `time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.events import CompileFinished, Event, TrialFinished
from attnfuzz.harness.campaign.options import OPTIONS, settings_from
from attnfuzz.harness.campaign.settings import PROFILES, Settings
from attnfuzz.harness.core.environment import resolve_device
from attnfuzz.harness.report.machine import campaign_object
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import reject


class Log:
    """Listens to a campaign and writes a line for each trial and compile."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __call__(self, event: Event) -> None:
        """Write the line of an event."""
        if isinstance(event, TrialFinished):
            problem = event.case.problem
            self.write(
                trial=time.monotonic(), kernel=event.kernel, phase=event.phase, tokens=problem.total_q + problem.total_k,
                heads=problem.heads, seconds=event.verdict.seconds, failed=event.verdict.status == "fail",
            )  # fmt: skip
        elif isinstance(event, CompileFinished):
            self.write(compile=time.monotonic(), kernel=event.kernel, seconds=event.seconds)

    def write(self, **values: Any) -> None:
        """Write one line; it is in the file when this returns."""
        self._file.write(msgspec.json.encode(values) + b"\n")


def settings_of(options: dict[str, str], device: Device) -> Settings:
    """Return the Settings of `attnfuzz run` with these options; the others have their defaults."""
    values = {each.key: each.default for each in OPTIONS}
    kinds = {each.name: each.type for each in OPTIONS}
    for name, text in options.items():
        values[name.replace("-", "_")] = kinds[name](text)
    return settings_from({**values, "device": device}, device)


def limit(settings: Settings, limits: dict[str, int]) -> None:
    """Replace limits of the profile, in this process.

    Raises:
        BadArgument: other processes draw, which would not see them.
    """
    if settings.workers > 1:
        raise reject("workers", settings.workers, "limits are those of the process that draws", "give 1, which is this process")
    own = PROFILES[settings.profile]
    changed = {settings.device: dataclasses.replace(own.limits[settings.device], **limits)}
    PROFILES[settings.profile] = dataclasses.replace(own, limits={**own.limits, **changed})


def main(request: dict[str, Any]) -> None:
    """Run the campaign of `request`."""
    settings = settings_of(request["options"], resolve_device(request["device"]))
    if request["limits"]:
        limit(settings, request["limits"])
    with Path(request["log"]).open("wb", buffering=0) as file:
        log = Log(file)
        finished = run_campaign([registry.get(name) for name in request["kernels"]], settings, log)
        log.write(campaign=campaign_object(finished))


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1]))
