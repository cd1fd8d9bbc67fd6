"""The core's side of the client sockets: decoding, admission, and answers to whoever asked.

A client is its ZeroMQ identity on one listening socket. Its requests live until their one final message was queued for
it; a client that can't be reached any more has its requests aborted.
"""

import logging
import socket
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from engine.allow_list import AllowList
from engine.request import ClientId, Request
from engine.unsent import LastWords, Unsent, traceable
from ipc.channel import MAX_PER_TURN, open_socket, receive_now
from ipc.codec import MAX_CLIENT_HEAD_BYTES, Frame, decode, encode, request_id_of
from ipc.endpoints import DEFAULT_LISTEN
from ipc.errors import ConfigError, ProtocolError, RequestError
from ipc.messages import (
    AbortRequest,
    AddRequest,
    Attach,
    Control,
    ControlReply,
    RequestFailed,
    RequestOutput,
    TimelineReply,
    TokenUpdates,
)
from ipc.security import ServerSecurity
from ipc.views import RequestsReply

logger = logging.getLogger(__name__)

ToClient = RequestOutput | RequestFailed | ControlReply | TimelineReply | TokenUpdates | RequestsReply

FROM_CLIENT = (AddRequest, AbortRequest, Attach, Control)

_IN_USE = "is in use; choose another address, or give none and take the one in the ready line"

REFUSAL_CODES = ("bad_request", "duplicate", "overloaded", "unavailable", "internal")
"""With which a message may be turned away."""

