"""`attnfuzz list`: kernels, where each can run, and all that one declares."""

from __future__ import annotations

import json

import msgspec
import pytest
from support.cli_subject import Subject, attnfuzz

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Capabilities

pytestmark = pytest.mark.usefixtures("only_acme")


def test_list() -> None:
    registry.register(Subject(refuses="its compiler is missing"))
    result = attnfuzz("list", "--json")
    assert result.exit_code == 0
    rows = {row["kernel"]: row for row in json.loads(result.stdout)["kernels"]}
    assert set(rows) == set(registry.names())
    assert rows["acme.flash"] == {
        "kernel": "acme.flash",
        "backend": "acme",
        "packings": ["ragged"],
        "dtypes": ["float16", "bfloat16"],
        "dims": [[8, 8]],
        "causal": [None, "bottom_right"],
        "outputs": ["o", "lse", "dq", "dk", "dv"],
        "runs_on": [],
        "reasons": {"cpu": "its compiler is missing", "cuda": "not declared"},
        "proof": None,
    }


def test_list_has_one_line_a_kernel_and_breaks_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "its compiler is missing, and so is what would install it: see the page on compilers of its makers"
    registry.register(Subject(refuses=reason))
    for columns in (100, 80, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = attnfuzz("list")
        assert result.exit_code == 0
        table, _, shown = result.stdout.partition("\n\n")
        head, *lines = table.splitlines()
        assert [line.split()[0] for line in lines] == list(registry.names())
        assert columns == 40 or max(map(len, shown.splitlines())) <= columns
        assert head.split()[:4] == ["kernel", "packings", "cpu", "cuda"]
        assert columns == 40 or max(map(len, lines)) <= columns
        [line] = (line for line in lines if line.startswith("acme.flash "))
        assert line.split()[1:4] == ["ragged", "no", "-"]
        assert reason.startswith(" ".join(line.split()[4:]).removesuffix(" ..."))
        assert set(line.split()[4:]) <= {*reason.split(), "..."}, "words are whole"


def test_list_says_what_was_shown_of_a_kernel_without_its_hardware() -> None:
    text = "compiled for sm_100a, run on the CPU"
    result = attnfuzz("list")
    shown = result.stdout.partition("\n\n")[2]
    rows = {row["kernel"]: row["proof"] for row in json.loads(attnfuzz("list", "--json").stdout)["kernels"]}
    for name in ("tilelang.sm100.ss", "tilelang.sm100.ts", "tilelang.sm100.wasp"):
        assert f"{name}: {text}" in shown
        assert rows[name].startswith(text)
        assert rows[name].endswith("not run on Blackwell hardware")
        assert f"   proof                 {text}" in attnfuzz("list", name).stdout
    assert {name for name, proof in rows.items() if proof is not None} == {
        line.split(":")[0] for line in shown.splitlines() if line[0] != " "
    }
    assert "proof" not in attnfuzz("list", "torch.reference_cpu").stdout


def test_list_of_a_kernel_shows_all_that_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register(Subject(refuses="its compiler is missing"))
    monkeypatch.setenv("COLUMNS", "60")
    result = attnfuzz("list", "acme.flash", "torch.reference_cpu")
    assert result.exit_code == 0
    own, peer = result.stdout.split("torch.reference_cpu (torch)\n")
    shown = {line[3:].split(maxsplit=1)[0]: line[25:] for line in own.splitlines()[1:] if line[3] != " "}
    assert own.startswith("acme.flash (acme)\n")
    assert set(shown) == {"cpu", "cuda", *(each.name for each in msgspec.structs.fields(Capabilities))}
    assert {name: shown[name] for name in ("cpu", "cuda", "packings", "dims", "causal", "unequal", "deviations")} == {
        "cpu": "its compiler is missing",
        "cuda": "not declared",
        "packings": "ragged",
        "dims": "8/8",
        "causal": "no, bottom_right",
        "unequal": "yes",
        "deviations": "none",
    }
    assert f"   files                 {registry.get('torch.reference_cpu').files[0]}\n" in peer
    assert (
        "   dims                  64/64, 32/32, 16/16, 128/128,\n                         96/96, 40/40, 7/7, 1/1, 256/256\n"
        in peer
    )
