"""How do sampled tokens get from the last stage to the first, past the core?

In front of each message stands a frame with the epoch's key, which the core gave both: the socket is open to whoever reaches its
address, and what a stranger sends is dropped unread.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from ipc.channel import MAX_PER_TURN, open_socket, receive_now, send_within
from ipc.codec import decode, encode
from ipc.errors import PeerLost, ProtocolError
from ipc.messages import SampledTokens

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 1000
"""Steps in flight are a few; what strangers send to an idle engine waits here."""

Accept = Callable[[int, list[int], list[int], list[int]], None]
"""Step, rows, token ids, and how many of these each row has."""


class TokenInbox:
    """First stage: takes SampledTokens in step order. Every step sends one, so a gap means that one was lost."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", *, run_dir: str, nonce: int, host: str | None
    ) -> None:
        self._socket = open_socket(context, zmq.PULL, high_water_mark=HIGH_WATER_MARK)
        self._path: Path | None = None
        if host is None:
            # Named after this life of the rank: binding an ipc path that is in use would steal it silently.
            self._path = Path(run_dir) / f"tokens-{nonce:016x}"
            self._socket.bind(f"ipc://{self._path}")
        else:
            self._socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:0")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.num_dropped = 0
        self._epoch = 0
        self._key = b""
        self._next_step = 0

    @property
    def last_step(self) -> int:
        """Newest step whose tokens were taken; -1 before the first."""
        return self._next_step - 1

    def begin(self, epoch: int, key: int) -> None:
        """What comes without this epoch's key, or of another epoch, is dropped and counted from now on; step 0 comes first."""
        self._epoch, self._key = epoch, _key_frame(key)

    def take_until(self, step_id: int, accept: Accept, *, timeout_s: float, peer: int) -> None:
        """Accept what has come, and wait until the tokens of this step are among it.

        Raises PeerLost when they don't come in time, or one before them is missing.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            # What nobody needs yet is taken all the same: it must not pile up in the socket.
            for _ in range(MAX_PER_TURN):
                if (frames := receive_now(self._socket)) is None:
                    break
                self._take(frames, accept, peer)
            if self._next_step > step_id:
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._socket.poll(max(1, int(1000 * left_s))):
                raise PeerLost(f"rank 0, step {step_id}: rank {peer} sent no sampled tokens within {timeout_s:g} s")

    def close(self) -> None:
        """Close the socket and delete its file."""
        self._socket.close(0)
        self.remove_file()

    def remove_file(self) -> None:
        """Delete the socket's file; safe from any thread."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _take(self, frames: list[bytes], accept: Accept, peer: int) -> None:
        key, *rest = frames
        if key != self._key:
            self._drop("without the key of this epoch")
            return
        try:
            sampled: SampledTokens = decode(rest, (SampledTokens,))
        except ProtocolError as error:
            self._drop(str(error))
            return
        if sampled.epoch != self._epoch or sampled.step_id < self._next_step:
            self._drop(f"SampledTokens of epoch {sampled.epoch}, step {sampled.step_id}")
            return
        if sampled.step_id > self._next_step:
            raise PeerLost(f"rank 0: tokens of step {self._next_step} from rank {peer} were lost, {sampled.step_id} came")
        self._next_step += 1
        accept(sampled.step_id, sampled.rows, sampled.token_ids, sampled.counts)

    def _drop(self, what: str) -> None:
        self.num_dropped += 1
        logger.warning("dropped a message on the token socket: %s", what)


class TokenOutbox:
    """Last stage: sends each step's tokens."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", *, address: str, epoch: int, key: int) -> None:
        self._socket = open_socket(context, zmq.PUSH)
        self._socket.connect(address)
        self._epoch, self._key = epoch, _key_frame(key)

    def send(self, step_id: int, rows: list[int], token_ids: list[int], counts: list[int], *, timeout_s: float) -> None:
        """Raises PeerLost when the first stage takes nothing for too long."""
        message = SampledTokens(epoch=self._epoch, step_id=step_id, rows=rows, token_ids=token_ids, counts=counts)
        send_within(self._socket, [self._key, *encode(message)], timeout_s, f"step {step_id}: rank 0, which needs the sampled tokens,")

    def close(self) -> None:
        self._socket.close(0)


def _key_frame(key: int) -> bytes:
    return key.to_bytes(8, "little")
