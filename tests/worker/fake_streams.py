"""A device whose streams are as late, or as early, as the rules of worker/links/streams.py allow; and NCCL on it.

Memory is the host's. What is asked of a stream is queued, and done by the order:
    "compute first"  the compute stream at once, the stream beside only when somebody waits for it: a copy is late
    "beside first"   the stream beside as soon as its events allow, the compute stream only when needed: a copy is early
An event that is missing shows as wrong data, each time.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

ORDERS = ("compute first", "beside first")


class World:
    """All devices of a test, so that waiting for one may move another."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.queues: list[Queue] = []
        self.running: Queue | None = None


class FakeEvent:
    def __init__(self, world: World, queue: "Queue") -> None:
        self.world, self.queue = world, queue
        self.occurred = False

    def wait(self, timeout_s: float | None) -> bool:
        deadline = time.monotonic() + (60.0 if timeout_s is None else timeout_s)
        with self.world.changed:
            while not self.occurred:
                if self.queue.advance() or any(queue.advance() for queue in self.world.queues):
                    continue
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self.world.changed.wait(left)
        return True


class Queue:
    """One stream: operations with the events that they come behind."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.waiting: deque[tuple[Callable[[], Any], list[FakeEvent], FakeEvent]] = deque()
        self.held_by: list[Callable[[], bool]] = []
        """What the operation that was started last still waits for."""
        self.current: FakeEvent | None = None
        self.advances_holders = True
        world.queues.append(self)

    def put(self, action: Callable[[], Any], after: Iterable[FakeEvent]) -> FakeEvent:
        event = FakeEvent(self.world, self)
        self.waiting.append((action, list(after), event))
        self.world.changed.notify_all()
        return event

    def advance(self) -> bool:
        """Do one thing; for an operation that comes behind an event, first what leads to that event."""
        if self.current is not None:
            if not all(is_free() for is_free in self.held_by):
                return False
            self.current.occurred = True
            self.current, self.held_by = None, []
            self.world.changed.notify_all()
            return True
        if not self.waiting:
            return False
        action, after, event = self.waiting[0]
        for earlier in after:
            if not earlier.occurred:
                return self.advances_holders and earlier.queue.advance()
        self.waiting.popleft()
        self.current, self.world.running = event, self
        action()
        self.world.running = None
        return True


class FakeStreams:
    def __init__(self, world: World, order: str) -> None:
        assert order in ORDERS
        self.world, self.order = world, order
        self.compute, self.side = Queue(world), Queue(world)

    def device_bytes(self, size_bytes: int) -> Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    host_bytes = device_bytes

    def queue(self, action: Callable[[], object]) -> None:
        with self.world.changed:
            self.compute.put(action, [])
            self._run()

    def mark(self) -> FakeEvent:
        with self.world.changed:
            event = self.compute.put(lambda: None, [])
            self._run()
            return event

    def beside(self, action: Callable[[], object], after: Iterable[FakeEvent] = ()) -> FakeEvent:
        with self.world.changed:
            event = self.side.put(action, after)
            self._run()
            return event

    def hold(self, event: FakeEvent) -> None:
        with self.world.changed:
            self.compute.put(lambda: None, [event])
            self._run()

    def finish(self) -> None:
        """Wait for the compute stream."""
        assert self.mark().wait(30)

    def _run(self) -> None:
        """As far as it comes by itself: no event is brought about that only the other stream brings about."""
        eager = self.compute if self.order == "compute first" else self.side
        eager.advances_holders = False
        while eager.advance():
            pass
        eager.advances_holders = True


class FakePairGroup:
    """A communicator of two on fake streams: bytes move when both sides' streams have come to the transfer, not before."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sends: deque[tuple[Tensor, list[bool]]] = deque()
        self.receives: deque[tuple[Tensor, list[bool]]] = deque()
        self.num_aborts = 0

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> "FakeWork":
        assert (peer, tag, len(tensors)) == (1, 0, 1)
        return self._join(self.sends, tensors[0])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> "FakeWork":
        assert (peer, tag, len(tensors)) == (0, 0, 1)
        return self._join(self.receives, tensors[0])

    def abort(self) -> None:
        self.num_aborts += 1

    def _join(self, side: deque[tuple[Tensor, list[bool]]], tensor: Tensor) -> "FakeWork":
        assert self.world.running is not None, "a transfer is asked for on the stream beside"
        done = [False]
        side.append((tensor, done))
        return FakeWork(self, done)

    def meet(self) -> None:
        while self.sends and self.receives:
            (source, sent), (target, received) = self.sends.popleft(), self.receives.popleft()
            size = min(source.numel(), target.numel())
            target[:size].copy_(source[:size])
            sent[0] = received[0] = True


class FakeWork:
    def __init__(self, group: FakePairGroup, done: list[bool]) -> None:
        self.group, self.done = group, done
        self.num_waits = 0

    def wait(self) -> bool:
        """Has the current stream wait, not the host."""
        self.num_waits += 1
        assert self.num_waits == 1
        queue = self.group.world.running
        assert queue is not None
        queue.held_by.append(self._is_done)
        return True

    def _is_done(self) -> bool:
        self.group.meet()
        return self.done[0]