HEARTBEAT_MS = 5_000
"""Between signs of life on an idle client connection; a peer silent for three of them is dropped by ZeroMQ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromClient:
    """One well-formed message of a client."""

    client: ClientId
    message: AddRequest | AbortRequest | Attach | Control


class Gateway:
    """Owns the listening sockets."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        core_id: int,
        max_prompt_tokens: int,
        security: ServerSecurity | None = None,
    ) -> None:
        """Prompts up to some times ``max_prompt_tokens`` are read, so that they can be refused with their length; a peer
        that sends bigger frames is disconnected. ``security`` is that of every tcp address.
        """
        self.sockets: list[zmq.Socket[bytes]] = []
        self.addresses: list[str] = []
        self.num_refused = Counter(dict.fromkeys(REFUSAL_CODES, 0))
        """Messages that were turned away, by the code of the answer."""
        self._security = security
        self.allow_list: AllowList | None = None
        """Of client keys. Its socket belongs to those that the loop polls."""
        if security is not None and security.client_keys is not None:
            self.allow_list = AllowList(context, security.client_keys)
        self._context = context
        self._core_id = core_id
        self._lost: dict[ClientId, int] = {}
        """With the error that told."""
        self._stalled: set[ClientId] = set()
        """Of those that ``take_lost`` gave last: who is there, and does not read."""
        self._unsent = Unsent()
        self._last_words = LastWords(time.monotonic)
        self._updates: dict[ClientId, _Updates] = {}
        self._max_frame_bytes = max(1 << 20, 16 * max_prompt_tokens)

    def listen(self, addresses: Sequence[str]) -> None:
        """Bind; with no address the default one, or a free port if that is taken.

        Raises:
            ConfigError: naming the address that is in use or can't be bound.
        """
        if addresses:
            for address in addresses:
                self._bind(address)
            return
        try:
            self._bind(DEFAULT_LISTEN)
        except ConfigError:
            logger.warning("%s is taken, perhaps by another engine: listening on a free port", DEFAULT_LISTEN)
            self._bind("tcp://127.0.0.1:0")

    def listen_privately(self, address: str) -> None:
        """Bind an ipc address that only the core's own children are told."""
        self._bind(address)
        self.addresses.remove(address)

    def receive(self, ready: Container[object]) -> Iterator[FromClient]:
        """What arrived on sockets that are ``ready`` and could be understood, one by one and not more than a share of a
        turn; the rest of it is answered with an error.
        """
        if self.allow_list is not None and self.allow_list.socket in ready:
            self.allow_list.answer()
        for listener, router in enumerate(self.sockets):
            if router not in ready:
                continue
            for _ in range(MAX_PER_TURN):
                frames = receive_now(router)
                if frames is None:
                    break
                identity, *rest = frames
                client = ClientId(listener, identity)
                try:
                    message = decode(rest, FROM_CLIENT, max_head_bytes=MAX_CLIENT_HEAD_BYTES)
                    yield FromClient(client=client, message=message)
                except ProtocolError as error:
                    self.refuse(client, request_id_of(rest), RequestError(str(error), field=_field_of(error)))
                except RequestError as error:
                    self.refuse(client, request_id_of(rest), error)

    def send(self, client: ClientId, message: ToClient) -> None:
        """Queue a message; a client that is gone or takes nothing is remembered as lost.

        One that takes nothing gets an error for what it missed the end of, as soon as it has room.
        """
        frames = encode(message)
        error = self.send_frames(client, frames)
        if error != zmq.EAGAIN:
            return
        if isinstance(message, RequestFailed):
            self._last_words.owe(client, message.request_id, frames)
        elif isinstance(message, RequestOutput) and message.finish_reason is not None:
            self._owe_end(client, message.request_id)

    def update(self, request: Request, new_token_ids: list[int]) -> None:
        """Tell of tokens, together with others of the same step: at the next ``send_updates``."""
        updates = self._updates.get(request.client)
        if updates is None:
            updates = self._updates[request.client] = _Updates()
        updates.request_ids.append(request.request_id)
        updates.counts.append(len(new_token_ids))
        updates.token_ids += new_token_ids
        updates.num_output_tokens.append(len(request.output_token_ids))
        updates.indices.append(request.index)

    def send_updates(self) -> None:
        """Queue what ``update`` collected, a message for each client. To be called before a request's next message."""
        for client, updates in self._updates.items():
            self.send(client, TokenUpdates(
                core_id=self._core_id,
                request_ids=tuple(updates.request_ids),
                counts=updates.counts,
                token_ids=updates.token_ids,
                num_output_tokens=updates.num_output_tokens,
                indices=updates.indices if any(updates.indices) else [],
            ))
        self._updates.clear()

    def send_frames(self, client: ClientId, frames: list[Frame]) -> int:
        """The same for frames that many clients share: big ones are queued without a copy for each.

        Returns 0, or why they could not be queued: EAGAIN for a client with too much to read, EHOSTUNREACH for one that is gone.
        """
        error = self._lost.get(client) or self._queue_up(client, frames)
        if error:
            self._lost[client] = error
        return error

    def refuse(self, client: ClientId, request_id: str, error: RequestError) -> None:
        """Queue the error with which a message is turned away."""
        self.num_refused[error.code] += 1
        self.fail(client, request_id, error)

    def fail(self, client: ClientId, request_id: str, error: RequestError) -> None:
        """Queue the error that ends a request."""
        self.send(client, RequestFailed(
            core_id=self._core_id,
            request_id=request_id,
            code=error.code,
            reason=error.reason,
            field=error.field,
        ))

    def end_lost(self, client: ClientId, request_ids: Iterable[str]) -> None:
        """Let a client that does not read know, once it does, that these were ended."""
        if client in self._stalled:
            for request_id in request_ids:
                self._owe_end(client, request_id)

    def deadline(self) -> float | None:
        """When ``take_lost`` should be called at the latest."""
        return self._last_words.deadline()

    def take_lost(self) -> set[ClientId]:
        """Clients that could not be reached since the last call; those that had no room are tried again meanwhile."""
        self._last_words.retry(self._queue_up)
        lost, self._lost = self._lost, {}
        self._stalled = {client for client, error in lost.items() if error == zmq.EAGAIN}
        return set(lost)

    def close(self, linger_ms: int) -> None:
        """Close the sockets; what is queued may still leave for ``linger_ms``."""
        for router in self.sockets:
            router.close(linger_ms)
        self.sockets.clear()
        if self.allow_list is not None:
            self.allow_list.socket.close(0)

    @property
    def sources(self) -> "list[zmq.Socket[bytes]]":
        """What the loop polls, and tells ``receive`` of."""
        return self.sockets if self.allow_list is None else [*self.sockets, self.allow_list.socket]

    @property
    def num_strangers(self) -> int:
        """Connections that were refused because their key is not listed."""
        return 0 if self.allow_list is None else self.allow_list.num_refused

    def _queue_up(self, client: ClientId, frames: list[Frame]) -> int:
        if not self._unsent.has_room(client):
            return int(zmq.EAGAIN)
        sent = traceable(frames)
        try:
            self.sockets[client.listener].send_multipart([client.identity, *sent], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return int(error.errno)
        self._unsent.add(client, sent)
        return 0

    def _owe_end(self, client: ClientId, request_id: str) -> None:
        reason = "the client did not take its outputs; the request was ended"
        self._last_words.owe(client, request_id, encode(
            RequestFailed(core_id=self._core_id, request_id=request_id, code="unavailable", reason=reason)
        ))  # fmt: skip

    def _bind(self, address: str) -> None:
        if address.startswith("ipc://"):
            _check_path(address)
        router = open_socket(self._context, zmq.ROUTER, max_frame_bytes=self._max_frame_bytes)
        router.setsockopt(zmq.IPV6, address.startswith("tcp://["))
        router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        if self._security is not None and address.startswith("tcp://"):
            self._security.guard(router)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            router.close(0)
            reason = _IN_USE if error.errno == zmq.EADDRINUSE else str(error)
            raise ConfigError("--listen", f"{address} {reason}") from None
        self.sockets.append(router)
        self.addresses.append(router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))


@dataclass(slots=True)
class _Updates:
    """Columns of one client's TokenUpdates."""

    request_ids: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)


def _check_path(address: str) -> None:
    """ZeroMQ removes what lies at the path before it binds: only a socket that nobody serves may be lost that way."""
    path = Path(address.removeprefix("ipc://"))
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError("--listen", f"{address}: the path is taken by something that is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ConfigError("--listen", f"{address} {_IN_USE}")


def _field_of(error: ProtocolError) -> str:
    return error.path.partition(".")[2] or error.path
