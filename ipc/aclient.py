"""An asyncio client that speaks token ids; the same calls as ``client.py``, awaited."""

import asyncio
import itertools
import logging
import weakref
from collections.abc import Sequence
from typing import cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from ipc.codec import Frame
from ipc.conversation import (
    ATTACH_TIMEOUT_S,
    CLOSE_LINGER_S,
    CONTROL_TIMEOUT_S,
    MONITORED,
    Failure,
    Handshakes,
    Reply,
    Scalar,
    Told,
    abort_frames,
    add_request_frames,
    attach_frames,
    check_request_id,
    check_seconds,
    check_timeout,
    connect,
    control_frames,
    open_dealer,
    read_answer,
    requests_of,
    timeline_of,
    values_of,
)
from ipc.errors import PeerLost, ProtocolError, RequestError
from ipc.messages import ModelInfo, RequestOutput, TimelineReply
from ipc.params import SamplingParams
from ipc.routes import Item, Last, Routes
from ipc.security import ClientSecurity, KeySource, client_security
from ipc.views import RequestsReply

log = logging.getLogger(__name__)

_Inbox = asyncio.Queue[Item | None]
"""None stands behind the last output, for readers that wait in other tasks."""


class AsyncTokenClient:
    """One attachment to a core, used from one event loop: ``async with AsyncTokenClient(address) as client``.

    When the core is lost every open stream and question raises PeerLost at once, and so does every later call: attach
    again.

    Raises:
        RequestError: ``timeout_s`` is not a time to wait; on attach also when ``address`` is not an address.
        ConfigError: on attach, a key can't be used.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = ATTACH_TIMEOUT_S,
        name: str = "brigade-python",
        server_key: KeySource | None = None,
        client_key: KeySource | None = None,
    ) -> None:
        """Keys as TokenClient's."""
        self.address = address
        self._server_key = server_key
        self._client_key = client_key
        self._timeout_s = check_timeout(timeout_s)
        self._name = name
        self._connection: _AsyncConnection | None = None

    async def attach(self) -> ModelInfo:
        """Connect and learn what is served. Raises PeerLost when no core answered in time."""
        if self._connection is None:
            security = client_security(self.address, self._server_key, self._client_key)
            self._connection = _AsyncConnection(self.address, attach_frames(self._name), security)
            try:
                return await self._connection.wait_attached(self._timeout_s)
            except BaseException:
                await self.aclose()
                raise
        return self.model

    async def __aenter__(self) -> "AsyncTokenClient":
        await self.attach()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @property
    def model(self) -> ModelInfo:
        """What the core serves, as it was told on attach."""
        return self._attached().attached.result()

    @property
    def is_lost(self) -> bool:
        """The core is gone, or this client was closed; false before it was attached."""
        return self._connection is not None and self._connection.lost is not None

    def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        told: Told | None = None,
    ) -> "AsyncTokenStream":
        """Submit a request now; ``async for`` over the result gives its outputs, with ``params.n`` those of all choices.

        ``told`` is what another core had told of this request: this one goes on behind it.

        Raises:
            RequestError: the request can't be sent as it is. The core's own refusals come from the stream.
            PeerLost: the core is gone.
        """
        request_id = check_request_id(request_id)
        params = params or SamplingParams()
        frames = add_request_frames(request_id, token_ids, params, priority, timeout_s, told)
        num_choices = params.n if told is None else len(told.outputs)
        connection = self._attached()
        return AsyncTokenStream(connection, request_id, connection.open_stream(request_id, frames, num_choices))

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its choices; each gets a last output. Harmless for ids that are unknown or over."""
        self._attached().send(abort_frames(check_request_id(request_id), index=index))

    async def stats(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Counters of the engine, by name. Raises PeerLost or RequestError."""
        return values_of(await self._attached().ask("stats", timeout_s))

    async def health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Can tokens flow? Raises PeerLost or RequestError when they can't."""
        return values_of(await self._attached().ask("health", timeout_s))

    async def reset_prefix_cache(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Forget the KV blocks that finished requests left. Requests that run keep theirs, and share them no more."""
        values_of(await self._attached().ask("reset_prefix_cache", timeout_s))

    async def timeline(self, seconds: float = 1.0, timeout_s: float = CONTROL_TIMEOUT_S) -> TimelineReply:
        """What the core and every rank did in the last seconds, in spans. Raises PeerLost or RequestError.

        A rank that does not answer in time has a lane with an error instead.
        """
        return timeline_of(await self._attached().ask("timeline", timeout_s, check_seconds(seconds)))

    async def requests(self, timeout_s: float = CONTROL_TIMEOUT_S) -> RequestsReply:
        """Which requests of all clients are open, without their text. Raises PeerLost or RequestError."""
        return requests_of(await self._attached().ask("requests", timeout_s))

    async def aclose(self) -> None:
        """End all open requests and leave. Idempotent."""
        if self._connection is not None:
            await self._connection.aclose()

    def _attached(self) -> "_AsyncConnection":
        if self._connection is None:
            raise PeerLost("the client is not attached; use it in `async with`, or await attach() first")
        if self._connection.lost is not None:
            raise PeerLost(self._connection.lost)
        return self._connection


class AsyncTokenStream:
    """Outputs of one request, in order; ends when each of its choices had the one that has a finish reason.

    Closing it early (also by dropping it) aborts the request at the core. So does cancelling: a stream whose reader is
    cancelled, while it waits for an output or works on one, is closed, whoever still holds it. That includes a deadline
    around a single output: after ``asyncio.wait_for(anext(stream), 1)`` timed out the stream is over, as a native
    asynchronous generator would be; to wait in portions, put ``asyncio.shield`` around a task for ``anext(stream)``.
    """

    def __init__(self, connection: "_AsyncConnection", request_id: str, inbox: _Inbox) -> None:
        self.request_id = request_id
        self._connection = connection
        self._inbox = inbox
        self._is_over = False
        self._reader: weakref.ref[asyncio.Task[object]] | None = None

    def __aiter__(self) -> "AsyncTokenStream":
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises RequestError when the core ends the request with an error, PeerLost when the core is gone."""
        if self._is_over:
            raise StopAsyncIteration
        self._note_reader()
        try:
            item = await self._inbox.get()
        except asyncio.CancelledError:
            self.close()
            raise
        return self._taken(item)

    def poll(self) -> RequestOutput | None:
        """The next output if it is there already; None otherwise, also when it is over. Raises as ``anext``."""
        if self._is_over or self._inbox.empty():
            return None
        try:
            return self._taken(self._inbox.get_nowait())
        except StopAsyncIteration:
            return None

    def _taken(self, item: Item | None) -> RequestOutput:
        if item is None or isinstance(item, Failure):
            self._is_over = True
            self._inbox.put_nowait(item)  # for the next task that waits
            if item is None:
                raise StopAsyncIteration
            raise item.error
        if isinstance(item, Last):
            self._is_over = True
            self._inbox.put_nowait(None)
            return item.output
        return item

    def end_choice(self, index: int, reason: str = "abort") -> None:
        """End one choice at the core if it had not ended; it gets a last output."""
        if not self._is_over:
            self._connection.end_choice(self.request_id, self._inbox, abort_frames(self.request_id, reason, index))

    def close(self, reason: str = "abort") -> None:
        """Stop reading; the request ends at the core if it had not. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._inbox.put_nowait(None)
            self._connection.abandon_stream(self.request_id, self._inbox, reason)

    async def aclose(self) -> None:
        self.close()

    def _note_reader(self) -> None:
        """A task that is cancelled between two outputs keeps the stream in its traceback, maybe for long."""
        task = asyncio.current_task()
        if task is None or (self._reader is not None and self._reader() is task):
            return
        reader, stream = weakref.ref(task), weakref.ref(self)
        self._reader = reader

        def on_end(task: "asyncio.Task[object]") -> None:
            if task.cancelled() and (left := stream()) is not None and left._reader is reader:
                left.close()

        task.add_done_callback(on_end)

    def __del__(self) -> None:
        if not self._is_over and not self._connection.loop.is_closed():
            abandon = self._connection.abandon_stream
            self._connection.loop.call_soon_threadsafe(abandon, self.request_id, self._inbox, "abort")


class _AsyncConnection:
    """The sockets, the two tasks that read them, and the tables of what is open; all on one event loop."""

    def __init__(self, address: str, hello: list[Frame], security: ClientSecurity | None) -> None:
        self.address = address
        self._handshakes = Handshakes(address, security)
        self.loop = asyncio.get_running_loop()
        self.attached: asyncio.Future[ModelInfo] = self.loop.create_future()
        self.lost: str | None = None
        self._hello = hello
        self._routes: Routes[_Inbox] = Routes()
        self._questions: dict[int, asyncio.Future[Reply]] = {}
        self._question_ids = itertools.count(1)
        self._context = zmq.asyncio.Context()
        self._dealer = cast(zmq.asyncio.Socket, open_dealer(cast("zmq.Context[zmq.Socket[bytes]]", self._context)))
        self._monitor = self._dealer.get_monitor_socket(MONITORED)
        self._tasks: list[asyncio.Task[None]] = []
        try:
            connect(cast("zmq.Socket[bytes]", self._dealer), address, security)
        except BaseException:
            self._close_sockets(linger_s=0)
            raise
        self._tasks = [self.loop.create_task(self._watch_connection()), self.loop.create_task(self._read_answers())]
        for task in self._tasks:
            task.add_done_callback(self._note_failed_task)

    async def wait_attached(self, timeout_s: float) -> ModelInfo:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self.attached)
        except TimeoutError:
            raise self._handshakes.not_attached(timeout_s) from None

    def open_stream(self, request_id: str, frames: list[Frame], num_choices: int) -> _Inbox:
        if request_id in self._routes:
            rule = f"request_id={request_id!r} names a request of this client that is still open"
            raise RequestError(rule, field="request_id")
        inbox: _Inbox = asyncio.Queue()
        self._routes.open(request_id, inbox, num_choices)
        self.send(frames)
        return inbox

    def abandon_stream(self, request_id: str, inbox: _Inbox, reason: str) -> None:
        """Abort, and drop what still comes for it: exactly one final message, before any of a later namesake."""
        if self.lost is None and self._routes.abandon(request_id, inbox):
            self.send(abort_frames(request_id, reason))

    def end_choice(self, request_id: str, inbox: _Inbox, frames: list[Frame]) -> None:
        """Nothing is sent of a stream that is over: its id may be another's by now."""
        if self.lost is None and self._routes.has(request_id, inbox):
            self.send(frames)

    async def ask(self, op: str, timeout_s: float, seconds: float = 1.0) -> Reply:
        check_timeout(timeout_s)
        control_id = next(self._question_ids)
        answer: asyncio.Future[Reply] = self.loop.create_future()
        self._questions[control_id] = answer
        self.send(control_frames(control_id, op, seconds))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise PeerLost(f"the core at {self.address} did not answer {op!r} within {timeout_s:g} s") from None
        finally:
            self._questions.pop(control_id, None)

    def send(self, frames: list[Frame]) -> None:
        """Sent at once if the socket has room, else as soon as it has, in order."""
        sent = cast("asyncio.Future[object]", self._dealer.send_multipart(frames))
        sent.add_done_callback(_note_failed_send)

    async def aclose(self) -> None:
        can_send = self.lost is None and self.attached.done()
        if can_send:
            for request_id in self._routes:
                self.send(abort_frames(request_id))
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._end("the client was closed", CLOSE_LINGER_S if can_send else 0)

    async def _watch_connection(self) -> None:
        """Greet each new connection until a core answers; from then on, end everything when it is gone."""
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            self._handshakes.note(event)
            if self._handshakes.refusal is not None:
                break
            kind = event["event"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self.attached.done():
                self.send(self._hello)
            elif kind == zmq.EVENT_DISCONNECTED and self.attached.done():
                break
        self._tasks[1].cancel()
        self._read_waiting()
        self._end(self._handshakes.refusal or f"the core at {self.address} is gone", 0)

    async def _read_answers(self) -> None:
        while True:
            await self._dealer.poll()
            self._read_waiting()

    def _read_waiting(self) -> None:
        """Nothing is awaited between taking a message and delivering it, so that no cancellation can lose one."""
        while True:
            taken = cast("asyncio.Future[list[bytes]]", self._dealer.recv_multipart(zmq.NOBLOCK))
            if isinstance(taken.exception(), zmq.Again):
                return
            self._read(taken.result())

    def _read(self, frames: list[bytes]) -> None:
        try:
            answer = read_answer(frames)
        except ProtocolError as error:
            log.warning("dropped a message from the core at %s: %s", self.address, error)
            return
        if isinstance(answer, ModelInfo):
            if not self.attached.done():
                self.attached.set_result(answer)
        elif not self.attached.done() or answer.core_id != self.attached.result().core_id:
            log.warning("dropped a message from a core that this client is not attached to")
        elif isinstance(answer, Reply):
            question = self._questions.get(answer.control_id)
            if question is not None and not question.done():
                question.set_result(answer)
        else:
            for inbox, item in self._routes.take(answer):
                inbox.put_nowait(item)

    def _note_failed_task(self, task: "asyncio.Task[None]") -> None:
        """A reader that fails must not leave others waiting for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the client's reader failed", exc_info=error)
            self._end("the client's reader failed", 0)

    def _end(self, reason: str, linger_s: float) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        for inbox, item in self._routes.end_all(PeerLost(reason)):
            inbox.put_nowait(item)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(PeerLost(reason))
        if not self.attached.done():
            self.attached.set_exception(PeerLost(reason))
            self.attached.exception()  # nobody may be waiting
        self._close_sockets(linger_s)

    def _close_sockets(self, linger_s: float) -> None:
        self._dealer.disable_monitor()
        self._monitor.close()
        self._dealer.close(linger=int(linger_s * 1000))
        self._context.term()


def _note_failed_send(sent: "asyncio.Future[object]") -> None:
    if not sent.cancelled() and (error := sent.exception()) is not None:
        log.warning("a message to the core was not sent: %s", error)
