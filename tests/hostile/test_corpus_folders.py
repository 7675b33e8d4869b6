"""Folders of case files that somebody else filled, as from a cache of CI: an error that names the file, or a sound result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hostile_files import CODE, NO_FILES, apart, attnfuzz, case, refused, written

from attnfuzz.harness.campaign.corpus import Corpus
from attnfuzz.harness.gate.parts.correctness import stored_cases
from attnfuzz.kernels.errors import BadArgument

RUN = ("run", "torch.reference_cpu", "--device", "cpu", "--in-process", "--max-examples", "1", "--out", "out")
FILE = Path("out/cases/torch.reference_cpu-o-mismatch-0123456789.json")


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with apart(tmp_path, monkeypatch):
        FILE.parent.mkdir(parents=True)
        yield


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON"),
    "200,000 brackets": (b"[" * 200_000, "nested too deeply"),
    "another version": (written(case(format=2)), "this attnfuzz reads format 1"),
    "a kernel to import": (written(case(kernel="os:system")), "a kernel's own name is expected"),
    "code for a choice": (written(case(config={f"x={CODE}": 1})), "case.config="),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_case_file_is_named_before_anything_runs(name: str) -> None:
    content, reason = BROKEN[name]
    FILE.write_bytes(content)
    refused(attnfuzz(*RUN), f"case={str(FILE)!r}: ", reason)
    refused(attnfuzz("merge", "all", "out"))
    assert not Path("out/runs").exists()
    assert not Path("all").exists()
    with pytest.raises(BadArgument, match="case="):
        stored_cases("none", ["out"])


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_is_named_before_anything_runs(name: str) -> None:
    make, reason = NO_FILES[name]
    make(FILE.absolute())
    refused(attnfuzz(*RUN), f"case={str(FILE)!r}: {reason}")
    with pytest.raises(BadArgument, match="case="):
        stored_cases("none", ["out"])
    assert not Path("out/runs").exists()


def test_a_case_of_another_kernel_under_this_ones_name_is_not_run() -> None:
    FILE.write_bytes(written(case(kernel="acme.unknown")))
    result = attnfuzz(*RUN)
    assert result.exit_code == 0, result.output
    assert "acme.unknown" not in result.output


def test_a_case_that_the_kernel_does_not_take_is_skipped_with_the_reason() -> None:
    FILE.write_bytes(written(case(config={"x": 1})))
    result = attnfuzz(*RUN)
    assert result.exit_code == 0, result.output
    assert f"{FILE}: not tried again here: config=" in result.stdout


@pytest.mark.parametrize("other", ["/dev", "/proc/self", "/etc"])
def test_a_folder_of_something_else_holds_no_cases(other: str) -> None:
    FILE.parent.rmdir()
    FILE.parent.symlink_to(other)
    assert list(Corpus("out").of("torch.reference_cpu")) == []


def test_names_of_files_are_data() -> None:
    for name in (
        "x\n::error::.json",
        "$(touch EXECUTED).json",
        "'; touch EXECUTED; '.json",
        "-rf.json",
        "x\x1b[2J.json",
        "\udcff.json",
    ):
        (FILE.parent / name).write_bytes(written(case()))
    [only] = stored_cases("out", [])
    assert only.case.kernel == "torch.reference_cpu"
    assert attnfuzz(*RUN).exit_code == 0


def test_a_case_file_that_is_a_link_is_replaced_and_not_followed() -> None:
    """What a finding is written to may be a link from the cache."""
    Path("mine").write_text("mine")
    link = FILE.with_name("link.json")
    link.symlink_to(Path("mine").absolute())
    from attnfuzz.harness.core.files import write_whole

    write_whole(link, "{}")
    assert Path("mine").read_text() == "mine"
    assert not link.is_symlink()


def test_a_kernel_of_a_long_name_has_a_case_file_and_finds_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from support.adapters import flash

    from attnfuzz.kernels import registry
    from attnfuzz.kernels.adapters import dense

    def wrong(q, k, v, softmax_scale=None, causal=False):
        return flash(q, k, v, softmax_scale=softmax_scale, causal=causal) + 1

    name = "acme." + "a" * 300
    small = {"dims": ((8, 8),), "dtypes": ("float32",), "devices": ("cpu",)}
    monkeypatch.setattr(registry, "_registered", {name: dense(wrong, name=name, **small)})
    command = ("run", name, *RUN[2:])
    assert attnfuzz(*command).exit_code == 1
    [file] = FILE.parent.iterdir()
    assert len(file.name) < 255
    assert attnfuzz("repro", str(file), "--in-process", "--device", "cpu").exit_code == 1
    registry._registered[name] = dense(flash, name=name, **small)
    result = attnfuzz(*command, "--json")
    assert [each.kernel for each in (stored.case for stored in Corpus("out").of(name))] == [name]
    assert json.loads(result.stdout)["kernels"][0]["kernel"] == name
    assert list(Path("out/cases").iterdir()) == [file]


def test_what_could_not_be_written_is_a_line_that_runs_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import shlex

    from support.adapters import flash

    from attnfuzz.harness.campaign import corpus
    from attnfuzz.kernels import registry
    from attnfuzz.kernels.adapters import dense

    def wrong(q, k, v, softmax_scale=None, causal=False):
        return flash(q, k, v, softmax_scale=softmax_scale, causal=causal) + 1

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "cases/x.json")

    kernel = dense(wrong, name="acme.wrong", dims=((8, 8),), dtypes=("float32",), devices=("cpu",))
    monkeypatch.setattr(registry, "_registered", {"acme.wrong": kernel})
    monkeypatch.setattr(corpus, "write_whole", full)
    result = attnfuzz("run", "acme.wrong", *RUN[2:])
    assert result.exit_code == 2
    line = result.stdout.partition("run it again:")[2].splitlines()[0].strip()
    program, command, blob = shlex.split(line)
    assert (program, command, blob[:4]) == ("attnfuzz", "repro", "AF1-")
    assert attnfuzz(command, blob, "--in-process", "--device", "cpu").exit_code == 1
