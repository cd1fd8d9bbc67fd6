"""How does a model call the tools that a request offers: the form of a call, and calls read back out of the answer's text?"""

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from engine.openai.call_forms import TAGGED, CallForm, call_grammar
from ipc.errors import RequestError
from ipc.structured import JSON_OPTIONS, MAX_GRAMMAR_BYTES, StructuredOutput

Tool = Mapping[str, Any]
"""One entry of the body's ``tools``: ``{"type": "function", "function": {"name", "description", "parameters", "strict"}}``."""

ToolChoice = str | Mapping[str, Any]
""""none", "auto", "required", or ``{"type": "function", "function": {"name": ...}}``."""

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

_GRAMMAR_ERROR = re.compile(r"at (?P<line>\d+)\(\d+\): (failed to compile JSON schema: )?(?P<reason>.*?)( \d+ \| .*)?$")
_CALL_RULE = re.compile(r"call_(\d+):")

_BLANKS = " \n\r\t"
_MAX_BLANKS = 64
"""In front of a literal of a call; text with more of them is no call."""

_LETTERS = string.ascii_letters + string.digits
_OPEN_SCHEMAS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "x-guidance")
"""Keywords of a schema that says itself what else an object may hold, or elsewhere."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of one call. The first delta of a call has its id and its name, later ones arguments only."""

    index: int
    """The call's number in the answer, from 0."""

    arguments: str = ""
    """A piece of JSON text; a call's pieces together are one JSON object."""

    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Fed:
    """What a piece of text turned out to be."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


# ------------------------------------------------------------------------------------------------------ the request


def check_tools(tools: Any, choice: Any = "auto") -> None:
    """Are these tools, and is this a choice among them?

    Raises:
        RequestError: naming the field below "tools" or "tool_choice", its value and the rule.
    """
    if not isinstance(tools, (list, tuple)):
        raise _refused("tools", f"must be a list, got {type(tools).__name__}")
    if len(tools) > MAX_TOOLS:
        raise _refused("tools", f"has {len(tools)} entries; at most {MAX_TOOLS} are allowed")
    names: list[str] = []
    for index, tool in enumerate(tools):
        name = _check_tool(tool, f"tools[{index}]")
        if name in names:
            raise _refused(f"tools[{index}].function.name", f"={name!r} is the name of tools[{names.index(name)}] too")
        names.append(name)
    _check_choice(choice, names)


def tool_grammar(
    tools: Sequence[Tool], choice: ToolChoice, *, form: CallForm = TAGGED, is_parallel: bool = True
) -> StructuredOutput | None:
    """The form that constrains the answer; None when it is free ("none", or no tools).

    "auto" allows text and behind it, or instead, calls; "required" calls alone. A tool that is named gets its arguments as
    the whole answer. A tool without ``strict`` may have a schema with keywords that can't be enforced: they are ignored.

    Args:
        form: how this model writes a call, see ``form_of``.
        is_parallel: more than one call is allowed.

    Raises:
        RequestError: see ``check_tools``; also tools that are too large together.
    """
    check_tools(tools, choice)
    if not tools or choice == "none":
        return None
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, Mapping):
        [function] = [function for function in functions if function["name"] == choice["function"]["name"]]
        return StructuredOutput(json_schema=_small(_as_json(_schema_of(function))))
    schemas = {function["name"]: _schema_of(function) for function in functions}
    _as_json(schemas)
    grammar = call_grammar(form, schemas, is_required=choice == "required", is_parallel=is_parallel)
    return StructuredOutput(grammar=_small(grammar))


def with_parsed_arguments(messages: Sequence[Any]) -> list[Any]:
    """Messages as templates want them: the arguments of earlier calls as maps, where OpenAI's clients send JSON text.

    Raises:
        RequestError: arguments that are not a JSON object, with their place.
    """
    return [_with_maps(message, f"messages[{index}]") for index, message in enumerate(messages)]


def blamed_on_tools(error: RequestError, constraint: StructuredOutput) -> RequestError:
    """The engine's refusal of what ``tool_grammar`` made, in terms of what the client sent; other errors as they are."""
    if error.code != "bad_request" or error.field != f"structured.{constraint.kind}":
        return error
    found = _GRAMMAR_ERROR.search(error.reason)
    where, reason = "tools", error.reason.removeprefix(f"{error.field}").lstrip(": ")
    if constraint.grammar is not None and found is not None:
        reason = found["reason"]
        line = constraint.grammar.splitlines()[int(found["line"]) - 1 :][:1]
        index = _CALL_RULE.match(line[0]) if line else None
        where = f"tools[{index[1]}].function.parameters" if index is not None else where
    return RequestError(f"{where} can't be enforced: {reason}", field=where)


