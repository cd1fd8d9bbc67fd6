"""How does a rank stay in touch with its core while it computes, and who may end it?

The control thread owns a socket to the core. It turns the core's messages into items of ``inbox`` (steps have a channel of
their own, see step_channel.py), sends what the main thread posts, reports once a second, and is the only one that ends the process from outside the main thread: on
a signal, when the core or the agent is gone, when another epoch begins, or when a shutdown takes too long. The main
thread may be blocked in a transport meanwhile, where neither Python signal handlers nor exceptions would reach it.
"""

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from ipc.channel import open_socket, receive_now, try_send
from ipc.codec import Frame, decode, encode
from ipc.errors import ProtocolError, RequestError
from ipc.messages import (
    EpochStart,
    Heartbeat,
    KVCacheConfig,
    Shutdown,
    StageReport,
    TimelineReport,
    TimelineRequest,
    WorkerFailed,
    WorkerHello,
)
from worker.clock import LINK, MASKS, PLAN, ROOM, TOKENS, StageClock
from worker.lifeline import end_process, watch_process
from worker.memory import resident_bytes
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

FROM_CORE = (Heartbeat, EpochStart, KVCacheConfig, Shutdown, TimelineRequest)

Item = EpochStart | KVCacheConfig | Shutdown

TICK_S = 1.0
"""A hello or a report goes out this often."""

HELLO_TIMEOUT_S = 120.0
"""Ranks of several agents start minutes apart at worst; longer means that there is no core to answer."""

SHUTDOWN_S = 2.0
"""What the main thread gets to finish its step after Shutdown."""

LAST_WORDS_S = 1.0
"""What the last messages to the core get to leave."""


