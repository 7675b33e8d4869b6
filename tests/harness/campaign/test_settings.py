"""Settings: durations, profiles, and what the header shows."""

from __future__ import annotations

import dataclasses

import pytest

from attnfuzz.harness.campaign import worker_count
from attnfuzz.harness.campaign.context import batch_for
from attnfuzz.harness.campaign.options import OPTIONS, settings_from
from attnfuzz.harness.campaign.settings import PROFILES, Settings, duration, profile
from attnfuzz.kernels.errors import BadArgument


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60s", 60.0),
        ("2m30s", 150.0),
        ("500ms", 0.5),
        ("1.5h", 5400.0),
        ("1h2m3s4ms", 3723.004),
        ("5min", 300.0),
        ("5m", 300.0),
        ("0.25s", 0.25),
        ("  60s\n", 60.0),
        ("0s1ms", 0.001),
        ("90m", 5400.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "banana",
        "60",
        "s",
        "-5s",
        "+5s",
        "5 s",
        "60s!",
        "x60s",
        "1d",
        "1e3s",
        "inf",
        "nans",
        "60S",
        ".5s",
        "1.5.2s",
        "5mins",
    ],
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(BadArgument) as caught:
        duration(text)
    assert str(caught.value) == f"budget={text!r}: it is not a duration; give a number and a unit, such as 60s, 5m or 1h"


@pytest.mark.parametrize("text", ["0s", "0m0s", "0.0h", "0ms"])
def test_no_time_is_refused(text: str) -> None:
    with pytest.raises(BadArgument) as caught:
        duration(text)
    assert str(caught.value) == f"budget={text!r}: must be positive; give a positive duration, such as 60s"


@pytest.mark.parametrize("name", ["quick", "gate", "nightly", "models"])
def test_profiles(name: str) -> None:
    found = profile(name)
    assert found.name == name
    assert found.budget > 0
    assert found.shrink > 0
    assert set(found.variants) == set(found.limits) == {"cpu", "cuda"}
    for limits in found.limits.values():
        assert limits.heads <= limits.tiles
        assert min(limits.batch, limits.heads, limits.length) >= 1


def test_profiles_try_more_and_more() -> None:
    quick, gate, nightly = (PROFILES[name] for name in ("quick", "gate", "nightly"))
    assert quick.budget < gate.budget < nightly.budget
    assert quick.shrink < gate.shrink < nightly.shrink
    for device in ("cpu", "cuda"):
        assert quick.variants[device] < gate.variants[device] < nightly.variants[device]
        assert quick.limits[device].length <= gate.limits[device].length < nightly.limits[device].length


@pytest.mark.parametrize("name", ["", "x", "Quick", "quick "])
def test_an_unknown_profile_is_refused(name: str) -> None:
    with pytest.raises(BadArgument) as caught:
        profile(name)
    assert str(caught.value) == f"profile={name!r}: there is no such profile; use one of quick, gate, nightly, models"


def test_changed_shows_only_what_differs() -> None:
    assert Settings().changed() == {}
    assert Settings(device="cpu", seed=0, out=".attnfuzz").changed() == {}
    assert Settings(seed=3, budget=5.0, out=None, device="cuda").changed() == {
        "device": "cuda",
        "budget": 5.0,
        "seed": 3,
        "out": None,
    }


@pytest.mark.parametrize("value", [0, -1])
def test_no_examples_are_refused(value: int) -> None:
    with pytest.raises(BadArgument) as caught:
        Settings(max_examples=value)
    assert str(caught.value) == f"max_examples={value}: must be positive; give 1 or more"


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(BadArgument) as caught:
        Settings(seed=-1)
    assert str(caught.value) == "seed=-1: must not be negative; give 0 or more"


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        (Settings(), 60.0),
        (Settings(profile="gate"), 300.0),
        (Settings(budget=8.0), 8.0),
        (Settings(budget=8.0, shards=4), 8.0),
        (Settings(max_examples=10), None),
        (Settings(max_examples=10, shards=4), None),
        (Settings(max_examples=10, budget=8.0), 8.0),
    ],
)
def test_seconds(settings: Settings, seconds: float | None) -> None:
    assert settings.seconds == seconds


def test_workers_share_a_gpu_unless_they_are_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(worker_count, "auto_workers", lambda _, *, share_gpu: asked.append(share_gpu) or 3)
    values = {option.key: option.default for option in OPTIONS}
    assert Settings().share_gpu
    made = [settings_from({**values, "seed": 0, "no_share_gpu": off}, "cuda") for off in (False, True)]
    assert [(each.share_gpu, each.workers) for each in made] == [(True, 3), (False, 3)]
    assert asked == [True, False]


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Settings().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(("cores", "cpu", "cuda", "shared"), [(1, 1, 1, 1), (2, 2, 1, 2), (16, 16, 12, 16), (64, 64, 32, 32)])
def test_workers_leave_cores_to_children_that_feed_a_gpu(
    cores: int, cpu: int, cuda: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_count.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(worker_count.os, "sysconf", lambda name: 1 << 12 if name == "SC_PAGE_SIZE" else 1 << 30)
    monkeypatch.setattr(worker_count, "gpus", lambda: ("0", "1"))
    monkeypatch.setattr(worker_count, "free_memory", lambda _: None)
    monkeypatch.setattr(worker_count, "obstacle", lambda: None)
    assert (worker_count.auto_workers("cpu", share_gpu=True), worker_count.auto_workers("cuda")) == (cpu, cuda)
    assert worker_count.auto_workers("cuda", share_gpu=True) == shared
    monkeypatch.setattr(worker_count, "obstacle", lambda: "no server")
    assert worker_count.auto_workers("cuda", share_gpu=True) == cuda


def test_a_batch_on_a_gpu_can_be_made_smaller_but_not_larger() -> None:
    usual = batch_for(Settings(device="cuda"))
    assert batch_for(Settings(device="cuda", batch=8)) == dataclasses.replace(usual, most=8)
    assert batch_for(Settings(device="cuda", batch=10000)) == usual
    assert batch_for(Settings(batch=8)) == batch_for(Settings())
