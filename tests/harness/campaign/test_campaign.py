"""The order in which a campaign begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.faults.host import FaultyReference


class Missing(FaultyReference):
    """Takes its time to say that it cannot run here."""

    def __init__(self, order: list[str], devices: tuple[Device, ...]) -> None:
        super().__init__("test.missing", lambda *_: None)
        self.order = order
        self.capabilities = replace(self.capabilities, devices=devices)

    def unavailable(self, device: Device) -> str | None:
        self.order.append("asked")
        return "something is missing"


class Group:
    """Workers that load from the moment they are made."""

    def __init__(self, order: list[str], names: Sequence[str]) -> None:
        self.order = order
        order.append(f"workers for {', '.join(names)}")

    def root(self) -> None:
        pass

    def close(self) -> None:
        self.order.append("closed")


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(("cpu", "cuda"), ["workers for test.missing", "asked", "closed"]), (("cuda",), [])],
    ids=["asked", "declared for another device"],
)
def test_workers_load_while_kernels_are_asked_whether_they_can_run(devices: tuple[Device, ...], expected: list[str]) -> None:
    """To ask takes seconds where that imports torch; what cannot run is skipped, and the workers end."""
    order: list[str] = []

    def group(kernels: Sequence[Kernel], _: CampaignContext) -> Any:
        return Group(order, [each.name for each in kernels])

    with pytest.raises(BadArgument, match="no kernel can run here"):
        run_campaign([Missing(order, devices)], Settings(out=None, workers=2), lambda _: None, group=group)
    assert order == expected


def test_workers_end_where_the_executor_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()

    def refuse(*_: Any, **__: Any) -> Any:
        raise BadArgument("ulimit -n: too few")

    monkeypatch.setattr("attnfuzz.harness.campaign.campaign.executor_of", refuse)
    kernel, settings = FaultyReference("test.refused", lambda *_: None), Settings(out=None, workers=2, max_examples=1)

    def group(*_: Any) -> Any:
        return Group(order, [kernel.name])

    with pytest.raises(BadArgument, match="too few"):
        run_campaign([kernel], settings, lambda _: None, group=group)
    assert order[-1] == "closed"
