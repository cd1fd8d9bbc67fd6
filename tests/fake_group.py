"""A worker group without torch: real sockets and messages, computed by FakeWorker, one thread for all ranks."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import zmq

from engine.scheduler import SchedulerConfig
from ipc.channel import open_socket, receive_now
from ipc.codec import decode, encode
from ipc.messages import (
    EpochStart,
    GrammarOutput,
    Heartbeat,
    KVCacheConfig,
    KVCacheGroup,
    SchedulerOutput,
    Shutdown,
    StageReport,
    TimelineReport,
    TimelineRequest,
    WorkerFailed,
    WorkerHello,
    WorkerLoaded,
    WorkerReady,
)
from tests.fakes import FakeWorker

FROM_CORE = (EpochStart, KVCacheConfig, SchedulerOutput, GrammarOutput, Shutdown, Heartbeat, TimelineRequest)


class _Died(Exception):
    """The end of one life."""


class FakeGroup:
    """Ranks that say hello on start, take part in one epoch and answer steps; ``stop`` is sudden death.

    Args:
        deaths: for each life but the last one, the number of the step that ends it; 0 ends it while it loads. A life ends
            before it answers that step, and another one follows at once.
        deadly: a token that also ends each life, before a step is answered that has it in a new prompt or samples it.
        has_last_words: whether lives end with a WorkerFailed; else nothing is heard before the next one's hello.
        free_bytes: of each rank, by life; the last one for all that follow.
    """

    def __init__(
        self, address: str, config: SchedulerConfig, *, key: str = "", hold: threading.Event | None = None,
        deaths: Sequence[int] = (), deadly: int | None = None, has_last_words: bool = False,
        free_bytes: Sequence[int] = (10**9,),
    ) -> None:
        self.config = config
        self.num_lives = 0
        self._deaths = list(deaths)
        self._deadly = deadly
        self._has_last_words = has_last_words
        self._free_bytes = list(free_bytes)
        self.epoch_start: EpochStart | None = None
        self.num_steps = 0
        self.plans: list[SchedulerOutput] = []
        self.masks: list[GrammarOutput] = []
        self.spans: dict[int, object] = {}
        """Flat, of the ranks that answer questions for timelines."""
        self.shut_down = threading.Event()
        self.exit_code: int | None = None
        self._last_words: WorkerFailed | None = None
        self.failure: BaseException | None = None
        self._address = address
        self._key = key
        self._hold = hold
        self._context = zmq.Context()
        self._wake, self._stop_end = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        os.write(self._stop_end, b"x")
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._context.destroy(0)
        os.close(self._wake)
        os.close(self._stop_end)
        if self.failure is not None:
            raise self.failure

    def fail(self, cause: str, *, fatal: bool) -> None:
        """Have rank 0 say WorkerFailed."""
        assert self.epoch_start is not None
        self._last_words = WorkerFailed(
            core_id=self.epoch_start.core_id, epoch=self.epoch_start.epoch, rank=0, cause=cause, fatal=fatal,
        )
        os.write(self._stop_end, b"f")

    def _run(self) -> None:
        try:
            while self._live():
                pass
        except BaseException as error:  # noqa: BLE001 raised again by stop()
            self.failure = error

    def _live(self) -> bool:
        """One life; whether another one follows."""
        sockets = [open_socket(self._context, zmq.DEALER) for _ in range(self.config.num_stages)]
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        linger_ms = 0
        try:
            for rank, socket in enumerate(sockets):
                socket.connect(self._address)
                poller.register(socket, zmq.POLLIN)
                socket.send_multipart(encode(self._hello(rank)))
            self._serve(sockets, poller)
        except _Died:
            linger_ms = 10_000
            if self._has_last_words:
                assert self.epoch_start is not None
                # Of the last rank, so that it comes behind the steps that were answered.
                sockets[-1].send_multipart(encode(WorkerFailed(
                    core_id=self.epoch_start.core_id, epoch=self.epoch_start.epoch, rank=len(sockets) - 1,
                    cause=f"end of life {self.num_lives}", fatal=False)))
            return True
        finally:
            for socket in sockets:
                socket.close(linger_ms)
        return False

    def _serve(self, sockets: list["zmq.Socket[bytes]"], poller: zmq.Poller) -> None:
        worker: FakeWorker | None = None
        self.num_lives += 1
        num_left = self._deaths[self.num_lives - 1] if self.num_lives <= len(self._deaths) else None
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                if os.read(self._wake, 1) == b"x":
                    return
                sockets[0].send_multipart(encode(self._last_words))
            for rank, socket in enumerate(sockets):
                while (frames := receive_now(socket)) is not None:
                    message = decode(frames, FROM_CORE)
                    if isinstance(message, EpochStart):
                        self.epoch_start = message
                        if num_left == 0:
                            raise _Died
                        socket.send_multipart(encode(self._loaded(rank, message)))
                    elif isinstance(message, KVCacheConfig):
                        made = replace(self.config, num_blocks=message.num_blocks, max_model_len=message.max_model_len)
                        worker = FakeWorker.for_config(made, depth=made.num_stages + 1)
                        socket.send_multipart(encode(WorkerReady(
                            core_id=message.core_id, epoch=message.epoch, rank=rank, kv_bytes=1, warmup_s=0.0)))
                        socket.send_multipart(encode(StageReport(
                            core_id=message.core_id, epoch=message.epoch, rank=rank, num_steps=0, busy_s=0, plan_wait_s=0,
                            receive_wait_s=0, token_wait_s=0, queue_depth=0, resident_bytes=1234)))
                    elif isinstance(message, SchedulerOutput) and rank == len(sockets) - 1:
                        assert worker is not None
                        if self._hold is not None:
                            self._hold.wait(30)
                        worker.send(message)
                        self.num_steps += 1
                        self.plans.append(message)
                        if num_left is not None:
                            num_left -= 1
                            if not num_left:
                                raise _Died
                        if any(self._deadly in new.token_ids.tolist() for new in message.new_requests):
                            raise _Died
                        self._answer(socket, worker)
                    elif isinstance(message, GrammarOutput):
                        assert worker is not None and rank == len(sockets) - 1, "masks are for the last stage"
                        self.masks.append(message)
                        worker.take_masks(message)
                        self._answer(socket, worker)
                    elif isinstance(message, TimelineRequest) and rank in self.spans:
                        now = time.monotonic_ns()
                        socket.send_multipart(encode(TimelineReport(
                            core_id=message.core_id, epoch=message.epoch, rank=rank, question_id=message.question_id,
                            received_ns=now, replied_ns=now, spans=self.spans[rank])))
                    elif isinstance(message, Shutdown):
                        self.exit_code = message.exit_code
                        self.shut_down.set()

    def _answer(self, socket: "zmq.Socket[bytes]", worker: FakeWorker) -> None:
        while worker.pending:
            output = worker.receive()
            if self._deadly in output.token_ids:
                raise _Died
            socket.send_multipart(encode(output))

    def _hello(self, rank: int) -> WorkerHello:
        return WorkerHello(
            rank=rank, world_size=self.config.num_stages, local_world_size=self.config.num_stages,
            nonce=int.from_bytes(os.urandom(8), "little"), pid=os.getpid(), host="here", key=self._key,
            token_address="inproc://none" if rank == 0 else "",
        )

    def _loaded(self, rank: int, start: EpochStart) -> WorkerLoaded:
        return WorkerLoaded(
            core_id=start.core_id, epoch=start.epoch, rank=rank,
            groups=(KVCacheGroup(kind="full", layers=[2 * rank, 2 * rank + 1]),),
            bytes_per_block=1000, free_bytes=self._free_bytes[min(self.num_lives, len(self._free_bytes)) - 1], device="cpu", weight_bytes=10, load_s=0.1, num_threads=1,
        )
