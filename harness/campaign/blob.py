"""A Case as one word that can be pasted: its canonical JSON, compressed, in base64, with the version of that form in front.

    AF1-eJyrVkrLL8pNLFGyUjLU...

A flaky failure's rate goes along, so that a blob is run as often as its case file.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from pathlib import Path

import msgspec

from attnfuzz.harness.campaign.corpus import CaseFile, case_file_of, read_case
from attnfuzz.harness.campaign.events import Rate
from attnfuzz.harness.core.files import Unreadable
from attnfuzz.strategies.case import BadCase, Case

__all__ = ["blob_of", "case_from_blob", "is_blob", "stored_case"]

_VERSION = 1
_FORM = re.compile(r"AF([0-9]+)-(.*)", re.DOTALL)
_MOST = 1 << 20
"""Bytes that a Case may have: a blob that unpacks to more is none."""


def blob_of(case: Case, rate: Rate | None = None) -> str:
    """The blob of a Case: letters, digits, `-`, `_` and `=` alone, so that no shell needs quotes for it."""
    data = {**case.to_object(), **({"found": {"rate": list(rate)}} if rate else {})}
    packed = zlib.compress(msgspec.json.encode(data, order="sorted"), 9)
    return f"AF{_VERSION}-{base64.urlsafe_b64encode(packed).decode()}"


def is_blob(text: str) -> bool:
    """Whether `text` begins as a blob does."""
    return _FORM.match(text.strip()) is not None


def case_from_blob(text: str) -> CaseFile:
    """Read a blob; its `path` is the blob itself.

    Raises:
        BadCase: it is of another version, was cut or changed, or holds no Case.
    """
    text = text.strip()
    form = _FORM.match(text)
    short = text if len(text) <= 24 else f"{text[:21]}..."
    if form is None:
        raise BadCase(f"case={short!r}: not a blob; a blob begins with AF{_VERSION}-")
    if form[1] != str(_VERSION):
        version = form[1] if len(form[1]) <= 9 else f"{form[1][:9]}..."
        raise BadCase(
            f"case={short!r}: a blob of version {version}, and this attnfuzz reads version {_VERSION}; "
            "use the attnfuzz that printed it, or a case file"
        )
    try:
        unpacking = zlib.decompressobj()
        content = unpacking.decompress(base64.b64decode(form[2], altchars=b"-_", validate=True), _MOST)
    except (ValueError, binascii.Error, zlib.error):
        content, whole = b"", False
    else:
        whole = unpacking.eof and not unpacking.unused_data
    if not whole:
        raise BadCase(f"case={short!r}: the blob is cut or changed; paste all of it, without blanks")
    try:
        return case_file_of(content, Path(text))
    except (BadCase, Unreadable) as error:
        raise BadCase(f"case={short!r}: {error}") from None


def stored_case(text: str) -> CaseFile:
    """The Case of a file or of a blob.

    Raises:
        BadCase: it cannot be read; the text says why.
    """
    return case_from_blob(text) if is_blob(text) else read_case(text)
