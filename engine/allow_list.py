"""Which clients may connect: ZeroMQ asks for each CURVE handshake (ZAP, its RFC 27), the core's own loop answers.

The loop polls this socket like any other, so that there is no second thread beside it, the answers to a flood of strangers
take no more of a turn than a flood of messages does, and nobody comes in while it is not answered.
"""

import logging
import time
from collections.abc import Callable, Iterable

import zmq
from zmq.utils import z85

from ipc.channel import MAX_PER_TURN, SMALL_MESSAGE_BYTES, open_socket, receive_now, try_send

logger = logging.getLogger(__name__)

ADDRESS = "inproc://zeromq.zap.01"
"""Where ZeroMQ looks for it, within a context."""

VERSION = b"1.0"
NUM_FRAMES = 9
"""Peer, empty, version, request id, domain, address, routing id, mechanism, key."""

KEY_BYTES = 32
TELL_EVERY_S = 10.0
"""A refusal is a line in the log, at most one in this time: strangers try again and again."""


class AllowList:
    """Public keys that may come in, and the socket at which they are asked for."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        client_keys: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_refused = 0
        self.socket = open_socket(context, zmq.ROUTER, max_frame_bytes=SMALL_MESSAGE_BYTES)
        self.socket.bind(ADDRESS)
        self._keys = frozenset(z85.decode(key) for key in client_keys)
        self._clock = clock
        self._told_at: float | None = None
        self._num_untold = 0

    def answer(self) -> None:
        """Let in or refuse who waits, not more than a share of a turn."""
        for _ in range(MAX_PER_TURN):
            frames = receive_now(self.socket)
            if frames is None:
                return
            if len(frames) < NUM_FRAMES or frames[2] != VERSION:
                continue  # not of ZeroMQ: without an answer its handshake does not go on
            address, mechanism, key = frames[5], frames[7], frames[8]
            is_listed = mechanism == b"CURVE" and key in self._keys
            status, text = (b"200", b"OK") if is_listed else (b"400", b"key is not listed")
            try_send(self.socket, [*frames[:4], status, text, b"", b""])
            if not is_listed:
                self._refused(address, key)

    def _refused(self, address: bytes, key: bytes) -> None:
        self.num_refused += 1
        now = self._clock()
        if self._told_at is not None and now - self._told_at < TELL_EVERY_S:
            self._num_untold += 1
            return
        shown = z85.encode(key).decode() if len(key) == KEY_BYTES else "none"
        more = f"; {self._num_untold} more since the last such line" if self._num_untold else ""
        logger.warning(
            "refused a client at %s: its public key %s is not among --client-keys%s",
            address.decode("ascii", "replace")[:64], shown, more,
        )  # fmt: skip
        self._told_at, self._num_untold = now, 0
