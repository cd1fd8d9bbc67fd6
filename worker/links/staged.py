"""How do activations travel between devices that share no channel of their own? Through the memory of their hosts.

device buffer --copy--> pinned host buffer --gloo--> pinned host buffer --copy--> device buffer

For ranks that share a GPU, which NCCL refuses, and for GPUs beside CPUs: what is on the wire is what gloo.py sends,
so one end may be staged and the other not. The copies run on a stream of their own. A forward pass is never waited
for by the thread that launches the next one: another thread hands a copy to gloo once it is complete.
"""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor
from torch.distributed import Work

from worker.links.gloo import NUM_SEND_BUFFERS, TAG, GlooReceiver, Group, reason
from worker.links.link import NUM_DEVICE_BUFFERS, BufferedSender, Hop, HopBuffer, check_boundary, write_trailer
from worker.links.streams import Event, Streams

JOIN_S = 1.0
"""What the thread gets to end. A device that never completes a copy may hold it for ever."""


class _Slot:
    """A step's way out: both buffers are in use until the peer has it."""

    def __init__(self, hop: Hop, streams: Streams) -> None:
        self.device = HopBuffer(hop.boundary, hop.max_tokens, streams.device_bytes)
        self.host = HopBuffer(hop.boundary, hop.max_tokens, streams.host_bytes)


class _Launch:
    """A transfer that starts as soon as a copy is complete."""

    def __init__(self, step_id: int, slot: _Slot) -> None:
        self.step_id = step_id
        self.slot = slot
        self.work: Work | None = None
        self.error: RuntimeError | None = None
        self.is_started = threading.Event()


class StagedSender(BufferedSender[_Slot, _Launch]):
    """Double-buffered, as GlooSender, but from a device."""

    def __init__(self, group: Group, hop: Hop, streams: Streams) -> None:
        super().__init__(hop, [_Slot(hop, streams) for _ in range(NUM_SEND_BUFFERS)])
        self._group = group
        self._streams = streams
        self._launches: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_run_launches, args=(self._launches,), name="sends", daemon=True)
        thread.start()
        weakref.finalize(self, _end_launches, self._launches, thread)

    def send(self, step_id: int, tensors: Sequence[Tensor]) -> None:
        num_tokens = check_boundary(self._hop.boundary, tensors)
        self.make_room()
        slot = self._free.pop()
        self._streams.queue(lambda: slot.device.fill(tensors))
        filled = self._streams.mark()
        copied = self._streams.beside(
            lambda: slot.host.body(num_tokens).copy_(slot.device.body(num_tokens), non_blocking=True), after=[filled]
        )
        # The copy ends before the trailer, so the host may write it meanwhile.
        write_trailer(slot.host.trailer(num_tokens), self._hop.epoch, step_id, num_tokens)
        launch = _Launch(step_id, slot)
        message, group, peer = slot.host.message(num_tokens), self._group, self._hop.peer
        self._launches.put(lambda: _launch(launch, copied, group, message, peer))
        self._in_flight.append(launch)

    def _complete(self, launch: _Launch, timeout_s: float) -> _Slot:
        deadline = time.monotonic() + timeout_s
        if not launch.is_started.wait(timeout_s):
            milliseconds = round(1000 * timeout_s)
            raise self._hop.sending_failed(launch.step_id, f"the device did not copy them within {milliseconds}ms")
        try:
            if launch.error is not None:
                raise launch.error
            assert launch.work is not None
            launch.work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            raise self._hop.sending_failed(launch.step_id, reason(error)) from None
        return launch.slot


class StagedReceiver:
    """As GlooReceiver, but into a device."""

    def __init__(self, group: Group, hop: Hop, streams: Streams) -> None:
        self._hop = hop
        self._streams = streams
        self._host = GlooReceiver(group, hop, streams.host_bytes)
        self._buffers = [HopBuffer(hop.boundary, hop.max_tokens, streams.device_bytes) for _ in range(NUM_DEVICE_BUFFERS)]
        self._free = deque((buffer, streams.mark()) for buffer in self._buffers)
        """With the event behind which nobody reads the buffer any longer."""
        self._in_use: HopBuffer | None = None
        self._copied: Event | None = None
        """The last copy to the device; until then the host buffer that it reads is in use."""

    @property
    def has_room(self) -> bool:
        return self._host.has_room

    def buffers(self) -> list[Tensor]:
        return [buffer.tensors(self._hop.max_tokens)[0] for buffer in self._buffers]

    def post(self, step_id: int, num_tokens: int) -> None:
        self._host.post(step_id, num_tokens)

    def wait(self, step_id: int) -> list[Tensor]:
        if self._in_use is not None:
            self._free.append((self._in_use, self._streams.mark()))
            self._in_use = None
        if self._copied is not None:
            if not self._copied.wait(self._hop.timeout_s):
                raise self._hop.nothing_came(step_id, f"the device copied nothing for {self._hop.timeout_s:g} s")
            self._copied = None
        arrived, num_tokens = self._host.take(step_id)
        buffer, read = self._free.popleft()
        self._copied = self._streams.beside(
            lambda: buffer.body(num_tokens).copy_(arrived.body(num_tokens), non_blocking=True), after=[read]
        )
        self._streams.hold(self._copied)
        self._in_use = buffer
        return buffer.tensors(num_tokens)


def _launch(launch: _Launch, copied: Event, group: Group, message: Tensor, peer: int) -> None:
    try:
        copied.wait(None)
        launch.work = group.send([message], peer, TAG)
    except RuntimeError as error:
        launch.error = error
    launch.is_started.set()


def _run_launches(launches: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """A thread's whole life. It refers to no sender, so that one that is no longer used ends it."""
    while (launch := launches.get()) is not None:
        launch()
        # The last reference to a transfer may be this one, and must not outlive the interpreter.
        del launch


def _end_launches(launches: "queue.SimpleQueue[Callable[[], None] | None]", thread: threading.Thread) -> None:
    """When a sender is no longer used, and before the interpreter ends: a thread that it cuts off aborts the process."""
    launches.put(None)
    if threading.current_thread() is not thread:
        thread.join(JOIN_S)
