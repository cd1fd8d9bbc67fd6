"""One rank from start to end: join an epoch, load, make the cache, then run step after step."""

import logging
import os
import secrets
import time
import traceback
import warnings
from contextlib import closing
from typing import TypeVar

import zmq

from ipc.endpoints import host_id
from ipc.errors import ConfigError, PeerLost, ProtocolError
from ipc.logs import set_up_logging
from ipc.messages import (
    EpochStart,
    KVCacheConfig,
    Shutdown,
    WorkerHello,
    WorkerLoaded,
    WorkerReady,
)
from ipc.parent import die_with_parent
from ipc.promptness import prompt_threads
from ipc.spans import NO_STEP, Kind
from worker.clock import PLAN, StageClock
from worker.control import ControlThread
from worker.device import choose_num_threads, device_identity
from worker.graphs.graph import make_pool
from worker.links.opening import Links, Meeting, meet, open_links
from worker.memory import free_memory, memory_for
from worker.model_runner import ModelRunner
from worker.progress import Progress
from worker.settings import WorkerSettings
from worker.shortage import shortage
from worker.stage import Stage
from worker.startup import LoadedStage, load_stage, make_caches
from worker.step_channel import ShutdownRequested, StepChannel
from worker.step_memory import measure_step_bytes
from worker.threads import StepThreads
from worker.token_return import TokenInbox, TokenOutbox
from worker.topology import Topology

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
"""What a neighbour gets to take the last activations when all ranks shut down."""

MAX_FRAMES = 6
"""Of a traceback in the log: an operator wants to know where, not how it came there."""

LINGER_MS = 1000
"""What the last messages get to leave."""

Expected = TypeVar("Expected", EpochStart, KVCacheConfig)


def run_worker(settings: WorkerSettings) -> int:
    """Be this rank until its end; returns the exit code.

    Signals must be blocked in every thread; ``settings.signal_fd`` tells of them. The control thread may end the
    process before this returns.

    Raises:
        ConfigError: what no restart can cure. The core knows of it already.
    """
    set_up_logging(f"rank {settings.rank}", settings.log_level)
    _quieten_libraries()
    if not die_with_parent(settings.parent_pid):
        return 1
    topology = Topology(rank=settings.rank, num_stages=settings.world_size)
    clock = StageClock()
    try:
        with prompt_threads():
            context, token_inbox, control = _start_control(settings, topology, clock)
    except (OSError, RuntimeError, zmq.ZMQError) as error:
        raise shortage(error) or _start_failure(error) from None
    try:
        return _run(Worker(settings, topology, context, control, clock, token_inbox), control)
    finally:
        control.stop()
        if token_inbox is not None:
            token_inbox.remove_file()
        if not control.is_alive():
            context.destroy(linger=LINGER_MS)


def _start_control(
    settings: WorkerSettings, topology: Topology, clock: StageClock
) -> tuple["zmq.Context[zmq.Socket[bytes]]", TokenInbox | None, ControlThread]:
    """The sockets and the thread that talks to the core."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    nonce = secrets.randbits(63)
    token_inbox = None
    if topology.is_first and not topology.is_last:
        token_inbox = TokenInbox(context, run_dir=settings.run_dir, nonce=nonce, host=settings.advertise_host)
    control = ControlThread(
        context,
        settings,
        _hello(settings, nonce, token_inbox),
        clock,
        on_end=lambda: None if token_inbox is None else token_inbox.remove_file(),
    )
    control.start()
    return context, token_inbox, control


def _run(worker: "Worker", control: ControlThread) -> int:
    try:
        return worker.run()
    except ConfigError as error:
        control.fail(str(error), fatal=True)
        raise
    except (PeerLost, ProtocolError) as error:
        if control.is_shutting_down:
            return control.shutdown_code
        logger.error("%s", error)
        control.fail(str(error), fatal=False)
        return 1
    except Exception as error:  # noqa: BLE001 - the top of a rank, which reports whatever it was
        limit = None if worker.is_ready else shortage(error)
        if limit is None:
            logger.error("this rank failed:\n%s", _short_traceback(error))
        if not worker.is_ready:
            # What nobody expected, before anybody asked for anything, comes again at the next start.
            failure = limit or _start_failure(error)
            control.fail(str(failure), fatal=True)
            raise failure from None
        control.fail(f"{type(error).__name__}: {error}", fatal=False)
        return 1


def _start_failure(error: Exception) -> ConfigError:
    """On one line, for the operator and for whoever will look for the fault."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    where = f" (line {frames[0].lineno} of {os.path.basename(frames[0].filename)})" if frames else ""
    text = " ".join(str(error).split())
    return ConfigError("start", f"failed unexpectedly with {type(error).__name__}: {text:.500}{where}")


