"""`attnfuzz check-adapter`."""

from __future__ import annotations

import sys

import click

from attnfuzz.harness.cli.complete import complete_kernels
from attnfuzz.harness.cli.options import (
    CLEAN,
    FAILURES,
    INTERRUPTED,
    WRONG_USE,
    console,
    deadline_option,
    device_option,
    echo_json,
    in_process_option,
    json_option,
    like_option,
    no_memory_check_option,
    with_like,
)
from attnfuzz.harness.cli.project import current_project, on_command_line
from attnfuzz.harness.core.environment import prepare, resolve_device
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.support.file_target import file_target
from attnfuzz.kernels.targets import look_in

__all__ = ["check_adapter_command"]


@click.command("check-adapter")
@click.argument("kernel", metavar="KERNEL", shell_complete=complete_kernels)
@like_option
@device_option
@deadline_option
@no_memory_check_option
@in_process_option
@json_option
def check_adapter_command(
    kernel: str, like: str | None, device: str, deadline: str | None, no_memory_check: bool, in_process: bool, as_json: bool
) -> None:
    """Check that a kernel (by name, package.module:OBJECT or FILE.py:OBJECT) fulfils the contract; say what is missing.

    Each row has the remedy.

    Exit 0: it does, 1: it does not, 2: it cannot be imported, or cannot run on this machine.
    """
    from attnfuzz.harness.audit.adapter_module import with_own_gradients
    from attnfuzz.harness.audit.conformance.check import check_adapter
    from attnfuzz.harness.audit.conformance.report import ConformanceProgress, conformance_object, show_conformance
    from attnfuzz.harness.campaign.settings import duration

    where = resolve_device(device)
    (kernel,) = with_like([kernel], like)
    seconds = None if deadline is None else duration(deadline, "deadline")
    if in_process:
        if deadline is not None:
            raise reject("deadline", deadline, "a kernel in this process has none", "leave out --deadline or --in-process")
        # Triton has one mode for a process, chosen at its import; a third party's module may import it.
        prepare(where)
    project = current_project()
    if project and not on_command_line("kernel") and not sys.flags.safe_path:
        look_in(project.folder)
    file = file_target(kernel)
    if file is not None and file.like is not None:
        kernel, _ = with_own_gradients(kernel, where, in_process=in_process)
    with ConformanceProgress(console(stderr=as_json)) as progress:
        done = check_adapter(kernel, where, progress, in_process=in_process, deadline=seconds, memory_check=not no_memory_check)
    if as_json:
        echo_json(conformance_object(done))
    else:
        show_conformance(console(), done)
    unwrong = INTERRUPTED if done.interrupted else CLEAN if done.complete else WRONG_USE
    click.get_current_context().exit(FAILURES if done.wrong else unwrong)
