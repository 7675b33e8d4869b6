"""Values against a JSON Schema, as far as docs/reference/attnfuzz.schema.json uses it; unknown keys count as wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from support.paths import ROOT

SCHEMA = json.loads((ROOT / "docs" / "reference" / "attnfuzz.schema.json").read_text(encoding="utf-8"))
_KINDS: dict[str, Any] = {"string": str, "object": dict, "array": list, "null": type(None), "boolean": bool}
_CHECKED = {"title", "description", "default", "$ref", "anyOf", "enum", "type", "properties", "required", "additionalProperties",
            "items", "prefixItems", "minItems", "maxItems", "propertyNames", "minimum", "maxLength"}  # fmt: skip


def wrong(value: Any, schema: dict[str, Any] | str, where: str = "") -> Iterator[str]:
    """Yield what of `value` is not as a schema, or the definition of a name, says."""
    if isinstance(schema, str):
        schema = SCHEMA["$defs"][schema]
    assert not set(schema) - _CHECKED, f"this test does not know {set(schema) - _CHECKED}"
    if "$ref" in schema:
        yield from wrong(value, schema["$ref"].removeprefix("#/$defs/"), where)
    if "anyOf" in schema:
        tries = [list(wrong(value, each, where)) for each in schema["anyOf"]]
        yield from [] if any(not each for each in tries) else min(tries, key=len)
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    kinds = schema.get("type", [])
    if kinds and not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        yield f"{where}: {value!r} is not of type {kinds}"
        return
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        yield f"{where}: {len(value)} letters are more than {schema['maxLength']}"
    if _is(value, "number") and value < schema.get("minimum", value):
        yield f"{where}: {value!r} is less than {schema['minimum']}"
    if isinstance(value, dict):
        yield from _wrong_object(value, schema, where)
    if isinstance(value, list) and ("items" in schema or "prefixItems" in schema):
        first = schema.get("prefixItems", [])
        for number, each in enumerate(value):
            part = first[number] if number < len(first) else schema["items"]
            yield from wrong(each, part or {}, f"{where}[{number}]")


def _wrong_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    yield from (f"{where}: no {name}" for name in schema.get("required", ()) if name not in value)
    for name, each in value.items():
        if name in properties:
            yield from wrong(each, properties[name], f"{where}.{name}")
        elif isinstance(others, dict):
            yield from wrong(each, others, f"{where}.{name}")
        elif properties:
            yield f"{where}: {name} is not in the schema"


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
    return isinstance(value, _KINDS[kind])
