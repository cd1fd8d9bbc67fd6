"""What the OpenAPI document says: paths with the models of their bodies and answers. Answers are not checked by these."""

from typing import Any, Literal, Protocol

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from engine.openai.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{model}"


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorContent(Document):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(Document):
    error: ErrorContent


class CachedTokens(Document):
    cached_tokens: int


class UsageDocument(Document):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(Document):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Document):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionDocument(Document):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageDocument


class TopLogprob(Document):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Document):
    content: list[ChatLogprob]
    refusal: None


class CalledFunction(Document):
    name: str
    arguments: str


class ToolCall(Document):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Document):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Document):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatDocument(Document):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageDocument


class ModelCard(Document):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Document):
    object: Literal["list"]
    data: list[ModelCard]


class TokensDocument(Document):
    count: int
    max_model_len: int
    tokens: list[int]


class TextDocument(Document):
    prompt: str


class HealthDocument(Document):
    status: Literal["ok"]
    model: str


class Routes(Protocol):
    """What answers; see Server."""

    async def completions(self, request: Request) -> Response: ...

    async def chat_completions(self, request: Request) -> Response: ...

    async def tokenize(self, request: Request) -> Response: ...

    async def detokenize(self, request: Request) -> Response: ...

    async def models(self) -> Response: ...

    async def model(self, model_id: str) -> Response: ...

    async def health(self) -> Response: ...

    async def metrics(self) -> Response: ...


def add_routes(api: FastAPI, routes: Routes) -> None:
    """All paths, and the document at /openapi.json."""
    posts = (
        ("/v1/completions", routes.completions, CompletionRequest, CompletionDocument, True),
        ("/v1/chat/completions", routes.chat_completions, ChatRequest, ChatDocument, True),
        ("/tokenize", routes.tokenize, TokenizeRequest, TokensDocument, False),
        ("/detokenize", routes.detokenize, DetokenizeRequest, TextDocument, False),
    )
    for path, route, asked, answered, is_streamed in posts:
        body = {"required": True, "content": {"application/json": {"schema": {"$ref": _REF.format(model=asked.__name__)}}}}
        api.post(path, responses=_responses(answered, _POST_ERRORS, is_streamed=is_streamed), openapi_extra={"requestBody": body})(route)
    api.get("/v1/models", responses=_responses(ModelList, (401, 503)))(routes.models)
    api.get("/v1/models/{model_id:path}", responses=_responses(ModelCard, (401, 404, 503)))(routes.model)
    api.get("/health", responses=_responses(HealthDocument, (503,)))(routes.health)
    text = {"description": "Metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}
    api.get("/metrics", responses={**_responses(HealthDocument, (401, 503)), 200: text})(routes.metrics)
    api.openapi = lambda: _document(api)  # type: ignore[method-assign]


_POST_ERRORS = (400, 401, 404, 413, 429, 503)
_MEANINGS = {
    400: "The request can't be served as it is",
    401: "The API key is missing or wrong",
    404: "There is no such model",
    405: "There is no such method here",
    413: "The body is too large",
    429: "A queue is full; try again later",
    431: "The headers are too large",
    503: "The engine can't be reached; try again later",
}


def _responses(answered: type[Document], errors: tuple[int, ...], *, is_streamed: bool = False) -> dict[int | str, dict[str, Any]]:
    good: dict[str, Any] = {"model": answered, "description": "The answer"}
    if is_streamed:
        good["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    found: dict[int | str, dict[str, Any]] = {200: good}
    for status in (*errors, 405, 431):
        found[status] = {"model": ErrorDocument, "description": _MEANINGS[status]}
    return found


def _document(api: FastAPI) -> dict[str, Any]:
    if api.openapi_schema is None:
        document = get_openapi(title=api.title, version="1", routes=api.routes)
        asked: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
        _, made = models_json_schema([(model, "validation") for model in asked], ref_template=_REF)
        schemas = document["components"]["schemas"]
        schemas |= made["$defs"]
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own; our errors have one form
            schemas.pop(name, None)
        for item in document["paths"].values():
            for operation in item.values():
                operation["responses"].pop("422", None)
        api.openapi_schema = document
    return api.openapi_schema
