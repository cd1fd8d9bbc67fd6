"""Messages of a chat to the text that the model expects, by the model's own template."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ipc.errors import RequestError

MAX_DEPTH = 32
"""Of lists and maps within a message."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning comes; templates read the first or the second."""

_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class ChatTemplate:
    """A model's template, in the same surroundings as transformers gives it, but for functions as tools.

    The template is a stranger's program: it runs in a sandbox and sees plain data only.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        """``source`` None: the model has none, and every rendering is refused."""
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text; it holds BOS if the model wants one, so it is encoded without adding any.

        Raises:
            RequestError: no template, messages of the wrong form, or the template refused them.
        """
        template = self._template
        chat = check_messages(messages)
        known: dict[str, Any] = {
            **self._special_tokens,
            **_plain(variables, "template variables", 0),
            "tools": None if tools is None else _plain(list(tools), "tools", 0),
            "messages": chat,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text: str = template.render(**{"documents": None} | known)
        except _TEMPLATE_FAULTS as error:
            raise RequestError(f"the model's chat template refused the messages: {error}", field="messages") from None
        return text

    @cached_property
    def _template(self) -> jinja2.Template:
        if self._source is None:
            raise RequestError(
                "this model has no chat template; send the finished prompt with generate instead", field="messages"
            )
        try:
            return _environment().from_string(self._source)
        except _TEMPLATE_FAULTS as error:
            raise RequestError(f"the model's chat template is broken: {error}", code="internal") from None


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies made of plain data, without the keys that are None. Raises RequestError."""
    if not isinstance(messages, (list, tuple)) or not messages:
        got = "none" if isinstance(messages, (list, tuple)) else type(messages).__name__
        raise RequestError(f"messages must be a list of at least one message, got {got}", field="messages")
    chat = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be a map with role and content, got {type(message).__name__}", field="messages")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{where}.role={message.get('role')!r:.80} must be a text", field="messages")
        plain = {key: value for key, value in _plain(message, where, 0).items() if value is not None}
        chat.append(_with_reasoning(plain))
    return chat


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any, where: str, depth: int) -> Any:
    """A copy of JSON-like data. Raises RequestError naming the place of anything else."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} is nested more than {MAX_DEPTH} deep", field="messages")
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise RequestError(f"{where} must be text, number, list or map, got {type(value).__name__}", field="messages")


def _key(key: Any, where: str) -> str:
    if type(key) is not str:
        raise RequestError(f"{where} has the key {key!r:.80}, which is not a text", field="messages")
    return key


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant says, for training; here its body is text like any other."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As it stands; jinja's own filter would write <, > and & as escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
