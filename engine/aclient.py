"""The asyncio client: the same calls as in ``client.py``, awaited."""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from engine.outputs import Answers, Output
from engine.prompts import Prepared, TextSide
from engine.text.tokenizer import Tokenizer
from ipc.aclient import AsyncTokenClient, AsyncTokenStream
from ipc.conversation import ATTACH_TIMEOUT_S, CONTROL_TIMEOUT_S, Scalar, check_request_id
from ipc.endpoints import DEFAULT_LISTEN
from ipc.errors import PeerLost
from ipc.messages import ModelInfo, TimelineReply
from ipc.params import SamplingParams


class AsyncClient:
    """One attachment to a running engine, used from one event loop::

        async with AsyncClient() as client:
            async for output in client.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.delta, end="")
    """

    def __init__(self, addr: str = DEFAULT_LISTEN, *, timeout_s: float = ATTACH_TIMEOUT_S) -> None:
        self._tokens = AsyncTokenClient(addr, timeout_s=timeout_s)
        self._attached_text: TextSide | None = None

    async def attach(self) -> "AsyncClient":
        """What ``async with`` does on entry.

        Raises:
            PeerLost: no engine answered at ``addr`` within ``timeout_s``.
            ConfigError: its tokenizer is not one that this version can read.
        """
        model = await self._tokens.attach()
        try:
            self._attached_text = await asyncio.to_thread(TextSide, model)  # parsing takes a while
        except BaseException:
            await self._tokens.aclose()
            raise
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
        return self._tokens.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError when it has none."""
        return self._text().tokenizer

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
        return self._send(self._text().prepare(prompt, params), request_id, priority, timeout_s)

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
        return self._send(self._text().prepare_chat(messages, params, template_variables), request_id, priority, timeout_s)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids that ``generate`` would send for this prompt."""
        return self._text().tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens."""
        return self._text().tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or only its choice ``index``; each choice that ends gets a last output. Harmless for ids that are
        unknown or over.
        """
        await self._tokens.abort(request_id, index)

    async def stats(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Counters of the engine, by name."""
        return await self._tokens.stats(timeout_s)

    async def health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Can tokens flow? Raises RequestError or PeerLost when they can't."""
        return await self._tokens.health(timeout_s)

    async def reset_prefix_cache(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Forget the KV blocks that finished requests left. Requests that run keep theirs, and share them no more."""
        await self._tokens.reset_prefix_cache(timeout_s)

    async def timeline(self, seconds: float = 1.0, timeout_s: float = CONTROL_TIMEOUT_S) -> TimelineReply:
        """What the core and every rank did in the last seconds (see ipc/spans.py). Raises RequestError or PeerLost.

        A rank that does not answer in time has a lane with an error instead of spans.
        """
        return await self._tokens.timeline(seconds, timeout_s)

    async def aclose(self) -> None:
        """End all open requests and leave. Idempotent."""
        await self._tokens.aclose()

    def _text(self) -> TextSide:
        if self._attached_text is None:
            raise PeerLost("the client is not attached; use it in `async with`, or await attach() first")
        return self._attached_text

    def _send(self, prepared: Prepared, request_id: str | None, priority: int, timeout_s: float | None) -> "AsyncGeneration":
        answers = self._text().answers(check_request_id(request_id), prepared)
        stream = self._tokens.generate(
            prepared.token_ids, prepared.params, answers.request_id, priority=priority, timeout_s=timeout_s
        )
        return AsyncGeneration(stream, answers)


class AsyncGeneration:
    """The outputs of one request, in order; with ``n`` choices those of all, told apart by ``index``.

    It ends when every choice has had its output with a finish reason. Leaving early, by ``aclose`` or by dropping it, aborts
    the request. So does cancelling the task that reads it, also by a deadline around a single ``anext``; see AsyncTokenStream.
    """

    def __init__(self, stream: AsyncTokenStream, answers: Answers) -> None:
        self.request_id = stream.request_id
        self._stream = stream
        self._answers = answers

    def __aiter__(self) -> "AsyncGeneration":
        return self

    async def __anext__(self) -> Output:
        """Raises RequestError when the engine ends the request with an error, PeerLost when the engine is gone."""
        while not self._answers.are_over:
            output = self._answers.take(await anext(self._stream), self._stream)
            if output is not None:
                return output
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop reading; the request ends at the engine if it had not. Idempotent."""
        self._stream.close()

    async def __aenter__(self) -> "AsyncGeneration":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
