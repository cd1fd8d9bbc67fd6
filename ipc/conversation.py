"""What a client says to the core and how it reads the answers; shared by the blocking and the asyncio client."""

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import zmq

from ipc.channel import MAX_FRAMES, open_socket
from ipc.codec import Frame, decode, encode
from ipc.errors import PeerLost, ProtocolError, RequestError
from ipc.messages import (
    AbortRequest,
    AddRequest,
    Attach,
    Control,
    ControlReply,
    ModelInfo,
    RequestFailed,
    RequestOutput,
    TimelineReply,
    TokenUpdates,
)
from ipc.params import MAX_CHOICES, MAX_TOKEN_ID, SamplingParams
from ipc.promptness import prompt_threads
from ipc.security import HANDSHAKE_FAILURES, ClientSecurity, handshake_failure
from ipc.views import RequestsReply

ATTACH_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 10.0

MAX_TIMEOUT_S = 1e9
"""Longer than anyone waits, and short enough for every kind of wait."""

CLOSE_LINGER_S = 1.0
"""How long a closing client waits for its last aborts to leave."""

HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
"""Half-open connections (peer's machine gone, process frozen) count as lost after this."""

MAX_FRAME_BYTES = 1 << 29
"""ModelInfo carries the tokenizer in its head."""

MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILURES | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED

Scalar = int | float | str | bool
Outcome = RequestOutput | RequestFailed
Reply = ControlReply | TimelineReply | RequestsReply
"""To a Control."""
Answer = ModelInfo | Outcome | TokenUpdates | Reply
_ANSWERS = (ModelInfo, RequestOutput, RequestFailed, TokenUpdates, ControlReply, TimelineReply, RequestsReply)


@dataclass(frozen=True, slots=True)
class Failure:
    """A final item of a stream: the error that its reader is to raise."""

    error: RequestError | PeerLost


