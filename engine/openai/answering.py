"""The part of a request in which the engine works: streams are opened, read and told, and end when the client leaves."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from starlette.responses import Response

from engine.aclient import AsyncGeneration
from engine.openai.errors import OUR_FAULT, ApiError, api_error_of
from engine.openai.gate import Message, Receive, Scope, Send
from engine.openai.generations import Batch, Generations
from engine.openai.params import Names
from engine.openai.replies import Reply
from engine.openai.server_events import DONE, HEADERS
from engine.openai.tool_calls import blamed_on_tools
from ipc.errors import EngineError, RequestError

log = logging.getLogger(__name__)

LARGE_BYTES = 1 << 17
"""Of events: behind so many, other requests have their turn."""

Open = Callable[[], Sequence[AsyncGeneration]]
"""Sends a request's prompts to the engine. May raise RequestError and PeerLost."""


class Answering(Response):
    """A response that is made while it is sent. Errors before its first byte are raised, as ApiError."""

    def __init__(self, request_id: str, open_streams: Open, reply: Reply, names: Names, *, is_streamed: bool) -> None:
        self.status_code = 200
        self.background = None
        self._request_id = request_id
        self._open_streams = open_streams
        self._reply = reply
        self._names = names
        self._is_streamed = is_streamed
        self._has_begun = False
        self._is_complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or stop as soon as the client is gone."""
        work = asyncio.create_task(self._work(send))
        watch = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not self._is_complete:
                log.info("request %s: the client left; what was open of it is ended", self._request_id)
        finally:
            watch.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))
        if not work.cancelled():
            work.result()

    async def _work(self, send: Send) -> None:
        generations: Generations | None = None
        try:
            generations = Generations(self._open_streams())
            await (self._stream(generations, send) if self._is_streamed else self._send_whole(generations, send))
        except EngineError as error:
            await self._fail(self._explained(error), send)
        except Exception:  # noqa: BLE001 - whoever reads a stream must learn that it failed
            log.exception("request %s failed", self._request_id)
            await self._fail(ApiError(500, OUR_FAULT, code="internal"), send)
        finally:
            if generations is not None:
                await generations.aclose()

    async def _send_whole(self, generations: Generations, send: Send) -> None:
        while batch := await generations.next():
            self._reply.keep(batch)
        pieces = []
        for piece in self._reply.body():
            pieces.append(piece)
            await asyncio.sleep(0)  # log probabilities of many choices take seconds: others have their turn in between
        body = b"".join(pieces)
        self._has_begun = self._is_complete = True
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(_part(body, more=False))

    async def _stream(self, generations: Generations, send: Send) -> None:
        # The status waits for the first token: what the engine refuses is no stream.
        while batch := await generations.next():
            if not self._has_begun:
                self._has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            await self._send_events(batch, send)
        self._is_complete = True
        await send(_part(self._reply.last_events(), more=False))

    async def _send_events(self, batch: Batch, send: Send) -> None:
        ready = bytearray()
        for events in self._reply.events(batch):
            ready += events
            if len(ready) > LARGE_BYTES:
                await send(_part(bytes(ready), more=True))
                ready.clear()
                await asyncio.sleep(0)
        if ready:
            await send(_part(bytes(ready), more=True))

    def _explained(self, error: EngineError) -> ApiError:
        form = self._reply.params.structured
        if form is not None and self._names.get("structured") == "tools" and isinstance(error, RequestError):
            return api_error_of(blamed_on_tools(error, form), self._names)
        return api_error_of(error, self._names)

    async def _fail(self, error: ApiError, send: Send) -> None:
        if error.status >= 500:
            log.warning("request %s failed: %s", self._request_id, error.message)
        if not self._has_begun:
            raise error
        await send(_part(b"data: " + error.body + b"\n\n" + DONE, more=False))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
