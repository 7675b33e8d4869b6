"""The options of a run for pytest, as --attnfuzz-...: their checks, and the Settings of a shard.

An option that is not on the command line has the value of `[tool.attnfuzz]` in the pyproject.toml of the root folder, if any.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from attnfuzz.harness.campaign.options import OPTIONS, drawn_seed, settings_from
from attnfuzz.harness.campaign.project import find_project
from attnfuzz.harness.core.github import shown

if TYPE_CHECKING:
    from attnfuzz.harness.campaign.settings import Settings
    from attnfuzz.kernels.contract import Device

__all__ = [
    "pytest_addoption",
    "pytest_cmdline_main",
    "pytest_configure",
    "pytest_configure_node",
    "pytest_report_header",
    "session_name",
    "session_seed",
    "settings_of",
]

_FROM: pytest.StashKey[tuple[str, dict[str, Any]]] = pytest.StashKey()
"""The project's file, and the values of options that are from there."""
_OPTIONS = {option.name: option for option in OPTIONS if option.only != "click"}
_SEED: pytest.StashKey[int] = pytest.StashKey()
_FOR_WORKERS, _NAME_FOR_WORKERS = "attnfuzz_seed", "attnfuzz_session"
"""The keys of the session's seed and name in what xdist gives to its workers."""
_NAME: pytest.StashKey[str] = pytest.StashKey()


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
        # None until the command line, the project and the defaults are known (`_complete`).
        group.addoption(f"--attnfuzz-{name}", default=None, help=text, **more)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    """Complete the options before xdist asks for the number of workers, which get them from this process."""
    _complete(config)
    return (yield)


def _complete(config: pytest.Config) -> None:
    """Give each option that is not on the command line its value by the project, or its default."""
    from attnfuzz.kernels.errors import BadArgument

    left = {name: option for name, option in _OPTIONS.items() if getattr(config.option, _attribute(name), None) is None}
    if not left or _FROM in config.stash:
        return
    try:
        project = None if hasattr(config, "workerinput") else find_project(config.rootpath)
    except BadArgument as error:
        raise pytest.UsageError(str(error)) from None
    values = dict(project.values) if project else {}
    config.stash[_FROM] = (str(project.path) if project else "", {n: values[o.key] for n, o in left.items() if o.key in values})
    for name, option in left.items():
        default = list(option.default) if isinstance(option.default, list) else option.default
        setattr(config.option, _attribute(name), values.get(option.key, default))


def _attribute(name: str) -> str:
    return f"attnfuzz_{name.replace('-', '_')}"


def pytest_configure(config: pytest.Config) -> None:
    """Refuse wrong options before anything runs."""
    from attnfuzz.kernels.errors import BadArgument, reject

    _complete(config)
    device = config.getoption("--attnfuzz-device")
    workers: dict[str, Any] = getattr(config, "workerinput", {})
    given = config.getoption("--attnfuzz-seed")
    config.stash[_NAME] = workers.get(_NAME_FOR_WORKERS) or secrets.token_hex(8)
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
    """Give xdist's worker the session's seed, as all of them draw from the same rounds, and its name."""
    node.workerinput[_FOR_WORKERS] = session_seed(node.config)
    node.workerinput[_NAME_FOR_WORKERS] = session_name(node.config)


def session_seed(config: pytest.Config) -> int:
    """Return the seed of all tests that have none of their own: of --attnfuzz-seed, else one that was drawn for this session."""
    return config.stash[_SEED]


def session_name(config: pytest.Config) -> str:
    """Return a name that all processes of this session have, and no other session."""
    return config.stash[_NAME]


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
    """Return the options that differ from their defaults, and those that the project sets."""
    path, of_project = config.stash.get(_FROM, ("", {}))
    values = {name: config.getoption(f"--attnfuzz-{name}") for name in _OPTIONS}
    lines = {
        "attnfuzz": {n: value for n, value in values.items() if value != _OPTIONS[n].default and n not in of_project},
        f"attnfuzz, from {path}": of_project,
    }
    text = "\n".join(f"{title}: {_words(each)}" for title, each in lines.items() if each)
    return shown(text) or None


def _words(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


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
