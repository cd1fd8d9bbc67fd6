"""ZeroMQ sockets whose limits are all explicit, and sending and receiving that never blocks without a deadline."""

import os
from collections.abc import Sequence

import zmq

from ipc.codec import Frame
from ipc.errors import PeerLost

MAX_FRAMES = 4096
"""Most frames of one message; a longer one is dropped by the receiver as broken."""

MAX_PER_TURN = 64
"""Messages that a loop takes from one socket before it looks after everything else again: a flood delays, and no more."""

HIGH_WATER_MARK = 10_000
"""Messages queued per peer before a send is refused; bounds memory, and is far above what steps in flight need."""

SMALL_MESSAGE_BYTES = 16 << 20
"""Frame limit where no big buffers travel."""

STEP_MESSAGE_BYTES = 1 << 28
"""Between core and workers: masks and log probabilities of a whole vocabulary for each of hundreds of rows, or the parameters of
as many new requests. ZeroMQ drops a larger frame with its connection, and with it the step."""


def open_socket(
    context: "zmq.Context[zmq.Socket[bytes]]",
    kind: int,
    *,
    max_frame_bytes: int = SMALL_MESSAGE_BYTES,
    high_water_mark: int = HIGH_WATER_MARK,
    linger_ms: int = 0,
) -> "zmq.Socket[bytes]":
    """A socket with explicit high-water marks, LINGER and MAXMSGSIZE; a ROUTER also tells of unknown peers."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if kind in (zmq.DEALER, zmq.PUSH):
        # These connect. A listener decides by its address: bound with this option, IPv4 ones would show up as mapped ones.
        socket.setsockopt(zmq.IPV6, 1)
    if kind == zmq.DEALER:
        socket.setsockopt(zmq.ROUTING_ID, b"b" + os.urandom(12))
    return socket


def try_send(socket: "zmq.Socket[bytes]", frames: Sequence[Frame]) -> bool:
    """Queue the frames; False when the peer is unknown or its queue is full. Nothing is sent in part."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    return True


def send_within(socket: "zmq.Socket[bytes]", frames: Sequence[Frame], timeout_s: float, peer: str) -> None:
    """Queue the frames, waiting for room at most ``timeout_s``. Raises PeerLost."""
    if not try_send(socket, frames) and not (
        socket.poll(int(timeout_s * 1000), zmq.POLLOUT) and try_send(socket, frames)
    ):
        raise PeerLost(f"{peer} took no message within {timeout_s:g} s")


def receive_now(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    """The next message's frames, or None when none is waiting."""
    # Asking is a tenth of the price of an exception, and most often there is nothing more.
    has_message = int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
    return socket.recv_multipart(zmq.NOBLOCK) if has_message else None


def receive_within(socket: "zmq.Socket[bytes]", timeout_s: float, peer: str) -> list[bytes]:
    """The next message's frames. Raises PeerLost when none came in time."""
    if not socket.poll(int(timeout_s * 1000), zmq.POLLIN):
        raise PeerLost(f"{peer} sent nothing within {timeout_s:g} s")
    return socket.recv_multipart(zmq.NOBLOCK)
