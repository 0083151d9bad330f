"""Tool schemas that every host can read: flat, described, closed.

Hosts differ in what they take. Some stop at `$ref`, some at a top-level union, some at a list of types, and
one refused tool can cost a whole session its tools. So schemas are inlined and checked once, when a tool is
registered, where a developer sees the failure and no user does.
"""

from __future__ import annotations

from typing import Any

_LOCAL = "#/$defs/"
_NULL = {"type": "null"}
_VALUES = ("default", "enum", "const", "examples")  # data, not schemas


class SchemaError(TypeError):
    """A tool's signature cannot be published; the text names the tool, the place and the way out."""


def flatten(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with definitions inlined, titles gone and `X or null` written as an optional `X`.

    Leaving a field out is the way to say null: in arguments null stays accepted, in answers it is left out.

    Raises:
        SchemaError: the schema refers to itself, so that it has no finite flat form.
    """
    return dict(_flat(schema, schema.get("$defs", {}), ()))


def _flat(node: Any, definitions: dict[str, Any], trail: tuple[str, ...]) -> Any:
    if isinstance(node, list):
        return [_flat(item, definitions, trail) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = str(node["$ref"]).removeprefix(_LOCAL)
        if name in trail:
            raise SchemaError(f"model {name} contains itself; give it a fixed depth.")
        siblings = {key: value for key, value in node.items() if key != "$ref"}
        return _flat({**definitions[name], **siblings}, definitions, (*trail, name))
    if _nullable(node):
        return _flat(_without_null(node), definitions, trail)
    flat = {
        key: value if key in _VALUES else _flat(value, definitions, trail)
        for key, value in node.items()
        if key not in ("$defs", "title", "properties", "required")
    }
    if "properties" in node:
        properties = node["properties"]
        required = [name for name in node.get("required", ()) if not _nullable(properties[name])]
        flat["properties"] = {name: _flat(child, definitions, trail) for name, child in properties.items()}
        flat |= {"required": required} if required else {}
    return flat


def _without_null(node: dict[str, Any]) -> dict[str, Any]:
    options = [option for option in node["anyOf"] if option != _NULL]
    rest = {key: value for key, value in node.items() if key != "anyOf"}
    if "default" in rest and rest["default"] is None:
        del rest["default"]
    return {**options[0], **rest} if len(options) == 1 else {**rest, "anyOf": options}


def _nullable(node: dict[str, Any]) -> bool:
    return _NULL in node.get("anyOf", ())


def check_input(tool: str, schema: dict[str, Any]) -> None:
    """Refuses what some host is known to stumble over.

    Raises:
        SchemaError: names the tool and the parameter.
    """
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            raise SchemaError(f"{tool}: {union} at the top level; spell the parameters out.")
    _check(tool, "", schema)


def _check(tool: str, place: str, node: dict[str, Any]) -> None:
    if isinstance(node.get("type"), list):
        raise SchemaError(f"{tool}: {place or 'the input'} has a list of types; give it one.")
    properties = node.get("properties", {})
    if "properties" in node and node.get("additionalProperties") is not False:
        raise SchemaError(f'{tool}: {place or "the input"} takes unknown fields; set extra="forbid".')
    for name, child in properties.items():
        where = f"{place}.{name}" if place else name
        if not child.get("description"):
            raise SchemaError(f"{tool}: parameter {where} has no description; add Field(description=...).")
        _check(tool, where, child)
    items = node.get("items")
    if isinstance(items, dict):
        if "anyOf" in items or "oneOf" in items:
            raise SchemaError(f"{tool}: {place}[] mixes kinds of items; make one model with optional fields.")
        _check(tool, f"{place}[]", items)
    if isinstance(node.get("additionalProperties"), dict):
        _check(tool, f"{place}.*", node["additionalProperties"])
    for option in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        _check(tool, place, option)


def fields_at(schema: dict[str, Any], location: tuple[int | str, ...]) -> list[str]:
    """Names a client may use at a place inside the arguments; empty where the schema names none."""
    node: Any = schema
    for step in location:
        node = node.get("items", {}) if isinstance(step, int) else node.get("properties", {}).get(step, {})
    return list(node.get("properties", {}))
