"""Error maps: what is wrong shows exactly where it is, at any size, and the picture keeps its promises of colour and size."""

from __future__ import annotations

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result
from support.report import right, spoilt_case

from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.cli.picture import Picture
from attnfuzz.harness.judge import errormap
from attnfuzz.harness.judge.errormap import (
    BROKEN,
    EXACT,
    MOST_CELLS,
    OUTSIDE,
    STEPS,
    UNWRITTEN,
    ErrorMaps,
    axis,
    read_maps,
    write_maps,
)
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report import plots
from attnfuzz.harness.repro.reproduce import Reproduction, Where
from attnfuzz.harness.trial.errormaps import error_maps
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Inputs
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Needs
from attnfuzz.oracles.attention import visible_keys

BEYOND = EXACT + STEPS
"""The worst level within the budget."""


@pytest.fixture(autouse=True)
def _only_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})


def mapped(*arguments: Any, **changed: Any) -> ErrorMaps:
    maps = error_maps(spoilt_case(*arguments, **changed), "cpu")
    assert isinstance(maps, ErrorMaps), maps
    return maps


def levels(maps: ErrorMaps, name: str) -> torch.Tensor:
    """(rows, columns) of one output's map."""
    grid = next(each.grid for each in maps.outputs if each.output == name)
    return torch.tensor(list(errormap.unpacked(grid))).reshape(grid.rows.cells, grid.columns.cells)


def mask(maps: ErrorMaps) -> torch.Tensor:
    assert maps.mask is not None
    return torch.tensor(list(errormap.unpacked(maps.mask))).reshape(maps.mask.rows.cells, maps.mask.columns.cells)


# --- what is wrong shows where it is


def test_a_right_kernel_has_no_cell_beyond_its_budget() -> None:
    maps = mapped(right)
    assert [each.output for each in maps.outputs] == ["o", "lse", "dq", "dk", "dv"]
    assert maps.over == 0
    assert all(int(levels(maps, each.output).max()) <= BEYOND for each in maps.outputs)
    assert any(int(levels(maps, each.output).max()) > EXACT for each in maps.outputs), "roundings show"