def _check_tool(tool: Any, where: str) -> str:
    """Its name."""
    if not isinstance(tool, Mapping):
        raise _refused(where, f"must be a map with type and function, got {type(tool).__name__}")
    if tool.get("type") != "function":
        raise _refused(f"{where}.type", f"={_shown(tool.get('type'))} is not supported; it must be 'function'")
    function = tool.get("function")
    where += ".function"
    if not isinstance(function, Mapping):
        raise _refused(where, f"must be a map with a name, got {type(function).__name__}")
    name = function.get("name")
    if type(name) is not str or not NAME.fullmatch(name):
        raise _refused(f"{where}.name", f"={_shown(name)} must be 1 to 64 letters, digits, _ or -")
    for key, kind, rule in (
        ("description", str, "a text"), ("parameters", Mapping, "a JSON schema, which is a map"), ("strict", bool, "true or false"),
    ):  # fmt: skip
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            raise _refused(f"{where}.{key}", f"={_shown(value)} must be {rule}")
    kind = (function.get("parameters") or {}).get("type", "object")
    if kind != "object":
        raise _refused(f"{where}.parameters.type", f"={_shown(kind)} must be 'object': arguments have names")
    return name


def _check_choice(choice: Any, names: Sequence[str]) -> None:
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise _refused("tool_choice", f"={_shown(choice)} must be 'none', 'auto', 'required' or a map that names a function")
        if choice == "required" and not names:
            raise _refused("tool_choice", "='required' needs tools, and there are none")
        return
    if not isinstance(choice, Mapping):
        raise _refused("tool_choice", f"must be a text or a map that names a function, got {type(choice).__name__}")
    if choice.get("type") != "function":
        raise _refused("tool_choice.type", f"={_shown(choice.get('type'))} is not supported; it must be 'function'")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        given = f"there are {', '.join(names)}"[:200] if names else "there are none"
        raise _refused("tool_choice.function.name", f"={_shown(name)} is not one of the tools; {given}")


def _schema_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Of a tool's arguments. Without ``parameters`` it takes none, and properties that it does not name it takes not either."""
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    if "properties" in schema and not any(key in schema for key in _OPEN_SCHEMAS):
        schema["additionalProperties"] = False
    options = {**JSON_OPTIONS, "lenient": not function.get("strict")}
    return {"x-guidance": options, **schema}


def _as_json(schema: Any) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused("tools", f"can't be written as JSON: {error}") from None


def _small(text: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _refused("tools", "must be valid Unicode text, without lone surrogates") from None
    if size > MAX_GRAMMAR_BYTES:
        raise _refused("tools", f"make a grammar of {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed: offer fewer at once")
    return text


def _with_maps(message: Any, where: str) -> Any:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, (list, tuple)):
        return message
    parsed = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            found = _parsed_object(arguments, f"{where}.tool_calls[{index}].function.arguments")
            call = {**call, "function": {**function, "arguments": found}}  # type: ignore[dict-item]
        parsed.append(call)
    return {**message, "tool_calls": parsed}


def _parsed_object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}={_shown(text)} is not JSON: {error}", field="messages") from None
    if not isinstance(found, dict):
        raise RequestError(f"{where}={_shown(text)} must be a JSON object", field="messages")
    return found


def _refused(where: str, rule: str) -> RequestError:
    return RequestError(where + (rule if rule.startswith("=") else " " + rule), field=where)


def _shown(value: Any) -> str:
    return f"{value!r:.80}"


# ------------------------------------------------------------------------------------------------------- the answer


