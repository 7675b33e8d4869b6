"""`json_schema`: a JSON Schema of the JSON that commands print, made of the types in `documents`.

It is docs/reference/attnfuzz.schema.json. A test compares what the commands print with it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from attnfuzz.harness.cli.documents.campaigns import Merge, Run
from attnfuzz.harness.cli.documents.check import Check, Conformance
from attnfuzz.harness.cli.documents.common import EventLine, WrongUse
from attnfuzz.harness.cli.documents.coverage import Coverage
from attnfuzz.harness.cli.documents.gate import Gate
from attnfuzz.harness.cli.documents.lists import CaseList, CaseRemoval, KernelList
from attnfuzz.harness.cli.documents.repro import ReproExplain, ReproOnce, ReproRepeat, ReproScript, ReproShrink

__all__ = ["json_schema"]


_DOCUMENTS = (
    *(Run, Merge, ReproOnce, ReproRepeat, ReproShrink, ReproExplain, ReproScript, Gate, KernelList),
    *(Conformance, CaseList, CaseRemoval, Check, Coverage, WrongUse, EventLine),
)
_NUMBERS = {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of every document, each by its name in `$defs`. A number may be "inf", "-inf" or "nan"."""
    _, components = msgspec.json.schema_components(_DOCUMENTS, ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "attnfuzz, format 1",
        "anyOf": [{"$ref": f"#/$defs/{each.__name__}"} for each in _DOCUMENTS if each is not EventLine],
        "$defs": {name: _with_infinities(_of_any_msgspec(each)) for name, each in sorted(components.items())},
    }


def _of_any_msgspec(schema: Any) -> Any:
    """Leave out what msgspec writes since 0.23 or writes more often: names that keys may have, empty objects as defaults."""
    if isinstance(schema, dict):
        kept = {name: each for name, each in schema.items() if name != "propertyNames" and (name, each) != ("default", {})}
        return {name: _of_any_msgspec(each) for name, each in kept.items()}
    return [_of_any_msgspec(each) for each in schema] if isinstance(schema, list) else schema


def _with_infinities(schema: Any) -> Any:
    if isinstance(schema, dict):
        if schema.get("type") == "number":
            return {**{name: value for name, value in schema.items() if name != "type"}, **_NUMBERS}
        if isinstance(text := schema.get("description"), str):
            schema = {**schema, "description": " ".join(text.split())}
        return {name: _with_infinities(each) for name, each in schema.items()}
    return [_with_infinities(each) for each in schema] if isinstance(schema, list) else schema
