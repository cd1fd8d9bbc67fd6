"""A client on bare frames: no library of ours beyond the codec, many requests from one thread, and room for broken ones."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import zmq

from ipc.channel import open_socket
from ipc.codec import PROTOCOL_VERSION, Frame, decode, encode
from ipc.messages import (
    AbortRequest,
    AddRequest,
    Attach,
    Control,
    ControlReply,
    ModelInfo,
    RequestFailed,
    RequestOutput,
    TokenLogprobs,
    TokenUpdates,
)
from ipc.params import SamplingParams

Stats = dict[str, Any]

TAG_ADD_REQUEST = 33
REFUSALS_OF_A_SECOND = ("duplicate",)
"""Codes of a RequestFailed that leaves the open request of the same id alone."""


@dataclass(slots=True, kw_only=True)
class Stream:
    """All that came back for one request."""

    request_id: str
    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    failed: RequestFailed | None = None
    seed: int | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    num_finals: int = 0

    @property
    def is_over(self) -> bool:
        return self.num_finals > 0

    def take(self, message: RequestOutput | RequestFailed) -> None:
        """Apply one message; nothing may come behind a final one."""
        assert not self.is_over, f"{self.request_id}: {message} came after the final message"
        if isinstance(message, RequestFailed):
            self.failed = message
            self.num_finals += 1
            return
        self.times.append(time.monotonic())
        self.token_ids += message.new_token_ids
        self.seed, self.stop_reason = message.seed, message.stop_reason
        self.num_prompt_tokens, self.num_output_tokens = message.num_prompt_tokens, message.num_output_tokens
        assert message.num_output_tokens == len(self.token_ids)
        if message.logprobs is not None:
            self.logprobs.append(message.logprobs)
        if message.prompt_logprobs is not None:
            self.prompt_logprobs.append(message.prompt_logprobs)
        if message.finish_reason is not None:
            self.finish_reason = message.finish_reason
            self.num_finals += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Log probabilities at one token: its own, its rank, and the most likely ones in order."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def positions(columns: Sequence[TokenLogprobs], *, start: int) -> list[Position]:
    """Columns of one request put together; the first position must be ``start`` and none may be missing."""
    result = []
    for part in columns:
        assert part.start == start + len(result), f"a part starts at {part.start}, expected {start + len(result)}"
        width = 1 + part.num_top
        assert len(part.token_ids) == len(part.logprobs) == width * len(part.ranks)
        for i, rank in enumerate(part.ranks.tolist()):
            ids = part.token_ids[i * width : (i + 1) * width].tolist()
            values = part.logprobs[i * width : (i + 1) * width].tolist()
            top = list(zip(ids[1:], values[1:], strict=True))
            assert all(a[1] >= b[1] for a, b in itertools.pairwise(top)), "the most likely tokens are not in order"
            result.append(Position(token_id=ids[0], logprob=values[0], rank=rank, top=top))
    return result


class RawClient:
    """A DEALER socket and what it was told. Not for use by several threads."""

    def __init__(self, address: str, *, timeout_s: float = 30.0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = open_socket(self._context, zmq.DEALER, max_frame_bytes=1 << 28)
        self.socket.connect(address)
        self._ids = itertools.count(1)
        self._open: dict[str, Stream] = {}
        self.updates: list[tuple[str, ...]] = []
        """For each step that brought tokens to requests that take updates and go on: which these are."""
        self.unclaimed: list[Any] = []
        """Answers that belong to no open request."""
        self.send(Attach(client="tests"))
        self.info: ModelInfo = self._answer(lambda m: isinstance(m, ModelInfo), timeout_s, "ModelInfo")

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()

    # ------------------------------------------------------------------------------------------ requests

    def submit(
        self, prompt: Sequence[int], *, request_id: str | None = None, takes_updates: bool = False, **params: Any
    ) -> Stream:
        """Send a request; its Stream fills while ``wait`` or ``pump`` run."""
        name = f"r{next(self._ids)}" if request_id is None else request_id
        stream = Stream(request_id=name, prompt=list(prompt))
        self._open[name] = stream
        self.send(AddRequest(
            request_id=name, prompt_token_ids=np.asarray(prompt, np.int32), params=SamplingParams(**params),
            takes_updates=takes_updates,
        ))
        return stream

    def abort(self, request_id: str) -> None:
        self.send(AbortRequest(request_id=request_id))

    def wait(self, streams: Iterable[Stream], timeout_s: float) -> None:
        """Until each has its final message."""
        streams = list(streams)
        self.pump_until(
            lambda: all(s.is_over for s in streams), timeout_s,
            lambda: f"{sum(not s.is_over for s in streams)} of {len(streams)} requests are not over",
        )

    def run(
        self, requests: Sequence[tuple[Sequence[int], dict[str, Any]]], *, concurrency: int, timeout_s: float
    ) -> list[Stream]:
        """All (prompt, params), at most ``concurrency`` at once; every one must succeed."""
        deadline = time.monotonic() + timeout_s
        streams: list[Stream] = []
        for prompt, params in requests:
            self.pump_until(
                lambda: sum(not s.is_over for s in streams) < concurrency, deadline - time.monotonic(),
                lambda: f"{len(streams)} of {len(requests)} requests were sent",
            )
            streams.append(self.submit(prompt, **params))
        self.wait(streams, deadline - time.monotonic())
        for stream in streams:
            assert stream.failed is None, f"{stream.request_id}: {stream.failed}"
        return streams

    def greedy(self, prompt: Sequence[int], num_tokens: int, timeout_s: float = 60.0) -> list[int]:
        """Greedy ids of one request alone, end tokens ignored."""
        params = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        return self.run([(prompt, params)], concurrency=1, timeout_s=timeout_s)[0].token_ids

    # ------------------------------------------------------------------------------------------ questions

    def ask(self, op: str, timeout_s: float = 10.0) -> ControlReply:
        control_id = next(self._ids)
        self.send(Control(control_id=control_id, op=op))
        return self._answer(
            lambda m: isinstance(m, ControlReply) and m.control_id == control_id, timeout_s, f"the answer to {op}"
        )

    def stats(self) -> Stats:
        reply = self.ask("stats")
        assert not reply.error, reply.error
        return reply.values

    def wait_for_stats(self, holds: Callable[[Stats], bool], timeout_s: float) -> Stats:
        """Ask until it holds, some fifty times a second."""
        deadline = time.monotonic() + timeout_s
        while not holds(stats := self.stats()):
            assert time.monotonic() < deadline, f"after {timeout_s:g} s still {stats}"
            self.pump(0.02)
        return stats

    # ------------------------------------------------------------------------------------------ messages

    def send(self, message: Any) -> None:
        self.send_frames(encode(message))

    def send_frames(self, frames: Sequence[Frame]) -> None:
        """Exactly these, however broken."""
        self.socket.send_multipart(frames)

    def pump(self, timeout_s: float) -> bool:
        """Take what has arrived, waiting for at most ``timeout_s``; False when nothing came."""
        if not self.socket.poll(max(0, math.ceil(timeout_s * 1000)), zmq.POLLIN):
            return False
        while self.socket.poll(0, zmq.POLLIN):
            frames = self.socket.recv_multipart()
            assert frames[0] == bytes((PROTOCOL_VERSION,)), f"a message starts with {frames[0]!r}"
            self._take(decode(frames, (ModelInfo, RequestOutput, RequestFailed, TokenUpdates, ControlReply)))
        return True

    def pump_for(self, seconds: float) -> None:
        """Take what arrives during this time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.pump(left)

    def pump_until(self, holds: Callable[[], bool], timeout_s: float, describe: Callable[[], str]) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            left = deadline - time.monotonic()
            assert left > 0, f"{describe()} after {timeout_s:.1f} s"
            self.pump(min(left, 1.0))

    def next_refusal(self, request_id: str, timeout_s: float = 10.0) -> RequestFailed:
        """The RequestFailed for an id that ``submit`` does not know, or that is open already."""
        return self._answer(
            lambda m: isinstance(m, RequestFailed) and m.request_id == request_id, timeout_s,
            f"a RequestFailed for {request_id[:40]!r}",
        )

    def _answer(self, is_wanted: Callable[[Any], bool], timeout_s: float, what: str) -> Any:
        self.pump_until(lambda: any(map(is_wanted, self.unclaimed)), timeout_s, lambda: f"no {what}")
        found = next(m for m in self.unclaimed if is_wanted(m))
        self.unclaimed.remove(found)
        return found

    def _take(self, message: Any) -> None:
        if isinstance(message, TokenUpdates):
            self._take_updates(message)
            return
        stream = self._open.get(message.request_id) if hasattr(message, "request_id") else None
        if stream is None or (isinstance(message, RequestFailed) and message.code in REFUSALS_OF_A_SECOND):
            self.unclaimed.append(message)
        else:
            stream.take(message)

    def _take_updates(self, updates: TokenUpdates) -> None:
        self.updates.append(updates.request_ids)
        token_ids = iter(updates.token_ids)
        for request_id, count, num_output_tokens in zip(
            updates.request_ids, updates.counts, updates.num_output_tokens, strict=True
        ):
            stream = self._open[request_id]
            stream.take(RequestOutput(
                core_id=updates.core_id,
                request_id=request_id,
                new_token_ids=list(itertools.islice(token_ids, count)),
                num_prompt_tokens=stream.num_prompt_tokens,
                num_output_tokens=num_output_tokens,
                seed=stream.seed or 0,
            ))


def add_request_frames(
    *,
    request_id: Any = "bad",
    prompt: Sequence[int] = (5, 6, 7),
    params: Any = None,
    output: Sequence[int] = (),
    priority: Any = 0,
    prompt_length: Any = None,
) -> list[bytes]:
    """Frames of an AddRequest around any values whatever; nothing is checked on this side."""
    prompt_frame, output_frame = np.asarray(prompt, "<i4").tobytes(), np.asarray(output, "<i4").tobytes()
    head = [
        request_id, len(prompt) if prompt_length is None else prompt_length, {} if params is None else params,
        len(output), priority,
    ]  # fmt: skip
    return [
        bytes((PROTOCOL_VERSION,)), bytes((TAG_ADD_REQUEST,)), msgpack.packb(head), prompt_frame, output_frame
    ]
