"""The ledger: what an entry must hold, what it lets through, and when it may not stay."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.gate.ledger import Ledger, case_of, check_kernels, let_through, read_ledger, spent
from attnfuzz.harness.gate.result import Finding, KernelGate, Part
from attnfuzz.kernels.errors import BadArgument

TODAY = date(2026, 3, 1)
WRONG_DK = Finding("campaign", "acme.flash", "dK: 3 of 9 elements are wrong", "mismatch", "dk", "element")
ROUGH = Finding("accuracy", "acme.flash", "dQ: the rms error over budget is 0.2", output="dq", check="rms")

ENTRY = {
    "kernel": '"acme.flash"',
    "kind": '"mismatch"',
    "output": '"dK"',
    "issue": '"https://example.org/acme/issues/12"',
    "expires": "2026-06-30",
}


def written(folder: Path, *entries: dict[str, str], text: str | None = None) -> Path:
    path = folder / "attnfuzz-ledger.toml"
    lines = ["# known failures"]
    for entry in entries:
        lines += ["[[known]]", *(f"{name} = {value}" for name, value in entry.items())]
    path.write_text("\n".join(lines) if text is None else text)
    return path


def read(folder: Path, *entries: dict[str, str], text: str | None = None) -> Ledger:
    return read_ledger(written(folder, *entries, text=text), TODAY)


def gated(*parts: Part) -> KernelGate:
    return KernelGate("acme.flash", "changed", parts)


def campaign(*findings: Finding, complete: bool = True) -> Part:
    return Part("campaign", "fail" if findings else "pass", "", findings, complete=complete)


def part_entry(part: str, **more: str) -> dict[str, str]:
    return {"kernel": '"acme.flash"', "part": f'"{part}"', "issue": '"#7"', "expires": "2026-03-01", **more}


def without(*names: str, **more: str) -> dict[str, str]:
    return {**{name: value for name, value in ENTRY.items() if name not in names}, **more}


def test_an_entry_lets_its_failure_through_until_it_expires(tmp_path: Path) -> None:
    ledger = read(tmp_path, ENTRY)
    before = gated(campaign(WRONG_DK))
    through = let_through(before, ledger, date(2026, 6, 30))
    assert through.outcome == "known"
    assert through.findings[0].waiver is not None
    assert through.findings[0].waiver.issue == "https://example.org/acme/issues/12"
    assert spent(ledger, [through], date(2026, 6, 30)) == ((), ())
    after = let_through(before, ledger, date(2026, 7, 1))
    assert after.outcome == "fail"
    (text, line), *rest = spent(ledger, [after], date(2026, 7, 1))[0]
    assert not rest
    assert line == 2
    assert "entry 1 (acme.flash: mismatch in dK, https://example.org/acme/issues/12): it expired on 2026-06-30" in text


def test_an_entry_holds_only_with_its_versions(tmp_path: Path) -> None:
    here = without(versions=f'{{ torch = "{versions()["torch"]}", click = "{metadata.version("click")}" }}')
    other = {**ENTRY, "versions": '{ torch = "1.0", nothing = "2" }'}
    ledger = read(tmp_path, here, other)
    before = gated(Part("replay", "pass", ""), campaign(WRONG_DK))
    assert [each.number for each in ledger.in_force(TODAY)] == [1]
    assert let_through(before, ledger, TODAY).outcome == "known"
    wrong, notes = spent(ledger, [before], TODAY)
    assert not wrong
    assert ": not used: it holds for nothing 2, torch 1.0, which is not installed here" in notes[0]
    alone = read(tmp_path, other)
    assert let_through(before, alone, TODAY).outcome == "fail"
    wrong, notes = spent(alone, [gated(Part("replay", "pass", ""), campaign())], TODAY)
    assert (wrong, len(notes)) == ((), 1), "it may show with its own versions"
    assert spent(alone, [], date(2026, 7, 1))[0], "an entry expires with any versions"


def test_an_entry_of_another_device_means_nothing_there(tmp_path: Path) -> None:
    both = read(tmp_path, {**ENTRY, "device": '"cuda"'}, {**ENTRY, "device": '"cpu"', "output": '"dV"'}, part_entry("speed"))
    fails, passes = (gated(Part("replay", "pass", ""), campaign(*each)) for each in ((WRONG_DK,), ()))
    on_gpu, on_cpu = both.on("cuda", TODAY), both.on("cpu", TODAY)
    assert [[each.number for each in ledger.entries] for ledger in (on_gpu, on_cpu)] == [[1, 3], [2, 3]]
    assert (let_through(fails, on_gpu, TODAY).outcome, let_through(fails, on_cpu, TODAY).outcome) == ("known", "fail")
    (gone,) = spent(on_gpu, [passes], TODAY)[0]
    assert gone[0].startswith("entry 1 (acme.flash: mismatch in dK on cuda, ")
    (gone,) = spent(on_cpu, [passes], TODAY)[0]
    assert gone[0].startswith("entry 2 (acme.flash: mismatch in dV on cpu, ")
    late = date(2026, 7, 1)
    (expired, *_) = spent(both.on("cpu", late), [], late)[0]
    assert expired[0].startswith("entry 1 "), "an entry expires on any device"


def test_entries_that_differ_in_the_device_only(tmp_path: Path) -> None:
    assert len(read(tmp_path, {**ENTRY, "device": '"cuda"'}, {**ENTRY, "device": '"cpu"'}).entries) == 2
    with pytest.raises(BadArgument, match=r"it repeats entry 1"):
        read(tmp_path, {**ENTRY, "device": '"cuda"'}, {**ENTRY, "device": '"cuda"'})


@pytest.mark.parametrize(
    "other",
    [
        replace(WRONG_DK, output="dv"),
        replace(WRONG_DK, kind="nonfinite"),
        replace(WRONG_DK, kernel="acme.other"),
        replace(WRONG_DK, part="accuracy", kind=None),
    ],
    ids=["another output", "another kind", "another kernel", "no kind"],
)
def test_another_failure_is_not_let_through(other: Finding, tmp_path: Path) -> None:
    found = let_through(gated(campaign(WRONG_DK, other)), read(tmp_path, ENTRY), TODAY)
    assert found.outcome == "fail"
    assert [each.waiver is not None for each in found.findings] == [True, False]


def test_an_entry_by_message_and_check(tmp_path: Path) -> None:
    ledger = read(tmp_path, without("output", message='"3 of 9"', check='"element"'))
    assert let_through(gated(campaign(WRONG_DK)), ledger, TODAY).outcome == "known"
    assert let_through(gated(campaign(replace(WRONG_DK, message="dK: 4 of 9"))), ledger, TODAY).outcome == "fail"
    assert let_through(gated(campaign(replace(WRONG_DK, check="R"))), ledger, TODAY).outcome == "fail"


def test_an_entry_of_a_part_lets_no_wrong_output_through(tmp_path: Path) -> None:
    ledger = read(tmp_path, part_entry("accuracy"))
    assert let_through(gated(Part("accuracy", "fail", "", (ROUGH,))), ledger, TODAY).outcome == "known"
    wrong = replace(WRONG_DK, part="accuracy")
    assert let_through(gated(Part("accuracy", "fail", "", (wrong,))), ledger, TODAY).outcome == "fail"


def test_an_entry_whose_failure_is_gone_is_an_error(tmp_path: Path) -> None:
    ledger = read(tmp_path, ENTRY, part_entry("accuracy"))
    clean = gated(Part("replay", "pass", ""), campaign(), Part("accuracy", "pass", ""))
    wrong, notes = spent(ledger, [clean], TODAY)
    assert [line for _, line in wrong] == [2, 8]
    assert "it did not show in the corpus nor in the campaign; take the entry out" in wrong[0][0]
    assert "accuracy passes" in wrong[1][0]
    assert not notes


def test_what_was_not_looked_for_is_no_error(tmp_path: Path) -> None:
    ledger = read(tmp_path, ENTRY, part_entry("speed"))
    assert spent(ledger, [], TODAY) == ((), ()), "the kernel did not change"
    skipped = gated(Part("replay", "fail", "", (replace(WRONG_DK, part="replay", output="o"),)), Part("campaign", "skipped", ""))
    assert spent(ledger, [skipped], TODAY) == ((), ())
    doubtful = gated(Part("speed", "pass", "", complete=False))
    assert spent(ledger, [doubtful], TODAY) == ((), ()), "noise may hide that it is slow still"


def test_a_campaign_that_time_ended_proves_nothing_but_the_entrys_case_does(tmp_path: Path) -> None:
    short = gated(Part("replay", "pass", ""), campaign(complete=False))
    wrong, notes = spent(read(tmp_path, ENTRY), [short], TODAY)
    assert not wrong
    assert "give the entry its case file" in notes[0]
    (tmp_path / "case.json").write_text("{}")
    wrong, notes = spent(read(tmp_path, {**ENTRY, "case": '"case.json"'}), [short], TODAY)
    assert "its case case.json does not show it" in wrong[0][0]
    assert not notes


def test_a_case_that_is_not_taken_here_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text("{}")
    ledger = read(tmp_path, {**ENTRY, "case": '"case.json"'})
    skipped = gated(Part("replay", "pass", "", figures={"skipped": ["case.json: no dims 64/64"]}), campaign())
    assert spent(ledger, [skipped], TODAY) == ((), ())


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (without("issue"), "it has no issue"),
        (without("expires"), "it has no expires"),
        (without("kernel"), "it has no kernel"),
        (without("kind"), "neither a kind nor a part"),
        ({**ENTRY, "part": '"accuracy"'}, "a kind and a part"),
        ({**ENTRY, "kind": '"mismatched"'}, "kind='mismatched': there is no such kind"),
        ({**ENTRY, "output": '"dW"'}, "use one of O, LSE, dQ, dK, dV"),
        ({**ENTRY, "issue": '"later"'}, "issue='later' is not a reference to an issue"),
        ({**ENTRY, "issue": "12"}, "issue=12 must be a text"),
        ({**ENTRY, "kernel": '""'}, "kernel='' must be a text"),
        ({**ENTRY, "expires": '"soon"'}, "expires='soon' is not a day"),
        ({**ENTRY, "expires": "2026-06-30T10:00:00"}, "is not a day"),
        ({**ENTRY, "expires": "2027-04-01"}, "more than a year ahead"),
        ({**ENTRY, "owner": '"me"'}, "'owner' is not a field of an entry"),
        ({**ENTRY, "device": '"gpu"'}, "device='gpu': there is no such device; use one of cpu, cuda"),
        ({**ENTRY, "case": '"gone.json"'}, "there is no such file"),
        ({**ENTRY, "versions": '"2.11.0"'}, "versions='2.11.0' must be a table of texts"),
        ({**ENTRY, "versions": "{}"}, "versions={} must be a table of texts"),
        ({**ENTRY, "versions": "{ torch = 2 }"}, "versions={'torch': 2} must be a table of texts"),
        (part_entry("campaign"), "part='campaign': there is no such part"),
        (part_entry("speed", case='"x.json"'), "a part cannot have a case"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_entry_is_told_with_its_number_and_line(entry: dict[str, str], told: str, tmp_path: Path) -> None:
    with pytest.raises(BadArgument) as error:
        read(tmp_path, part_entry("speed", kernel='"acme.other"'), entry)
    assert told in str(error.value)
    assert "entry 2 (line 7)" in str(error.value)
    assert str(tmp_path / "attnfuzz-ledger.toml") in str(error.value)


def test_an_entry_twice(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"entry 2 \(line 8\): it repeats entry 1; keep one"):
        read(tmp_path, ENTRY, {**ENTRY, "issue": '"#13"'})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[known]\n", "it is not TOML: .*line 1"),
        ("known = " + "[" * 5000 + "]" * 5000, "it is nested too deeply"),
        ("[known]\nkernel = 'a'\n", "known must be a list of tables"),
        ("known = [1]\n", "known must be a list of tables"),
        ("[[waived]]\n", "'waived' is not a field of a ledger"),
    ],
)
def test_a_broken_file(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=told):
        read(tmp_path, text=text)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="cannot be read"):
        read_ledger(tmp_path / "none.toml", TODAY)
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(BadArgument, match="not UTF-8"):
        read_ledger(tmp_path / "latin.toml", TODAY)


def test_an_empty_ledger_is_one(tmp_path: Path) -> None:
    assert read(tmp_path, text="").entries == ()


def test_inline_entries_have_no_line(tmp_path: Path) -> None:
    inside: dict[str, Any] = {**ENTRY, "issue": '"later"'}
    with pytest.raises(BadArgument, match=r"entry 1: issue='later'"):
        read(tmp_path, text="known = [{" + ", ".join(f"{name} = {value}" for name, value in inside.items()) + "}]")


PEERS = ROOT / "tests/corpus/peers"


def test_the_ledger_of_pytorchs_kernels_has_every_kept_case() -> None:
    ledger = read_ledger(PEERS / "ledger.toml", date.today())
    assert sorted(each.case for each in ledger.entries if each.case) == sorted(PEERS.glob("*.json"))
    check_kernels(ledger, ())
    for entry in ledger.entries:
        stored = case_of(entry)
        assert stored is not None
        assert entry.kernel.startswith("torch."), "our own kernels are mended"
        assert dict(entry.versions) == {"torch": stored.finding.versions["torch"]}
        identity = stored.finding.identity
        assert identity is not None
        assert entry.covers(Finding.of("campaign", identity, stored.finding.message))


def test_a_case_of_another_kernel_than_its_entrys(tmp_path: Path) -> None:
    (case, *_) = sorted(PEERS.glob("torch.cudnn-*.json"))
    (tmp_path / "case.json").write_bytes(case.read_bytes())
    (entry,) = read(tmp_path, {**ENTRY, "case": '"case.json"'}).entries
    with pytest.raises(BadArgument, match=r"it is of torch.cudnn, and named by the ledger's entry 1 \(acme.flash"):
        case_of(entry)
