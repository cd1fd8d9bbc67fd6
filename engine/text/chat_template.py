"""Messages of a chat to the text that the model expects, by the model's own template."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2

from engine.text.template_sandbox import render_bounded, template_environment
from ipc.errors import RequestError

MAX_DEPTH = 32
"""Of lists and maps within a message."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning comes; templates read the first or the second."""

_TEMPLATE_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip

_FOR_TOOLS = "tool_use"
"""Name of the template that is taken when there are tools."""

_PROBE = "qzprobe"


class ChatTemplate:
    """A model's template, in the same surroundings as transformers gives it, but for functions as tools.

    The template is a stranger's program: it runs in a sandbox, sees plain data only, and its work is bounded. Safe to use from
    many threads.
    """

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str], named: Mapping[str, str] | None = None
    ) -> None:
        """``source`` None: the model has none, and every rendering is refused.

        Args:
            named: templates that the model has beside it, by name; see ``named_templates``.
        """
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._named = dict(named or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text; it holds BOS if the model wants one, so it is encoded without adding any.

        Content in parts, all of them text, is joined by line ends for a template that takes texts only.

        Raises:
            RequestError: no template, messages of the wrong form, or the template refused them.
        """
        template = self._tool_template if tools is not None and _FOR_TOOLS in self._named else self._template
        chat = check_messages(messages)
        known: dict[str, Any] = {
            **self._special_tokens,
            **_plain(variables, "template_variables", 0),
            "tools": None if tools is None else _plain(list(tools), "tools", 0),
            "messages": chat if self._takes_parts else [_with_joined_parts(message) for message in chat],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render_bounded(template, {"documents": None} | known)
        except _TEMPLATE_FAULTS as error:
            raise RequestError(f"the model's chat template refused the messages: {error}", field="messages") from None

    @cached_property
    def _template(self) -> jinja2.Template:
        if self._source is None:
            had = f"; it has named ones only: {', '.join(sorted(self._named))}" if self._named else ""
            raise RequestError(
                f"this model has no chat template{had}; send the finished prompt with generate instead", field="messages"
            )
        return _compiled(self._source)

    @cached_property
    def _tool_template(self) -> jinja2.Template:
        return _compiled(self._named[_FOR_TOOLS])

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether content as a list of parts becomes their text, and neither an error nor a list written out."""
        parts = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
        source = self._named.get(_FOR_TOOLS) if self._source is None else self._source
        try:
            text = render_bounded(_compiled(source or ""), self._special_tokens | {"messages": parts, "tools": None})
        except (*_TEMPLATE_FAULTS, RequestError):
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def named_templates(tokenizer_config: bytes) -> dict[str, str]:
    """All templates that a tokenizer's configuration has by name; none where it has a single one."""
    config = json.loads(tokenizer_config)
    entry = config.get("chat_template") if isinstance(config, dict) else None
    items = [item for item in entry if isinstance(item, dict)] if isinstance(entry, list) else []
    found = {item.get("name"): item.get("template") for item in items}
    return {name: text for name, text in found.items() if isinstance(name, str) and isinstance(text, str)}


def _compiled(source: str) -> jinja2.Template:
    try:
        return template_environment().from_string(source)
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


def _with_joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    parts = message.get("content")
    if not isinstance(parts, list) or not parts:
        return message
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        return message
    return {**message, "content": "\n".join(map(str, texts))}


def _plain(value: Any, where: str, depth: int) -> Any:
    """A copy of JSON-like data. Raises RequestError naming the place of anything else."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} is nested more than {MAX_DEPTH} deep", field=_field_of(where))
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise RequestError(f"{where} must be text, number, list or map, got {type(value).__name__}", field=_field_of(where))


def _key(key: Any, where: str) -> str:
    if type(key) is not str:
        raise RequestError(f"{where} has the key {key!r:.80}, which is not a text", field=_field_of(where))
    return key


def _field_of(where: str) -> str:
    return where.partition(".")[0].partition("[")[0]
