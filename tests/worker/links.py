"""Both ends of a hop in one process, by any transport, for tests that hold for all of them."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.worker.fake_streams import ORDERS, FakePairGroup, FakeStreams, World
from worker.links.gloo import GlooReceiver, GlooSender
from worker.links.link import Hop, HopBuffer, Receiver, Sender
from worker.links.nccl import NcclReceiver, NcclSender
from worker.links.staged import StagedReceiver, StagedSender
from worker.links.streams import HostStreams
from worker.models import BoundaryTensor

# An odd width in a 2-byte dtype before one of 4 bytes: the second tensor must start at an aligned place.
BOUNDARY = (
    BoundaryTensor(name="hidden", width=7, dtype=torch.bfloat16),
    BoundaryTensor(name="residual", width=5, dtype=torch.float32),
)
MAX_TOKENS = 9
EPOCH = 4

KINDS = ["gloo", "staged", *(f"staged, {order}" for order in ORDERS), *(f"nccl, {order}" for order in ORDERS)]
"""Transport, and the order of the fake device's streams; without one the device is the CPU itself."""


def hop_of(rank: int, peer: int, **changes: Any) -> Hop:
    values = {
        "boundary": BOUNDARY, "rank": rank, "peer": peer, "epoch": EPOCH, "max_tokens": MAX_TOKENS, "timeout_s": 30.0,
    }  # fmt: skip
    return Hop(**(values | changes))


def activations(num_tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_tokens, part.width, generator=generator).to(part.dtype) for part in BOUNDARY]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


class CountingGroup:
    """Counts, for each transfer, how often it was waited for; remembers the order of what was asked for."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.numbers = itertools.count()
        self.waits: Counter[int] = Counter()
        self.calls: list[str] = []

    def send(self, *arguments: Any) -> "CountingWork":
        return self._count("send", self.group.send(*arguments))

    def recv(self, *arguments: Any) -> "CountingWork":
        return self._count("recv", self.group.recv(*arguments))

    def abort(self) -> None:
        self.group.abort()

    def _count(self, name: str, work: Any) -> "CountingWork":
        number = next(self.numbers)
        self.waits[number] = 0
        self.calls.append(name)
        return CountingWork(self, number, work)


class CountingWork:
    def __init__(self, group: CountingGroup, number: int, work: Any) -> None:
        self.group, self.number, self.work = group, number, work

    def wait(self, *arguments: Any) -> Any:
        self.group.waits[self.number] += 1
        self.group.calls.append("wait")
        return self.work.wait(*arguments)


class Pair:
    """Rank 0 sends to rank 1. Devices compute only what is given to ``on_sender`` and ``on_receiver``."""

    def __init__(self, kind: str, groups: list[Any]) -> None:
        """``groups``: gloo's, of either rank."""
        self.transport, _, order = kind.partition(", ")
        self.world = World()
        self.nccl = FakePairGroup(self.world)
        self.groups = [CountingGroup(self.nccl if self.transport == "nccl" else group) for group in groups]
        self.streams: list[Any] = [FakeStreams(self.world, order) if order else HostStreams() for _ in range(2)]
        self.raw_groups = groups

    def make_sender(self, **changes: Any) -> Sender:
        hop, group, streams = hop_of(0, 1, **changes), self.groups[0], self.streams[0]
        if self.transport == "gloo":
            return GlooSender(group, hop)
        return StagedSender(group, hop, streams) if self.transport == "staged" else NcclSender(group, hop, streams)

    def make_receiver(self, **changes: Any) -> Receiver:
        hop, group, streams = hop_of(1, 0, **changes), self.groups[1], self.streams[1]
        if self.transport == "gloo":
            return GlooReceiver(group, hop)
        return StagedReceiver(group, hop, streams) if self.transport == "staged" else NcclReceiver(group, hop, streams)

    def give(self, sender: Sender, step_id: int, values: list[Tensor]) -> None:
        """Compute a step's activations on the sender's device, send them, and go on computing in the same memory."""
        memory = [torch.full_like(value, float("nan")) for value in values]
        self.on_sender(lambda: [target.copy_(value) for target, value in zip(memory, values, strict=True)])
        sender.send(step_id, memory)
        self.on_sender(lambda: [target.zero_() for target in memory])

    def take(self, receiver: Receiver, step_id: int) -> list[Tensor]:
        """Wait for a step and have the receiver's device read it; the result is there behind ``finish``."""
        views = receiver.wait(step_id)
        copies = [torch.zeros_like(view) for view in views]
        self.on_receiver(lambda: [target.copy_(view) for target, view in zip(copies, views, strict=True)])
        return copies

    def on_sender(self, action: Callable[[], object]) -> None:
        self.streams[0].queue(action)

    def on_receiver(self, action: Callable[[], object]) -> None:
        self.streams[1].queue(action)

    def finish(self) -> None:
        for streams in self.streams:
            if isinstance(streams, FakeStreams):
                streams.finish()

    def inject(self, data: Tensor) -> Any:
        """Rank 0 sends something of its own; what is returned must be kept until it was received."""
        if self.transport != "nccl":
            return self.raw_groups[0].send([data], 1, 0)
        streams = self.streams[0]
        return streams.beside(lambda: self.nccl.send([data.view(torch.uint8)], 1, 0).wait())


def message_bytes(num_tokens: int) -> int:
    return HopBuffer(BOUNDARY, MAX_TOKENS).message(num_tokens).numel()
