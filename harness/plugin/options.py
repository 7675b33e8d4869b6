"""The options of a run for pytest, as --attnfuzz-...: their checks, and the Settings of a shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from attnfuzz.harness.campaign.options import OPTIONS, drawn_seed, settings_from
from attnfuzz.harness.core.github import shown

if TYPE_CHECKING:
    from attnfuzz.harness.campaign.settings import Settings
    from attnfuzz.kernels.contract import Device

__all__ = ["pytest_addoption", "pytest_configure", "pytest_configure_node", "pytest_report_header", "session_seed", "settings_of"]

_OPTIONS = {option.name: option for option in OPTIONS if option.only != "click"}
_SEED: pytest.StashKey[int] = pytest.StashKey()
_FOR_WORKERS = "attnfuzz_seed"
"""The key of the session's seed in what xdist gives to its workers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of the command line."""
    group = parser.getgroup("attnfuzz", "fuzz testing of attention kernels")
    for name, option in _OPTIONS.items():
        text = option.pytest_help or option.help
        if option.type is not bool and option.default not in (None, []):
            text += f" [default: {option.default}]"
        more: dict[str, Any] = {"metavar": option.metavar, "type": option.type}
        if option.type is bool:
            more = {"action": "store_true"}
        elif isinstance(option.default, list):
            more["action"] = "append"
        group.addoption(f"--attnfuzz-{name}", default=option.default, help=text, **more)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse wrong options before anything runs."""
    from attnfuzz.kernels.problem import BadArgument, reject

    device = config.getoption("--attnfuzz-device")
    workers: dict[str, Any] = getattr(config, "workerinput", {})
    given = config.getoption("--attnfuzz-seed")
    config.stash[_SEED] = given if given is not None else workers.get(_FOR_WORKERS, drawn_seed())
    try:
        # Whether there is CUDA is asked only where it is named: that imports torch, which other packages' sessions do not need.
        if device not in ("auto", "cpu", "cuda"):
            raise reject("device", device, "no such device", "use auto, cpu or cuda")
        settings_of(config, device="cuda" if device == "cuda" else "cpu")
        _readable(config)
        if device == "cuda":
            from attnfuzz.harness.core.environment import resolve_device

            resolve_device(device)
    except BadArgument as error:
        raise pytest.UsageError(shown(str(error))) from None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give xdist's worker the session's seed: all of them draw from the same rounds."""
    node.workerinput[_FOR_WORKERS] = session_seed(node.config)


def session_seed(config: pytest.Config) -> int:
    """Return the seed of all tests that have none of their own: of --attnfuzz-seed, else one that was drawn for this session."""
    return config.stash[_SEED]


def _readable(config: pytest.Config) -> None:
    """Check that case files and blobs can be read, and that a folder other than the default can be written.

    Raises:
        BadArgument: one cannot.
    """
    if cases := config.getoption("--attnfuzz-case"):
        from attnfuzz.harness.campaign.blob import stored_case

        for each in cases:
            stored_case(each)
    if (out := config.getoption("--attnfuzz-out")) != _OPTIONS["out"].default:
        from attnfuzz.harness.campaign.corpus import Corpus

        Corpus(out).check()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the options that differ from their defaults."""
    values = {name: config.getoption(f"--attnfuzz-{name}") for name in _OPTIONS}
    changed = " ".join(f"{name}={value}" for name, value in values.items() if value != _OPTIONS[name].default)
    return shown(f"attnfuzz: {changed}") if changed else None


def settings_of(
    config: pytest.Config,
    *,
    device: Device | None = None,
    shard: int = 0,
    shards: int = 1,
    most: int = 1,
    seed: int | None = None,
) -> Settings:
    """Return the Settings of one of `shards` shards, which together try `most` Cases where no option says otherwise.

    `seed`: the test's own; None: the session's.

    Raises:
        BadArgument: an option is wrong.
    """
    from attnfuzz.harness.core.environment import resolve_device

    values = {option.key: config.getoption(f"--attnfuzz-{name}") for name, option in _OPTIONS.items()}
    if values["seed"] is None:
        values["seed"] = session_seed(config) if seed is None else seed
    examples = values["max_examples"]
    if examples is None and values["budget"] is None:
        examples = most
    device = device or resolve_device(values["device"])
    return settings_from(values, device, max_examples=examples, shard=shard, shards=shards)
