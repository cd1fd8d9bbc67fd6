"""What does a hop between two stages look like, whatever carries it?

A hop is one flat buffer: the boundary's tensors one after the other, then a trailer of 16 bytes. Both sides know the
shapes from the step's plan, so nothing about them travels; the trailer proves that the two sides mean the same step.
"""

import struct
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ipc.errors import PeerLost
from worker.models import BoundaryTensor

TRAILER = struct.Struct("<IQI")
"""Epoch, step, tokens."""

_ALIGNMENT = 16
"""Bytes; each tensor starts at a multiple, so that a view of any dtype is possible."""


Boundary = tuple[BoundaryTensor, ...]


class HopBuffer:
    """Memory of one hop in flight, for at most ``max_tokens`` tokens. On the CPU; pinned when asked.

    Owned by a sender or a receiver, who hands it to the transport and must not touch it until that is done with it.
    """

    def __init__(self, boundary: Boundary, max_tokens: int, *, pinned: bool = False) -> None:
        self._boundary = boundary
        self._bytes = torch.zeros(self.size_of(boundary, max_tokens), dtype=torch.uint8, pin_memory=pinned)
        self._memory = memoryview(self._bytes.numpy())  # type: ignore[arg-type]

    @staticmethod
    def size_of(boundary: Boundary, max_tokens: int) -> int:
        """Bytes that a buffer takes."""
        return _layout(boundary, max_tokens)[-1] + TRAILER.size

    def message(self, num_tokens: int) -> Tensor:
        """The bytes that travel for so many tokens: a view."""
        return self._bytes[: self._layout(num_tokens)[-1] + TRAILER.size]

    def tensors(self, num_tokens: int) -> list[Tensor]:
        """The boundary's tensors: views, ``[T, width]`` each."""
        *starts, _ = self._layout(num_tokens)
        views = []
        for start, part in zip(starts, self._boundary, strict=True):
            size_bytes = num_tokens * part.width * part.dtype.itemsize
            flat = self._bytes[start : start + size_bytes].view(part.dtype)
            views.append(flat.view(num_tokens, part.width))
        return views

    def write_trailer(self, epoch: int, step_id: int, num_tokens: int) -> None:
        TRAILER.pack_into(self._memory, self._layout(num_tokens)[-1], epoch, step_id, num_tokens)

    def clear_trailer(self, num_tokens: int) -> None:
        """A message that ends too early must not be taken for complete because of what the buffer held before."""
        TRAILER.pack_into(self._memory, self._layout(num_tokens)[-1], 0, 0, 0)

    def read_trailer(self, num_tokens: int) -> tuple[int, int, int]:
        """Epoch, step and tokens at the place where a message for so many tokens has them."""
        epoch, step_id, tokens = TRAILER.unpack_from(self._memory, self._layout(num_tokens)[-1])
        return epoch, step_id, tokens

    def _layout(self, num_tokens: int) -> list[int]:
        return _layout(self._boundary, num_tokens)


def _layout(boundary: Boundary, num_tokens: int) -> list[int]:
    """Start of each tensor, then of the trailer."""
    starts = [0]
    for part in boundary:
        end = starts[-1] + num_tokens * part.width * part.dtype.itemsize
        starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
    return starts


class Sender(Protocol):
    """Hands a step's activations to the next stage."""

    def send(self, step_id: int, tensors: Sequence[Tensor]) -> None:
        """Start sending copies of the tensors. They may be changed afterwards.

        Waits for an earlier send when all buffers are in flight. Raises PeerLost.
        """

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent has been taken over by the peer. Raises PeerLost."""


class Receiver(Protocol):
    """Takes a step's activations from the previous stage."""

    @property
    def has_room(self) -> bool:
        """Whether one more receive can be posted now."""

    def post(self, step_id: int, num_tokens: int) -> None:
        """Make ready for a step; steps are posted in the order in which they are sent."""

    def wait(self, step_id: int) -> list[Tensor]:
        """The tensors of the oldest posted step, which must be this one; views, valid until the next ``wait``.

        Raises PeerLost when they don't come in time or are not what was agreed.
        """


def check_trailer(
    buffer: HopBuffer, *, rank: int, peer: int, epoch: int, step_id: int, num_tokens: int
) -> None:
    """Raise PeerLost unless the message in the buffer is the one that was agreed for this step."""
    got = buffer.read_trailer(num_tokens)
    if got != (epoch, step_id, num_tokens):
        raise PeerLost(
            f"rank {rank}, step {step_id}: rank {peer} sent something else than {num_tokens} tokens of epoch {epoch} "
            f"(trailer: epoch {got[0]}, step {got[1]}, {got[2]} tokens); it may run another version or model"
        )
