"""Ledgers of which somebody else chose every byte, as in a pull request."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.hostile_files import CODE, NO_FILES, apart, attnfuzz, refused


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with apart(tmp_path, monkeypatch):
        yield


SOON = (datetime.now(UTC).date() + timedelta(days=30)).isoformat()
RUN = ("run", "torch.reference_cpu", "--device", "cpu", "--in-process", "--max-examples", "1", "--out", "out")


def entry(**changed: str) -> str:
    fields = {"kernel": '"torch.reference_cpu"', "kind": '"mismatch"', "issue": '"#12"', "expires": SOON}
    return "[[known]]\n" + "".join(f"{name} = {value}\n" for name, value in {**fields, **changed}.items() if value)


BROKEN: dict[str, tuple[str | bytes, str]] = {
    "not TOML": ("[[known]", "it is not TOML"),
    "JSON": ('{"known": []}', "it is not TOML"),
    "Python": (CODE, "it is not TOML"),
    "a NUL": ("a = '\0'", "it is not TOML"),
    "bytes that are not UTF-8": (b"a = '\xff'", "it is not UTF-8 (invalid start byte at byte 5)"),
    "UTF-16": (entry().encode("utf-16"), "it is not UTF-8"),
    "a lone surrogate": ('a = "\\ud800"', "it is not TOML"),
    "an integer of 5,000 digits": (f"a = {'9' * 5000}", "it is not TOML: Exceeds the limit"),
    "a date of 5,000 digits": (entry(expires="9" * 5000), "it is not TOML"),
    "100,000 brackets": ("a = " + "[" * 100_000, "nested too deeply"),
    "300 levels": ("a = " + "[" * 300 + "]" * 300, "nested too deeply"),
    "300 tables in each other": (".".join(["a"] * 300) + " = 1", "nested too deeply"),
    "another table": ("[tool]\nx = 1", "'tool' is not a field of a ledger"),
    "a table with an escape": ('["\\u001b[2J"]\nx = 1', "'\\x1b[2J' is not a field of a ledger"),
    "known as a number": ("known = 3", "known must be a list of tables"),
    "an unknown field": (entry(command=f'"{CODE}"'), "'command' is not a field of an entry"),
    "a field of a million letters": (entry(**{"x" * 1_000_000: "1"}), "is not a field of an entry"),
    "no expiry": (entry(expires=""), "it has no expires"),
    "an expiry in a hundred years": (entry(expires="2126-01-01"), "is more than a year ahead"),
    "an expiry in words": (entry(expires='"never"'), "expires='never' is not a day"),
    "an expiry with a time": (entry(expires="2026-12-31T00:00:00"), "is not a day"),
    "an expiry of 40,000 bits": (entry(expires=f"0x{'f' * 10_000}"), "expires=a int that cannot be printed is not a day"),
    "a kernel of 40,000 bits": (entry(kernel=f"0x{'f' * 10_000}"), "kernel=a int that cannot be printed must be a text"),
    "no issue": (entry(issue='" "'), "must be a text that is not empty"),
    "an issue in words": (entry(issue='"later"'), "is not a reference to an issue"),
    "an issue of a million slashes": (entry(issue=f'"https://{"/" * 1_000_000} x"'), "is not a reference to an issue"),
    "kind and part": (entry(part='"accuracy"'), "it has a kind and a part"),
    "every kind": (entry(kind='"*"'), "there is no such kind"),
    "an unknown output": (entry(output='"everything"'), "there is no such output"),
    "an unknown kernel": (entry(kernel='"acme.flash"'), "there is no such kernel here"),
    "a kernel to import": (entry(kernel='"os:system"'), "there is no such kernel here"),
    "a case that is absent": (entry(case='"../../etc/passwd-not-there"'), "there is no such file"),
    "a case that is no Case": (entry(case='"/etc/hostname"'), "case='/etc/hostname'"),
    "a case that is a device": (entry(case='"/dev/zero"'), "there is no such file"),
    "a case of 5,000 letters": (entry(case=f'"{"x" * 5000}"'), "there is no such file"),
    "a case with a NUL": (entry(case='"x\\u0000y"'), "there is no such file"),
    "versions of nothing": (entry(versions='{ "" = "1" }'), "must be a table of texts"),
    "versions of numbers": (entry(versions="{ torch = 2 }"), "must be a table of texts"),
    "the same twice": (entry() * 2, "it repeats entry 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_hostile_ledger_is_refused(name: str) -> None:
    content, reason = BROKEN[name]
    Path("ledger.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert len(refused(attnfuzz(*RUN, "--ledger", "ledger.toml"), reason)) < 3000
    assert not Path("out/runs").exists(), "nothing ran"


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_is_refused_as_a_ledger(name: str) -> None:
    make, reason = NO_FILES[name]
    make(Path.cwd() / "ledger.toml")
    refused(attnfuzz(*RUN, "--ledger", "ledger.toml"), f"ledger='ledger.toml': {reason}")


def test_versions_that_no_package_has_are_not_looked_for_elsewhere() -> None:
    Path("ledger.toml").write_text(entry(versions='{ "../../etc" = "1", "x\\u0000" = "2" }'))
    result = attnfuzz(*RUN, "--ledger", "ledger.toml")
    assert result.exit_code == 0, result.output
    assert "which is not installed here" in result.stdout
