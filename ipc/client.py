"""A blocking client that speaks token ids: requests in, streams of RequestOutput out."""

import logging
import queue
import socket as os_socket
import threading
import weakref
from collections.abc import Sequence
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
    Scalar,
    abort_frames,
    add_request_frames,
    attach_frames,
    check_request_id,
    connect,
    control_frames,
    error_of,
    is_final,
    open_dealer,
    read_answer,
    values_of,
)
from ipc.errors import PeerLost, ProtocolError, RequestError
from ipc.messages import ControlReply, ModelInfo, RequestFailed, RequestOutput
from ipc.params import SamplingParams

log = logging.getLogger(__name__)

_Inbox = queue.SimpleQueue[RequestOutput | ModelInfo | ControlReply | Failure]


class TokenClient:
    """One attachment to a core; safe to use from many threads.

    When the core is lost every open stream and question raises PeerLost at once, and so does every later call: attach
    again with a new client.

    Raises:
        PeerLost: no core answered at ``address`` within ``timeout_s``.
    """

    def __init__(self, address: str, *, timeout_s: float = ATTACH_TIMEOUT_S, name: str = "brigade-python") -> None:
        self.address = address
        self._connection = _Connection(address, attach_frames(name))
        self._finalizer = weakref.finalize(self, self._connection.stop, False)
        try:
            self.model = self._connection.wait_attached(timeout_s)
        except BaseException:
            self.close()
            raise

    model: ModelInfo
    """What the core serves, as it was told on attach."""

    def __enter__(self) -> "TokenClient":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> "TokenStream":
        """Submit a request now; iterate over the result for its outputs.

        Raises:
            RequestError: the request can't be sent as it is. The core's own refusals come from the stream.
            PeerLost: the core is gone.
        """
        request_id = check_request_id(request_id)
        frames = add_request_frames(request_id, token_ids, params or SamplingParams(), priority)
        return TokenStream(self, request_id, self._connection.open_stream(request_id, frames))

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request; its stream gets a last output. Harmless for ids that are unknown or over."""
        self._connection.post(abort_frames(check_request_id(request_id), reason))

    def stats(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Counters of the engine, by name. Raises PeerLost or RequestError."""
        return self._connection.ask("stats", timeout_s)

    def health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Can tokens flow? Raises PeerLost or RequestError when they can't."""
        return self._connection.ask("health", timeout_s)

    def close(self) -> None:
        """End all open requests and leave. Idempotent."""
        self._finalizer.detach()
        self._connection.stop(True)

    def _forget(self, request_id: str) -> None:
        self._connection.abandon_stream(request_id)


