"""What does a hop between two stages look like, whatever carries it?

A hop is one flat buffer: the boundary's tensors one after the other, then a trailer of 16 bytes. Both sides know the
shapes from the step's plan, so nothing about them travels; the trailer proves that the two sides mean the same step.
"""

import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ipc.errors import PeerLost
from worker.models import BoundaryTensor

TRAILER = struct.Struct("<IQI")
"""Epoch, step, tokens."""

NUM_DEVICE_BUFFERS = 2
"""Of a receiver on a device: one that the current step reads, one that the next is received into."""

_ALIGNMENT = 16
"""Bytes; each tensor starts at a multiple, so that a view of any dtype is possible."""


Boundary = tuple[BoundaryTensor, ...]


def host_bytes(size_bytes: int) -> Tensor:
    """Zeroed memory of the host."""
    return torch.zeros(size_bytes, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """What both ends of a hop agree on, as one of them sees it."""

    boundary: Boundary
    rank: int
    peer: int
    epoch: int
    max_tokens: int
    timeout_s: float
    """Longest wait for the peer; the epoch ends behind it."""

    def sending_failed(self, step_id: int, reason: str) -> PeerLost:
        """To be raised when a step did not reach the peer."""
        return PeerLost(f"rank {self.rank}, step {step_id}: sending to rank {self.peer} failed: {reason}")

    def nothing_came(self, step_id: int, reason: str) -> PeerLost:
        """To be raised when the peer's activations of a step did not come."""
        return PeerLost(f"rank {self.rank}, step {step_id}: nothing came from rank {self.peer}: {reason}")


class HopBuffer:
    """Memory of one hop in flight, for at most ``max_tokens`` tokens.

    Owned by a sender or a receiver, who hands it to the transport and must not touch it until that is done with it.
    """

    def __init__(
        self, boundary: Boundary, max_tokens: int, allocate: Callable[[int], Tensor] = host_bytes
    ) -> None:
        """``allocate`` makes a number of zeroed bytes wherever the buffer shall be."""
        self._boundary = boundary
        self._bytes = allocate(self.size_of(boundary, max_tokens))

    @staticmethod
    def size_of(boundary: Boundary, max_tokens: int) -> int:
        """Bytes that a buffer takes."""
        return _layout(boundary, max_tokens)[-1] + TRAILER.size

    def whole(self) -> Tensor:
        """All bytes: where a message of any permitted size has room."""
        return self._bytes

    def message(self, num_tokens: int) -> Tensor:
        """The bytes that travel for so many tokens: a view."""
        return self._bytes[: self._trailer_start(num_tokens) + TRAILER.size]

    def body(self, num_tokens: int) -> Tensor:
        """The bytes that travel, without the trailer: a view."""
        return self._bytes[: self._trailer_start(num_tokens)]

    def trailer(self, num_tokens: int) -> Tensor:
        """The trailer's bytes in a message for so many tokens: a view."""
        start = self._trailer_start(num_tokens)
        return self._bytes[start : start + TRAILER.size]

    def tensors(self, num_tokens: int) -> list[Tensor]:
        """The boundary's tensors: views, ``[T, width]`` each."""
        *starts, _ = _layout(self._boundary, num_tokens)
        views = []
        for start, part in zip(starts, self._boundary, strict=True):
            size_bytes = num_tokens * part.width * part.dtype.itemsize
            flat = self._bytes[start : start + size_bytes].view(part.dtype)
            views.append(flat.view(num_tokens, part.width))
        return views

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy one step's tensors in; on a device in the order of its current stream."""
        for target, tensor in zip(self.tensors(tensors[0].shape[0]), tensors, strict=True):
            target.copy_(tensor)

    def _trailer_start(self, num_tokens: int) -> int:
        return _layout(self._boundary, num_tokens)[-1]


def check_boundary(boundary: Boundary, tensors: Sequence[Tensor]) -> int:
    """The number of tokens; raises ValueError for tensors that are not those of the boundary."""
    num_tokens = tensors[0].shape[0]
    for part, tensor in zip(boundary, tensors, strict=True):
        if part.dtype != tensor.dtype or tensor.shape != (num_tokens, part.width):
            raise ValueError(
                f"boundary is {part.dtype} {[num_tokens, part.width]}, got {tensor.dtype} {list(tensor.shape)}"
            )
    return num_tokens


def write_trailer(trailer: Tensor, epoch: int, step_id: int, num_tokens: int) -> None:
    """Sign a message. ``trailer``: its 16 bytes, on the host."""
    TRAILER.pack_into(memoryview(trailer.numpy()), 0, epoch, step_id, num_tokens)  # type: ignore[arg-type]


def check_trailer(trailer: Tensor, hop: Hop, step_id: int, num_tokens: int) -> None:
    """Raise PeerLost unless the message is the one that was agreed for this step. ``trailer``: 16 bytes, on the host."""
    epoch, step, tokens = TRAILER.unpack_from(memoryview(trailer.numpy()))  # type: ignore[arg-type]
    if (epoch, step, tokens) != (hop.epoch, step_id, num_tokens):
        raise PeerLost(
            f"rank {hop.rank}, step {step_id}: rank {hop.peer} sent something else than {num_tokens} tokens of epoch "
            f"{hop.epoch} (trailer: epoch {epoch}, step {step}, {tokens} tokens); it may run another version or model"
        )


def _layout(boundary: Boundary, num_tokens: int) -> list[int]:
    """Start of each tensor, then of the trailer."""
    starts = [0]
    for part in boundary:
        end = starts[-1] + num_tokens * part.width * part.dtype.itemsize
        starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
    return starts


class Sender(Protocol):
    """Hands a step's activations to the next stage."""

    def make_room(self) -> None:
        """Wait until the next send finds a buffer: no time when the peer keeps up. Raises PeerLost."""

    def send(self, step_id: int, tensors: Sequence[Tensor]) -> None:
        """Start sending copies of the tensors. They may be changed afterwards, on a device in the order of its stream.

        Waits for an earlier send when all buffers are in flight. Raises PeerLost.
        """

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent has been taken over by the peer. Raises PeerLost."""


Buffer = TypeVar("Buffer")
Transfer = TypeVar("Transfer")


class BufferedSender(ABC, Generic[Buffer, Transfer]):
    """What senders share: a buffer is in use from its filling until the peer has taken what is in it, in step order."""

    def __init__(self, hop: Hop, buffers: Iterable[Buffer]) -> None:
        self._hop = hop
        self._free = list(buffers)
        self._in_flight: deque[Transfer] = deque()

    def make_room(self) -> None:
        if not self._free:
            self._complete_oldest(self._hop.timeout_s)

    def flush(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._in_flight:
            self._complete_oldest(max(0.001, deadline - time.monotonic()))

    def _complete_oldest(self, timeout_s: float) -> None:
        self._free.append(self._complete(self._in_flight.popleft(), timeout_s))

    @abstractmethod
    def _complete(self, transfer: Transfer, timeout_s: float) -> Buffer:
        """Wait for a transfer, each once; its buffer. Raises PeerLost."""


class Receiver(Protocol):
    """Takes a step's activations from the previous stage."""

    @property
    def has_room(self) -> bool:
        """Whether one more receive can be posted now."""

    def buffers(self) -> list[Tensor]:
        """[max tokens, width] each: the first tensor of every ``wait`` is the beginning of one of these."""

    def post(self, step_id: int, num_tokens: int) -> None:
        """Make ready for a step; steps are posted in the order in which they are sent."""

    def wait(self, step_id: int) -> list[Tensor]:
        """The tensors of the oldest posted step, which must be this one; views, valid until the next ``wait``.

        They are whole when this returns, or on a device for what is computed behind it. Raises PeerLost when they don't
        come in time or are not what was agreed.
        """
