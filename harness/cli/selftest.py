"""`attnfuzz selftest`: attnfuzz itself, on faults that are known."""

from __future__ import annotations

import click

from attnfuzz.harness.cli.options import CLEAN, FAILURES, console, device_option, echo_json, json_option, seed_option
from attnfuzz.harness.core.environment import resolve_device

__all__ = ["selftest_group"]


@click.group("selftest")
def selftest_group() -> None:
    """Try attnfuzz itself on faults that are known."""


@selftest_group.command("faults")
@click.argument("kernels", nargs=-1, metavar="[FAULT]...")
@device_option
@click.option(
    "--workers", type=click.IntRange(1, 1000), default=1, show_default=True, metavar="N", help="Processes that try the faults."
)
@click.option(
    "--budget", metavar="TIME", help="Time to try the faults, such as 2m, from the first variants on [default: no limit]."
)
@json_option
def selftest_faults_command(kernels: tuple[str, ...], device: str, workers: int, budget: str | None, as_json: bool) -> None:
    """Kernels that crash, hang, eat memory or lie, one fault each (default: all): exit 0 only if every row is right."""
    import msgspec

    from attnfuzz.harness.audit.selftest.faults import faults
    from attnfuzz.harness.audit.selftest.report import FaultProgress, show_faults
    from attnfuzz.harness.campaign.settings import duration

    seconds, where = None if budget is None else duration(budget), resolve_device(device)
    with FaultProgress(console(stderr=True), where) as progress:
        done = faults(where, progress, kernels, workers=workers, budget=seconds)
    if as_json:
        echo_json({"right": done.right, "leaks_wrong": list(done.leaks.wrong), **msgspec.to_builtins(done)})
    else:
        show_faults(console(), done)
    click.get_current_context().exit(CLEAN if done.right else FAILURES)


@selftest_group.command("memory")
@click.argument("faults", nargs=-1, metavar="[FAULT]...")
@click.option("--cases", default=200, show_default=True, type=int, metavar="N", help="Cases of each kernel that has no fault.")
@seed_option
@json_option
def selftest_memory_command(faults: tuple[str, ...], cases: int, seed: int, as_json: bool) -> None:
    """Nine faults of memory in copies of triton.varlen, and the Triton kernels as they are, all on the CPU.

    Exit 0 only if each fault is found as what it is, with its source line, and nothing is found in the kernels.
    """
    import msgspec

    from attnfuzz.harness.audit.selftest.memory import memory
    from attnfuzz.harness.audit.selftest.report import FaultProgress, show_memory

    with FaultProgress(console(stderr=as_json)) as progress:
        done = memory(progress, faults, cases, seed)
    if as_json:
        echo_json({"right": done.right, **msgspec.to_builtins(done)})
    else:
        show_memory(console(), done)
    click.get_current_context().exit(CLEAN if done.right else FAILURES)


@selftest_group.command("barriers")
@click.argument("faults", nargs=-1, metavar="[FAULT]...")
@click.option("--schedules", default=1000, show_default=True, type=int, metavar="N", help="Schedules of each function.")
@seed_option
@json_option
def selftest_barriers_command(faults: tuple[str, ...], schedules: int, seed: int, as_json: bool) -> None:
    """Seven faults of barriers in copies of tilelang.sm100.wasp, and TileLang's kernels as they are, on the CPU.

    Of these, each function with warp roles, or with asynchronous copies or products.

    Exit 0 only if each fault is found as what it is, with its role, barrier, stage and iteration, and nothing is found in the
    kernels, under the schedules and in all interleavings of one block.
    """
    import msgspec

    from attnfuzz.harness.audit.selftest.barriers import barriers
    from attnfuzz.harness.audit.selftest.barriers_report import RolesProgress, show_barriers

    with RolesProgress(console(stderr=as_json)) as progress:
        done = barriers(progress.advance, faults, schedules, seed)
    if as_json:
        echo_json({"right": done.right, **msgspec.to_builtins(done)})
    else:
        show_barriers(console(), done)
    click.get_current_context().exit(CLEAN if done.right else FAILURES)
