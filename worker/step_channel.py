"""How do steps reach the thread that computes them, and their outputs the core?

Past the control thread: a step that passed through it would wake one more thread on each rank, which takes the
interpreter, and a core's caches, from the thread that computes.
"""

import logging
from collections import deque
from dataclasses import dataclass

import zmq

from ipc.channel import open_socket, receive_now, send_within
from ipc.codec import decode, encode
from ipc.errors import ProtocolError, RequestError
from ipc.messages import ModelRunnerOutput, SchedulerOutput, Shutdown, WorkerReady

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownRequested(Exception):  # noqa: N818
    """The core asked this rank to end, with this exit code."""

    exit_code: int


class StepChannel:
    """The main thread's own socket to the core. The core learns of it from the WorkerReady that comes through it.

    It carries no signs of life and has no deadlines: the control thread ends the process when the core is gone.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", core_address: str, *, core_id: int, epoch: int, timeout_s: float
    ) -> None:
        """``timeout_s``: longest wait for room to send."""
        self.num_dropped = 0
        """Messages of another core or epoch, and broken ones."""
        self._life = (core_id, epoch)
        self._timeout_s = timeout_s
        self._ahead: deque[SchedulerOutput | Shutdown] = deque()
        """Taken from the socket, not yet worked on."""
        self._socket = open_socket(context, zmq.DEALER, linger_ms=1000)
        self._socket.connect(core_address)

    @property
    def num_ahead(self) -> int:
        """Steps that were taken from the socket and not yet from here."""
        return len(self._ahead)

    def next_plan(self) -> SchedulerOutput:
        """The next step; waits for it at no cost. Raises ShutdownRequested when the core said so behind the last one."""
        while not self._ahead:
            self._receive(self._socket.recv_multipart())
        item = self._ahead.popleft()
        if isinstance(item, Shutdown):
            raise ShutdownRequested(exit_code=item.exit_code)
        return item

    def take_waiting(self) -> list[SchedulerOutput]:
        """Read what has come; the steps behind the one that was taken last."""
        while (frames := receive_now(self._socket)) is not None:
            self._receive(frames)
        return [item for item in self._ahead if isinstance(item, SchedulerOutput)]

    def send(self, message: WorkerReady | ModelRunnerOutput) -> None:
        """In order. Raises PeerLost when the core takes nothing for too long."""
        send_within(self._socket, encode(message), self._timeout_s, "the core")

    def close(self) -> None:
        """What was sent may still leave for a moment."""
        self._socket.close()

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message: SchedulerOutput | Shutdown = decode(frames, (SchedulerOutput, Shutdown))
        except (ProtocolError, RequestError) as error:
            self.num_dropped += 1
            logger.warning("dropped a message of the core: %s", error)
            return
        if (message.core_id, message.epoch) == self._life:
            self._ahead.append(message)
            return
        self.num_dropped += 1
        logger.debug("dropped %s of core %x, epoch %d", type(message).__name__, message.core_id, message.epoch)