class ControlThread(threading.Thread):
    """See the module. Methods are for the main thread."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        settings: WorkerSettings,
        hello: WorkerHello,
        clock: StageClock,
        on_end: Callable[[], None],
    ) -> None:
        """``on_end`` is called before the process is ended from here, to leave nothing behind."""
        super().__init__(name="control", daemon=True)
        self.inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.num_dropped = 0
        """Messages of another core or epoch, and broken ones."""
        self._context = context
        self._settings = settings
        self._hello = hello
        self._clock = clock
        self._on_end = on_end
        self._life: tuple[int, int] | None = None
        """Core id and epoch, once the hello was answered."""
        self._outbox: deque[list[Frame]] = deque()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._core_fd: int | None = None
        self._is_stopping = False
        self._shutdown_at: float | None = None
        self._shutdown_code = 0
        self._started_at = self._heard_at = time.monotonic()
        self._next_tick = 0.0
        self._tick_s = min(TICK_S, settings.health_timeout_s / 4)
        self._poller = zmq.Poller()
        # Made here, where a failure can still be reported; used by the thread alone.
        self._socket = open_socket(context, zmq.DEALER, linger_ms=int(LAST_WORDS_S * 1000))
        self._socket.connect(settings.core_address)

    @property
    def is_shutting_down(self) -> bool:
        """Whether the core asked this rank to end; neighbours end at the same time, so a lost peer is no fault then."""
        return self._shutdown_at is not None

    @property
    def shutdown_code(self) -> int:
        """The exit code that the core's Shutdown asks for."""
        return self._shutdown_code

    def post(self, message: object) -> None:
        """Send to the core, in order. The message's arrays must not change any more."""
        self._outbox.append(encode(message))
        os.eventfd_write(self._wakeup, 1)

    def fail(self, cause: str, *, fatal: bool) -> None:
        """Tell the core why this rank is about to end, then stop. From now on nothing else ends the process."""
        if self._life is not None:
            core_id, epoch = self._life
            self.post(WorkerFailed(
                core_id=core_id, epoch=epoch, rank=self._settings.rank, cause=cause[: 1 << 15], fatal=fatal
            ))
        self.stop()

    def stop(self) -> None:
        """Send what was posted, close the socket, and end the thread. May be called twice."""
        self._is_stopping = True
        os.eventfd_write(self._wakeup, 1)
        self.join(2 * LAST_WORDS_S)

    # ------------------------------------------------------------------------------------------ the thread

    def run(self) -> None:
        """The loop; a failure of its own ends the process, since nothing else could."""
        try:
            socket = self._socket
            for source in (socket, self._settings.signal_fd, self._wakeup):
                self._poller.register(source, zmq.POLLIN)
            while not self._is_stopping:
                self._turn(socket)
            self._flush(socket)
            socket.close()
        except Exception:
            logger.exception("the control thread failed")
            self._end(1)

    def _turn(self, socket: "zmq.Socket[bytes]") -> None:
        ready = {source for source, _ in self._poller.poll(self._timeout_ms())}
        if self._settings.signal_fd in ready:
            self._on_signal()
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        self._flush(socket)
        while (frames := receive_now(socket)) is not None:
            self._receive(frames)
        if self._core_fd in ready and not self.is_shutting_down:
            self._end(1, "the core's process ended")
        now = time.monotonic()
        if self._shutdown_at is not None and now >= self._shutdown_at:
            self._end(self._shutdown_code, "the step in progress took too long to wait for")
        if now >= self._next_tick:
            self._next_tick = now + self._tick_s
            self._tick(socket, now)

    def _timeout_ms(self) -> int:
        until = self._next_tick if self._shutdown_at is None else min(self._next_tick, self._shutdown_at)
        return max(0, int((until - time.monotonic()) * 1000) + 1)

    def _flush(self, socket: "zmq.Socket[bytes]") -> None:
        while self._outbox and try_send(socket, self._outbox[0]):
            self._outbox.popleft()

    def _on_signal(self) -> None:
        numbers = os.read(self._settings.signal_fd, 64)
        if numbers:
            self._end(128 + numbers[-1] % 128, f"signal {numbers[-1]}", level=logging.DEBUG)
        # The other end is closed: no signal can come this way any more.
        self._poller.unregister(self._settings.signal_fd)

    def _tick(self, socket: "zmq.Socket[bytes]", now: float) -> None:
        if os.getppid() != self._settings.parent_pid:
            self._end(1, "the agent that started this rank is gone")
        if self._life is None:
            if now - self._started_at > max(HELLO_TIMEOUT_S, self._settings.health_timeout_s):
                self._end(1, f"no core answered at {self._settings.core_address}")
            try_send(socket, encode(self._hello))
            return
        if now - self._heard_at > self._settings.health_timeout_s and not self.is_shutting_down:
            self._end(1, f"the core said nothing for {self._settings.health_timeout_s:g} s")
        try_send(socket, encode(self._report(*self._life)))

    def _report(self, core_id: int, epoch: int) -> StageReport:
        busy_s, waits = self._clock.busy_and_waits()
        return StageReport(
            core_id=core_id,
            epoch=epoch,
            rank=self._settings.rank,
            num_steps=self._clock.num_steps,
            busy_s=busy_s,
            plan_wait_s=waits[PLAN],
            receive_wait_s=waits[LINK],
            token_wait_s=waits[TOKENS],
            queue_depth=self._clock.num_ahead,
            resident_bytes=resident_bytes(),
            send_wait_s=waits[ROOM],
            num_full_graph_steps=self._clock.num_full_graph_steps,
            num_piecewise_graph_steps=self._clock.num_piecewise_graph_steps,
            num_tokens=self._clock.num_tokens,
            num_padded_tokens=self._clock.num_padded_tokens,
            mask_wait_s=waits[MASKS],
        )

    def _timeline(self, request: TimelineRequest) -> TimelineReport:
        received_ns = time.monotonic_ns()
        spans = self._clock.snapshot(request.seconds)
        return TimelineReport(
            core_id=request.core_id,
            epoch=request.epoch,
            rank=self._settings.rank,
            question_id=request.question_id,
            received_ns=received_ns,
            replied_ns=time.monotonic_ns(),
            spans=spans.reshape(-1),
        )

    # ------------------------------------------------------------------------------------------ messages

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames, FROM_CORE)
        except (ProtocolError, RequestError) as error:
            self.num_dropped += 1
            logger.warning("dropped a message of the core: %s", error)
            return
        if isinstance(message, EpochStart):
            self._on_epoch_start(message)
            return
        # A rank that is in no epoch yet can still be told to go.
        is_early_shutdown = self._life is None and isinstance(message, Shutdown)
        if self._life != (message.core_id, message.epoch) and not is_early_shutdown:
            self.num_dropped += 1
            logger.debug("dropped %s of core %x, epoch %d", type(message).__name__, message.core_id, message.epoch)
            return
        self._heard_at = time.monotonic()
        if isinstance(message, Shutdown) and self._shutdown_at is None:
            self._shutdown_code = message.exit_code
            self._shutdown_at = time.monotonic() + SHUTDOWN_S
        if isinstance(message, TimelineRequest):
            self._outbox.append(encode(self._timeline(message)))
            os.eventfd_write(self._wakeup, 1)
        elif not isinstance(message, Heartbeat):
            self.inbox.put(message)

    def _on_epoch_start(self, start: EpochStart) -> None:
        life = (start.core_id, start.epoch)
        if start.nonce != self._hello.nonce:
            self.num_dropped += 1
        elif self._life is None:
            self._life = life
            self._heard_at = time.monotonic()
            if start.core_host == self._hello.host and (core_fd := watch_process(start.core_pid)) is not None:
                self._core_fd = core_fd
                self._poller.register(core_fd, zmq.POLLIN)
            self.inbox.put(start)
        elif life != self._life:
            self._end(1, f"epoch {start.epoch} began without this rank")

    def _end(self, code: int, reason: str = "", level: int | None = None) -> None:
        if reason:
            logger.log(level or (logging.ERROR if code else logging.WARNING), "ending: %s", reason)
        self._on_end()
        logging.shutdown()
        end_process(code)
