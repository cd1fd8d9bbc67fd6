"""How do activations travel between CPUs? By gloo, point to point, over TCP.

What gloo does, and how this file copes (torch 2.13): a message shorter than the receive, or of another dtype, is
accepted in silence, so a trailer is checked; a longer one ends the process; a wait that times out closes the pair
for good, so a deadline means that the peer is lost and is never a polling interval; a buffer that changes before
its send is complete reaches the peer changed.
"""

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work  # type: ignore[attr-defined,unused-ignore]

from ipc.errors import PeerLost
from worker.links.link import Boundary, HopBuffer, check_trailer
from worker.shortage import shortage

NUM_SEND_BUFFERS = 2
NUM_RECEIVE_BUFFERS = 3
"""One that the current step reads, and two posted for the steps behind it."""

_TAG = 0


class Group(Protocol):
    """What this file needs of a process group: transfers that are started here and waited for later."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...


def connect_group(
    store: Store, *, rank: int, world_size: int, host: str | None, timeout_s: float
) -> Group:
    """Connect every pair of ranks, listening on ``host`` alone (loopback if None).

    Raises PeerLost, and ConfigError when there are not enough open files or threads.

    The group is not torch.distributed's default one: that would listen on whatever the machine's name resolves to.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined,unused-ignore]
    options._timeout = timedelta(seconds=timeout_s)
    try:
        options._devices = [ProcessGroupGloo.create_device(hostname=host or "127.0.0.1")]
        return cast(Group, ProcessGroupGloo(store, rank, world_size, options))
    except RuntimeError as error:
        if (limit := shortage(error)) is not None:
            raise limit from None
        raise PeerLost(f"rank {rank}: could not connect to the other {world_size - 1} ranks: {_reason(error)}") from None


class GlooSender:
    """Double-buffered: the next step is copied into one buffer while the other is on its way."""

    def __init__(
        self,
        group: Group,
        boundary: Boundary,
        *,
        rank: int,
        peer: int,
        epoch: int,
        max_tokens: int,
        timeout_s: float,
        pinned: bool = False,
    ) -> None:
        self._group = group
        self._rank = rank
        self._peer = peer
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._free = [HopBuffer(boundary, max_tokens, pinned=pinned) for _ in range(NUM_SEND_BUFFERS)]
        self._in_flight: deque[tuple[int, HopBuffer, Work]] = deque()

    def send(self, step_id: int, tensors: Sequence[Tensor]) -> None:
        if not self._free:
            self._complete_oldest(self._timeout_s)
        buffer = self._free.pop()
        num_tokens = tensors[0].shape[0]
        for target, tensor in zip(buffer.tensors(num_tokens), tensors, strict=True):
            if target.dtype != tensor.dtype or target.shape != tensor.shape:
                raise ValueError(f"boundary is {target.dtype} {list(target.shape)}, got {tensor.dtype} {list(tensor.shape)}")
            target.copy_(tensor)
        buffer.write_trailer(self._epoch, step_id, num_tokens)
        try:
            work = self._group.send([buffer.message(num_tokens)], self._peer, _TAG)
        except RuntimeError as error:
            raise self._lost(step_id, error) from None
        self._in_flight.append((step_id, buffer, work))

    def flush(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._in_flight:
            self._complete_oldest(max(0.001, deadline - time.monotonic()))

    def _complete_oldest(self, timeout_s: float) -> None:
        step_id, buffer, work = self._in_flight.popleft()
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise self._lost(step_id, error) from None
        self._free.append(buffer)

    def _lost(self, step_id: int, error: RuntimeError) -> PeerLost:
        return PeerLost(f"rank {self._rank}, step {step_id}: sending to rank {self._peer} failed: {_reason(error)}")


class GlooReceiver:
    """Receives posted ahead of their use, in step order."""

    def __init__(
        self,
        group: Group,
        boundary: Boundary,
        *,
        rank: int,
        peer: int,
        epoch: int,
        max_tokens: int,
        timeout_s: float,
        pinned: bool = False,
    ) -> None:
        self._group = group
        self._rank = rank
        self._peer = peer
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._free = [HopBuffer(boundary, max_tokens, pinned=pinned) for _ in range(NUM_RECEIVE_BUFFERS)]
        self._posted: deque[tuple[int, int, HopBuffer, Work]] = deque()
        self._in_use: HopBuffer | None = None

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def post(self, step_id: int, num_tokens: int) -> None:
        buffer = self._free.pop()
        buffer.clear_trailer(num_tokens)
        try:
            work = self._group.recv([buffer.message(num_tokens)], self._peer, _TAG)
        except RuntimeError as error:
            raise self._lost(step_id, error) from None
        self._posted.append((step_id, num_tokens, buffer, work))

    def wait(self, step_id: int) -> list[Tensor]:
        if self._in_use is not None:
            self._free.append(self._in_use)
            self._in_use = None
        posted_step, num_tokens, buffer, work = self._posted.popleft()
        if posted_step != step_id:
            raise ValueError(f"step {step_id} is awaited, but the oldest receive was posted for step {posted_step}")
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise self._lost(step_id, error) from None
        check_trailer(
            buffer, rank=self._rank, peer=self._peer, epoch=self._epoch, step_id=step_id, num_tokens=num_tokens
        )
        self._in_use = buffer
        return buffer.tensors(num_tokens)

    def _lost(self, step_id: int, error: RuntimeError) -> PeerLost:
        return PeerLost(f"rank {self._rank}, step {step_id}: nothing came from rank {self._peer}: {_reason(error)}")


def _reason(error: RuntimeError) -> str:
    """gloo's own words, without the source position before them and the advice behind."""
    text = str(error).splitlines()[0]
    if text.startswith("["):
        text = text.split("] ", 1)[-1]
    return text.split(". This is typically")[0]
