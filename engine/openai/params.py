"""From the fields of a body to the engine's sampling parameters, prompts and messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.openai.call_forms import TAGGED, CallForm
from engine.openai.errors import api_error_of, refused
from engine.openai.fields import (
    DEFAULT_COMPLETION_TOKENS,
    SAMPLING_NAMES,
    ChatRequest,
    CompletionRequest,
    JsonSchemaFormat,
    Message,
    NamedTool,
    SamplingFields,
    TextFormat,
    TokenizeRequest,
    ToolField,
)
from engine.openai.tool_calls import Tool, ToolChoice, tool_grammar, with_parsed_arguments
from ipc.errors import RequestError
from ipc.params import MAX_TOKEN_ID, SamplingParams
from ipc.structured import StructuredOutput

Names = dict[str, str]
"""What fields of SamplingParams are called in a body."""


def completion_params(body: CompletionRequest) -> SamplingParams:
    """Raises ApiError naming the field."""
    _check_stream_options(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refused("best_of", f"best_of={body.best_of} must be the same as n={body.n or 1}: no answers are left out here")
    values = _common(body)
    values["max_tokens"] = body.max_tokens or max(DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0)
    values["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = body.logprobs
    if body.structured_outputs is not None:
        values["structured"] = body.structured_outputs.model_dump(exclude_none=True)
    return _made(values, {})


def chat_params(body: ChatRequest, call_form: CallForm = TAGGED) -> tuple[SamplingParams, Names]:
    """The same for a chat, with names for later errors. ``call_form`` is how the model calls tools."""
    _check_stream_options(body)
    names: Names = {"prompt": "messages", "prompt_token_ids": "messages"}
    values = _common(body)
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    values["max_tokens"] = body.max_completion_tokens or body.max_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", f"top_logprobs={body.top_logprobs} needs logprobs=true")
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    form, field = _form(body, call_form)
    if form is not None:
        values["structured"] = form
        names["structured"] = field
    if field == "tools" and call_form.shows_special_tokens and not isinstance(body.tool_choice, NamedTool):
        values["skip_special_tokens"] = False  # calls begin with one
    return _made(values, names), names


def tools_of(body: ChatRequest | TokenizeRequest) -> list[Tool]:
    """As plain maps, as the chat template takes them."""
    return [_plain_tool(tool) for tool in body.tools or []]


def tool_choice_of(body: ChatRequest) -> ToolChoice:
    """"auto" where there are tools and nothing is said."""
    if isinstance(body.tool_choice, NamedTool):
        return body.tool_choice.model_dump()
    return body.tool_choice or ("auto" if body.tools else "none")


def template_variables(
    tools: list[Tool], choice: ToolChoice, kwargs: Mapping[str, Any] | None, add_generation_prompt: bool | None
) -> dict[str, Any]:
    """What the chat template gets beside the messages. Raises ApiError for variables that are fields of their own."""
    variables = dict(kwargs or {})
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in variables:
            raise refused("chat_template_kwargs", f"chat_template_kwargs.{name} must be given as the field {name} of the body")
    for name in ("self", "params"):
        if name in variables:
            raise refused("chat_template_kwargs", f"chat_template_kwargs.{name} can't be given: a template has no variable of this name here")
    if tools and choice != "none":
        variables["tools"] = tools
    if add_generation_prompt is not None:
        variables["add_generation_prompt"] = add_generation_prompt
    return variables


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As chat templates take them: with the arguments of earlier calls as maps. Raises ApiError for what is no text."""
    try:
        return with_parsed_arguments([_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)])
    except RequestError as error:
        raise api_error_of(error) from None


def _plain_message(message: Message, where: str) -> dict[str, Any]:
    plain = {"role": message.role, "content": message.content, **(message.model_extra or {})}
    for index, part in enumerate(message.content if isinstance(message.content, list) else []):
        _check_part(part, f"{where}.content[{index}]")
    calls = plain.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else []):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refused(f"{where}.tool_calls[{index}]", f"{where}.tool_calls[{index}] must have a function with a name")
    if plain["content"] is None:
        if not calls:
            raise refused(f"{where}.content", f"{where}.content is missing")
        plain["content"] = ""  # templates join it to other text
    return plain


def _check_part(part: dict[str, Any], where: str) -> None:
    if part.get("type") != "text":
        kind = part.get("type")
        raise refused(where, f"{where}.type={kind!r:.80} is not supported: only parts of type \"text\" are")
    if not isinstance(part.get("text"), str):
        raise refused(where, f"{where}.text={part.get('text')!r:.80} must be a text")


def _plain_tool(tool: ToolField) -> Tool:
    function = tool.function.model_dump(exclude_none=True)
    function.setdefault("description", "")
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": function}


def _form(body: ChatRequest, call_form: CallForm) -> tuple[StructuredOutput | dict[str, Any] | None, str]:
    """What constrains the answer, and the field that says so."""
    found: list[tuple[StructuredOutput | dict[str, Any], str]] = []
    wanted = body.response_format
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.json_schema.schema_
        found.append(({"json_object": True} if schema is None else {"json_schema": schema}, "response_format"))
    elif wanted is not None and not isinstance(wanted, TextFormat):
        found.append(({"json_object": True}, "response_format"))
    if body.structured_outputs is not None:
        found.append((body.structured_outputs.model_dump(exclude_none=True), "structured_outputs"))
    try:
        is_parallel = body.parallel_tool_calls is not False
        called = tool_grammar(tools_of(body), tool_choice_of(body), form=call_form, is_parallel=is_parallel)
    except RequestError as error:
        raise api_error_of(error) from None
    if called is not None:
        found.append((called, "tools"))
    if len(found) > 1:
        first, second = found[0][1], found[1][1]
        raise refused(first, f"{first} and {second} both say what form the answer has; give one of them")
    return found[0] if found else (None, "")


def _common(body: SamplingFields) -> dict[str, Any]:
    values = {name: value for name in SAMPLING_NAMES if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        values["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
        if len(values["logit_bias"]) < len(body.logit_bias):
            raise refused("logit_bias", "logit_bias has a token id twice, written in two ways")
    for name in ("stop", "stop_token_ids", "bad_words"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    return values


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
        raise refused("logit_bias", f"logit_bias has the key {key!r:.80}; keys are token ids, 0 to {MAX_TOKEN_ID}")
    return int(key)


def _check_stream_options(body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "stream_options needs stream=true")


def _made(values: dict[str, Any], names: Names) -> SamplingParams:
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise api_error_of(error, names) from None
