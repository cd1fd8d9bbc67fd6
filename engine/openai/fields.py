"""Which fields may the body of a request have? Types, ranges and defaults, also for the OpenAPI document.

Null is the same as absent everywhere but in ``prompt``, ``messages`` and the like. Fields that nobody here knows are refused.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, WithJsonSchema

from ipc.params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_CACHE_SALT_CHARS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    SamplingParams,
)

DEFAULT_COMPLETION_TOKENS = 16
"""Of /v1/completions, as OpenAI's; chats go on up to the context limit."""

MAX_PROMPTS = 1024
MAX_CHOICES_IN_ALL = 1024
"""Of all prompts of a request together."""

MAX_MESSAGES = 4096
MAX_TOOLS = 512

class _FailFast(FailFast):
    __hash__ = object.__hash__  # a union's members must have one


FIRST_ERROR = _FailFast()
"""A list stops being looked at where it is wrong: an error for each of a million entries takes long."""

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
Prompt = Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
"""Checked by ``prompts_of``: pydantic would make an error for every token of a list."""


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Body):
    """Exactly one of them is given; see docs/structured.md."""

    json_schema: dict[str, Any] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingFields(Body):
    """What completions and chats have in common; the names are those of SamplingParams where it has them."""

    model: str | None = Field(None, description="A name from /v1/models; absent: the model that is served.")
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASED_TOKENS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Without effect.")

    top_k: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_REPETITION_PENALTY)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    stop_token_ids: Annotated[list[TokenId], FIRST_ERROR, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], FIRST_ERROR, Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    structured_outputs: StructuredOutputs | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    prefix_caching: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None
    logits_processors: dict[str, dict[str, Any]] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    timeout: Annotated[float, Field(gt=0, le=1e9)] | None = Field(None, description="Seconds; then the finish reason is timeout.")
    return_token_ids: bool | None = Field(None, description="Adds token_ids and prompt_token_ids to each choice.")


class CompletionRequest(SamplingFields):
    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        None, description=f"Absent: {DEFAULT_COMPLETION_TOKENS}."
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: Literal[""] | None = Field(None, description="Not supported.")
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(None, description="Only the same as n.")


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class Message(Body):
    """Further fields go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None


Nothing = Annotated[None, Field(description="Not supported: only null.")]


class ChatRequest(SamplingFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        None, description="Absent: up to the context limit. Wins over max_tokens."
    )
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = Field(None, discriminator="type")
    tools: Annotated[list[ToolField], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    add_generation_prompt: bool | None = None

    store: Literal[False] | None = None
    metadata: dict[str, str] | None = Field(None, description="Without effect.")
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    safety_identifier: str | None = Field(None, description="Without effect.")
    prompt_cache_key: str | None = Field(None, description="Without effect.")
    verbosity: Literal["medium"] | None = None
    reasoning_effort: Nothing = None
    prediction: Nothing = None
    audio: Nothing = None
    web_search_options: Nothing = None
    functions: Nothing = None
    function_call: Nothing = None


class TokenizeRequest(Body):
    """Either a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = Field(None, description="Absent: true. Only with a prompt.")
    add_generation_prompt: bool | None = Field(None, description="Absent: true. Only with messages.")
    tools: Annotated[list[ToolField], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], FIRST_ERROR, Field(max_length=1 << 22)]
    skip_special_tokens: bool | None = Field(None, description="Absent: false.")


SAMPLING_NAMES = tuple(
    name for name in SamplingFields.model_fields if name in SamplingParams.__dataclass_fields__ and name != "logit_bias"
)
"""Fields that go to SamplingParams as they are."""
