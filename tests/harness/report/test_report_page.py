"""The report's page in a real headless Chromium: it opens without an error, its pictures are there, its tables sort."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.browser import Browser, browser, missing
from support.report import failure, kernel_record, record, spoilt_case, written

from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.judge.errormap import write_maps
from attnfuzz.harness.trial.errormaps import error_maps
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Inputs

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
_ENTER = "\ue007"
_EVIL = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


def wrong_dk(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> None:
    if "dk" in outputs:
        outputs["dk"][8:, 1] += 1.0


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve failures, so that the last two are folded; the first says what would be a script in a page that believed it."""
    folder = tmp_path_factory.mktemp("found")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", {})
        maps = error_maps(spoilt_case(wrong_dk), "cpu")
    assert not isinstance(maps, str)
    write_maps(folder / "maps" / "a.json", maps)
    failures = [failure(number, "b.kernel", maps="maps/a.json" if number < 3 else None) for number in range(1, 13)]
    failures[0].messages = failures[0].pattern = _EVIL  # type: ignore[assignment]
    failures[0].messages = [_EVIL]
    kernels = [
        kernel_record("b.kernel", cases=200, worst=12.5, wrong=3),
        kernel_record("a.kernel", cases=30, worst="inf", wrong=1),
        kernel_record("c.kernel", cases=1000, worst=0.25),
    ]
    written(folder, record(kernels=kernels, failures=failures))
    done = CliRunner().invoke(cli.main, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    return folder / "report.html"


@pytest.fixture(scope="module")
def window(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as session:
        yield session


@pytest.fixture
def opened(window: Browser, page: Path) -> Browser:
    window.open(page)
    return window


def kernels(window: Browser) -> list[str]:
    found: list[str] = window.run("return [...document.querySelectorAll('#kernels tbody th')].map(each => each.innerText)")
    return found


def sorted_by(window: Browser) -> dict[str, str]:
    found: dict[str, str] = window.run(
        "return Object.fromEntries([...document.querySelectorAll('#kernels th[aria-sort]')]"
        ".filter(each => each.ariaSort !== 'none').map(each => [each.innerText.trim().split(/\\s/)[0], each.ariaSort]))"
    )
    return found


def test_it_opens_without_an_error_and_asks_for_nothing_else(window: Browser, page: Path) -> None:
    window.log("browser")
    window.requests()
    window.open(page)
    assert window.run("return document.readyState") == "complete"
    assert window.run("return document.title") == "12 failures – attnfuzz report"
    assert window.log("browser") == []
    assert window.requests() == [page.resolve().as_uri()]


def test_its_pictures_are_there(opened: Browser) -> None:
    sizes = opened.run("return [...document.images].map(each => [each.complete, each.naturalWidth, each.clientWidth])")
    assert len(sizes) == 2
    assert all(complete and natural == 1200 and shown > 600 for complete, natural, shown in sizes)
    assert opened.run("return document.querySelectorAll('.chart svg rect').length") > 6


def test_a_click_on_a_heading_sorts_by_number_and_a_second_one_the_other_way(opened: Browser) -> None:
    assert kernels(opened) == ["a.kernel", "b.kernel", "c.kernel"]
    opened.click("#kernels th:nth-child(5) button")
    assert kernels(opened) == ["a.kernel", "b.kernel", "c.kernel"], "infinite first, then 12.5, then 0.25"
    assert sorted_by(opened) == {"dK": "descending"}
    opened.click("#kernels th:nth-child(5) button")
    assert kernels(opened) == ["c.kernel", "b.kernel", "a.kernel"]
    assert sorted_by(opened) == {"dK": "ascending"}
    opened.click("#kernels th:nth-child(9) button")
    assert kernels(opened) == ["c.kernel", "b.kernel", "a.kernel"], "1,000 is more than 200"


def test_the_keyboard_sorts_as_well(opened: Browser) -> None:
    opened.press("#kernels th:nth-child(1) button", _ENTER)
    opened.press("#kernels th:nth-child(1) button", _ENTER)
    assert kernels(opened) == ["c.kernel", "b.kernel", "a.kernel"]
    assert opened.run("return document.getElementById('sorted').textContent") == "sorted by kernel, descending"


def test_a_link_to_a_folded_failure_unfolds_it(opened: Browser) -> None:
    folded = "return document.getElementById('failure-12').open"
    assert opened.run(folded) is False
    opened.click("#failures tbody a[href='#failure-12']")
    # The page hears of its new address after the click.
    end = time.monotonic() + 10.0
    while not opened.run(folded) and time.monotonic() < end:
        time.sleep(0.02)
    assert opened.run(folded) is True


def test_dark_and_light_have_colours_of_their_own_and_enough_contrast(opened: Browser) -> None:
    def luminance(colour: list[float]) -> float:
        linear = [each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in (x / 255 for x in colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    grounds = []
    script = (
        "const numbers = colour => colour.match(/[\\d.]+/g).map(Number).slice(0, 3);"
        "const of = (selector, ground) => [numbers(getComputedStyle(document.querySelector(selector)).color),"
        " numbers(getComputedStyle(document.querySelector(ground)).backgroundColor)];"
        "return [of('body', 'body'), of('td.wrong', 'td.wrong'), of('.note', 'body'), of('header', 'header'), of('nav a', 'nav')]"
    )
    for mode in ("light", "dark"):
        opened.command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": mode}]})
        for ink, ground in opened.run(script):
            high, low = sorted((luminance(ink), luminance(ground)), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (mode, ink, ground)
        grounds.append(opened.run("return getComputedStyle(document.body).backgroundColor"))
    opened.command("Emulation.setEmulatedMedia", {"features": []})
    assert len(set(grounds)) == 2


def test_on_paper_every_failure_is_unfolded(opened: Browser) -> None:
    opened.run("dispatchEvent(new Event('beforeprint'))")
    assert opened.run("return [...document.querySelectorAll('details.failure')].every(each => each.open)") is True


def test_nothing_is_wider_than_the_window(opened: Browser) -> None:
    assert opened.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth") is True


def test_a_page_that_fetches_would_be_noticed(window: Browser, tmp_path: Path) -> None:
    """The other tests could pass for a browser that tells of nothing."""
    bad = tmp_path / "bad.html"
    bad.write_text("<!doctype html><script src='absent.js'></script><script>undefined.x</script>")
    window.log("browser")
    window.requests()
    window.open(bad)
    assert window.requests() == [bad.as_uri(), (tmp_path / "absent.js").as_uri()]
    assert {each["level"] for each in window.log("browser")} == {"SEVERE"}
