"""A pytest configuration with the plugin's options, without a pytest session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attnfuzz.harness.campaign.options import OPTIONS
from attnfuzz.harness.plugin import options as plugin_options


def config(device: str = "auto", **changed: Any) -> Any:
    values = {f"--attnfuzz-{option.name}": option.default for option in OPTIONS} | {"--attnfuzz-device": device}
    values |= {f"--attnfuzz-{name.replace('_', '-')}": value for name, value in changed.items()}
    session = SimpleNamespace(getoption=values.__getitem__, stash=pytest.Stash())
    session.stash[plugin_options._SEED] = values["--attnfuzz-seed"] or 12345
    return session
