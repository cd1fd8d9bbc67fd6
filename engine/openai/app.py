"""The routes of the server: which path does what."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from engine.aclient import AsyncClient
from engine.metrics_text import render_metrics
from engine.openai import documents
from engine.openai.answering import Answering
from engine.openai.bodies import read_body
from engine.openai.call_forms import TAGGED, CallForm, form_of
from engine.openai.chat_reply import ChatReply
from engine.openai.completion_reply import CompletionReply
from engine.openai.errors import OUR_FAULT, ApiError, api_error_of, refused
from engine.openai.fields import (
    MAX_CHOICES_IN_ALL,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from engine.openai.gate import App, Gate
from engine.openai.heap import HeapTrim
from engine.openai.link import EngineLink
from engine.openai.params import (
    Names,
    chat_params,
    completion_params,
    plain_messages,
    template_variables,
    tool_choice_of,
    tools_of,
)
from engine.openai.parse import Model, parse_body, prompts_of
from engine.openai.replies import Head
from engine.openai.server_events import around, dumps, integers
from engine.openai.settings import HttpSettings
from engine.prompts import Prepared
from engine.text.chat_template import named_templates
from ipc.errors import EngineError, PeerLost, RequestError

log = logging.getLogger(__name__)

LONG_BODY_BYTES = 1 << 15
"""From here on a body is taken for work of its own."""

HEALTH_TIMEOUT_S = 1.0
NUM_SHORT_THREADS = 4
NUM_LONG_THREADS = 2
"""Short prompts have threads of their own, so that none of them waits behind a megabyte of text."""

Made = TypeVar("Made")


class Server:
    """The application and what its routes share."""

    def __init__(self, link: EngineLink, settings: HttpSettings) -> None:
        self._link = link
        self._settings = settings
        self._numbers = itertools.count(1)
        self._short = ThreadPoolExecutor(NUM_SHORT_THREADS, thread_name_prefix="short-text")
        self._long = ThreadPoolExecutor(NUM_LONG_THREADS, thread_name_prefix="long-text")
        self._heap = HeapTrim()
        self._started = int(time.time())
        self._known_form: tuple[AsyncClient, CallForm] | None = None
        self.api = self._make_api()
        """Its routes alone, for the OpenAPI document."""
        self.gate = Gate(self.api, api_keys=settings.api_keys)

    @property
    def app(self) -> App:
        """With all that stands before the routes."""
        if not self._settings.cors_origins:
            return self.gate
        return CORSMiddleware(
            self.gate,
            allow_origins=self._settings.cors_origins, allow_methods=("GET", "POST"), allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )  # fmt: skip

    def close(self) -> None:
        """Let the threads end."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------ routes

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts."""
        body, is_long = await self._parsed(request, CompletionRequest)
        client = await self._client(body.model)
        prompts = prompts_of(body.prompt)
        params = completion_params(body)
        if len(prompts) * params.n > MAX_CHOICES_IN_ALL:
            rule = f"at most {MAX_CHOICES_IN_ALL} answers to one request are given"
            raise refused("n", f"n={params.n} for each of {len(prompts)} prompts: {rule}")

        def prepare() -> tuple[list[Prepared], list[str]]:
            prepared = [client.prepare(prompt, params) for prompt in prompts]
            return prepared, [_echoed(client, prompt, params.skip_special_tokens) for prompt in prompts] if body.echo else []

        prepared, echoed = await self._in_thread(prepare, is_long, {})
        has_tokenizer = bool(client.model.tokenizer)
        if params.logprobs is not None and not has_tokenizer:
            raise refused("logprobs", "logprobs needs a tokenizer, and this model has none")
        head = self._head(client, body, "text_completion", request, "cmpl")
        tokenizer = client.tokenizer if has_tokenizer else None
        reply = CompletionReply(head, prepared, params, tokenizer, echoed)
        return self._answering(request, client, body, prepared, reply, {})

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        body, is_long = await self._parsed(request, ChatRequest)
        client = await self._client(body.model)
        form = await self._call_form(client) if body.tools else TAGGED
        params, names = await self._in_thread(lambda: chat_params(body, form), is_long, {})
        tools, choice = tools_of(body), tool_choice_of(body)
        variables = template_variables(tools, choice, body.chat_template_kwargs, body.add_generation_prompt)

        def prepare() -> Prepared:
            return client.prepare_chat(plain_messages(body.messages), params, **variables)

        prepared = await self._in_thread(prepare, is_long, names)
        head = self._head(client, body, "chat.completion", request, "chatcmpl")
        reply = ChatReply(head, prepared, params.n, tools, choice, has_logprobs=bool(body.logprobs), call_form=form)
        return self._answering(request, client, body, [prepared], reply, names)

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a prompt, or of a conversation."""
        body, is_long = await self._parsed(request, TokenizeRequest)
        client = await self._client(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise refused("prompt", "exactly one of prompt and messages must be given")
        variables = template_variables(tools_of(body), "auto", body.chat_template_kwargs, body.add_generation_prompt)

        def work() -> bytes:
            if body.prompt is None:
                tokens = client.prepare_chat(plain_messages(body.messages or []), **variables).token_ids
            else:
                tokens = client.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False)
            before, after = around(
                lambda ids: {"count": len(tokens), "max_model_len": client.model.max_model_len, "tokens": [ids]}
            )
            return before + integers(tokens) + after

        names = {"prompt": "prompt" if body.messages is None else "messages"}
        content = await self._in_thread(work, is_long, names)
        return Response(content, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        body, is_long = await self._parsed(request, DetokenizeRequest)
        client = await self._client(body.model)
        skips = body.skip_special_tokens is True
        text = await self._in_thread(lambda: client.detokenize(body.tokens, skip_special_tokens=skips), is_long, {})
        return _json({"prompt": text})

    async def models(self) -> Response:
        """The model that is served, under each of its names."""
        client = await self._link.client()
        return _json({"object": "list", "data": [self._card(client, name) for name in self._names(client)]})

    async def model(self, model_id: str) -> Response:
        """One of them."""
        client = await self._client(model_id)
        return _json(self._card(client, model_id))

    async def health(self) -> Response:
        """200 when a token could flow now, else 503."""
        client = await self._link.client()
        try:
            values = await client.health(HEALTH_TIMEOUT_S)
        except EngineError as error:
            raise ApiError(503, f"the engine does not answer: {error}", code="engine_unavailable") from None
        if not values.get("ready"):
            raise ApiError(503, f"the engine is not ready: {values.get('state')}", code="engine_unavailable")
        return _json({"status": "ok", "model": client.model.name})

    async def metrics(self) -> Response:
        """Counters in the text format of Prometheus."""
        client = await self._link.client()
        try:
            stats = await client.stats()
        except EngineError as error:
            raise api_error_of(error) from None
        return Response(render_metrics(stats), media_type="text/plain; version=0.0.4; charset=utf-8")

    # ------------------------------------------------------------------------------------------ what they share

    def _make_api(self) -> FastAPI:
        api = FastAPI(title="Brigade", docs_url=None, redoc_url=None, redirect_slashes=False)
        documents.add_routes(api, self)
        api.add_exception_handler(ApiError, _on_api_error)  # type: ignore[arg-type]
        api.add_exception_handler(HTTPException, _on_http_exception)  # type: ignore[arg-type]
        api.add_exception_handler(PeerLost, _on_peer_lost)
        api.add_exception_handler(Exception, _on_fault)
        return api

    async def _parsed(self, request: Request, model: type[Model]) -> tuple[Model, bool]:
        """The body, and whether it is a long one."""
        raw = await read_body(request, self._settings.max_body_bytes)
        if len(raw) < LONG_BODY_BYTES:
            return parse_body(raw, model), False
        self._heap.soon()
        return await asyncio.get_running_loop().run_in_executor(self._long, parse_body, raw, model), True

    async def _in_thread(self, work: Callable[[], Made], is_long: bool, names: Names) -> Made:
        pool = self._long if is_long else self._short
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except RequestError as error:
            raise api_error_of(error, names) from None

    async def _client(self, model: str | None) -> AsyncClient:
        """Raises ApiError 404 for a model that isn't served."""
        client = await self._link.client()
        names = self._names(client)
        if model is not None and model not in names:
            raise ApiError(
                404, f"model={model!r:.120} is not served here; {' or '.join(names)} is", param="model", code="model_not_found"
            )
        return client

    async def _call_form(self, client: AsyncClient) -> CallForm:
        """How the model calls tools; the same as long as the engine is."""
        if self._known_form is None or self._known_form[0] is not client:
            template = named_templates(client.model.tokenizer_config).get("tool_use", client.model.chat_template)
            tokenizer = client.tokenizer if client.model.tokenizer else None
            form = await self._in_thread(lambda: form_of(template, tokenizer), False, {})
            self._known_form = client, form
        return self._known_form[1]

    def _names(self, client: AsyncClient) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._settings.served_model_names, client.model.name)))

    def _head(self, client: AsyncClient, body: SamplingFields, kind: str, request: Request, prefix: str) -> Head:
        options = body.stream_options
        return Head(
            answer_id=f"{prefix}-{request.state.request_id}",
            kind=kind,
            model=body.model or self._names(client)[0],
            includes_usage=bool(options is not None and options.include_usage),
            returns_token_ids=bool(body.return_token_ids),
        )

    def _answering(
        self, request: Request, client: AsyncClient, body: SamplingFields, prepared: list[Prepared], reply: Any, names: Names
    ) -> Answering:
        request_id = request.state.request_id
        number = next(self._numbers)

        def open_streams() -> list[Any]:
            # The number tells apart what clients gave the same id.
            return [
                client.submit(one, f"{request_id}-{number}-{index}", priority=body.priority or 0, timeout_s=body.timeout)
                for index, one in enumerate(prepared)
            ]

        return Answering(request_id, open_streams, reply, names, is_streamed=bool(body.stream))

    def _card(self, client: AsyncClient, name: str) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": self._started, "owned_by": "brigade",
            "max_model_len": client.model.max_model_len,
        }  # fmt: skip


def _echoed(client: AsyncClient, prompt: str | list[int], skips: bool) -> str:
    return prompt if isinstance(prompt, str) else client.detokenize(prompt, skip_special_tokens=skips)


def _json(content: Any) -> Response:
    return Response(dumps(content), media_type="application/json")


def _response_of(error: ApiError) -> Response:
    return Response(error.body, error.status, error.headers, "application/json")


async def _on_api_error(request: Request, error: ApiError) -> Response:
    return _response_of(error)


async def _on_peer_lost(request: Request, error: Exception) -> Response:
    return _response_of(ApiError(503, "the engine can't be reached", code="engine_unavailable"))


async def _on_fault(request: Request, error: Exception) -> Response:
    """A fault of ours."""
    log.error("request %s failed", request.state.request_id, exc_info=error)
    return _response_of(ApiError(500, OUR_FAULT, code="internal"))


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """Of the router: paths and methods that there are not."""
    path = request.url.path[:200]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method:.20} {path} is not possible; the path allows {allowed}"
        return _response_of(ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed}))
    if error.status_code == 404:
        return _response_of(ApiError(404, f"{path} is not a path of this server", code="not_found"))
    return _response_of(ApiError(error.status_code, str(error.detail)))