def _short_traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error, limit=-MAX_FRAMES, chain=False)).rstrip()


def _hello(settings: WorkerSettings, nonce: int, token_inbox: TokenInbox | None) -> WorkerHello:
    return WorkerHello(
        rank=settings.rank,
        world_size=settings.world_size,
        local_world_size=settings.local_world_size,
        nonce=nonce,
        pid=os.getpid(),
        host=host_id(),
        key=settings.key,
        token_address="" if token_inbox is None else token_inbox.address,
    )


def _quieten_libraries() -> None:
    """Warnings of libraries are for us, not for an operator: they go to the log's debug level."""
    logging.captureWarnings(True)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)


class Worker:
    """One rank's main thread: joins an epoch by way of the control thread, then takes steps from a channel of its own."""

    def __init__(
        self,
        settings: WorkerSettings,
        topology: Topology,
        context: "zmq.Context[zmq.Socket[bytes]]",
        control: ControlThread,
        clock: StageClock,
        token_inbox: TokenInbox | None,
    ) -> None:
        self._settings = settings
        self._topology = topology
        self._context = context
        self._control = control
        self._clock = clock
        self._token_inbox = token_inbox
        self.is_ready = False
        """Whether the core was told that steps may come."""

    def run(self) -> int:
        """Until the core says Shutdown; the exit code that it asks for. Raises ConfigError, PeerLost, ProtocolError."""
        try:
            start = self._next(EpochStart)
            meeting = meet(self._settings, self._topology, start) if self._topology.num_stages > 1 else None
            store = None if meeting is None else meeting.store
            loaded = load_stage(self._settings, self._topology, store=store, ranks_on_host=start.ranks_on_host)
            self._report_loaded(start, loaded)
            stage, channel = self._initialize_from_config(self._next(KVCacheConfig), start, loaded, meeting)
        except ShutdownRequested as shutdown:
            return shutdown.exit_code
        with closing(channel):
            try:
                while True:
                    self._step(stage, channel)
            except ShutdownRequested as shutdown:
                stage.flush(FLUSH_S)
                return shutdown.exit_code

    def _step(self, stage: Stage, channel: StepChannel) -> None:
        self._clock.doing(PLAN, NO_STEP)
        plan = channel.next_plan()
        self._clock.doing(Kind.PREPARE, plan.step_id)
        upcoming = channel.take_waiting()
        self._clock.num_ahead = len(upcoming)
        output = stage.run_step(plan, upcoming, channel.take_masks)
        if output is not None:
            channel.send(output)
        self._clock.num_steps += 1

    # ------------------------------------------------------------------------------------------ start

    def _report_loaded(self, start: EpochStart, loaded: LoadedStage) -> None:
        step_bytes = measure_step_bytes(self._settings, self._topology, loaded)
        self._control.post(WorkerLoaded(
            core_id=start.core_id,
            epoch=start.epoch,
            rank=self._settings.rank,
            groups=loaded.kv_groups,
            bytes_per_block=loaded.bytes_per_block,
            free_bytes=free_memory(loaded.device),
            device=device_identity(loaded.device),
            weight_bytes=loaded.weight_bytes,
            load_s=loaded.load_s,
            num_threads=loaded.num_threads,
            step_bytes=step_bytes,
        ))

    def _initialize_from_config(
        self, kv: KVCacheConfig, start: EpochStart, loaded: LoadedStage, meeting: Meeting | None
    ) -> tuple[Stage, StepChannel]:
        """Make the cache tensors and the links, use everything once, and report ready on the channel for steps."""
        settings, started = self._settings, time.monotonic()
        caches = make_caches(settings, loaded, kv)
        with memory_for("--max-num-seqs", f"the state of {settings.max_num_seqs} sequences", "give fewer"):
            runner = ModelRunner(
                loaded.model,
                loaded.backend,
                caches,
                config=settings.config,
                is_first=self._topology.is_first,
                is_last=self._topology.is_last,
                device=loaded.device,
                dtype=loaded.dtype,
                num_rows=2 * settings.max_num_seqs,
                max_model_len=kv.max_model_len,
                block_size=kv.block_size,
                processors=loaded.processors,
            )
        stage = self._connect(runner, start, loaded, meeting)
        stage.warm_up(kv.max_model_len, kv.block_size)
        self._capture_graphs(stage, loaded)
        kv_bytes = kv.num_blocks * loaded.bytes_per_block
        warmup_s = time.monotonic() - started
        logger.info("KV cache: %d blocks, %.1f MB; warm after %.1f s", kv.num_blocks, kv_bytes / 1e6, warmup_s)
        with prompt_threads():
            channel = StepChannel(
                self._context,
                settings.core_address,
                core_id=start.core_id,
                epoch=start.epoch,
                timeout_s=settings.link_timeout_s,
            )
        channel.send(WorkerReady(
            core_id=start.core_id, epoch=start.epoch, rank=settings.rank, kv_bytes=kv_bytes, warmup_s=warmup_s
        ))
        self.is_ready = True
        return stage, channel

    def _capture_graphs(self, stage: Stage, loaded: LoadedStage) -> None:
        if not loaded.graph_shapes:
            return
        started = time.monotonic()
        draws = self._settings.local_rank == 0
        num_graphs = stage.capture_graphs(
            loaded.graph_shapes,
            make_pool(loaded.device),
            Progress(f"rank {self._settings.rank}: capturing", draws=draws),
        )
        logger.info("captured %d graphs in %.1f s", num_graphs, time.monotonic() - started)

    def _connect(
        self, runner: ModelRunner, start: EpochStart, loaded: LoadedStage, meeting: Meeting | None
    ) -> Stage:
        settings, topology = self._settings, self._topology
        links, token_outbox = Links(receiver=None, sender=None), None
        if meeting is not None:
            links = open_links(settings, topology, meeting, loaded.model.boundary(), start.epoch)
            if topology.is_last:
                token_outbox = TokenOutbox(
                    self._context, address=start.token_address, epoch=start.epoch, key=start.token_key
                )
            if self._token_inbox is not None:
                self._token_inbox.begin(start.epoch, start.token_key)
        return Stage(
            topology,
            runner,
            self._clock,
            receiver=links.receiver,
            sender=links.sender,
            token_inbox=self._token_inbox,
            token_outbox=token_outbox,
            max_tokens=settings.max_num_batched_tokens,
            timeout_s=settings.link_timeout_s,
            threads=StepThreads(
                shared=loaded.num_threads,
                alone=choose_num_threads(settings.num_threads, 1) if loaded.device.type == "cpu" else loaded.num_threads,
            ),
        )

    # ------------------------------------------------------------------------------------------ items

    def _next(self, kind: type[Expected]) -> Expected:
        """The next item, which must be of this kind; waits for it at no cost, supervised by the control thread."""
        with self._clock.waiting(PLAN):
            item = self._control.inbox.get()
        if isinstance(item, Shutdown):
            raise ShutdownRequested(item.exit_code)
        if not isinstance(item, kind):
            raise ProtocolError(type(item).__name__, f"came while {kind.__name__} was awaited")
        return item
