"""Failure: an identity that shrinking keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, get_args

import msgspec
import pytest

from attnfuzz.harness.core.text import normalised
from attnfuzz.harness.judge.failure import KINDS, OUTPUT_TITLES, Failure, Identity, Place
from attnfuzz.kernels.support.memory import MemoryKind
from attnfuzz.kernels.support.protocol import PROTOCOL_KINDS


def failure(**changed: Any) -> Failure:
    return Failure(**{"kernel": "acme.flash", "kind": "mismatch", "check": "element", "message": "", "output": "dk", **changed})


PLACE = Place(sequence=1, position=2, head=3, dim=4, got=1.0, expected=2.0, allowed=0.1)
NUMERIC = (
    *("contract", "mismatch", "nonfinite", "aggregate", "unwritten", "nondeterministic", "relation", "guard", "hang"),
    "out-of-memory",
    *get_args(MemoryKind),
    *PROTOCOL_KINDS,
)


@pytest.mark.parametrize("kind", NUMERIC)
def test_wrong_numbers_of_one_output_are_one_bug(kind: str) -> None:
    here = failure(kind=kind, message="dK: 3 of 64 elements are wrong", place=PLACE)
    there = failure(kind=kind, message="dK: all but one are wrong", detail="elsewhere")
    assert here.identity == there.identity
    assert here.identity.fingerprint == there.identity.fingerprint
    assert here.identity.message == ""


@pytest.mark.parametrize(
    "changed",
    [{"kernel": "acme.other"}, {"kind": "nonfinite"}, {"output": "dv"}, {"output": None}, {"check": "sum"}],
    ids=lambda changed: next(iter(changed)),
)
def test_another_kernel_kind_output_or_check_is_another_bug(changed: dict[str, Any]) -> None:
    assert failure(**changed).identity != failure().identity
    assert failure(**changed).identity.fingerprint != failure().identity.fingerprint


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(NUMERIC)))
def test_the_others_are_told_apart_by_their_text_without_numbers(kind: str) -> None:
    def identity(message: str) -> Identity:
        return failure(kind=kind, output=None, check="forward", message=message).identity

    assert identity("index 17 is out of range [0, 5)") == identity("index 8 is out of range [0, 123)")
    assert identity("index 17 is out of range") != identity("key 17 is out of range")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("illegal access at 0x7fA0b1 by thread 31", "illegal access at # by thread #"),
        ("got 1.5, expected 2.25", "got #.#, expected #.#"),
        ("first\nsecond 2\nthird", "first"),
        ("\n\n  first 1  \n", "first #"),
        ("", ""),
        ("   \n ", ""),
        ("x" * 500, "x" * 120),
    ],
)
def test_normalised(message: str, expected: str) -> None:
    assert normalised(message) == expected


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    identity = failure(kind="exception", output=None, check="forward", message="forward raised ValueError: 7").identity
    code = (
        "import sys, msgspec; from attnfuzz.harness.judge.failure import Identity; "
        "print(msgspec.json.decode(sys.argv[1], type=Identity).fingerprint)"
    )
    text = msgspec.json.encode(identity).decode()
    for seed in ("0", "1"):
        command = [sys.executable, "-P", "-c", code, text]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        assert done.stdout.strip() == identity.fingerprint
    assert len(identity.fingerprint) == 8
    assert int(identity.fingerprint, 16) >= 0


def test_a_known_fingerprint_never_changes() -> None:
    # Stored names and ledgers of known failures are built on it.
    assert Identity(kernel="acme.flash", kind="mismatch", output="dk", check="element").fingerprint == "882bb78e"


def test_identities_in_words() -> None:
    assert str(failure().identity) == "acme.flash: mismatch in dK"
    raised = failure(kind="exception", output=None, check="backward", message="backward raised KeyError: 3")
    assert str(raised.identity) == "acme.flash: exception in backward (backward raised KeyError: #)"
    shape = failure(kind="contract", output="lse", check="shape", message="LSE has shape (1, 3) where (1, 4) is expected")
    assert str(shape.identity) == "acme.flash: contract in LSE"


def test_every_output_has_a_title() -> None:
    assert OUTPUT_TITLES == {"o": "O", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV"}


def test_a_failure_survives_json() -> None:
    whole = failure(place=PLACE, detail="Traceback ...")
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Failure) == whole
