"""Foreign text that a terminal or GitHub's runner would obey, and a scan of outputs for it that shares no code with attnfuzz."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["ANNOTATION", "EVERYTHING", "MARK", "PAYLOADS", "obeyed"]

MARK = "Zq9"
"""Stands in every payload: a row whose output lacks it shows nothing of its foreign text."""
PAYLOADS = {
    "clear the screen": "\x1b[2J",
    "write the clipboard (OSC 52)": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "C1: CSI": "\x9b31m",
    "C1: OSC and its end": "\x9d0;title\x9c",
    "C1: next line": "a\x85b",
    "delete": "a\x7f",
    "backspaces": "bad\b\b\bgood",
    "carriage return": "FAILED\rPASSED",
    "vertical tab and form feed": "a\x0bb\x0cc",
    "shift out": "\x0e",
    "NUL": "a\0b",
    "bidi: override": "\u202egnp.exe\u202c",
    "bidi: isolate": "\u2067a\u2069",
    "bidi: marks": "\u200ea\u200fb\u061c",
    "line and paragraph separator": "a\u2028b\u2029c",
    "zero width": "a\u200bb\u200cc\u200dd\u2060e\ufefff",
    "soft hyphen": "a\u00adb",
    "invisible letters": "a\u3164b\u115fc\u034f",
    "variation selector": "a\ufe0fb\U000e0101",
    "tag characters": "\U000e0041\U000e007f",
    "a noncharacter": "\ufffe",
    "GitHub: stop-commands": "boom\n::stop-commands::tok",
    "GitHub: after blanks": "boom\n \t\u3000 ::add-mask::secret",
    "GitHub: an annotation": "boom\n::debug::pwn",
    "GitHub: the old form": "a ##[group]b",
    "markup and emoji": "[red]a[/b] :boom:",
}
EVERYTHING = MARK.join(PAYLOADS.values()) + MARK
_VISIBLE = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13440)}
"""Of the format characters, those with a shape of their own."""
INVISIBLE = {0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F, 0x3164, 0xFFA0, 0xFFFE, 0xFFFF} | {
    *range(0xFE00, 0xFE10),
    *range(0xE0100, 0xE01F0),
}
ANNOTATION = re.compile(r"::(error|warning|notice)( (file|title)=[^\n]*)?::")
"""What a gate says to GitHub's runner; no payload looks like it."""


def obeyed(text: str, *, annotated: bool = False, on_page: bool = False) -> list[str]:
    """Return what a terminal, a reader or GitHub's runner would take for something else than text.

    `annotated`: lines of a gate's own annotations are right; `on_page`: no runner reads it.
    """
    wrong = []
    for sign in set(text) - {"\n", "\t"}:
        kind, number = unicodedata.category(sign), ord(sign)
        if kind in ("Cc", "Cs", "Zl", "Zp") or (kind == "Cf" and number not in _VISIBLE) or number in INVISIBLE:
            wrong.append(f"U+{number:04X}")
    for line in [] if on_page else re.split(r"[\r\n]", text):
        if line.strip().startswith("::") and not (annotated and ANNOTATION.match(line)):
            wrong.append(f"a workflow command: {line!r}")
        if "##[" in line:
            wrong.append(f"a workflow command of the old form: {line!r}")
    return wrong
