"""JSON schemas in the style of real tool signatures, from a seed: nested, with enums, arrays, unions, formats and recursion.

Everything that could grow is bounded, so that answers fit into a limit of some hundred tokens.
"""

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ("city", "query", "unit", "limit", "user_id", "filters", "sort_by", "tags", "start_date", "payload", "options", "email",
         "priority", "recipients", "amount", "currency", "notes", "is_active", "address", "page_size", "language", "größe")  # fmt: skip
WORDS = ("celsius", "fahrenheit", "asc", "desc", "low", "medium", "high", "EUR", "USD", "en", "de", "Zürich", "a \"b\"", "x/y")
FORMATS = ("date", "date-time", "time", "uuid", "ipv4")
NANOSECONDS = r"^[^.]*(\.[0-9]{1,9}([^0-9].*)?)?$"
MAX_DEPTH = 3

NODE: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
    },
    "required": ["name"],
    "additionalProperties": False,
}
"""A list as tools describe folders, comments or categories: each has at most one more of its kind."""

MOST_NODES = 4
"""That may be in one another. The recursive schema itself has no end, nor have answers of a small model that begins to repeat
itself; so each use of it narrows what is that deep in it."""


def tool_schema(seed: int) -> Schema:
    """The parameters of one tool."""
    draw = random.Random(seed)
    schema = _object(draw, 0)
    schema["title"] = f"tool_{seed}"
    if _uses_node(schema):
        schema["$defs"] = {"node": NODE}
    return schema


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, draw.randint(1, 4 - depth // 2))
    return {
        "type": "object",
        "properties": {name: _described(draw, _any(draw, depth + 1)) for name in names},
        "required": sorted(draw.sample(names, draw.randint(1, len(names)))),
        "additionalProperties": False,
    }


def _any(draw: random.Random, depth: int) -> Schema:
    simple = [_string, _enum, _integer, _number, _boolean, _format, _pattern, _const]
    nested = [_array, _union, _object, _node, _nullable, _tuple] if depth < MAX_DEPTH else []
    return draw.choice([*simple, *nested])(draw, depth)


def _described(draw: random.Random, schema: Schema) -> Schema:
    return schema | {"description": "What the user asked for."} if draw.random() < 0.3 else schema


def _string(draw: random.Random, depth: int) -> Schema:
    return {"type": "string", "minLength": draw.choice([0, 1, 3]), "maxLength": draw.choice([5, 12, 20])}


def _enum(draw: random.Random, depth: int) -> Schema:
    return {"enum": [*draw.sample(WORDS, draw.randint(1, 5)), *draw.sample([None, 1, 2.5, True], draw.randint(0, 1))]}


def _integer(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(-100, 100)
    return {"type": "integer", "minimum": low, "maximum": low + draw.choice([1, 10, 5000])}


def _number(draw: random.Random, depth: int) -> Schema:
    return {"type": "number", "minimum": 0, "maximum": draw.choice([1, 100]), "multipleOf": 0.25}


def _boolean(draw: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _format(draw: random.Random, depth: int) -> Schema:
    name = draw.choice(FORMATS)
    # A time may have any number of digits behind its seconds.
    return {"type": "string", "format": name} | ({"pattern": NANOSECONDS} if "time" in name else {})


def _pattern(draw: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": draw.choice(["^[A-Z]{2,3}-[0-9]{4}$", "^#[0-9a-f]{6}$", "^(a|b{1,3})c?$"])}


def _const(draw: random.Random, depth: int) -> Schema:
    return {"const": draw.choice([draw.choice(WORDS), {"kind": "point", "at": [1, 2]}])}


def _array(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(0, 1)
    return {"type": "array", "items": _any(draw, depth + 1), "minItems": low, "maxItems": low + draw.randint(1, 2)}


def _tuple(draw: random.Random, depth: int) -> Schema:
    return {"type": "array", "prefixItems": [_integer(draw, depth), _enum(draw, depth)], "items": False, "minItems": 2}


def _union(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth + 1) for _ in range(draw.randint(2, 3))]}


def _nullable(draw: random.Random, depth: int) -> Schema:
    return {"type": ["string", "null"], "maxLength": 10}


def _node(draw: random.Random, depth: int) -> Schema:
    narrowed: Schema = {"properties": {"children": {"maxItems": 0}}}
    for _ in range(MOST_NODES - 1):
        narrowed = {"properties": {"children": {"items": narrowed}}}
    return {"$ref": "#/$defs/node"} | narrowed


def _uses_node(schema: Any) -> bool:
    return "#/$defs/node" in str(schema)
