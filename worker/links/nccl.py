"""How do activations travel between GPUs? By NCCL, straight from device to device.

Each pair of neighbours has a communicator of its own, so that a hop never queues behind another's, and each end a
stream beside the compute stream. A transfer occupies part of a GPU from the moment it is enqueued until both sides are
there, so a receive is enqueued when its step is waited for, not when the plan becomes known: the step before
was launched by then, and the transfer runs beside it.

NCCL knows no deadlines that name a step, and no message sizes: the host waits for every message's trailer, with a
deadline, before it launches anything that reads the message. That costs the launch of a step when activations come late,
and nothing when they come while the step before is computed.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, Work  # type: ignore[attr-defined,unused-ignore]

from ipc.errors import PeerLost
from worker.links.gloo import NUM_RECEIVE_BUFFERS, NUM_SEND_BUFFERS, TAG, reason
from worker.links.link import (
    NUM_DEVICE_BUFFERS,
    TRAILER,
    BufferedSender,
    Hop,
    HopBuffer,
    check_boundary,
    check_trailer,
    write_trailer,
)
from worker.links.streams import Event, Streams

try:
    from torch.distributed import ProcessGroupNCCL
except ImportError:  # a build of torch without it
    ProcessGroupNCCL = None  # type: ignore[assignment,misc]


WATCHDOG_FACTOR = 3
"""NCCL ends the process by itself behind this many link timeouts: after our own deadline, which names the step."""


class PairGroup(Protocol):
    """What this file needs of a communicator of two: transfers in the order of the stream that is current."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def abort(self) -> None:
        """Give up what is under way, so that the process can end."""


def nccl_version() -> str:
    """Of the library that this process would use; empty without one."""
    if ProcessGroupNCCL is None or not torch.cuda.is_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def connect_pair(store: Store, *, rank: int, peer: int, device: torch.device, timeout_s: float) -> PairGroup:
    """Make the communicator of two neighbours, which both must do. Raises PeerLost."""
    low, high = sorted((rank, peer))
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=WATCHDOG_FACTOR * timeout_s)
    # Small kernels that a neighbour waits for, beside large ones that nobody waits for.
    options.is_high_priority_stream = True
    try:
        group = ProcessGroupNCCL(PrefixStore(f"nccl-{low}-{high}", store), int(rank == high), 2, options)
        group.eager_connect_single_device(device)
    except RuntimeError as error:
        raise PeerLost(f"rank {rank}: could not connect to rank {peer} by NCCL: {reason(error)}") from None
    return group  # type: ignore[return-value]


class _Slot:
    """A message on the device, and its trailer on the host."""

    def __init__(self, hop: Hop, streams: Streams) -> None:
        self.device = HopBuffer(hop.boundary, hop.max_tokens, streams.device_bytes)
        self.trailer = streams.host_bytes(TRAILER.size)


class NcclSender(BufferedSender[_Slot, tuple[int, _Slot, Event]]):
    """Double-buffered: the next step is copied into one buffer while the other is on its way."""

    def __init__(self, group: PairGroup, hop: Hop, streams: Streams) -> None:
        super().__init__(hop, [_Slot(hop, streams) for _ in range(NUM_SEND_BUFFERS)])
        self._group = group
        self._streams = streams

    def send(self, step_id: int, tensors: Sequence[Tensor]) -> None:
        num_tokens = check_boundary(self._hop.boundary, tensors)
        self.make_room()
        slot = self._free.pop()
        message, trailer = slot.device.message(num_tokens), slot.device.trailer(num_tokens)
        write_trailer(slot.trailer, self._hop.epoch, step_id, num_tokens)
        self._streams.queue(lambda: slot.device.fill(tensors))
        self._streams.queue(lambda: trailer.copy_(slot.trailer, non_blocking=True))
        filled = self._streams.mark()
        try:
            sent = self._streams.beside(lambda: self._group.send([message], _other(self._hop), TAG).wait(), after=[filled])
        except RuntimeError as error:
            raise self._hop.sending_failed(step_id, reason(error)) from None
        self._in_flight.append((step_id, slot, sent))

    def _complete(self, transfer: tuple[int, _Slot, Event], timeout_s: float) -> _Slot:
        step_id, slot, sent = transfer
        if not sent.wait(timeout_s):
            self._group.abort()
            raise self._hop.sending_failed(step_id, _timed_out(timeout_s))
        return slot


class NcclReceiver:
    """Messages in step order; each is enqueued when it is waited for."""

    def __init__(self, group: PairGroup, hop: Hop, streams: Streams) -> None:
        self._group = group
        self._hop = hop
        self._streams = streams
        self._slots = [_Slot(hop, streams) for _ in range(NUM_DEVICE_BUFFERS)]
        self._free = deque((slot, streams.mark()) for slot in self._slots)
        """With the event behind which nobody reads the buffer any longer."""
        self._posted: deque[tuple[int, int]] = deque()
        self._in_use: _Slot | None = None

    @property
    def has_room(self) -> bool:
        return len(self._posted) + (self._in_use is not None) < NUM_RECEIVE_BUFFERS

    def buffers(self) -> list[Tensor]:
        return [slot.device.tensors(self._hop.max_tokens)[0] for slot in self._slots]

    def post(self, step_id: int, num_tokens: int) -> None:
        self._posted.append((step_id, num_tokens))

    def wait(self, step_id: int) -> list[Tensor]:
        if self._in_use is not None:
            self._free.append((self._in_use, self._streams.mark()))
            self._in_use = None
        posted_step, num_tokens = self._posted.popleft()
        if posted_step != step_id:
            raise ValueError(f"step {step_id} is awaited, but the oldest receive was posted for step {posted_step}")
        slot, read = self._free.popleft()
        arrived = self._receive(step_id, slot, num_tokens, read)
        if not arrived.wait(self._hop.timeout_s):
            self._group.abort()
            raise self._hop.nothing_came(step_id, _timed_out(self._hop.timeout_s))
        check_trailer(slot.trailer, self._hop, step_id, num_tokens)
        self._in_use = slot
        return slot.device.tensors(num_tokens)

    def _receive(self, step_id: int, slot: _Slot, num_tokens: int, read: Event) -> Event:
        """Enqueue the transfer, and behind it the copy of the trailer to the host; returns when both are done."""
        message, trailer = slot.device.message(num_tokens), slot.device.trailer(num_tokens)
        try:
            # A message that ends too early must not be taken for complete because of what the buffer held before.
            self._streams.beside(trailer.zero_, after=[read])
            self._streams.beside(lambda: self._group.recv([message], _other(self._hop), TAG).wait())
        except RuntimeError as error:
            raise self._hop.nothing_came(step_id, reason(error)) from None
        # Whoever reads the message does so behind this event, which the host waits for: the compute stream need not.
        return self._streams.beside(lambda: slot.trailer.copy_(trailer, non_blocking=True))


def _other(hop: Hop) -> int:
    """The peer's number inside the pair."""
    return int(hop.peer > hop.rank)


def _timed_out(timeout_s: float) -> str:
    return f"Timed out waiting {round(1000 * timeout_s)}ms"