class _At(Enum):
    """Where in an answer a parser is."""

    TEXT = auto()
    HEAD = auto()
    """Behind the beginning of a call, before its arguments."""

    ARGUMENTS = auto()
    TAIL = auto()
    """Behind a call's arguments, before its end."""

    NEXT = auto()
    """Behind a call, where another one may follow."""

    NAMED = auto()
    """In an answer that is the arguments of a call and nothing else."""


_NONE, _MORE = -1, -2
"""Instead of an offset: the literals are not there; the text ends before that is known."""


class ToolCallParser:
    """Parts one choice's text, as it comes, into what the user reads and the calls; one parser for each choice.

    What comes out does not depend on how the text was cut. No part of a call's literals is ever content, unless the text
    went on in a way that no call does.
    """

    def __init__(self, tools: Sequence[Tool], choice: ToolChoice, *, form: CallForm = TAGGED) -> None:
        """``tools`` and ``choice`` have been checked. The arguments are those of ``tool_grammar``."""
        self.has_calls = False
        """Whether a call has begun: then the finish reason is "tool_calls" where it were "stop"."""

        self._form = form
        self._names = {tool["function"]["name"] for tool in tools}
        self._named = choice["function"]["name"] if isinstance(choice, Mapping) else None
        self._is_free = choice == "none" or not tools
        self._at = _At.NAMED if self._named is not None else _At.TEXT
        self._held = ""
        self._num_calls = 0
        self._is_blank = True
        """Nothing but blanks since the beginning, or since the last call."""

        self._blanks = ""
        """In front of what may be a call; then they are nobody's text."""

        self._may_begin = True
        """Whether a call may begin in what follows."""

        self._scan = _ObjectScan()

    def feed(self, delta: str) -> Fed:
        """Text may be held back while it could be the beginning of a call."""
        return self._take(delta, is_last=False)

    def finish(self) -> Fed:
        """The rest, once the text is over; also text that began like a call and was none. A call that was cut off is left out
        if its name was not known yet.
        """
        return self._take("", is_last=True)

    def _take(self, delta: str, *, is_last: bool) -> Fed:
        if self._is_free:
            return Fed(content=delta)
        self._held += delta
        content: list[str] = []
        calls: list[CallDelta] = []
        steps = {
            _At.TEXT: self._read_text, _At.HEAD: self._read_head, _At.ARGUMENTS: self._read_arguments,
            _At.TAIL: self._read_tail, _At.NEXT: self._read_next, _At.NAMED: self._read_named,
        }  # fmt: skip
        while self._held and steps[self._at](content, calls):
            pass
        if is_last:
            if self._at is _At.TEXT and not (self._num_calls and self._is_blank):
                content.append(self._held)
            self._held = ""
        return Fed(content="".join(content), calls=tuple(calls))

    # Each of these takes what it can from the held text; false: it needs more.

    def _read_text(self, content: list[str], calls: list[CallDelta]) -> bool:
        start = self._find_trigger()
        if self._is_blank and not self._held[:start].strip(_BLANKS):
            if start < len(self._held) and self._starts_with_trigger(start):
                self._blanks, self._held = self._held[:start], self._held[start:]
                self._at = _At.HEAD
                return True
            return False
        self._is_blank = False
        if self._form.is_whole_answer:
            self._may_begin = False
        content.append(self._held[:start])
        self._blanks, self._held = "", self._held[start:]
        if not self._starts_with_trigger(0):
            return False
        self._at = _At.HEAD
        return True

    def _find_trigger(self) -> int:
        """Where the held text has a trigger, or at its end a part of one; its length if neither."""
        if not self._may_begin:
            return len(self._held)
        trigger = self._form.trigger
        if self._form.is_whole_answer:
            start = len(self._held) - len(self._held.lstrip(_BLANKS))
            return start if self._held.startswith(trigger, start) else len(self._held)
        start = self._held.find(trigger)
        if start >= 0:
            return start
        sizes = range(min(len(trigger) - 1, len(self._held)), 0, -1)
        return len(self._held) - next((size for size in sizes if self._held.endswith(trigger[:size])), 0)

    def _starts_with_trigger(self, start: int) -> bool:
        return self._may_begin and self._held.startswith(self._form.trigger, start)

    def _read_head(self, content: list[str], calls: list[CallDelta]) -> bool:
        end, name = self._match_head(0, (*self._form.opening, *self._form.before_name))
        if end == _NONE:
            # It began like a call: its first character is text, and behind it a call may begin again.
            content.append(self._blanks + self._held[0])
            self._blanks = ""
            self._held = self._held[1:]
            self._is_blank = False
            self._may_begin = not self._form.is_whole_answer
            self._at = _At.TEXT
            return True
        return end != _MORE and self._begin_call(name, end, calls)

    def _begin_call(self, name: str, end: int, calls: list[CallDelta]) -> bool:
        calls.append(CallDelta(index=self._num_calls, call_id=self._new_id(), name=name))
        self.has_calls = True
        self._num_calls += 1
        self._held = self._held[end:]
        self._scan = _ObjectScan()
        self._at = _At.ARGUMENTS
        return True

    def _read_arguments(self, content: list[str], calls: list[CallDelta]) -> bool:
        end = self._scan.feed(self._held)
        calls.append(CallDelta(index=self._num_calls - 1, arguments=self._held[:end]))
        self._held = self._held[end:]
        if self._scan.is_over:
            self._at = _At.TAIL
        return self._scan.is_over

    def _read_tail(self, content: list[str], calls: list[CallDelta]) -> bool:
        end = _match(self._held, 0, self._form.behind_arguments)
        if end == _MORE:
            return False
        self._is_blank = True
        self._may_begin = not self._form.is_whole_answer
        self._at = _At.TEXT if end == _NONE else _At.NEXT
        self._held = self._held[max(end, 0) :]
        return True

    def _read_next(self, content: list[str], calls: list[CallDelta]) -> bool:
        """Another call, the end of all calls, or text."""
        end, name = _NONE, ""
        if self._form.between is not None:
            end, name = self._match_head(0, (*self._form.between, *self._form.before_name))
        if end >= 0:
            return self._begin_call(name, end, calls)
        closed = _match(self._held, 0, self._form.closing) if self._form.closing else _NONE
        if closed == _MORE or (end == _MORE and closed == _NONE):
            return False
        self._held = self._held[max(closed, 0) :]
        self._at = _At.TEXT
        return True

    def _read_named(self, content: list[str], calls: list[CallDelta]) -> bool:
        if not self.has_calls:
            self.has_calls = True
            calls.append(CallDelta(index=0, call_id=self._new_id(), name=self._named))
        calls.append(CallDelta(index=0, arguments=self._held))
        self._held = ""
        return True

    def _match_head(self, start: int, literals: Sequence[str]) -> tuple[int, str]:
        """Where the arguments begin, and the call's name."""
        start = _match(self._held, start, literals)
        if start < 0:
            return start, ""
        start = _skip_blanks(self._held, start)
        found = NAME.match(self._held, start) if start >= 0 else None
        if start < 0 or found is None:
            return (_MORE if start in (_MORE, len(self._held)) else _NONE), ""
        if found.end() == len(self._held):
            return (_MORE if any(name.startswith(found[0]) for name in self._names) else _NONE), ""
        if found[0] not in self._names:
            return _NONE, ""
        end = _match(self._held, found.end(), (*self._form.before_arguments, "{"))
        return (end - 1 if end >= 0 else end), found[0]

    def _new_id(self) -> str:
        if self._form.has_short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class _ObjectScan:
    """Finds the end of a JSON object in a text that comes in pieces."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """How many characters of the text belong to the object."""
        for index, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_over = True
                    return index + 1
        return len(text)


def _match(text: str, start: int, literals: Sequence[str]) -> int:
    """The offset behind the literals, each with blanks in front or none."""
    for literal in literals:
        start = _skip_blanks(text, start)
        if start < 0:
            return start
        if not text.startswith(literal, start):
            return _MORE if literal.startswith(text[start:]) else _NONE
        start += len(literal)
    return start


def _skip_blanks(text: str, start: int) -> int:
    end = start
    while end < len(text) and text[end] in _BLANKS:
        end += 1
    return end if end - start <= _MAX_BLANKS else _NONE
