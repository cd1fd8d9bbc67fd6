"""A worker group without torch: real sockets and messages, computed by FakeWorker, one thread for all ranks."""

import os
import threading
import time
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


class FakeGroup:
    """Ranks that say hello on start, take part in one epoch and answer steps; ``stop`` is sudden death."""

    def __init__(self, address: str, config: SchedulerConfig, *, key: str = "", hold: threading.Event | None = None) -> None:
        self.config = config
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
        sockets = [open_socket(self._context, zmq.DEALER) for _ in range(self.config.num_stages)]
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        try:
            for rank, socket in enumerate(sockets):
                socket.connect(self._address)
                poller.register(socket, zmq.POLLIN)
                socket.send_multipart(encode(self._hello(rank)))
            self._serve(sockets, poller)
        except BaseException as error:  # noqa: BLE001 raised again by stop()
            self.failure = error
        finally:
            for socket in sockets:
                socket.close(0)

    def _serve(self, sockets: list["zmq.Socket[bytes]"], poller: zmq.Poller) -> None:
        worker: FakeWorker | None = None
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
            socket.send_multipart(encode(worker.receive()))

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
            bytes_per_block=1000, free_bytes=10**9, device="cpu", weight_bytes=10, load_s=0.1, num_threads=1,
        )
