"""How do steps reach the thread that computes them, and their outputs the core?

Past the control thread: a step that passed through it would wake one more thread on each rank, which takes the
interpreter, and a core's caches, from the thread that computes.
"""

import logging
import time
from collections import deque

import zmq

from ipc.channel import STEP_MESSAGE_BYTES, open_socket, receive_now, send_within
from ipc.codec import decode, encode
from ipc.errors import PeerLost, ProtocolError, RequestError
from ipc.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput, Shutdown, WorkerReady

logger = logging.getLogger(__name__)

FROM_CORE = (SchedulerOutput, GrammarOutput, Shutdown)

LAST_WORDS_MS = 1000
"""What the last outputs get to leave."""


class ShutdownRequested(Exception):  # noqa: N818
    """The core asked this rank to end, with this exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class StepChannel:
    """The main thread's own socket to the core. The core learns of it from the WorkerReady that comes through it.

    It carries no signs of life, and waiting for a plan has no deadline: the control thread ends the process when the core
    is gone.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", core_address: str, *, core_id: int, epoch: int, timeout_s: float
    ) -> None:
        """``timeout_s``: longest wait for room to send."""
        self.num_dropped = 0
        """Messages of another core or epoch."""
        self._life = (core_id, epoch)
        self._timeout_s = timeout_s
        self._ahead: deque[SchedulerOutput | Shutdown] = deque()
        """Taken from the socket, not yet worked on."""
        self._masks: deque[GrammarOutput] = deque()
        """The same for masks, in the order of their steps."""
        self._socket = open_socket(context, zmq.DEALER, max_frame_bytes=STEP_MESSAGE_BYTES, linger_ms=LAST_WORDS_MS)
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
            raise ShutdownRequested(item.exit_code)
        return item

    def take_waiting(self) -> list[SchedulerOutput]:
        """Read what has come; the steps behind the one that was taken last."""
        while (frames := receive_now(self._socket)) is not None:
            self._receive(frames)
        return [item for item in self._ahead if isinstance(item, SchedulerOutput)]

    def take_masks(self, step_id: int, timeout_s: float) -> GrammarOutput:
        """The masks of a step, which were promised with its plan.

        Raises:
            PeerLost: they don't come in time.
            ProtocolError: another step's come.
            ShutdownRequested: the core wants no more of this step.
        """
        deadline = time.monotonic() + timeout_s
        while not self._masks:
            if self._ahead and isinstance(self._ahead[-1], Shutdown):
                raise ShutdownRequested(self._ahead[-1].exit_code)
            if not self._socket.poll(max(1, int(1000 * (deadline - time.monotonic())))):
                raise PeerLost(f"step {step_id}: the core sent no masks within {timeout_s:g} s")
            self._receive(self._socket.recv_multipart(zmq.NOBLOCK))
        masks = self._masks.popleft()
        if masks.step_id != step_id:
            raise ProtocolError("GrammarOutput.step_id", f"is {masks.step_id}, the masks of step {step_id} are to come next")
        return masks

    def send(self, message: WorkerReady | ModelRunnerOutput) -> None:
        """In order. Raises PeerLost when the core takes nothing for too long."""
        send_within(self._socket, encode(message), self._timeout_s, "the core")

    def close(self) -> None:
        """What was sent may still leave for a moment."""
        self._socket.close()

    def _receive(self, frames: list[bytes]) -> None:
        """Raises ProtocolError for what can't be read: a step that was left out would be waited for in vain."""
        try:
            message: SchedulerOutput | GrammarOutput | Shutdown = decode(frames, FROM_CORE)
        except RequestError as error:
            raise ProtocolError("SchedulerOutput", f"has sampling parameters that break a rule: {error}") from None
        if (message.core_id, message.epoch) != self._life:
            self.num_dropped += 1
            logger.debug("dropped %s of core %x, epoch %d", type(message).__name__, message.core_id, message.epoch)
        elif isinstance(message, GrammarOutput):
            self._masks.append(message)
        else:
            self._ahead.append(message)