class TokenStream:
    """Outputs of one request, in order; ends behind the one that has a finish reason.

    Closing it early (also by dropping it) aborts the request at the core. Not to be shared between threads.
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
        item = self._inbox.get()
        if isinstance(item, Failure):
            self._is_over = True
            raise item.error
        output = cast(RequestOutput, item)
        self._is_over = output.finish_reason is not None
        return output

    def close(self) -> None:
        """Stop reading; the request ends at the core if it had not. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._client._forget(self.request_id)

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _Connection:
    """The IO thread, which alone touches the sockets, and the tables that it shares with callers under a lock."""

    def __init__(self, address: str, hello: list[Frame]) -> None:
        self.address = address
        self._hello = hello
        self._lock = threading.Lock()
        self._streams: dict[str, _Inbox] = {}
        self._abandoned: dict[str, int] = {}
        self._questions: dict[int, _Inbox] = {}
        self._next_question = 1
        self._attached: _Inbox = queue.SimpleQueue()
        self._model: ModelInfo | None = None
        self._lost: PeerLost | None = None
        self._outbox: queue.SimpleQueue[list[Frame]] = queue.SimpleQueue()
        self._waiting_to_send: list[Frame] | None = None
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = open_dealer(self._context)
        self._wake_in, self._wake_out = os_socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        try:
            self._monitor = cast("zmq.Socket[bytes]", self._dealer.get_monitor_socket(MONITORED))
            connect(self._dealer, address)
        except BaseException:
            self._close_sockets(linger_s=0)
            raise
        self._thread = threading.Thread(target=self._run, name="brigade-client", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------ called from any thread

    def wait_attached(self, timeout_s: float) -> ModelInfo:
        try:
            item = self._attached.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerLost(f"no core answered at {self.address} within {timeout_s:g} s") from None
        if isinstance(item, Failure):
            raise item.error
        return cast(ModelInfo, item)

    def open_stream(self, request_id: str, frames: list[Frame]) -> _Inbox:
        inbox: _Inbox = queue.SimpleQueue()
        with self._lock:
            self._raise_if_lost()
            if request_id in self._streams:
                raise RequestError(f"request_id={request_id!r} names a request that is still open", field="request_id")
            self._streams[request_id] = inbox
            self._outbox.put(frames)
        self._wake()
        return inbox

    def abandon_stream(self, request_id: str) -> None:
        """Abort, and drop what still comes for it: exactly one final message, before any of a later namesake."""
        with self._lock:
            if self._streams.pop(request_id, None) is None or self._lost is not None:
                return
            self._abandoned[request_id] = self._abandoned.get(request_id, 0) + 1
            self._outbox.put(abort_frames(request_id))
        self._wake()

    def post(self, frames: list[Frame]) -> None:
        with self._lock:
            self._raise_if_lost()
            self._outbox.put(frames)
        self._wake()

    def ask(self, op: str, timeout_s: float) -> dict[str, Scalar]:
        inbox: _Inbox = queue.SimpleQueue()
        with self._lock:
            self._raise_if_lost()
            control_id = self._next_question
            self._next_question += 1
            self._questions[control_id] = inbox
            self._outbox.put(control_frames(control_id, op))
        self._wake()
        try:
            item = inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerLost(f"the core at {self.address} did not answer {op} within {timeout_s:g} s") from None
        finally:
            with self._lock:
                self._questions.pop(control_id, None)
        if isinstance(item, Failure):
            raise item.error
        return values_of(cast(ControlReply, item))

    def stop(self, wait: bool) -> None:
        """Let the thread abort what is open and end."""
        with self._lock:
            self._stopping = True
        self._wake()
        if wait and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_LINGER_S + 5)

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise PeerLost(str(self._lost))
        if self._stopping:
            raise PeerLost("the client was closed")

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"\0")
        except BlockingIOError:
            return  # enough wake-ups are waiting already
        except OSError:
            return  # the thread has ended and closed its end; what was posted is failed already

    # --------------------------------------------------------------------------------------------- the IO thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        is_connected = True
        try:
            while is_connected and not self._stopping:
                poller.register(self._dealer, zmq.POLLIN | (zmq.POLLOUT if self._waiting_to_send else 0))
                poller.poll()
                is_connected = self._read_monitor()
                self._read_answers()
                self._drain_wake()
                self._send_posted()
        finally:
            self._end(is_connected)

    def _read_monitor(self) -> bool:
        """False once the core that we were attached to is gone. Until then each new connection is greeted."""
        while (event := receive_now(self._monitor)) is not None:
            kind = parse_monitor_message(event)["event"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._model is None:
                try_send(self._dealer, self._hello)
            elif kind == zmq.EVENT_DISCONNECTED and self._model is not None:
                return False
        return True

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
            elif isinstance(answer, ControlReply):
                with self._lock:
                    inbox = self._questions.pop(answer.control_id, None)
                if inbox is not None:
                    inbox.put(answer)
            else:
                self._deliver(answer)

    def _deliver(self, answer: RequestOutput | RequestFailed) -> None:
        request_id = answer.request_id
        with self._lock:
            if request_id in self._abandoned:
                if is_final(answer):
                    self._abandoned[request_id] -= 1
                    if not self._abandoned[request_id]:
                        del self._abandoned[request_id]
                return
            inbox = self._streams.get(request_id)
            if inbox is not None and is_final(answer):
                del self._streams[request_id]
        if inbox is None:
            if isinstance(answer, RequestFailed):
                log.warning("the core refused a message: %s", answer.reason)
            return
        inbox.put(Failure(error_of(answer)) if isinstance(answer, RequestFailed) else answer)

    def _drain_wake(self) -> None:
        try:
            while self._wake_out.recv(4096):
                continue
        except BlockingIOError:
            return

    def _send_posted(self) -> None:
        """Send until the outbox is empty or the socket is full; then the rest waits for room, in order."""
        while True:
            if self._waiting_to_send is None:
                try:
                    self._waiting_to_send = self._outbox.get_nowait()
                except queue.Empty:
                    return
            if not try_send(self._dealer, self._waiting_to_send):
                return
            self._waiting_to_send = None

    def _end(self, is_connected: bool) -> None:
        gone = f"the core at {self.address} is gone" if not is_connected else "the client was closed"
        with self._lock:
            self._lost = PeerLost(gone)
            open_ids = list(self._streams)
            inboxes = [*self._streams.values(), *self._questions.values(), self._attached]
            self._streams.clear()
            self._questions.clear()
        for inbox in inboxes:
            inbox.put(Failure(PeerLost(gone)))
        if is_connected and self._model is not None:
            self._send_posted()
            for request_id in open_ids:
                try_send(self._dealer, abort_frames(request_id))
        self._close_sockets(linger_s=CLOSE_LINGER_S if is_connected and self._model is not None else 0)

    def _close_sockets(self, linger_s: float) -> None:
        self._dealer.disable_monitor()
        self._dealer.close(linger=int(linger_s * 1000))
        self._wake_in.close()
        self._wake_out.close()
        self._context.term()
