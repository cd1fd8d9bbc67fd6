"""The core's side of the worker socket, moved by hand, and the ranks it talks to as real processes."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import zmq

from ipc.channel import open_socket
from ipc.codec import decode, encode
from ipc.endpoints import host_id
from ipc.messages import (
    EpochStart,
    GrammarOutput,
    Heartbeat,
    KVCacheConfig,
    KVCacheGroup,
    ModelRunnerOutput,
    SchedulerOutput,
    Shutdown,
    StageReport,
    WorkerFailed,
    WorkerHello,
    WorkerLoaded,
    WorkerReady,
)

FROM_RANK = (WorkerHello, WorkerLoaded, WorkerReady, WorkerFailed, StageReport, ModelRunnerOutput)
CORE_ID, EPOCH = 7, 3
NUM_LAYERS = 5
DEADLINE_S = 120.0
"""Ranks load torch before they say anything."""


class FakeCore:
    """Starts ranks, answers their reports with heartbeats, and keeps everything else they say for the test."""

    def __init__(self, model: Path, num_ranks: int, **settings) -> None:
        self.model, self.num_ranks, self.settings = model, num_ranks, settings
        self.run_dir = Path(tempfile.mkdtemp(prefix="bw-"))
        self.context = zmq.Context()
        self.router = open_socket(self.context, zmq.ROUTER)
        self.router.bind(f"ipc://{self.run_dir}/workers")
        self.ranks: list[subprocess.Popen] = []
        self.identities: dict[int, bytes] = {}
        self.step_identities: dict[int, bytes] = {}
        """Of the sockets on which ranks wait for steps."""
        self.hellos: dict[int, WorkerHello] = {}
        self.reports: dict[int, StageReport] = {}
        self.settings_of_rank: dict[int, dict] = {}
        """What single ranks are told differently."""
        self.answers_reports = True
        self._seen: list[tuple[int | None, object]] = []

    def start(self) -> None:
        for rank in range(self.num_ranks):
            values = {
                "model": str(self.model), "partition": "even", "rank": rank, "world_size": self.num_ranks,
                "local_rank": rank, "local_world_size": self.num_ranks, "core_address": f"ipc://{self.run_dir}/workers",
                "key": "k", "run_dir": str(self.run_dir), "device": "cpu", "dtype": "float32", "max_num_seqs": 8,
                "max_num_batched_tokens": 512, "block_size": 16, "num_threads": 1, "link_timeout_s": 20.0,
                "health_timeout_s": 20.0,
            }  # fmt: skip
            own = values | self.settings | self.settings_of_rank.get(rank, {})
            command = [sys.executable, "-m", "tests.worker.rank_main", json.dumps(own)]
            self.ranks.append(subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def send(self, rank: int, message: object) -> None:
        """On the rank's socket for such messages."""
        identities = [self.identities[rank]]
        if isinstance(message, SchedulerOutput | GrammarOutput):
            identities = [self.step_identities[rank]]
        elif isinstance(message, Shutdown) and rank in self.step_identities:
            identities.append(self.step_identities[rank])
        for identity in identities:
            self.router.send_multipart([identity, *encode(message)])

    def broadcast(self, message: object) -> None:
        for rank in range(self.num_ranks):
            self.send(rank, message)

    def expect(self, kind: type, rank: int | None = None, timeout_s: float = DEADLINE_S):
        """The next message of this kind, from this rank if one is given; others stay for later."""
        deadline = time.monotonic() + timeout_s
        while True:
            for i, (sender, message) in enumerate(self._seen):
                if isinstance(message, kind) and rank in (None, sender):
                    del self._seen[i]
                    return message
            if not self.router.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                raise AssertionError(f"no {kind.__name__} from rank {rank} within {timeout_s} s\n{self.stderr_so_far()}")
            self._receive()

    def serve_for(self, seconds: float) -> None:
        """Answer reports for a while."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.router.poll(int(1000 * left) + 1):
                self._receive()

    def _receive(self) -> None:
        identity, *frames = self.router.recv_multipart()
        message = decode(frames, FROM_RANK)
        if isinstance(message, WorkerHello):
            self.hellos[message.rank], self.identities[message.rank] = message, identity
        if isinstance(message, WorkerReady):
            self.step_identities[message.rank] = identity
        if isinstance(message, StageReport):
            self.reports[message.rank] = message
            if self.answers_reports:
                self._answer(message)
            return
        known = (*self.identities.items(), *self.step_identities.items())
        sender = next((rank for rank, of_rank in known if of_rank == identity), None)
        self._seen.append((sender, message))

    def _answer(self, report: StageReport) -> None:
        try:
            self.send(report.rank, Heartbeat(core_id=report.core_id, epoch=report.epoch))
        except zmq.ZMQError as error:
            # A rank may have reported and then ended.
            if error.errno != errno.EHOSTUNREACH:
                raise

    def epoch_start(self, rank: int, *, epoch: int = EPOCH, core_id: int = CORE_ID, core_pid: int = 0) -> EpochStart:
        return EpochStart(
            core_id=core_id, epoch=epoch, nonce=self.hellos[rank].nonce, core_pid=core_pid or os.getpid(),
            core_host=host_id(), store=f"{self.run_dir}/store-{epoch}", token_address=self.hellos[0].token_address,
        )  # fmt: skip

    def begin(self, core_pid: int = 0) -> None:
        """Hellos, then the epoch; the ranks load."""
        self.start()
        while len(self.hellos) < self.num_ranks:
            self.expect(WorkerHello)
        for rank in range(self.num_ranks):
            self.send(rank, self.epoch_start(rank, core_pid=core_pid))

    def configure(self, num_blocks: int = 64, max_model_len: int = 512) -> dict[int, WorkerLoaded]:
        loaded = {rank: self.expect(WorkerLoaded, rank) for rank in range(self.num_ranks)}
        self.broadcast(self.kv_config(num_blocks, max_model_len))
        return loaded

    def expect_loaded_and_configure(self, rank: int, epoch: int) -> None:
        """As ``configure`` for one rank alone."""
        self.expect(WorkerLoaded, rank)
        self.send(rank, replace(self.kv_config(), epoch=epoch))

    def kv_config(self, num_blocks: int = 64, max_model_len: int = 512) -> KVCacheConfig:
        return KVCacheConfig(
            core_id=CORE_ID, epoch=EPOCH, num_blocks=num_blocks, block_size=16, max_model_len=max_model_len,
            groups=(KVCacheGroup(kind="full", layers=list(range(NUM_LAYERS))),),
        )  # fmt: skip

    def become_ready(self, core_pid: int = 0) -> None:
        self.begin(core_pid)
        self.configure()
        for rank in range(self.num_ranks):
            self.expect(WorkerReady, rank)

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.broadcast(plan)
        return self.expect(ModelRunnerOutput, self.num_ranks - 1)

    def shut_down(self) -> None:
        self.broadcast(Shutdown(core_id=CORE_ID, epoch=EPOCH, reason="test"))

    def wait(self, rank: int, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
        """Exit code and standard error of a rank that ends by itself."""
        _, stderr = self.ranks[rank].communicate(timeout=timeout_s)
        return self.ranks[rank].returncode, stderr

    def stderr_so_far(self) -> str:
        for process in self.ranks:
            process.kill()
        return "\n".join(process.communicate()[1] for process in self.ranks)

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            if not process.stderr.closed:
                process.communicate()
        self.router.close(0)
        self.context.term()
        shutil.rmtree(self.run_dir)
