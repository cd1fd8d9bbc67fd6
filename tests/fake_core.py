"""A core without a scheduler: a ROUTER in a thread that speaks the real messages and answers as a test tells it to."""

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

from ipc.channel import open_socket, receive_now, try_send
from ipc.codec import decode, encode
from ipc.messages import (
    AbortRequest,
    AddRequest,
    Attach,
    Control,
    ControlReply,
    ModelInfo,
    RequestFailed,
    RequestOutput,
)

CORE_ID = 7
DEADLINE_S = 30.0

Reply = Callable[["FakeCore", bytes, AddRequest], None]


def model_info(**fields: Any) -> ModelInfo:
    base: dict[str, Any] = {
        "core_id": CORE_ID, "version": "0", "name": "fake", "num_stages": 2, "vocab_size": 512, "max_model_len": 64,
        "max_num_seqs": 8, "eos_token_ids": [1], "tokenizer": b"", "tokenizer_config": b"{}",
    }  # fmt: skip
    return ModelInfo(**base | fields)


def say(tokens: Sequence[int], finish_reason: str = "length", *, chunk: int = 1, **last: Any) -> Reply:
    """A reply to every request: these tokens, ``chunk`` at a time; ``last`` goes into the final message."""

    def reply(core: "FakeCore", client: bytes, request: AddRequest) -> None:
        for start in range(0, len(tokens), chunk):
            done = start + chunk >= len(tokens)
            core.output(
                client, request.request_id, list(tokens[start : start + chunk]),
                num_prompt_tokens=len(request.prompt_token_ids), num_output_tokens=min(start + chunk, len(tokens)),
                seed=5, finish_reason=finish_reason if done else None, **(last if done else {}),
            )  # fmt: skip

    return reply


def stay_silent(core: "FakeCore", client: bytes, request: AddRequest) -> None:
    """A reply for requests that the test answers by hand."""


@dataclass(slots=True)
class FakeCore:
    """Use as a context manager. Aborts are answered with a last output unless the request is over."""

    info: ModelInfo = field(default_factory=model_info)
    reply: Reply = stay_silent
    answers_attach: bool = True
    answers_control: bool = True
    answers_abort: bool = True
    answers: dict[str, Any] = field(default_factory=dict)
    """By op: values, or a function from the Control to a message. Other ops have a default."""
    endpoint: str = "tcp://127.0.0.1:0"
    address: str = ""
    received: "queue.SimpleQueue[tuple[bytes, Any]]" = field(default_factory=queue.SimpleQueue)
    open_requests: set[tuple[bytes, str]] = field(default_factory=set)
    _posted: "queue.SimpleQueue[Callable[[], None] | None]" = field(default_factory=queue.SimpleQueue)
    _context: Any = None
    _router: Any = None
    _wakers: Any = None
    _thread: Any = None
    _is_alive: bool = True

    def __enter__(self) -> "FakeCore":
        self._context = zmq.Context()
        self._router = open_socket(self._context, zmq.ROUTER, linger_ms=2000)
        self._router.bind(self.endpoint)
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._wakers = socket.socketpair()
        for waker in self._wakers:
            waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.die()

    def die(self) -> None:
        """Close the socket, as a core that is gone. Idempotent."""
        if self._thread.is_alive():
            self._post(None)
        self.wait_gone()

    def wait_gone(self) -> None:
        """Until it has died."""
        self._thread.join(DEADLINE_S)
        for waker in self._wakers:
            waker.close()

    def stop_soon(self) -> None:
        """Die when everything posted before was sent; callable from a reply."""
        self._post(None)

    def next(self, kind: type) -> tuple[bytes, Any]:
        """The next received message of a type, and its client; others are skipped. Raises queue.Empty."""
        while True:
            client, message = self.received.get(timeout=DEADLINE_S)
            if isinstance(message, kind):
                return client, message

    def output(self, client: bytes, request_id: str, tokens: list[int], **fields: Any) -> None:
        self.send(client, RequestOutput(**{"core_id": CORE_ID, "request_id": request_id, "new_token_ids": tokens} | fields))

    def fail(self, client: bytes, request_id: str, code: str, reason: str, where: str | None = None) -> None:
        self.send(client, RequestFailed(core_id=CORE_ID, request_id=request_id, code=code, reason=reason, field=where))

    def send(self, client: bytes, message: Any) -> None:
        """From any thread."""
        self.send_raw(client, encode(message), message)

    def send_raw(self, client: bytes, frames: Sequence[Any], message: Any = None) -> None:
        def act() -> None:
            is_last = isinstance(message, RequestFailed) or getattr(message, "finish_reason", None) is not None
            if is_last:
                self.open_requests.discard((client, message.request_id))
            try_send(self._router, [client, *frames])

        self._post(act)

    def _post(self, act: Callable[[], None] | None) -> None:
        self._posted.put(act)
        with contextlib.suppress(BlockingIOError):  # enough wake-ups are waiting already
            self._wakers[0].send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wakers[1].fileno(), zmq.POLLIN)
        while self._is_alive:
            for ready, _ in poller.poll():
                if ready is self._router:
                    self._receive()
                else:
                    self._wakers[1].recv(1 << 16)
            self._act()
        self._router.close()
        self._context.term()

    def _act(self) -> None:
        while self._is_alive and not self._posted.empty():
            act = self._posted.get()
            if act is None:
                self._is_alive = False
            else:
                act()

    def _receive(self) -> None:
        while (frames := receive_now(self._router)) is not None:
            client, *rest = frames
            message = decode(rest, (Attach, AddRequest, AbortRequest, Control))
            if isinstance(message, AddRequest):
                self.open_requests.add((client, message.request_id))
                self.reply(self, client, message)
            elif isinstance(message, AbortRequest) and self.answers_abort and (client, message.request_id) in self.open_requests:
                self.output(client, message.request_id, [], finish_reason=message.reason, index=message.index or 0)
            elif isinstance(message, Attach) and self.answers_attach:
                self.send(client, replace(self.info))
            elif isinstance(message, Control) and self.answers_control:
                self._answer_control(client, message)
            self.received.put((client, message))

    def _answer_control(self, client: bytes, message: Control) -> None:
        answer = self.answers.get(message.op)
        if callable(answer):
            self.send(client, answer(message))
            return
        is_known = message.op in ("stats", "health")
        self.send(client, ControlReply(
            core_id=CORE_ID, control_id=message.control_id, error="" if is_known else f"op={message.op!r} is unknown",
            values=answer or ({"running": 1, "op": message.op} if is_known else {}),
        ))  # fmt: skip
