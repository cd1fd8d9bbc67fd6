"""A blocking client that speaks token ids: requests in, streams of RequestOutput out."""

import itertools
import logging
import queue
import socket as os_socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from ipc.channel import receive_now, try_send
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
from ipc.promptness import prompt_threads
from ipc.routes import Item, Last, Routes
from ipc.security import ClientSecurity, KeySource, client_security
from ipc.views import RequestsReply

log = logging.getLogger(__name__)

_Inbox = queue.SimpleQueue[Item | ModelInfo | Reply | None]
"""None stands behind the last output of a stream, for readers that wait in other threads."""


class _TellingInbox(_Inbox):
    """Says that there is something to read, for who reads many streams in one thread."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def put(self, item: Item | ModelInfo | Reply | None, *how: object) -> None:
        super().put(item)
        self._tell()


class TokenClient:
    """One attachment to a core; safe to use from many threads.

    When the core is lost every open stream and question raises PeerLost at once, and so does every later call: attach
    again with a new client.

    Raises:
        PeerLost: no core answered at ``address`` within ``timeout_s``.
        RequestError: one of the two is not an address, or not a time to wait.
        ConfigError: a key can't be used.
    """

    model: ModelInfo
    """What the core serves, as it was told on attach."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = ATTACH_TIMEOUT_S,
        name: str = "brigade-python",
        server_key: KeySource | None = None,
        client_key: KeySource | None = None,
    ) -> None:
        """``server_key``: the engine's public key or its file; ``client_key``: the file of this client's secret key. By default
        what BRIGADE_SERVER_KEY and BRIGADE_CLIENT_KEY say; with neither the connection is not encrypted.
        """
        check_timeout(timeout_s)
        self.address = address
        self._connection = _Connection(address, attach_frames(name), client_security(address, server_key, client_key))
        self._finalizer = weakref.finalize(self, self._connection.stop)
        try:
            self.model = self._connection.wait_attached(timeout_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "TokenClient":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def is_lost(self) -> bool:
        """The core is gone, or this client was closed."""
        return self._connection.is_lost

    def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        on_news: Callable[[], None] | None = None,
        told: Told | None = None,
    ) -> "TokenStream":
        """Submit a request now; iterate over the result for its outputs, with ``params.n`` those of all choices.

        ``on_news`` is called, from any thread, when there is something to read: then ``next`` of the stream does not wait.
        ``told`` is what another core had told of this request: this one goes on behind it.

        Raises:
            RequestError: the request can't be sent as it is. The core's own refusals come from the stream.
            PeerLost: the core is gone.
        """
        request_id = check_request_id(request_id)
        params = params or SamplingParams()
        frames = add_request_frames(request_id, token_ids, params, priority, timeout_s, told)
        num_choices = params.n if told is None else len(told.outputs)
        return TokenStream(self, request_id, self._connection.open_stream(request_id, frames, num_choices, on_news))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its choices; each gets a last output. Harmless for ids that are unknown or over."""
        self._connection.send(abort_frames(check_request_id(request_id), index=index))

    def stats(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Counters of the engine, by name. Raises PeerLost or RequestError."""
        return values_of(self._connection.ask("stats", timeout_s))

    def health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Can tokens flow? Raises PeerLost or RequestError when they can't."""
        return values_of(self._connection.ask("health", timeout_s))

    def reset_prefix_cache(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Forget the KV blocks that finished requests left. Requests that run keep theirs, and share them no more."""
        values_of(self._connection.ask("reset_prefix_cache", timeout_s))

    def timeline(self, seconds: float = 1.0, timeout_s: float = CONTROL_TIMEOUT_S) -> TimelineReply:
        """What the core and every rank did in the last seconds, in spans. Raises PeerLost or RequestError.

        A rank that does not answer in time has a lane with an error instead.
        """
        return timeline_of(self._connection.ask("timeline", timeout_s, check_seconds(seconds)))

    def requests(self, timeout_s: float = CONTROL_TIMEOUT_S) -> RequestsReply:
        """Which requests of all clients are open, without their text. Raises PeerLost or RequestError."""
        return requests_of(self._connection.ask("requests", timeout_s))

    def close(self) -> None:
        """End all open requests and leave. Idempotent."""
        self._finalizer.detach()
        self._connection.stop()
        self._connection.join()


class TokenStream:
    """Outputs of one request, in order; ends when each of its choices had the one that has a finish reason.

    Closing it early (also by dropping it) aborts the request at the core. Threads that read one stream get different
    outputs of it; when it is over, it is over for all of them.
    """

    def __init__(self, client: TokenClient, request_id: str, inbox: _Inbox) -> None:
        self.request_id = request_id
        self._client = client
        self._inbox = inbox
        self._is_over = False

    def __iter__(self) -> "TokenStream":
        return self

    def __next__(self) -> RequestOutput:
        """Raises RequestError when the core ends the request with an error, PeerLost when the core is gone."""
        if self._is_over:
            raise StopIteration
        return self._taken(self._inbox.get())

    def poll(self) -> RequestOutput | None:
        """The next output if it is there already; None otherwise, also when it is over. Raises as ``next``."""
        if self._is_over:
            return None
        try:
            return self._taken(self._inbox.get_nowait())
        except (queue.Empty, StopIteration):
            return None

    def _taken(self, item: object) -> RequestOutput:
        if item is None or isinstance(item, Failure):
            self._is_over = True
            self._inbox.put(item)  # for the next thread that waits
            if item is None:
                raise StopIteration
            raise item.error
        if isinstance(item, Last):
            self._is_over = True
            self._inbox.put(None)
            return item.output
        return cast(RequestOutput, item)

    def end_choice(self, index: int, reason: str = "abort") -> None:
        """End one choice at the core if it had not ended; it gets a last output."""
        if not self._is_over:
            self._client._connection.end_choice(self.request_id, self._inbox, abort_frames(self.request_id, reason, index))

    def close(self, reason: str = "abort") -> None:
        """Stop reading; the request ends at the core if it had not. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._inbox.put(None)
            self._client._connection.abandon_stream(self.request_id, self._inbox, reason)

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _Connection:
    """The IO thread, which alone touches the ZeroMQ sockets and the tables; callers hand it functions to run.

    There is no lock around the tables because a stream may be dropped, and so closed, by the garbage collector in the
    middle of anything; a SimpleQueue may be put to even then.
    """

    def __init__(self, address: str, hello: list[Frame], security: ClientSecurity | None) -> None:
        self.address = address
        self._hello = hello
        self._handshakes = Handshakes(address, security)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._question_ids = itertools.count(1)
        self._attached: _Inbox = queue.SimpleQueue()
        self._lost: str | None = None
        self._stopping = False
        self._wake_lock = threading.RLock()
        self._wake_in, self._wake_out = os_socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        # From here on the IO thread's own:
        self._model: ModelInfo | None = None
        self._routes: Routes[_Inbox] = Routes()
        self._questions: dict[int, _Inbox] = {}
        self._unsent: deque[list[Frame]] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = open_dealer(self._context)
        self._monitor = self._dealer.get_monitor_socket(MONITORED)
        try:
            connect(self._dealer, address, security)
        except BaseException:
            self._close_sockets(linger_s=0)
            raise
        self._thread = threading.Thread(target=self._run, name="brigade-client", daemon=True)
        with prompt_threads():
            self._thread.start()

    # ------------------------------------------------------------------------------------ called from any thread

    def wait_attached(self, timeout_s: float) -> ModelInfo:
        try:
            item = self._attached.get(timeout=timeout_s)
        except queue.Empty:
            raise self._handshakes.not_attached(timeout_s) from None
        if isinstance(item, Failure):
            raise item.error
        return cast(ModelInfo, item)

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def open_stream(
        self, request_id: str, frames: list[Frame], num_choices: int, on_news: Callable[[], None] | None = None
    ) -> _Inbox:
        self._raise_if_lost()
        inbox: _Inbox = queue.SimpleQueue() if on_news is None else _TellingInbox(on_news)
        self._post(partial(self._open, request_id, inbox, frames, num_choices))
        if self._lost is not None:
            inbox.put(Failure(PeerLost(self._lost)))
        return inbox

    def abandon_stream(self, request_id: str, inbox: _Inbox, reason: str) -> None:
        self._post(partial(self._abandon, request_id, inbox, reason))

    def end_choice(self, request_id: str, inbox: _Inbox, frames: list[Frame]) -> None:
        self._post(partial(self._end_choice, request_id, inbox, frames))

    def send(self, frames: list[Frame]) -> None:
        self._raise_if_lost()
        self._post(partial(self._unsent.append, frames))

    def ask(self, op: str, timeout_s: float, seconds: float = 1.0) -> Reply:
        check_timeout(timeout_s)
        self._raise_if_lost()
        inbox: _Inbox = queue.SimpleQueue()
        control_id = next(self._question_ids)
        self._post(partial(self._ask, control_id, inbox, control_frames(control_id, op, seconds)))
        if self._lost is not None:
            raise PeerLost(self._lost)
        try:
            item = inbox.get(timeout=timeout_s)
        except queue.Empty:
            self._post(lambda: cast(None, self._questions.pop(control_id, None)))
            raise PeerLost(f"the core at {self.address} did not answer {op!r} within {timeout_s:g} s") from None
        if isinstance(item, Failure):
            raise item.error
        return cast(Reply, item)

    def stop(self) -> None:
        """Let the thread abort what is open, and end."""
        self._stopping = True
        self._wake()

    def join(self) -> None:
        self._thread.join(CLOSE_LINGER_S + 5)

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise PeerLost(self._lost)

    def _post(self, command: Callable[[], None]) -> None:
        """Callers look at ``_lost`` once more afterwards: the thread may have run its last command meanwhile."""
        self._commands.put(command)
        self._wake()

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_in.fileno() >= 0:
                try:
                    self._wake_in.send(b"\0")
                except BlockingIOError:
                    return  # enough wake-ups are waiting already

    # --------------------------------------------------------------------------------------------- the IO thread

    def _run(self) -> None:
        reason = "the client's IO thread failed"
        try:
            reason = self._serve()
        finally:
            self._end(reason)

    def _serve(self) -> str:
        """Work until there is a reason to end; returns it."""
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        while not self._stopping:
            poller.register(self._dealer, zmq.POLLIN | (zmq.POLLOUT if self._unsent else 0))
            poller.poll()
            is_connected = self._read_monitor()
            self._read_answers()
            if not is_connected:
                return self._handshakes.refusal or f"the core at {self.address} is gone"
            self._drain_wake()
            self._run_commands()
            self._send_unsent()
        return "the client was closed"

    def _read_monitor(self) -> bool:
        """False once the core that we were attached to is gone, or will never be. Until then each new connection is greeted."""
        while (frames := receive_now(self._monitor)) is not None:
            event = parse_monitor_message(frames)
            self._handshakes.note(event)
            kind = event["event"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._model is None:
                self._unsent.append(self._hello)
            elif kind == zmq.EVENT_DISCONNECTED and self._model is not None:
                return False
        return self._handshakes.refusal is None

    def _read_answers(self) -> None:
        while (frames := receive_now(self._dealer)) is not None:
            try:
                answer = read_answer(frames)
            except ProtocolError as error:
                log.warning("dropped a message from the core at %s: %s", self.address, error)
                continue
            if isinstance(answer, ModelInfo):
                if self._model is None:
                    self._model = answer
                    self._attached.put(answer)
            elif self._model is None or answer.core_id != self._model.core_id:
                log.warning("dropped a message from a core that this client is not attached to")
            elif isinstance(answer, Reply):
                if (asker := self._questions.pop(answer.control_id, None)) is not None:
                    asker.put(answer)
            else:
                for inbox, item in self._routes.take(answer):
                    inbox.put(item)

    def _drain_wake(self) -> None:
        try:
            self._wake_out.recv(1 << 16)
        except BlockingIOError:
            return

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _open(self, request_id: str, inbox: _Inbox, frames: list[Frame], num_choices: int) -> None:
        if self._lost is not None:
            inbox.put(Failure(PeerLost(self._lost)))
        elif request_id in self._routes:
            rule = f"request_id={request_id!r} names a request of this client that is still open"
            inbox.put(Failure(RequestError(rule, field="request_id")))
        else:
            self._routes.open(request_id, inbox, num_choices)
            self._unsent.append(frames)

    def _abandon(self, request_id: str, inbox: _Inbox, reason: str) -> None:
        """Abort, and drop what still comes for it: exactly one final message, before any of a later namesake."""
        if self._lost is None and self._routes.abandon(request_id, inbox):
            self._unsent.append(abort_frames(request_id, reason))

    def _end_choice(self, request_id: str, inbox: _Inbox, frames: list[Frame]) -> None:
        """Nothing is sent of a stream that is over: its id may be another's by now."""
        if self._lost is None and self._routes.has(request_id, inbox):
            self._unsent.append(frames)

    def _ask(self, control_id: int, inbox: _Inbox, frames: list[Frame]) -> None:
        if self._lost is not None:
            inbox.put(Failure(PeerLost(self._lost)))
            return
        self._questions[control_id] = inbox
        self._unsent.append(frames)

    def _send_unsent(self) -> None:
        while self._unsent and try_send(self._dealer, self._unsent[0]):
            self._unsent.popleft()

    def _end(self, reason: str) -> None:
        can_send = self._stopping and self._model is not None
        if can_send:
            self._run_commands()
            self._unsent.extend(abort_frames(request_id) for request_id in self._routes)
            self._send_unsent()
        self._lost = reason
        for reader, item in self._routes.end_all(PeerLost(reason)):
            reader.put(item)
        for inbox in (*self._questions.values(), self._attached):
            inbox.put(Failure(PeerLost(reason)))
        self._run_commands()
        self._close_sockets(linger_s=CLOSE_LINGER_S if can_send else 0)

    def _close_sockets(self, linger_s: float) -> None:
        with self._wake_lock:
            self._wake_in.close()
            self._wake_out.close()
        self._dealer.disable_monitor()
        self._monitor.close()
        self._dealer.close(linger=int(linger_s * 1000))
        self._context.term()
