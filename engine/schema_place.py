"""Where in a JSON schema is what a compiler refuses, when it only says what?"""

import time
from collections.abc import Callable, Iterator
from typing import Any

MAX_TRIES = 500
MAX_SEARCH_S = 0.5
"""Compilations for one answer, and the time for them; the place found so far is given when either is used up."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""

_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords whose value is a list of schemas."""

_SINGLE = (
    "items",
    "additionalProperties",
    "additionalItems",
    "unevaluatedProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
)
"""Keywords whose value is a schema."""


def place_of_error(schema: Any, error_of: Callable[[Any], str]) -> tuple[str, Any]:
    """JSON pointer and value of the innermost schema that is wrong, alone as well as in its place.

    Args:
        error_of: the first error of a schema, empty if there is none; there must be one for ``schema``.
    """
    place: list[str] = []
    current, whole_error = schema, error_of(schema)
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
    tries_left, deadline = MAX_TRIES, time.monotonic() + MAX_SEARCH_S
    is_narrower = True
    while is_narrower:
        is_narrower = False
        for path, inner in _subschemas(current):
            tries_left -= 1
            if tries_left < 0 or time.monotonic() > deadline:
                break
            alone = {**shared, **inner} if isinstance(inner, dict) else inner
            if error_of(_replaced(schema, [*place, *path])) != whole_error and error_of(alone):
                place += path
                current, is_narrower = inner, True
                break
    return "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in place), current


def _subschemas(schema: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each schema directly inside this one, and the way there."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            yield from (((keyword, name), inner) for name, inner in value.items())
        elif keyword in _LISTS and isinstance(value, list):
            yield from (((keyword, str(index)), inner) for index, inner in enumerate(value))
        elif keyword in _SINGLE:
            yield (keyword,), value


def _replaced(schema: Any, place: list[str]) -> Any:
    """A copy with ``true``, which allows anything, in this place."""
    if not place:
        return True
    name, *rest = place
    if isinstance(schema, list):
        index = int(name)
        return [*schema[:index], _replaced(schema[index], rest), *schema[index + 1 :]]
    return schema | {name: _replaced(schema[name], rest)}
