"""The options of `attnfuzz run` for pytest, as --attnfuzz-...: their help, their checks, and the Settings that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attnfuzz.harness.campaign.settings import Settings

__all__ = ["pytest_addoption", "pytest_configure", "pytest_report_header", "settings_of"]

_DEFAULTS: dict[str, Any] = {
    "kernel": [],
    "device": "auto",
    "profile": "quick",
    "budget": None,
    "max-examples": None,
    "max-failures": None,
    "case": [],
    "seed": 0,
    "out": ".attnfuzz",
    "jobs": None,
    "deadline": None,
    "memory": None,
    "in-process": False,
    "no-memory-check": False,
    "no-maps": False,
}
_GIB = 1 << 30


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the command line."""
    group = parser.getgroup("attnfuzz", "fuzz testing of attention kernels")

    def add(name: str, **more: Any) -> None:
        group.addoption(f"--attnfuzz-{name}", **{"default": _DEFAULTS[name], **more})

    add("kernel", action="append", metavar="NAME", help="only these kernels (may be repeated)")
    add("device", metavar="auto|cpu|cuda", help="where kernels run")
    add("profile", metavar="quick|gate|nightly", help="how large Cases may be")
    add("budget", metavar="60s", help="time for trials of each kernel, over all its shards")
    add("max-examples", type=int, metavar="N", help="Cases of each kernel, over all its shards")
    add("max-failures", type=int, metavar="N", help="failures after which a shard ends")
    add("case", action="append", metavar="FILE|BLOB", help="run just this case, in its kernel's tests (may be repeated)")
    add("seed", type=int, metavar="N", help="same seed, same Cases")
    add("out", metavar="DIR", help="folder of case files")
    add("jobs", type=int, metavar="N", help="compiles at once (default: the cores)")
    add("deadline", metavar="60s", help="time that a stage of a trial may take before it hangs")
    add("memory", type=float, metavar="GIB", help="memory that a child process may hold, in GiB (default: half of the machine's)")
    add("in-process", action="store_true", help="no child processes, for a debugger: a crash ends the tests")
    add("no-memory-check", action="store_true", help="do not check every access to memory of interpreted kernels")
    add("no-maps", action="store_true", help="keep no maps of the errors of minimal Cases for `attnfuzz report`")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse wrong options before anything runs."""
    from attnfuzz.kernels.problem import BadArgument, reject

    device = config.getoption("--attnfuzz-device")
    try:
        # Only for CUDA is it asked here whether there is one: that imports torch, which other people's sessions can do without.
        if device not in ("auto", "cpu", "cuda"):
            raise reject("device", device, "no such device", "use auto, cpu or cuda")
        settings_of(config, device="cuda" if device == "cuda" else "cpu")
        _readable(config)
        if device == "cuda":
            from attnfuzz.harness.core.environment import resolve_device

            resolve_device(device)
    except BadArgument as error:
        raise pytest.UsageError(str(error)) from None


def _readable(config: pytest.Config) -> None:
    """Case files and blobs can be read, and the folder that was asked for be written.

    Raises:
        BadArgument: one cannot.
    """
    if cases := config.getoption("--attnfuzz-case"):
        from attnfuzz.harness.campaign.blob import stored_case

        for each in cases:
            stored_case(each)
    if (out := config.getoption("--attnfuzz-out")) != _DEFAULTS["out"]:
        from attnfuzz.harness.campaign.corpus import Corpus

        Corpus(out).check()


def pytest_report_header(config: pytest.Config) -> str | None:
    """The options that differ from their defaults."""
    values = {name: config.getoption(f"--attnfuzz-{name}") for name in _DEFAULTS}
    changed = " ".join(f"{name}={value}" for name, value in values.items() if value != _DEFAULTS[name])
    return f"attnfuzz: {changed}" if changed else None


def settings_of(config: pytest.Config, *, device: str | None = None, shard: int = 0, shards: int = 1, most: int = 1) -> Settings:
    """The Settings of one shard of `shards`: it tries its part of the budget, or of `most` Cases where the options say nothing.

    Raises:
        BadArgument: an option is wrong.
    """
    from attnfuzz.harness.campaign import settings as options
    from attnfuzz.harness.core.environment import resolve_device

    def of(name: str) -> Any:
        return config.getoption(f"--attnfuzz-{name}")

    budget, asked = of("budget"), of("max-examples")
    if asked is not None and asked < 1:
        options.Settings(max_examples=asked)
    return options.Settings(
        device=resolve_device(of("device") if device is None else device) if device != "cuda" else "cuda",
        profile=options.profile(of("profile")).name,
        budget=None if budget is None else options.duration(budget),
        max_examples=None if budget is not None and asked is None else -(-(most if asked is None else asked) // shards),
        max_failures=of("max-failures"),
        seed=of("seed"),
        shard=shard,
        shards=shards,
        out=of("out"),
        jobs=of("jobs"),
        in_process=of("in-process"),
        memory_check=not of("no-memory-check"),
        maps=not of("no-maps"),
        deadline=None if of("deadline") is None else options.duration(of("deadline"), "deadline"),
        memory=None if of("memory") is None else _bytes(of("memory")),
    )


def _bytes(gib: float) -> int:
    from attnfuzz.kernels.problem import reject

    if not 1 <= gib <= 1 << 20:
        raise reject("memory", gib, "a child needs 1 GiB or more", "give GiB, such as 8")
    return int(gib * _GIB)