def test_wrong_elements_show_exactly_where_they_are() -> None:
    def spoil(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> None:
        if "dk" in outputs:
            # Keys 2 and 3 of the second sequence, the second head, dims 5 to 7.
            outputs["dk"][8:10, 1, 5:8] += 1.0

    maps = mapped(spoil)
    expected = torch.zeros(15, 2, 8, dtype=torch.bool)
    expected[8:10, 1, 5:8] = True
    assert torch.equal(levels(maps, "dk") > BEYOND, expected.reshape(15, 16))
    found = {each.output: each for each in maps.outputs}
    assert (found["dk"].over, found["dk"].elements) == (6, 240)
    assert [name for name, each in found.items() if each.over] == ["dk"]


def test_a_level_tells_how_far_off_an_element_is() -> None:
    def spoil(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> None:
        if "o" in outputs:
            outputs["o"][0, 0, 0] += 1e-5
            outputs["o"][0, 0, 1] += 1.0

    row = levels(mapped(spoil), "o")[0]
    assert BEYOND < row[0] < row[1]
    assert row[1] == EXACT + 2 * STEPS, "a thousand budgets and more are one level"


def test_nan_that_was_computed_and_memory_never_written_are_told_apart() -> None:
    def spoil(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> None:
        if "dv" in outputs:
            outputs["dv"][0, 0] = torch.nan
            outputs["dv"][1] = torch.empty_like(outputs["dv"][1])

    found = levels(mapped(spoil), "dv")
    assert (found[0, :8] == BROKEN).all()
    assert (found[1] == UNWRITTEN).all()
    assert int(found[2:].max()) <= BEYOND


def test_what_cannot_be_compared_is_left_out() -> None:
    def spoil(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> None:
        if "o" in outputs:
            outputs["o"].resize_(1)

    found = mapped(spoil, needs=Needs(outputs=("o", "lse")))
    assert [each.output for each in found.outputs] == ["lse"]


def test_why_there_is_nothing_to_map_is_told() -> None:
    def spoil(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> None:
        raise ValueError("no such tile")

    assert error_maps(spoilt_case(spoil), "cpu") == "exception: forward raised ValueError: no such tile"
    assert error_maps(spoilt_case(right, check="permuted_keys"), "cpu") == (
        "permuted_keys compares two calls with each other, and neither with budgets"
    )


def test_a_sequence_of_calls_maps_the_last() -> None:
    calls = []

    def spoil(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> None:
        if "o" in outputs:
            calls.append(1)
            outputs["o"][0] += float(len(calls) > 1)

    assert mapped(spoil, check="twice").over > 0


# --- large Cases, masks, tiles


def test_a_single_wrong_element_survives_the_reduction() -> None:
    def spoil(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> None:
        if "dq" in outputs:
            outputs["dq"][650, 2, 7] += 1.0

    maps = mapped(spoil, seqlens_q=(301, 500), seqlens_k=(3, 5), dim_qk=64, dim_v=64, heads=8, kv_heads=8)
    [row, column] = (levels(maps, "dq") > BEYOND).nonzero()[0].tolist()
    grid = next(each.grid for each in maps.outputs if each.output == "dq")
    assert max(grid.rows.cells, grid.columns.cells) <= MOST_CELLS
    assert int((levels(maps, "dq") > BEYOND).sum()) == 1
    first, cells, _ = list(grid.rows.parts())[1]
    assert row == first + (650 - 301) // grid.rows.step
    assert column == (-(-64 // grid.columns.step)) * 2 + 7 // grid.columns.step
    assert first + cells == grid.rows.cells


@pytest.mark.parametrize("segments", [(0,), (1,), (0, 3, 0), (385,), (200, 200), (1,) * 48, (7,) * 500, (3_000_000, 1)])
def test_an_axis_is_never_longer_than_a_picture(segments: tuple[int, ...]) -> None:
    made = axis(segments)
    assert made.cells <= MOST_CELLS
    assert sum(made.segments) == sum(segments)
    assert made.cells * made.step >= sum(segments)
    assert bool(made.merged) == (len(segments) > errormap.MOST_SEGMENTS)


@pytest.mark.parametrize("causal", [None, "top_left"])
def test_the_mask_is_the_oracles(causal: Any) -> None:
    case = spoilt_case(right, causal=causal)
    found = mask(mapped(right, causal=causal))
    for index, (rows, columns) in enumerate(((slice(5), slice(6)), (slice(5, 12), slice(6, 15)))):
        assert torch.equal(found[rows, columns] == 2, visible_keys(case.problem, index))
    assert (found[:5, 6:] == OUTSIDE).all()
    assert (found[5:, :6] == OUTSIDE).all()


def test_a_reduced_mask_says_where_a_cell_is_seen_in_part() -> None:
    maps = mapped(right, seqlens_q=(800,), seqlens_k=(800,), causal="top_left", heads=1, kv_heads=1)
    found = mask(maps)
    step = maps.mask.rows.step if maps.mask else 0
    assert step > 1
    assert (found.diagonal() == 1)[:-1].all()
    assert (found.triu(1) == 0).all()
    assert (found.tril(-1) == torch.full_like(found, 2).tril(-1)).all()


def test_tiles_are_those_of_the_config() -> None:
    def tiles(**config: int) -> list[int]:
        return [each.tile for each in mapped(right, config=Config(**config)).outputs]

    assert tiles(tile_m=16, tile_n=32) == [16, 16, 16, 32, 32]
    assert tiles(tile_m=16, tile_n=32, back_tile_m=8, back_tile_n=64) == [16, 16, 8, 64, 64]
    assert tiles(tile_m=16, tile_n=32, dq_tile_m=128, dkv_tile_n=4) == [16, 16, 128, 4, 4]
    assert tiles(stages=2) == [0] * 5


# --- the file


def test_maps_come_back_as_they_were(tmp_path: Path) -> None:
    maps = mapped(right, seqlens_q=(0, 4), seqlens_k=(3, 0))
    write_maps(tmp_path / "maps" / "a.json", maps)
    assert msgspec.json.encode(read_maps(tmp_path / "maps" / "a.json")) == msgspec.json.encode(maps)
    assert [each.name for each in (tmp_path / "maps").iterdir()] == ["a.json"]


def broken_maps(maps: ErrorMaps) -> dict[str, tuple[str, str]]:
    plain = json.loads(msgspec.json.encode(maps))
    few, bomb, wide, step = (json.loads(json.dumps(plain)) for _ in range(4))
    few["outputs"][0]["grid"]["cells"] = errormap.packed(b"\1")
    bomb["outputs"][0]["grid"]["cells"] = errormap.packed(bytes(50_000_000))
    wide["outputs"][0]["grid"]["rows"]["segments"] = [10**12]
    step["outputs"][0]["grid"]["rows"]["step"] = 0
    return {
        "empty": ("", "it is broken (not JSON (Input data was truncated))"),
        "a list": ("[]", "its format is None, this attnfuzz reads 1"),
        "another version": ('{"format": 2}', "its format is 2, this attnfuzz reads 1"),
        "a part missing": ('{"format": 1}', "it is broken (Object missing required field `case`)"),
        "too few levels": (json.dumps(few), "it is broken (it has 1 levels, not 384)"),
        "too many levels": (json.dumps(bomb), "it is broken (it has 385 levels, not 384)"),
        "a side too long": (json.dumps(wide), "it is broken (a map is larger than any that is written)"),
        "no step": (json.dumps(step), "it is broken (an axis has steps of 1 or more"),
    }


def test_a_broken_file_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for name, (content, reason) in broken_maps(mapped(right)).items():
        path.write_text(content)
        with pytest.raises(BadArgument) as error:
            read_maps(path)
        assert str(error.value).startswith(f"maps={str(path)!r}: {reason}"), (name, str(error.value))
    with pytest.raises(BadArgument, match="it cannot be read"):
        read_maps(tmp_path / "none.json")


# --- the picture


def pixels(content: bytes) -> Any:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(BytesIO(content)).convert("RGB")).astype(int)


def reds(content: bytes) -> int:
    """Pixels of the colours beyond the budget, above the scale, which holds them all."""
    seen = pixels(content)[:-110]
    return int(((seen[..., 0] > seen[..., 2] + 40) & (seen[..., 1] < seen[..., 0] - 40)).sum())


def test_the_picture_shows_red_only_where_something_is_wrong() -> None:
    def spoil(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> None:
        if "dk" in outputs:
            outputs["dk"][8:] += 1.0

    bad, good = plots.render(mapped(spoil), "a title"), plots.render(mapped(right), "a title")
    assert reds(good) == 0
    assert reds(bad) > 10_000
    assert pixels(bad).shape == (835, 1200, 3)
    assert max(len(bad), len(good)) < 200_000
    assert plots.render(mapped(right), "a title") == good, "equal maps are equal pictures"


@pytest.mark.parametrize(
    "problem",
    [
        {"seqlens_q": (0,), "seqlens_k": (0,)},
        {"seqlens_q": (0, 3), "seqlens_k": (4, 0)},
        {"seqlens_q": (1,) * 60, "seqlens_k": (2,) * 60},
        {"seqlens_q": (3, 500, 2), "seqlens_k": (9, 1, 30), "heads": 20, "kv_heads": 20},
    ],
    ids=["nothing", "no queries or no keys", "many sequences", "many heads"],
)
def test_every_shape_can_be_drawn(problem: dict[str, Any]) -> None:
    for form, begin in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        assert plots.render(mapped(right, **problem), "$a_{b$ \x07 <b>", "x " * 500, form).startswith(begin)


def test_the_scale_steps_at_the_budget_for_every_eye() -> None:
    import numpy as np

    table = plots._lookup()
    within, beyond = table[EXACT + 1 : EXACT + 1 + STEPS], table[EXACT + 1 + STEPS : EXACT + 1 + 2 * STEPS]
    grey = np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(within @ grey) <= 1e-9).all(), "worse is darker"
    assert (np.diff(beyond @ grey) <= 1e-9).all(), "worse is darker"
    # Machado and others, 2009: what is left of a colour without red or without green receptors.
    protan = np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]])
    deutan = np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]])
    for eye in (np.eye(3), protan, deutan):
        apart = np.linalg.norm((within @ eye.T)[:, None] - (beyond @ eye.T)[None], axis=-1)
        assert apart.min() > 0.25


# --- attnfuzz repro CASE --plot


def attnfuzz(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, [*arguments, "--device", "cpu"])


def stored(spoil: Any) -> str:
    Path("case.json").write_text(json.dumps(spoilt_case(spoil).to_object()))
    return "case.json"


def wrong_dk(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> None:
    if "dk" in outputs:
        outputs["dk"][8:] += 1.0


def test_repro_draws_into_a_file_or_a_folder(tmp_path: Path) -> None:
    case = stored(wrong_dk)
    done = attnfuzz("repro", case, "--in-process", "--plot", "a/b.png")
    assert done.exit_code == 1, done.output
    assert done.stdout.splitlines()[-1] == "plot: a/b.png"
    assert reds(Path("a/b.png").read_bytes()) > 10_000
    done = attnfuzz("repro", case, "--in-process", "--plot", "a", "--json")
    assert (done.exit_code, json.loads(done.stdout)["plot"]) == (1, "a/case.png")
    assert Path("a/case.png").read_bytes() == Path("a/b.png").read_bytes()


def test_what_cannot_be_drawn_is_said_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it ran")

    case = stored(never)
    Path("file").write_text("")
    for target, reason in (
        ("a.gif", "plot='a.gif': no such format; give a file that ends with .png, .svg, .pdf, or a folder"),
        ("file/a.png", "plot='file/a.png': it cannot be written (file is not a folder)"),
    ):
        done = attnfuzz("repro", case, "--in-process", "--plot", target)
        assert done.exit_code == 2
        assert done.stderr.startswith(f"error: {reason}")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = attnfuzz("repro", case, "--in-process", "--plot", "a.png")
    assert done.exit_code == 2
    assert "it is not installed, and drawing needs it; pip install 'attnfuzz[report]'" in done.stderr


def test_a_kernel_that_crashes_costs_the_picture_only() -> None:
    problem = {"seqlens_q": [3], "seqlens_k": [4], "dim_qk": 16, "dim_v": 16, "dtype": "float32"}
    config = {"tile_m": 16, "tile_n": 16}
    Path("case.json").write_text(json.dumps({"format": 1, "kernel": "fault.abort", "problem": problem, "config": config}))
    made = Picture("a.png", read_case("case.json")).draw(Reproduction("FAILED", "cpu", Verdict(status="fail")), Where("cpu"))
    assert made == {"plot": None, "no_plot": "SIGABRT at host.py:_abort"}
    assert not Path("a.png").exists()
