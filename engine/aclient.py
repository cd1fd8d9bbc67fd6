"""The asyncio client: the same calls as in ``client.py``, awaited."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from engine.batch import Result, check_list, params_of_batch, room_for, run_batch_async
from engine.outputs import Answers, Output
from engine.progress import ProgressHook
from engine.prompts import Prepare, Prepared, PrepareItem, TextSide
from engine.resumption import Losses, TimeLeft, told_to
from engine.text.tokenizer import Tokenizer
from ipc.aclient import AsyncTokenClient, AsyncTokenStream
from ipc.conversation import ATTACH_TIMEOUT_S, CONTROL_TIMEOUT_S, Scalar, Told, check_request_id, check_timeout
from ipc.endpoints import DEFAULT_LISTEN
from ipc.errors import PeerLost
from ipc.messages import ModelInfo, TimelineReply
from ipc.params import SamplingParams
from ipc.security import KeySource
from ipc.views import RequestsReply


class _Attachment(NamedTuple):
    tokens: AsyncTokenClient
    text: TextSide


_Resend = Callable[[], Awaitable[AsyncTokenStream]]


@dataclass(slots=True)
class _Sent:
    stream: AsyncTokenStream
    answers: Answers
    losses: Losses[_Resend]


class AsyncClient:
    """One attachment to a running engine, used from one event loop::

        async with AsyncClient() as client:
            async for output in client.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.delta, end="")

    When the engine goes away, everything that is open raises PeerLost, and so does every later call. With ``reconnect_s``
    the client attaches again instead, to whatever engine is at ``addr`` by then, and waits so many seconds for it: requests
    that are open are sent once more with the tokens that they have, and their outputs go on where they were.

    An engine that was started with ``--server-key`` is reached with ``server_key``, its public key or the file of it, and
    ``client_key``, the file of a secret key that it lets in. Where they are not given, BRIGADE_SERVER_KEY and
    BRIGADE_CLIENT_KEY say them.
    """

    def __init__(
        self,
        addr: str = DEFAULT_LISTEN,
        *,
        timeout_s: float = ATTACH_TIMEOUT_S,
        reconnect_s: float | None = None,
        server_key: KeySource | None = None,
        client_key: KeySource | None = None,
    ) -> None:
        self._addr = addr
        self._connect = partial(AsyncTokenClient, addr, server_key=server_key, client_key=client_key)
        self._timeout_s = check_timeout(timeout_s)
        self._reconnect_s = None if reconnect_s is None else check_timeout(reconnect_s, "reconnect_s")
        self._attaching = asyncio.Lock()
        self._is_closed = False
        self._attachment: _Attachment | None = None
        self._seeking: asyncio.Future[_Attachment] | None = None
        """The way to an engine in place of a lost one."""

    async def attach(self) -> "AsyncClient":
        """What ``async with`` does on entry; with ``reconnect_s`` also the way to find a lost engine again.

        Raises:
            PeerLost: no engine answered at ``addr`` within ``timeout_s``.
            ConfigError: its tokenizer is not one that this version can read, or a key can't be used.
            RequestError: ``addr`` is not an address.
        """
        async with self._attaching:
            if self._attachment is None:
                self._attachment = await _attach(self._connect, self._timeout_s)
        await self._attached()
        return self

    async def __aenter__(self) -> "AsyncClient":
        return await self.attach()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def model(self) -> ModelInfo:
        """What the engine serves: name, limits, and the model's text files."""
        return self._attachment_now().tokens.model

    @property
    def is_lost(self) -> bool:
        """The engine is gone, or this client was closed; false before it was attached."""
        return self._attachment is not None and self._attachment.tokens.is_lost

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError when it has none."""
        return self._attachment_now().text.tokenizer

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> "AsyncGeneration":
        """Send a request now and iterate over its outputs with ``async for``; the last one has a finish reason.

        With ``params.n`` above 1 outputs of all choices come as they are made; see ``Output.index``.
        ``priority`` orders requests under ``--scheduling-policy priority``, the lowest number first. After ``timeout_s``
        seconds a request ends with finish reason "timeout" and the tokens that it has.

        Raises:
            RequestError: the prompt can't be used. The engine's own refusals come while iterating.
            PeerLost: the engine is gone.
        """
        return self._generation(lambda text: text.prepare(prompt, params), request_id, priority, timeout_s)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        **template_variables: Any,
    ) -> "AsyncGeneration":
        """The same for messages, each a map with role and content, through the model's chat template.

        ``template_variables`` go to the template (``tools``, ``add_generation_prompt=False`` and what else it knows).
        """
        return self._generation(
            lambda text: text.prepare_chat(messages, params, template_variables), request_id, priority, timeout_s
        )

    async def generate_batch(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | ProgressHook = False,
        max_open: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[Result]:
        """Answers to all prompts, in their order, when the last one is there. Arguments and errors as in ``Client``."""
        asked = check_list("prompts", prompts, "prompts, each a text or a list of token ids")
        return await self._batch(asked, params, TextSide.prepare, progress, max_open, priority, timeout_s)

    async def chat_batch(
        self,
        conversations: Iterable[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | ProgressHook = False,
        max_open: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        **template_variables: Any,
    ) -> list[Result]:
        """The same for conversations, each a list of messages as ``chat`` takes them."""
        asked = check_list("conversations", conversations, "lists of messages")

        def prepare(text: TextSide, messages: Sequence[Mapping[str, Any]], rules: SamplingParams) -> Prepared:
            return text.prepare_chat(messages, rules, template_variables)

        return await self._batch(asked, params, prepare, progress, max_open, priority, timeout_s)

    def prepare(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Prepared:
        """The slow half of ``generate``, in proportion to the prompt: checks and tokens. ``submit`` is the other.

        Safe to call from any thread, so that a large prompt need not hold up the event loop.
        """
        return self._attachment_now().text.prepare(prompt, params)

    def prepare_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **template_variables: Any
    ) -> Prepared:
        """The same of ``chat``."""
        return self._attachment_now().text.prepare_chat(messages, params, template_variables)

    def submit(
        self,
        prepared: Prepared,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> "AsyncGeneration":
        """Send what was prepared now, and iterate over its outputs as those of ``generate``."""
        return self._generation(lambda text: prepared, request_id, priority, timeout_s)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids that ``generate`` would send for this prompt."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or only its choice ``index``; each choice that ends gets a last output. Harmless for ids that are
        unknown or over.
        """
        await (await self._attached()).tokens.abort(request_id, index)

    async def stats(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Counters of the engine, by name."""
        return await (await self._attached()).tokens.stats(timeout_s)

    async def health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Can tokens flow? Raises RequestError or PeerLost when they can't."""
        return await (await self._attached()).tokens.health(timeout_s)

    async def reset_prefix_cache(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Forget the KV blocks that finished requests left. Requests that run keep theirs, and share them no more."""
        await (await self._attached()).tokens.reset_prefix_cache(timeout_s)

    async def timeline(self, seconds: float = 1.0, timeout_s: float = CONTROL_TIMEOUT_S) -> TimelineReply:
        """What the core and every rank did in the last seconds (see ipc/spans.py). Raises RequestError or PeerLost.

        A rank that does not answer in time has a lane with an error instead of spans.
        """
        return await (await self._attached()).tokens.timeline(seconds, timeout_s)

    async def requests(self, timeout_s: float = CONTROL_TIMEOUT_S) -> RequestsReply:
        """Which requests of all clients are open, and how far each is (see ipc/views.py); nothing of their text."""
        return await (await self._attached()).tokens.requests(timeout_s)

    async def aclose(self) -> None:
        """End all open requests and leave. Idempotent."""
        self._is_closed = True
        if self._seeking is not None:
            self._seeking.cancel()
        if self._attachment is not None:
            await self._attachment.tokens.aclose()

    def _attachment_now(self) -> _Attachment:
        if self._attachment is None:
            raise PeerLost("the client is not attached; use it in `async with`, or await attach() first")
        return self._attachment

    def _may_reattach(self) -> bool:
        return self._reconnect_s is not None and not self._is_closed and self._attachment_now().tokens.is_lost

    async def _attached(self) -> _Attachment:
        """What is there; a new one if that is lost and may be replaced. Raises PeerLost when nobody answers in time."""
        if self._may_reattach():
            async with self._attaching:
                if self._may_reattach():
                    assert self._reconnect_s is not None
                    old = self._attachment_now()
                    await old.tokens.aclose()
                    self._seeking = asyncio.ensure_future(_attach(self._connect, self._reconnect_s, old.text))
                    try:
                        self._attachment = await self._seeking
                    except asyncio.CancelledError:
                        if self._is_closed:
                            raise PeerLost("the client was closed") from None
                        raise
        return self._attachment_now()

    async def _batch(
        self, asked: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None, prepare: PrepareItem,
        progress: bool | ProgressHook, max_open: int | None, priority: int, timeout_s: float | None,
    ) -> list[Result]:  # fmt: skip
        rules = params_of_batch(params, len(asked))

        def send(index: int) -> AsyncGeneration:
            return self._generation(lambda text: prepare(text, asked[index], rules[index]), None, priority, timeout_s)

        room = room_for(max_open, self.model.max_num_seqs, rules)
        return await run_batch_async(len(asked), self._attached, send, room, progress)

    def _generation(
        self, prepare: Prepare, request_id: str | None, priority: int, timeout_s: float | None
    ) -> "AsyncGeneration":
        """Sent now; or, when the engine must be found again first, when its first output is awaited."""
        request_id = check_request_id(request_id)
        time_left = TimeLeft(timeout_s)

        def send(attachment: _Attachment) -> _Sent:
            begun_at = attachment.text
            prepared = prepare(begun_at)
            answers = begun_at.answers(request_id, prepared)

            def stream_of(tokens: AsyncTokenClient, timeout_s: float | None, told: Told | None = None) -> AsyncTokenStream:
                return tokens.generate(
                    prepared.token_ids, prepared.params, request_id, priority=priority, timeout_s=timeout_s, told=told
                )

            async def resend() -> AsyncTokenStream:
                tokens, found = await self._attached()
                return stream_of(tokens, time_left(), told_to(answers, begun_at, found.model, self._addr))

            losses = Losses[_Resend](None if self._reconnect_s is None else resend)
            return _Sent(stream_of(attachment.tokens, timeout_s), answers, losses)

        async def find_and_send() -> _Sent:
            return send(await self._attached())

        if self._may_reattach():
            return AsyncGeneration(request_id, None, find_and_send)
        return AsyncGeneration(request_id, send(self._attachment_now()), find_and_send)


async def _attach(connect: "partial[AsyncTokenClient]", timeout_s: float, known: TextSide | None = None) -> _Attachment:
    """``known`` is taken over if it is of the same model: making one takes long."""
    tokens = connect(timeout_s=timeout_s)
    model = await tokens.attach()
    if known is not None and known.is_of(model):
        return _Attachment(tokens, known)
    try:
        return _Attachment(tokens, await asyncio.to_thread(TextSide, model))  # parsing takes a while
    except BaseException:
        await tokens.aclose()
        raise


class AsyncGeneration:
    """The outputs of one request, in order; with ``n`` choices those of all, told apart by ``index``.

    It ends when every choice has had its output with a finish reason. Leaving early, by ``aclose`` or by dropping it, aborts
    the request. So does cancelling the task that reads it, also by a deadline around a single ``anext``; see AsyncTokenStream.
    """

    def __init__(self, request_id: str, sent: _Sent | None, send: Callable[[], Awaitable[_Sent]]) -> None:
        """``sent`` None: ``send`` is awaited first, once."""
        self.request_id = request_id
        self._sent = sent
        self._send = send
        self._sending = asyncio.Lock()
        self._was_tried = False
        self._is_closed = False

    def __aiter__(self) -> "AsyncGeneration":
        return self

    async def __anext__(self) -> Output:
        """Raises RequestError when the engine ends the request with an error, PeerLost when the engine is gone."""
        if self._sent is None:
            await self._send_once()
        if self._sent is None:
            raise StopAsyncIteration
        sent = self._sent
        while not sent.answers.are_over:
            stream = sent.stream
            try:
                sent.losses.raise_polled()
                message = await anext(stream)
            except PeerLost as error:
                await self._replace(sent, stream, error)
                continue
            sent.losses.note_message()
            output = sent.answers.take(message, stream)
            if output is not None:
                return output
        raise StopAsyncIteration

    def poll(self) -> Output | None:
        """The next output if it is there already, without waiting; None also when there will be none, or when ``anext`` would
        have to find the engine again. Raises as ``anext``.
        """
        if (sent := self._sent) is None:
            return None
        while not sent.answers.are_over and (message := sent.losses.poll(sent.stream.poll)) is not None:
            output = sent.answers.take(message, sent.stream)
            if output is not None:
                return output
        return None

    async def aclose(self) -> None:
        """Stop reading; the request ends at the engine if it had not. Idempotent."""
        self._is_closed = True
        if self._sent is not None:
            self._sent.stream.close()

    async def __aenter__(self) -> "AsyncGeneration":
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self.aclose()

    async def _replace(self, sent: _Sent, lost: AsyncTokenStream, error: PeerLost) -> None:
        async with self._sending:
            if sent.stream is lost:
                sent.stream = await sent.losses.way_on(error)()
                if self._is_closed:
                    sent.stream.close()

    async def _send_once(self) -> None:
        async with self._sending:
            if self._sent is not None or self._was_tried or self._is_closed:
                return
            self._was_tried = True  # also if it fails or is cancelled
            self._sent = await self._send()
            if self._is_closed:
                self._sent.stream.close()
