"""The core's side of the worker group: who belongs to it, what it was sent, and what came back.

One epoch is one life of the group::

    gathering  hellos come in          all ranks there  -> EpochStart to each
    loading    WorkerLoaded come in    all ranks there  -> KVCacheConfig to each
    warming    WorkerReady come in     all ranks there  -> the epoch is ready, steps may be sent
    ready      SchedulerOutput out, ModelRunnerOutput in

A hello in any later state means that the group was restarted: the epoch ends and gathering begins again.
"""

import logging
import os
import secrets
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import zmq

from engine.config import CoreConfig
from engine.kv_sizing import KVPlan, plan_kv_cache
from ipc.channel import MAX_PER_TURN, receive_now, try_send
from ipc.codec import Frame, decode, encode
from ipc.endpoints import process_start
from ipc.errors import ConfigError, ProtocolError
from ipc.messages import (
    Control,
    ControlReply,
    EpochStart,
    GrammarOutput,
    Heartbeat,
    KVCacheConfig,
    ModelRunnerOutput,
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

logger = logging.getLogger(__name__)

FROM_WORKER = (
    WorkerHello, WorkerLoaded, WorkerReady, WorkerFailed, StageReport, ModelRunnerOutput, TimelineReport, Control,
)  # fmt: skip

MAX_WORKER_HEAD_BYTES = 1 << 24
"""Enough for the log probabilities and columns of the largest step."""

FROM_ANYBODY = (WorkerHello, WorkerReady, Control)
"""What may come from a socket that no rank is known by. None of them holds columns."""

MAX_STRANGERS_HEAD_BYTES = 1 << 12
"""Enough for a hello whose texts are as long as those of real hosts and paths."""

HELLO_LIFETIME_S = 3.0
"""A waiting rank repeats its hello every second; one that stopped doing so is gone."""

MessageOfEpoch = WorkerLoaded | WorkerReady | WorkerFailed | StageReport | ModelRunnerOutput | TimelineReport


class Phase(Enum):
    """Where the worker group stands; see the module docstring."""

    GATHERING = "waiting for workers"
    LOADING = "loading weights"
    WARMING = "making the KV cache"
    READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReady:
    """Steps may be sent from now on."""

    epoch: int
    plan: KVPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnded:
    """The worker group is gone or broken; what it computed is lost."""

    epoch: int
    cause: str
    fatal: bool
    """No restart can cure the cause."""
    was_ready: bool
    reports: Mapping[int, StageReport] = field(default_factory=dict)
    """The newest one of each rank that had sent any."""


Event = EpochReady | EpochEnded | ModelRunnerOutput | TimelineReport


@dataclass(slots=True, kw_only=True)
class _Member:
    identity: bytes
    hello: WorkerHello
    heard_at: float
    started_at: int | None
    """Start time of a process on this host: with its pid, its identity."""
    loaded: WorkerLoaded | None = None
    steps_identity: bytes | None = None
    """Of the socket on which the rank waits for steps: the one that its WorkerReady came from; None before that."""
    report: StageReport | None = None
    report_before: StageReport | None = None

    def may_say(self, message: object, identity: bytes) -> bool:
        """Whether this comes from the rank's socket for such messages; that of steps is known from the first one on."""
        match message:
            case WorkerReady():
                return self.steps_identity in (None, identity)
            case ModelRunnerOutput():
                return self.steps_identity == identity
            case _:
                return self.identity == identity


class Executor:
    """Owns the socket to the workers; turns their messages into events for the core's loop."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        *,
        config: CoreConfig,
        core_id: int,
        core_pid: int,
        core_host: str,
        clock: Callable[[], float],
    ) -> None:
        self.phase = Phase.GATHERING
        self.epoch = 0
        self.num_dropped = 0
        """Messages of another core or epoch."""
        self._socket = socket
        self._config = config
        self._core_id = core_id
        self._core_pid = core_pid
        self._core_host = core_host
        self._clock = clock
        self._members: dict[int, _Member] = {}
        self._plan: KVPlan | None = None

    def receive(self) -> list[Event]:
        """What arrived, a share of a turn at most, turned into events in order of arrival."""
        events: list[Event] = []
        for _ in range(MAX_PER_TURN):
            frames = receive_now(self._socket)
            if frames is None:
                break
            identity, *rest = frames
            is_known = self._knows(identity)
            try:
                message = decode(
                    rest, FROM_WORKER if is_known else FROM_ANYBODY,
                    max_head_bytes=MAX_WORKER_HEAD_BYTES if is_known else MAX_STRANGERS_HEAD_BYTES,
                )  # fmt: skip
            except ProtocolError as error:
                self.num_dropped += 1
                # Ranks of an epoch that has ended go on for a moment, and are strangers then.
                level = logging.DEBUG if error.path == "tag" and not is_known else logging.WARNING
                logger.log(level, "a message on the workers' socket was dropped: %s", error)
                continue
            events.extend(self._on_message(identity, message))
        return events

    def _knows(self, identity: bytes) -> bool:
        """Whether this is a socket of a rank. ZeroMQ lets nobody else have its name while it is connected."""
        return any(identity in (member.identity, member.steps_identity) for member in self._members.values())

    def deadline(self) -> float | None:
        """When the next member counts as lost unless it is heard of; None while the group gathers."""
        if self.phase is Phase.GATHERING or not self._members:
            return None
        return min(member.heard_at for member in self._members.values()) + self._config.health_timeout_s

    def end_silent_epoch(self) -> list[Event]:
        """End the epoch when a member gave no sign of life for the health timeout.

        Its control thread reports every second also while the main thread computes or loads, so a silent rank is frozen,
        cut off or gone. On this host it is killed, and its agent starts the group again. Call after ``receive``: what
        waits in the socket is a sign of life.
        """
        deadline = self.deadline()
        if deadline is None or self._clock() < deadline:
            return []
        silent = min(self._members.values(), key=lambda member: member.heard_at)
        self._kill(silent)
        return self._end_epoch(
            f"rank {silent.hello.rank} gave no sign of life for {self._config.health_timeout_s:g} s", fatal=False
        )

    def _kill(self, member: _Member) -> None:
        if self._lives(member):
            logger.warning("rank %d (process %d) is killed: it is frozen", member.hello.rank, member.hello.pid)
            with suppress(ProcessLookupError):
                os.kill(member.hello.pid, signal.SIGKILL)

    def _lives(self, member: _Member) -> bool:
        """Whether its process is there; False also for one of another host."""
        return member.started_at is not None and process_start(member.hello.pid) == member.started_at

    def send_step(self, plan: SchedulerOutput) -> list[Event]:
        """Send one step to every rank: encoded once, the same bytes to each."""
        frames = encode(plan)
        return self._send_to_each([(member, member.steps_identity) for member in self._members.values()], frames)

    def send_masks(self, masks: GrammarOutput) -> list[Event]:
        """Send a step's masks to the last stage, which alone samples."""
        last = self._members.get(self._config.num_stages - 1)  # none when the epoch has ended
        return [] if last is None else self._send_to_each([(last, last.steps_identity)], encode(masks))

    def shut_down(self, reason: str, *, exit_code: int = 0) -> None:
        """Ask every rank that was heard of to end with this exit code: behind the steps that it was sent, or at a deadline."""
        frames = encode(Shutdown(core_id=self._core_id, epoch=self.epoch, reason=reason, exit_code=exit_code))
        for member in self._members.values():
            try_send(self._socket, [member.identity, *frames])
            if member.steps_identity not in (None, member.identity):
                try_send(self._socket, [member.steps_identity, *frames])

    def missing_ranks(self) -> list[int]:
        """Ranks that the current phase still waits for."""
        return [rank for rank in range(self._config.num_stages) if not self._has_arrived(rank)]

    def stage_reports(self) -> dict[int, tuple[StageReport, StageReport | None]]:
        """The newest report of each rank, and the one before it, about a second older."""
        return {rank: (m.report, m.report_before) for rank, m in sorted(self._members.items()) if m.report is not None}

    def ask_timelines(self, question_id: int, seconds: float) -> dict[int, str]:
        """Ask every rank of the epoch for its last seconds; TimelineReports come as events. Hosts of those asked."""
        if self.phase is Phase.GATHERING:
            return {}
        frames = encode(TimelineRequest(
            core_id=self._core_id, epoch=self.epoch, question_id=question_id, seconds=seconds
        ))
        return {
            rank: member.hello.host for rank, member in sorted(self._members.items())
            if try_send(self._socket, [member.identity, *frames])
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------ messages

    def _on_message(self, identity: bytes, message: object) -> list[Event]:
        match message:
            case WorkerHello():
                return self._on_hello(identity, message)
            case Control():
                reply = ControlReply(core_id=self._core_id, control_id=message.control_id, error="", values={})
                try_send(self._socket, [identity, *encode(reply)])
                return []
            case (
                WorkerLoaded() | WorkerReady() | WorkerFailed() | StageReport() | ModelRunnerOutput() | TimelineReport()
            ):
                if (message.core_id, message.epoch) == (self._core_id, self.epoch) and self._members:
                    return self._on_epoch_message(identity, message)
                self.num_dropped += 1
                return []
            case _:
                raise AssertionError(f"{type(message).__name__} is not a worker's message")

    def _on_epoch_message(self, identity: bytes, message: MessageOfEpoch) -> list[Event]:
        rank = self._config.num_stages - 1 if isinstance(message, ModelRunnerOutput) else message.rank
        member = self._members.get(rank)
        if member is None or not member.may_say(message, identity):
            self.num_dropped += 1
            return []
        member.heard_at = self._clock()
        match message:
            case ModelRunnerOutput():
                return [message] if self.phase is Phase.READY else []
            case WorkerFailed():
                return self._end_epoch(f"rank {rank}: {message.cause}", fatal=message.fatal)
            case WorkerLoaded() if self.phase is Phase.LOADING:
                member.loaded = message
                return self._configure() if not self.missing_ranks() else []
            case WorkerReady() if self.phase is Phase.WARMING:
                member.steps_identity = identity
                return self._become_ready() if not self.missing_ranks() else []
            case TimelineReport():
                return [message]
            case StageReport():
                member.report_before, member.report = member.report, message
                return self._send(member, Heartbeat(core_id=self._core_id, epoch=self.epoch))
        return []

    def _on_hello(self, identity: bytes, hello: WorkerHello) -> list[Event]:
        if hello.key != self._config.key:
            logger.warning("a hello of rank %d with a foreign key was dropped", hello.rank)
            return []
        if hello.world_size != self._config.num_stages or hello.rank >= hello.world_size:
            logger.warning("a hello of rank %d of %d was dropped: this engine has %d stages",
                           hello.rank, hello.world_size, self._config.num_stages)
            return []
        known = self._members.get(hello.rank)
        if self.phase is not Phase.GATHERING:
            if known is not None and known.hello.nonce == hello.nonce:
                # Its EpochStart is on the way.
                return []
            if known is not None and self._lives(known):
                # No rank begins before the one that it replaces is gone. One that comes too early says it again.
                self.num_dropped += 1
                logger.warning("a hello of rank %d was dropped: that rank lives", hello.rank)
                return []
            events = self._end_epoch(f"rank {hello.rank} was restarted", fatal=False)
            return events + self._on_hello(identity, hello)
        now = self._clock()
        started_at = process_start(hello.pid) if hello.host == self._core_host else None
        self._members[hello.rank] = _Member(identity=identity, hello=hello, heard_at=now, started_at=started_at)
        for rank, member in list(self._members.items()):
            if now - member.heard_at > HELLO_LIFETIME_S:
                del self._members[rank]
        return self._start_epoch() if not self.missing_ranks() else []

    # ------------------------------------------------------------------------------------------ phases

    def _has_arrived(self, rank: int) -> bool:
        member = self._members.get(rank)
        if member is None or self.phase is Phase.GATHERING:
            return member is not None
        return member.loaded is not None if self.phase is Phase.LOADING else member.steps_identity is not None

    def _start_epoch(self) -> list[Event]:
        self.epoch += 1
        self.phase = Phase.LOADING
        for member in self._members.values():
            member.heard_at = self._clock()
        store = f"brigade/{self._core_id:x}/{self.epoch}"
        if self._config.advertise_host is None:
            Path(f"{self._config.run_dir}/store-{self.epoch - 1}").unlink(missing_ok=True)
            store = f"{self._config.run_dir}/store-{self.epoch}"
        token_key = secrets.randbits(64)
        for member in self._members.values():
            lost = self._send(member, EpochStart(
                core_id=self._core_id,
                epoch=self.epoch,
                nonce=member.hello.nonce,
                core_pid=self._core_pid,
                core_host=self._core_host,
                store=store,
                token_address=self._members[0].hello.token_address,
                ranks_on_host=sum(other.hello.host == member.hello.host for other in self._members.values()),
                token_key=token_key,
            ))
            if lost:
                return lost
        return []

    def _configure(self) -> list[Event]:
        stages = [m.loaded for _, m in sorted(self._members.items()) if m.loaded is not None]
        hosts = {rank: m.hello.host for rank, m in self._members.items()}
        try:
            self._plan = plan_kv_cache(self._config, stages, hosts)
        except ConfigError as error:
            return self._end_epoch(str(error), fatal=True)
        for note in self._plan.notes:
            logger.info("%s", note)
        self.phase = Phase.WARMING
        return self._broadcast(encode(KVCacheConfig(
            core_id=self._core_id,
            epoch=self.epoch,
            num_blocks=self._plan.num_blocks,
            block_size=self._config.block_size,
            max_model_len=self._plan.max_model_len,
            groups=self._plan.groups,
        )))

    def _become_ready(self) -> list[Event]:
        assert self._plan is not None
        self.phase = Phase.READY
        return [EpochReady(epoch=self.epoch, plan=self._plan)]

    def _end_epoch(self, cause: str, *, fatal: bool) -> list[Event]:
        was_ready = self.phase is Phase.READY
        reports = {rank: newest for rank, (newest, _) in self.stage_reports().items()}
        if fatal:
            self.shut_down(cause, exit_code=1)
        self.phase = Phase.GATHERING
        self._members.clear()
        self._plan = None
        return [EpochEnded(epoch=self.epoch, cause=cause, fatal=fatal, was_ready=was_ready, reports=reports)]

    # ------------------------------------------------------------------------------------------ sending

    def _broadcast(self, frames: list[Frame]) -> list[Event]:
        return self._send_to_each([(member, member.identity) for member in self._members.values()], frames)

    def _send(self, member: _Member, message: object) -> list[Event]:
        return self._send_to_each([(member, member.identity)], encode(message))

    def _send_to_each(self, receivers: list[tuple[_Member, bytes | None]], frames: list[Frame]) -> list[Event]:
        """On one of each member's sockets; the first that can't be reached ends the epoch."""
        for member, identity in receivers:
            assert identity is not None, "steps are for ranks that are ready"
            if not try_send(self._socket, [identity, *frames]):
                return self._end_epoch(f"rank {member.hello.rank} can't be reached", fatal=False)
        return []
