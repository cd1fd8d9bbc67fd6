"""How do activations travel between CPUs? By gloo, point to point, over TCP.

What gloo does, and how this file copes (torch 2.13): a message shorter than the receive, or of another dtype, is
accepted in silence, so a trailer is checked; one longer than the receive ends the process, so a receive always has
room for the longest; a wait that times out closes the pair for good, so a deadline means that the peer is lost and
is never a polling interval; a buffer that changes before its send is complete reaches the peer changed; a work that
nobody refers to any longer is called off.
"""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, cast

from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work  # type: ignore[attr-defined,unused-ignore]

from ipc.errors import PeerLost
from worker.links.link import BufferedSender, Hop, HopBuffer, check_boundary, check_trailer, host_bytes, write_trailer
from worker.shortage import shortage

NUM_SEND_BUFFERS = 2
NUM_RECEIVE_BUFFERS = 3
"""One that the current step reads, and two posted for the steps behind it."""

TAG = 0


class Group(Protocol):
    """What links need of a process group: transfers that are started here and waited for later."""

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
        raise PeerLost(f"rank {rank}: could not connect to the other {world_size - 1} ranks: {reason(error)}") from None


class GlooSender(BufferedSender[HopBuffer, tuple[int, HopBuffer, Work]]):
    """Double-buffered: the next step is copied into one buffer while the other is on its way."""

    def __init__(self, group: Group, hop: Hop) -> None:
        super().__init__(hop, [HopBuffer(hop.boundary, hop.max_tokens) for _ in range(NUM_SEND_BUFFERS)])
        self._group = group

    def send(self, step_id: int, tensors: Sequence[Tensor]) -> None:
        num_tokens = check_boundary(self._hop.boundary, tensors)
        self.make_room()
        buffer = self._free.pop()
        buffer.fill(tensors)
        write_trailer(buffer.trailer(num_tokens), self._hop.epoch, step_id, num_tokens)
        try:
            work = self._group.send([buffer.message(num_tokens)], self._hop.peer, TAG)
        except RuntimeError as error:
            raise self._hop.sending_failed(step_id, reason(error)) from None
        self._in_flight.append((step_id, buffer, work))

    def _complete(self, transfer: tuple[int, HopBuffer, Work], timeout_s: float) -> HopBuffer:
        step_id, buffer, work = transfer
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise self._hop.sending_failed(step_id, reason(error)) from None
        return buffer


class GlooReceiver:
    """Receives posted ahead of their use, in step order."""

    def __init__(self, group: Group, hop: Hop, allocate: Callable[[int], Tensor] = host_bytes) -> None:
        self._group = group
        self._hop = hop
        self._buffers = [HopBuffer(hop.boundary, hop.max_tokens, allocate) for _ in range(NUM_RECEIVE_BUFFERS)]
        self._free = list(self._buffers)
        self._posted: deque[tuple[int, int, HopBuffer, Work]] = deque()
        self._in_use: HopBuffer | None = None

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def buffers(self) -> list[Tensor]:
        return [buffer.tensors(self._hop.max_tokens)[0] for buffer in self._buffers]

    def post(self, step_id: int, num_tokens: int) -> None:
        buffer = self._free.pop()
        # A message that ends too early must not be taken for complete because of what the buffer held before.
        buffer.trailer(num_tokens).zero_()
        try:
            work = self._group.recv([buffer.whole()], self._hop.peer, TAG)
        except RuntimeError as error:
            raise self._hop.nothing_came(step_id, reason(error)) from None
        self._posted.append((step_id, num_tokens, buffer, work))

    def wait(self, step_id: int) -> list[Tensor]:
        buffer, num_tokens = self.take(step_id)
        return buffer.tensors(num_tokens)

    def take(self, step_id: int) -> tuple[HopBuffer, int]:
        """As ``wait``, but the buffer itself, and how many tokens it holds."""
        if self._in_use is not None:
            self._free.append(self._in_use)
            self._in_use = None
        posted_step, num_tokens, buffer, work = self._posted.popleft()
        if posted_step != step_id:
            raise ValueError(f"step {step_id} is awaited, but the oldest receive was posted for step {posted_step}")
        try:
            work.wait(timedelta(seconds=self._hop.timeout_s))
        except RuntimeError as error:
            raise self._hop.nothing_came(step_id, reason(error)) from None
        check_trailer(buffer.trailer(num_tokens), self._hop, step_id, num_tokens)
        self._in_use = buffer
        return buffer, num_tokens


def reason(error: RuntimeError) -> str:
    """A transport's own words, without the source position before them and the advice behind."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    if text.startswith("["):
        text = text.split("] ", 1)[-1]
    return text.split(". This is typically")[0]
