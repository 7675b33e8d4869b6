"""The options of a run: one table for `attnfuzz run` and for pytest's --attnfuzz-..., and the Settings that their values make.

This module imports neither click nor pytest, so that each is started without the other.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from attnfuzz.kernels.errors import reject

if TYPE_CHECKING:
    from attnfuzz.harness.campaign.settings import Settings
    from attnfuzz.kernels.contract import Device

__all__ = ["OPTIONS", "Option", "drawn_seed", "seed_of", "settings_from"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option: --NAME of `attnfuzz run`, --attnfuzz-NAME of pytest."""

    name: str
    help: str
    metavar: str | None = None
    type: type = str
    """bool: a flag."""
    default: Any = None
    """Of options that may be repeated, a list."""
    least: float | None = None
    """Checked by click, whose messages name the range; `Settings` and `settings_from` check the same for pytest."""
    most: float | None = None
    only: Literal["click", "pytest"] | None = None
    pytest_help: str | None = None
    """Where `help` is not true of a test, which is one shard of one kernel."""

    @property
    def key(self) -> str:
        """The name in a mapping of values."""
        return self.name.replace("-", "_")


_MOST_GIB = 1 << 20
_MOST_SHARDS = 1_000_000
_MOST_WORKERS = 1024
_SEEDS = 1_000_000_000
_flag = partial(Option, type=bool, default=False)
# fmt: off
OPTIONS = (
    Option("kernel", "Only these kernels; may be repeated.", "NAME", default=[], only="pytest"),
    Option("device", "Where the kernels run; auto takes CUDA if there is one.", "auto|cpu|cuda", default="auto"),
    Option("profile", "How much is tried, and how large Cases are; models: with the attention shapes of published models.",
           "quick|gate|nightly|models", default="quick"),
    Option("budget", "Time for the run, compiles included [default: the profile's].", "60s",
           pytest_help="Time for all fuzz tests of the session together, compiles included."),
    Option("max-examples", "Distinct Cases per kernel, instead of a budget or in addition to it.", "N", int,
           pytest_help="Distinct Cases of each kernel, over all its shards."),
    Option("max-failures", "Failures after which a kernel is not tried further.", "N", int,
           pytest_help="Failures after which a shard ends."),
    Option("case", "Run only this case, in its kernel's tests; may be repeated.", "FILE|BLOB", default=[], only="pytest"),
    Option("seed", "Same seed, same Cases in the same order [default: a new one for each run, which it prints].", "N", int,
           pytest_help="Same seed, same Cases in the same order [default: that of `fuzz(..., seed=N)`, else a new one for each "
                       "session, which it prints]."),
    Option("shard", "Try part I of N of this --seed's Cases; `attnfuzz merge` joins the folders of all parts.", "I/N",
           only="click"),
    Option("out", "Folder of case files.", "DIR", default=".attnfuzz"),
    Option("workers", "Processes that draw Cases and try them; auto fills the machine.", "N|auto", default="auto", only="click"),
    _flag("no-share-gpu", "Start no server of CUDA's MPS, by which several workers of a GPU use it at once, until one breaks it.",
          only="click"),
    Option("jobs", "Compiles at once [default: the cores].", "N", int, least=1),
    Option("deadline", "Time limit of each stage of a trial [default: 60s].", "60s"),
    Option("memory", "Memory that a child process may hold, in GiB [default: half of the machine's].", "GIB", float,
           least=1, most=_MOST_GIB),
    _flag("in-process", "No child processes, for a debugger: a crash of a kernel ends this process."),
    _flag("no-memory-check", "Do not check every access to memory of interpreted kernels (Triton on the CPU)."),
    _flag("no-maps", "Keep no maps of the errors of minimal Cases for `attnfuzz report`."),
    _flag("statistics", "Show at the end of the session what each fuzz test has tried: Cases, worst errors, all that was drawn.",
          only="pytest"),
    _flag("plain", "Only one call against the oracle: no sequences of calls, no relations.", only="click"),
    _flag("no-replay", "Do not try the stored Cases first.", only="click"),
    Option("ledger", "Known failures, as those of `attnfuzz gate`: they count only once they are gone.", "FILE", only="click"),
    Option("events", "Write events as lines of JSON, each at once; - for stdout.", "FILE|-", only="click"),
    Option("table", "Write figures of every kernel and output as Markdown.", "FILE", only="click"),
)
# fmt: on


def settings_from(values: Mapping[str, Any], device: Device, **more: Any) -> Settings:
    """Return the Settings that the values of the options make (by `Option.key`); `more` are fields as they are.

    Raises:
        BadArgument: a value is wrong.
    """
    from attnfuzz.harness.campaign import settings

    def seconds(name: str) -> float | None:
        return None if values[name] is None else settings.duration(values[name], name)

    fields: dict[str, Any] = {
        **{name: values[name] for name in ("max_examples", "max_failures", "out", "jobs", "in_process")},
        "seed": seed_of(values),
        "device": device,
        "profile": settings.profile(values["profile"]).name,
        "budget": seconds("budget"),
        "deadline": seconds("deadline"),
        "memory": None if values["memory"] is None else _bytes(values["memory"]),
        "memory_check": not values["no_memory_check"],
        "maps": not values["no_maps"],
        "plain": values.get("plain", False),
        "replay": not values.get("no_replay"),
        "share_gpu": not values.get("no_share_gpu"),
        "workers": _workers(values, device),
        **_shard(values.get("shard")),
    }
    return settings.Settings(**{**fields, **more})


def drawn_seed() -> int:
    """Return a seed for a run that is given none: short enough to be typed."""
    return secrets.randbelow(_SEEDS)


def seed_of(values: Mapping[str, Any]) -> int:
    """Return the seed that the values of the options give, or a new one.

    Raises:
        BadArgument: a shard is given without one, or there is no such shard.
    """
    seed: int | None = values["seed"]
    _shard(values.get("shard"))
    if seed is None and values.get("shard") is not None:
        reason = "each part would draw a seed of its own, and the parts would try some Cases twice and others never"
        raise reject("shard", values["shard"], reason, "give the same --seed N to all parts")
    return drawn_seed() if seed is None else seed


def _shard(text: str | None) -> dict[str, int]:
    """Return the fields of "2/8": the second of eight shards."""
    if text is None:
        return {}
    parts = re.fullmatch(r"([0-9]{1,7})/([0-9]{1,7})", text)
    if parts is None or not 1 <= int(parts[1]) <= int(parts[2]) <= _MOST_SHARDS:
        remedy = f"give the shard and their number, {_MOST_SHARDS} at most, such as 2/8"
        raise reject("shard", text, "it is not I/N with I from 1 to N", remedy)
    return {"shard": int(parts[1]) - 1, "shards": int(parts[2])}


def _workers(values: Mapping[str, Any], device: Device) -> int:
    text: str = values.get("workers", "1")
    if text == "auto":
        from attnfuzz.harness.campaign.worker_count import auto_workers

        return 1 if values["in_process"] else auto_workers(device, share_gpu=not values.get("no_share_gpu"))
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_WORKERS:
        raise reject("workers", text, f"it is not a number from 1 to {_MOST_WORKERS}, nor auto", "give a number, or auto")
    return int(text)


def _bytes(gib: float) -> int:
    if not 1 <= gib <= _MOST_GIB:
        reason = f"must be at most {_MOST_GIB}" if gib > _MOST_GIB else "a child needs 1 GiB or more"
        raise reject("memory", gib, reason, "give GiB, such as 8")
    return int(gib * (1 << 30))
