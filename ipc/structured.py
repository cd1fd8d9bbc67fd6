"""Which form does a client want its answer to have?"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ipc.errors import RequestError

MAX_GRAMMAR_BYTES = 1 << 16
"""Of a schema, a regular expression or a grammar, or of all choices together, as UTF-8."""

MAX_CHOICES = 1024

JSON_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,32})?"}
"""Between the parts of JSON: nothing, one blank, or a new line with its indentation. A model that may add as much blank space
as it likes sometimes adds nothing else until its last token. A schema's own "x-guidance" object wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """Exactly one form that the whole text of an answer must have; whether it can be compiled says the engine.

    Raises:
        RequestError: naming the field, its value and the rule.
    """

    json_schema: str | None = None
    """A JSON Schema (2020-12): JSON text, or an object or a boolean, which becomes text."""

    json_object: bool = False
    """Any JSON object."""

    regex: str | None = None
    """A regular expression, in the syntax of Rust's regex crate (no look-around, no back-references)."""

    choice: tuple[str, ...] = ()
    """One of these texts."""

    grammar: str | None = None
    """A context-free grammar: Lark, or EBNF as GGML-based engines write it (``root ::= ...``)."""

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, (Mapping, bool)):
            object.__setattr__(self, "json_schema", _as_json(self.json_schema))
        if type(self.json_object) is not bool:
            raise _refused("json_object", "must be true or false")
        for name in ("json_schema", "regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if not isinstance(self.choice, (list, tuple)) or any(type(text) is not str for text in self.choice):
            raise _refused("choice", "must be a list of texts")
        object.__setattr__(self, "choice", tuple(self.choice))
        if len(self.choice) > MAX_CHOICES:
            raise _refused("choice", f"has {len(self.choice)} entries; at most {MAX_CHOICES} are allowed")
        _check_size("choice", "".join(self.choice))
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False, ())]
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            got = f"got {' and '.join(given)}" if given else "none is given"
            raise RequestError(f"structured must have exactly one of {names}; {got}", field="structured")

    @classmethod
    def of(cls, value: Any) -> "StructuredOutput":
        """From what a user or the wire gives: an object of this class, or a map of its fields (null means unset)."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(
                f"structured must be a StructuredOutput or a map, got {type(value).__name__}", field="structured"
            )
        names = {f.name for f in fields(cls)}
        for name in value:
            if name not in names:
                raise RequestError(
                    f"structured.{str(name)[:64]} is not known; it has {', '.join(sorted(names))}", field="structured"
                )
        return cls(**{name: item for name, item in value.items() if item is not None})

    def to_wire(self) -> dict[str, Any]:
        """The one field that is set."""
        return {self.kind: getattr(self, self.kind)}

    @property
    def size_bytes(self) -> int:
        """What its text takes."""
        texts = (self.json_schema, self.regex, self.grammar, *self.choice)
        return sum(len(text.encode()) for text in texts if text)

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(f.name for f in fields(self) if getattr(self, f.name) not in (None, False, ()))


def _as_json(schema: Any) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(
            f"structured.json_schema={_shown(schema)} can't be written as JSON: {error}", field="structured.json_schema"
        ) from None


def _check_text(name: str, text: Any) -> None:
    if type(text) is not str:
        or_object = " or an object" if name == "json_schema" else ""
        raise RequestError(
            f"structured.{name}={_shown(text)} must be text{or_object}, got {type(text).__name__}", field=f"structured.{name}"
        )
    if not text:
        raise _refused(name, "is empty")
    _check_size(name, text)


def _shown(value: Any) -> str:
    """At most 80 characters, also of what can't be shown: a map that holds itself in great depth, a huge integer."""
    try:
        shown = repr(value)
    except (ValueError, RecursionError):
        return f"({type(value).__name__})"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _refused(name, "must be valid Unicode text, without lone surrogates") from None
    if size > MAX_GRAMMAR_BYTES:
        raise _refused(name, f"has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")


def _refused(name: str, rule: str) -> RequestError:
    return RequestError(f"structured.{name} {rule}", field=f"structured.{name}")