def open_dealer(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """An unconnected client socket. Messages wait in it only for as long as its owner keeps it open."""
    with prompt_threads():
        socket = open_socket(context, zmq.DEALER, max_frame_bytes=MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    return socket


def connect(socket: "zmq.Socket[bytes]", address: str, security: ClientSecurity | None = None) -> None:
    """Begin to connect, encrypted if there are keys. Raises RequestError for what is no address."""
    if type(address) is not str:
        raise RequestError(f"addr={_shown(address)} must be a text such as tcp://127.0.0.1:5757", field="addr")
    if security is not None:
        security.guard(socket)
    try:
        socket.connect(address)
    except zmq.ZMQError:
        raise RequestError(f"addr={address!r} must be tcp://HOST:PORT or ipc://PATH", field="addr") from None


class Handshakes:
    """Why there is no attachment yet, from what the monitor of a connecting socket tells."""

    def __init__(self, address: str, security: ClientSecurity | None) -> None:
        self._address = address
        self._security = security
        self._failure: str | None = None
        self.refusal: str | None = None
        """Set when there will never be one: ZeroMQ does not connect again after a handshake that broke its rules."""

    def note(self, event: Mapping[str, Any]) -> None:
        """Any event."""
        if event["event"] & HANDSHAKE_FAILURES:
            self._failure = handshake_failure(event, self._security)
            if event["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self.refusal = f"no engine answered at {self._address}; {self._failure}"
        elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failure = None

    def not_attached(self, timeout_s: float) -> PeerLost:
        """What to raise when the time is over."""
        why = self._failure or "is `brigade serve` running there?"
        return PeerLost(f"no engine answered at {self._address} within {timeout_s:g} s; {why}")


def check_timeout(timeout_s: float, field: str = "timeout_s") -> float:
    """The same number. Raises RequestError for one that nobody can wait for."""
    if type(timeout_s) not in (int, float) or not 0 <= timeout_s <= MAX_TIMEOUT_S:
        rule = f"{field}={_shown(timeout_s)} must be a number of seconds from 0 to {MAX_TIMEOUT_S:g}"
        raise RequestError(rule, field=field)
    return timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a core that is gone had told of a request, for another one to go on behind it."""

    seed: int | None
    """The request's, that is choice 0's; None if nothing was told yet."""

    outputs: dict[int, list[int]]
    """Tokens of each choice that is still open, by index in ascending order."""


def attach_frames(name: str) -> list[Frame]:
    return encode(Attach(client=name[:256]))


def add_request_frames(
    request_id: str, token_ids: Sequence[int], params: SamplingParams, priority: int = 0, timeout_s: float | None = None,
    told: Told | None = None,
) -> list[Frame]:  # fmt: skip
    """Raises RequestError for what can't be put on the wire; all other rules are the core's."""
    if type(priority) is not int or not -(1 << 31) <= priority < 1 << 31:
        raise RequestError(f"priority={priority!r} must be an integer of 32 bits", field="priority")
    if timeout_s is not None and (type(timeout_s) not in (int, float) or not 0 < timeout_s < math.inf):
        raise RequestError(f"timeout_s={timeout_s!r} must be a number of seconds above 0", field="timeout_s")
    request = AddRequest(
        request_id=request_id, prompt_token_ids=_id_buffer(token_ids), params=params, priority=priority,
        timeout_s=None if timeout_s is None else float(timeout_s), takes_updates=True,
    )  # fmt: skip
    return encode(request if told is None or told.seed is None else _resubmission(request, told))


def _resubmission(request: AddRequest, told: Told) -> AddRequest:
    has_choices = request.params.n > 1
    return replace(
        request,
        params=replace(request.params, seed=told.seed),
        output_token_ids=_id_buffer([token_id for token_ids in told.outputs.values() for token_id in token_ids]),
        counts=[len(token_ids) for token_ids in told.outputs.values()] if has_choices else [],
        indices=list(told.outputs) if has_choices else [],
    )


def abort_frames(request_id: str, reason: str = "abort", index: int | None = None) -> list[Frame]:
    """Raises RequestError for what is no index."""
    if index is not None and (type(index) is not int or not 0 <= index < MAX_CHOICES):
        raise RequestError(f"index={_shown(index)} must be an integer from 0 to {MAX_CHOICES - 1}", field="index")
    return encode(AbortRequest(request_id=request_id, reason=reason, index=index))


def control_frames(control_id: int, op: str, seconds: float = 1.0) -> list[Frame]:
    return encode(Control(control_id=control_id, op=op, seconds=seconds))


def check_seconds(seconds: float) -> float:
    """The same as a float. Raises RequestError for what is no number; the core knows how far it can look back."""
    if type(seconds) not in (int, float):
        raise RequestError(f"seconds={_shown(seconds)} must be a number", field="seconds")
    return float(seconds)


def check_request_id(request_id: str | None) -> str:
    """The id, or a new random one for None. Raises RequestError."""
    if request_id is None:
        return uuid.uuid4().hex
    if type(request_id) is not str or not 1 <= len(request_id) <= 128 or not _is_encodable(request_id):
        shown = repr(request_id)[:80]
        raise RequestError(f"request_id={shown} must be a text of 1 to 128 characters", field="request_id")
    return request_id


def read_answer(frames: Sequence[Frame]) -> Answer:
    """Raises ProtocolError."""
    if len(frames) > MAX_FRAMES:
        raise ProtocolError("message", f"has {len(frames)} frames, more than {MAX_FRAMES}")
    try:
        answer: Answer = decode(frames, _ANSWERS)
    except RequestError as error:
        raise ProtocolError("message", str(error)) from None
    if isinstance(answer, TokenUpdates):
        _check_columns(answer)
    return answer


def _check_columns(updates: TokenUpdates) -> None:
    counts = updates.counts
    if not len(updates.request_ids) == len(counts) == len(updates.num_output_tokens):
        raise ProtocolError("TokenUpdates", "has columns of different lengths")
    if updates.indices and len(updates.indices) != len(counts):
        raise ProtocolError("TokenUpdates.indices", f"has {len(updates.indices)} entries for {len(counts)} requests")
    if min(counts, default=0) < 0 or sum(counts) != len(updates.token_ids):
        raise ProtocolError("TokenUpdates.counts", f"don't add up to {len(updates.token_ids)} tokens")


def error_of(failed: RequestFailed) -> RequestError:
    return RequestError(failed.reason, code=failed.code, field=failed.field)


def values_of(reply: Reply) -> dict[str, Scalar]:
    """What the core answered. Raises RequestError when it answered with an error, or with something else."""
    return _checked(reply, ControlReply).values


def timeline_of(reply: Reply) -> TimelineReply:
    """The same for a timeline."""
    return _checked(reply, TimelineReply)


def requests_of(reply: Reply) -> RequestsReply:
    """The same for the requests that are open."""
    answer = _checked(reply, RequestsReply)
    columns = (
        answer.client_indices, answer.indices, answer.states, answer.ages_ms, answer.num_prompt_tokens,
        answer.num_cached_tokens, answer.num_output_tokens, answer.num_preemptions,
    )  # fmt: skip
    if any(len(column) != len(answer.request_ids) for column in columns):
        raise RequestError("the core answered with columns of different lengths", code="internal")
    if any(not 0 <= index < len(answer.clients) for index in answer.client_indices):
        raise RequestError("the core answered with a client that it does not name", code="internal")
    return answer


AnyReply = TypeVar("AnyReply", ControlReply, TimelineReply, RequestsReply)


def _checked(reply: Reply, kind: type[AnyReply]) -> AnyReply:
    if isinstance(reply, ControlReply) and reply.error:
        raise RequestError(reply.error, code="unavailable")
    if not isinstance(reply, kind):
        raise RequestError(f"the core answered with a {type(reply).__name__} that nobody asked for", code="internal")
    return reply


def is_final(answer: Outcome) -> bool:
    return isinstance(answer, RequestFailed) or answer.finish_reason is not None


def _id_buffer(token_ids: Sequence[int]) -> Any:
    array = np.asarray(token_ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RequestError(f"prompt={_shown(token_ids)} must be a flat list of integers", field="prompt")
    if array.size and not 0 <= array.min() <= array.max() <= MAX_TOKEN_ID:
        worst = array.min() if array.min() < 0 else array.max()
        raise RequestError(f"prompt holds {worst}, but a token id is 0 to {MAX_TOKEN_ID}", field="prompt")
    return np.array(array, dtype=np.int32)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
