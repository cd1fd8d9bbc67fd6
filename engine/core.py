"""The EngineCore: one thread and one poller between clients, scheduler and workers.

Each turn of the loop: receive from clients, receive from workers, apply outputs, then schedule and send while fewer
steps than the depth are in flight, then poll. It never waits anywhere else and never spins.
"""

import logging
import os
import random
import signal
import sys
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import zmq

from engine.admission import check_request
from engine.choices import OpenRequests, choices_of
from engine.config import CoreConfig, ModelFiles
from engine.cost_model import FittedCosts
from engine.executor import EpochEnded, EpochReady, Event, Executor, Phase
from engine.gateway import FromClient, Gateway
from engine.grammar_compiler import GrammarCompiler, load_vocabulary
from engine.http_child import http_child_of
from engine.metrics import Metrics
from engine.policies import Deadlines, check_open_room, check_queue_room
from engine.recovery import MAX_LOST_EPOCHS, Recovery
from engine.request import AnswerGrammar, ClientId, Request
from engine.request_views import RequestViews
from engine.sampling_defaults import sampling_defaults
from engine.scheduler import RequestProgress, Scheduler
from engine.scheduler_config import scheduler_config_of
from engine.timeline import Timelines, core_values, stage_values
from ipc.channel import STEP_MESSAGE_BYTES, open_socket
from ipc.codec import Frame, encode
from ipc.endpoints import RunDirectory, host_id
from ipc.errors import ProtocolError, RequestError
from ipc.logs import signal_name
from ipc.messages import (
    AbortRequest,
    AddRequest,
    Attach,
    Control,
    ControlReply,
    ModelInfo,
    ModelRunnerOutput,
    RequestOutput,
    Scalars,
    TimelineReport,
)
from ipc.spans import NO_STEP, Kind, Recorder
from ipc.structured import StructuredOutput

logger = logging.getLogger(__name__)

VERSION = "0.1.0"
LAST_WORDS_MS = 2_000
"""How long queued final messages may take to leave when the core ends."""

AGENT_GRACE_S = 10.0
"""How long the worker group may take to end after Shutdown before its agent gets SIGTERM."""


class EngineCore:
    """Owns every socket of the core's process, the queue of requests, and the current epoch's scheduler.

    Raises ConfigError on construction when an address can't be bound.
    """

    def __init__(self, config: CoreConfig, files: ModelFiles) -> None:
        self._config = config
        self._files = files
        self._core_id = int.from_bytes(os.urandom(8), "little")
        self._seeds = random.Random(config.seed)
        self._defaults = sampling_defaults(files.generation_config, config.generation_config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gateway = Gateway(
            self._context, core_id=self._core_id, max_prompt_tokens=config.model_max_len, security=config.security
        )
        self._gateway.listen(config.listen)
        self._http = http_child_of(config, self._gateway)
        self.worker_address = ""
        self._worker_socket = self._open_worker_socket()
        self._executor = Executor(
            self._worker_socket,
            config=config,
            core_id=self._core_id,
            core_pid=os.getpid(),
            core_host=host_id(),
            clock=time.monotonic,
        )
        self._recorder = Recorder()
        self._timelines = Timelines(
            self._recorder, self._executor, self._gateway,
            core_id=self._core_id, host=host_id(), num_stages=config.num_stages,
        )  # fmt: skip
        self._scheduler: Scheduler | None = None
        """Of the current epoch; None while there is no ready one."""
        self._info: ModelInfo | None = None
        self._info_frames: list[Frame] = []
        """The same, encoded once: it holds the tokenizer."""
        self._recovery = Recovery()
        self._grammars = GrammarCompiler(lambda: load_vocabulary(files, config.vocab_size, config.eos_token_ids))
        """Has the requests whose grammar isn't ready yet; neither recovery nor scheduler knows of them."""
        self._open = OpenRequests()
        """Leaving it is what makes a final message final."""
        self._views = RequestViews(self._open, self._grammars, core_id=self._core_id)
        self._waiting_to_attach: set[ClientId] = set()
        self._was_ready_said = False
        self._num_requests = 0
        self._metrics = Metrics()
        self._deadlines = Deadlines()
        """Of open requests."""
        self._costs = FittedCosts(config.num_stages)
        """The newest epoch's."""
        self._drain_deadline: float | None = None
        self._agent_deadline: float | None = None
        self._agent = os.pidfd_open(config.agent_pid)
        self._wakeup, self._signal_end = os.pipe()
        self._poller = zmq.Poller()

    # ------------------------------------------------------------------------------------------ life

    def run(self) -> int:
        """Serve until the agent is gone; returns the exit code."""
        self._watch_signals()
        self._defaults.log()
        for source in (*self._gateway.sources, self._worker_socket, self._agent, self._wakeup, self._grammars.fd, self._http.fd):
            self._poller.register(source, zmq.POLLIN)
        self._http.start()
        exit_code = 0
        try:
            while True:
                timeout_ms = self._poll_timeout_ms()
                self._recorder.doing(Kind.IDLE, NO_STEP)
                ready = {source for source, _ in self._poller.poll(timeout_ms)}
                self._recorder.doing(Kind.CLIENTS)
                if self._agent in ready:
                    break
                if self._wakeup in ready:
                    self._on_signal(os.read(self._wakeup, 64))
                self._turn(ready)
        except Exception:
            logger.exception("the core's loop failed")
            exit_code = 1
        self._end("the engine was stopped" if exit_code == 0 else "the engine failed", exit_code)
        return exit_code

    def _turn(self, ready: Container[object]) -> None:
        for received in self._gateway.receive(ready):
            self._on_client_message(received)
        self._recorder.doing(Kind.RECEIVE)
        if self._worker_socket in ready:
            for event in self._executor.receive():
                self._on_event(event)
        for event in self._executor.end_silent_epoch():
            self._on_event(event)
        for request, outcome in self._grammars.take_done():
            self._on_compiled(request, outcome)
        self._release()
        self._schedule()
        self._recorder.doing(Kind.OTHER, NO_STEP)
        self._timelines.answer_overdue()
        for client in self._gateway.take_lost():
            self._drop_client(client)
        self._check_deadlines()
        self._send_masks()
        self._http.look_after()
        if not self._was_ready_said and self._info is not None:
            self._say_ready()

    def _schedule(self) -> None:
        self._recorder.doing(Kind.SCHEDULE, NO_STEP)
        while self._scheduler is not None and (plan := self._scheduler.schedule()) is not None:
            self._recorder.doing(Kind.SEND_PLAN, plan.step_id)
            for event in self._executor.send_step(plan):
                self._on_event(event)
            self._recorder.doing(Kind.SCHEDULE, NO_STEP)

    def _send_masks(self) -> None:
        """After the plans, so that stages compute meanwhile; and after all that may have ended requests in this turn."""
        if self._scheduler is None:
            return
        for masks in self._scheduler.take_masks():
            self._recorder.doing(Kind.MASKS, masks.step_id)
            for event in self._executor.send_masks(masks):
                self._on_event(event)
            self._recorder.doing(Kind.OTHER, NO_STEP)

    def _poll_timeout_ms(self) -> int | None:
        possible = (
            self._drain_deadline, self._agent_deadline, self._executor.deadline(), self._deadlines.nearest(),
            self._timelines.deadline(),
            self._grammars.deadline(), self._http.deadline(), self._gateway.deadline(),
        )
        deadlines = [deadline for deadline in possible if deadline is not None]
        return None if not deadlines else max(0, int((min(deadlines) - time.monotonic()) * 1000) + 1)

    def _open_worker_socket(self) -> "zmq.Socket[bytes]":
        router = open_socket(self._context, zmq.ROUTER, max_frame_bytes=STEP_MESSAGE_BYTES)
        # A rank that was restarted within one connection's life must be able to come back.
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        directory = RunDirectory(path=Path(self._config.run_dir))
        self.worker_address = directory.address("workers")
        router.bind(self.worker_address)
        if self._config.advertise_host is not None:
            host = self._config.advertise_host
            router.setsockopt(zmq.IPV6, ":" in host)
            router.bind(f"tcp://{f'[{host}]' if ':' in host else host}:0")
            self.worker_address = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return router

    def _watch_signals(self) -> None:
        os.set_blocking(self._signal_end, False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._signal_end, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))

    def _on_signal(self, received: bytes) -> None:
        if self._drain_deadline is None and self._agent_deadline is None:
            name, drain_s = signal_name(received[0]), self._config.drain_timeout_s
            logger.info("%s: draining for at most %g s", name, drain_s)
            self._drain_deadline = time.monotonic() + self._config.drain_timeout_s
            self._http.stop()
        else:
            self._drain_deadline = time.monotonic()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for request in reversed(self._deadlines.take_due(now)):
            if not request.is_closed:
                self._abort(request, "timeout")
        if self._drain_deadline is not None and (not self._open or now >= self._drain_deadline):
            self._drain_deadline = None
            self._fail_all(RequestError("the engine is shutting down", code="unavailable"))
            self._send_masks()
            if self._executor.phase is Phase.READY:
                self._executor.shut_down("drained")
                self._agent_deadline = now + AGENT_GRACE_S
            else:
                self._stop_agent()
        if self._agent_deadline is not None and now >= self._agent_deadline:
            self._stop_agent()

    def _stop_agent(self) -> None:
        self._agent_deadline = None
        try:
            signal.pidfd_send_signal(self._agent, signal.SIGTERM)
        except ProcessLookupError:
            logger.info("the agent is gone already")

    def _end(self, reason: str, exit_code: int) -> None:
        self._fail_all(RequestError(reason, code="unavailable"))
        # After a failure of the core alone, ranks that end with 1 are started again, and bring up another core.
        self._executor.shut_down(reason, exit_code=exit_code)
        self._gateway.close(LAST_WORDS_MS)
        self._worker_socket.close(LAST_WORDS_MS)
        self._http.end()
        self._context.term()
        RunDirectory(path=Path(self._config.run_dir)).remove()

    def _give_up(self, cause: str) -> None:
        logger.error("giving up: %s", cause)
        if self._config.error_file is not None:
            with open(self._config.error_file, "a", encoding="utf-8") as file:
                file.write(cause + "\n")
        self._fail_all(RequestError(f"the engine gave up: {cause}", code="unavailable"))
        self._stop_agent()

    # ------------------------------------------------------------------------------------------ workers

    def _on_event(self, event: Event) -> None:
        match event:
            case EpochReady():
                self._on_epoch_ready(event)
            case EpochEnded():
                self._on_epoch_ended(event)
            case ModelRunnerOutput():
                self._apply(event)
            case TimelineReport():
                self._timelines.take(event)

    def _apply(self, output: ModelRunnerOutput) -> None:
        if self._scheduler is None:
            return
        self._recorder.doing(Kind.APPLY, output.step_id)
        try:
            progresses = self._scheduler.update(output)
        except ProtocolError as error:
            self._give_up(f"the workers' output can't be trusted: {error}")
            return
        self._recorder.doing(Kind.ANSWER)
        self._metrics.tokens_came(progresses, time.monotonic())
        for progress in progresses:
            self._report(progress)
        self._gateway.send_updates()

    def _on_epoch_ready(self, event: EpochReady) -> None:
        config = self._config
        self._costs = FittedCosts(config.num_stages, self._costs.coefficients)
        self._scheduler = Scheduler(
            scheduler_config_of(config, event.plan),
            core_id=self._core_id,
            epoch=event.epoch,
            costs=self._costs,
        )
        if config.error_file is not None:
            for lives in Path(config.error_file).parent.glob("*.lives-*"):
                lives.unlink(missing_ok=True)
        is_first = self._info is None
        self._info = self._model_info(event.plan.max_model_len)
        self._info_frames = encode(self._info)
        if not is_first:
            logger.info("epoch %d is ready", event.epoch)
        for client in self._waiting_to_attach:
            self._gateway.send_frames(client, self._info_frames)
        self._waiting_to_attach.clear()

    def _on_epoch_ended(self, event: EpochEnded) -> None:
        if self._agent_deadline is None:
            logger.warning("epoch %d ended: %s", event.epoch, event.cause)
        scheduler, self._scheduler = self._scheduler, None
        self._metrics.epoch_ended(None if scheduler is None else scheduler.stats(), event.reports)
        guilty = RequestError(
            f"it was being computed when the workers died, {MAX_LOST_EPOCHS} times; the last time: {event.cause}", code="internal"
        )
        for request in self._recovery.epoch_ended(scheduler):
            if not request.is_closed:
                self._fail(request, guilty)
        if event.fatal or self._recovery.is_hopeless:
            self._give_up(event.cause)

    # ------------------------------------------------------------------------------------------ requests

    def _on_client_message(self, received: FromClient) -> None:
        client = received.client
        match received.message:
            case AddRequest() as message:
                try:
                    self._add(client, message)
                except RequestError as error:
                    self._gateway.refuse(client, message.request_id, error)
            case AbortRequest() as message:
                for request in self._open.find(client, message.request_id, message.index):
                    if not request.is_closed:
                        self._abort(request, "stop" if message.reason == "stop" else "abort")
            case Attach() as message:
                self._views.attached(client, message.client)
                if self._info is None:
                    self._waiting_to_attach.add(client)
                else:
                    self._gateway.send_frames(client, self._info_frames)
            case Control(op="timeline") as message:
                self._timelines.ask(client, message)
            case Control(op="requests") as message:
                self._gateway.send(client, self._views.answer(message))
            case Control() as message:
                self._gateway.send(client, self._answer(message))

    def _add(self, client: ClientId, message: AddRequest) -> None:
        if self._drain_deadline is not None or self._agent_deadline is not None:
            raise RequestError("the engine is shutting down; send it to another one", code="unavailable")
        if self._info is None:
            raise RequestError("the engine is still starting; attach first", code="unavailable")
        if (client, message.request_id) in self._open:
            raise RequestError(
                f"request_id={message.request_id!r} is already open; the request that has it goes on",
                code="duplicate", field="request_id",
            )  # fmt: skip
        check_request(message, self._info)
        params = message.params
        num_choices = len(message.indices) or params.n
        check_open_room(len(self._open), num_choices, self._config.max_num_seqs, self._config.max_queued_requests)
        num_tokens = num_choices * message.prompt_token_ids.size + message.output_token_ids.size
        check_queue_room(self._num_waiting_tokens(), num_tokens, self._config.max_queued_tokens)
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        requests = choices_of(
            message, client, first_id=self._num_requests + 1, seed=seed, now=time.monotonic(), defaults=self._defaults.rules
        )
        self._num_requests += len(requests)
        shares_blocks = (
            self._config.prefix_caching and params.prefix_caching
            and message.prompt_token_ids.size > self._config.block_size
        )
        self._open.add(requests)
        for request in requests:
            self._deadlines.add(request)
        if not message.indices and (shares_blocks or params.structured is not None):
            self._open.hold(requests, params.structured, waits_for_blocks=shares_blocks)
            del requests[1:]
        for request in requests:
            self._start(request, params.structured)

    def _on_compiled(self, request: Request, outcome: AnswerGrammar | RequestError) -> None:
        if isinstance(outcome, RequestError):
            self._fail(request, outcome)
            return
        request.grammar = outcome
        for ready in (request, *self._open.compiled(request, outcome)):
            self._start(ready)

    def _start(self, request: Request, structured: StructuredOutput | None = None) -> None:
        """Queue an open request, or have its form compiled first; nothing happens to one that is over."""
        if request.is_closed:
            return
        try:
            if structured is not None:
                self._grammars.submit(request, structured)
            elif request.grammar is not None and request.grammar.is_complete:
                self._send_output(request, RequestProgress(request=request, new_token_ids=[]), finish_reason="stop")
            else:
                self._enqueue(request)
        except RequestError as error:
            self._fail(request, error)

    def _enqueue(self, request: Request) -> None:
        if self._scheduler is None or self._recovery.holds_all:
            self._recovery.hold(request)
        else:
            self._scheduler.add(request)

    def _release(self) -> None:
        if self._scheduler is None:
            return
        while released := self._recovery.release(self._scheduler):
            for request in released:
                try:
                    if not request.is_closed:
                        self._scheduler.add(request)
                except RequestError as error:  # a new epoch may have less room
                    self._fail(request, error)

    def _withdraw(self, request: Request, reason: str) -> None:
        """Take an open request out of wherever it is."""
        if self._open.cancel(request) or self._grammars.cancel(request):
            return
        if self._scheduler is not None:
            self._scheduler.finish(request, reason)

    def _num_waiting_tokens(self) -> int:
        num_queued = 0 if self._scheduler is None else self._scheduler.num_waiting_tokens
        return num_queued + self._recovery.num_held_tokens + self._grammars.num_pending_tokens + self._open.num_held_tokens

    def _abort(self, request: Request, reason: str) -> None:
        self._withdraw(request, reason)
        self._send_output(request, RequestProgress(request=request, new_token_ids=[]), finish_reason=reason)

    def _report(self, progress: RequestProgress) -> None:
        request = progress.request
        if request.is_closed:
            return
        if progress.error is not None:
            self._fail(request, progress.error)
            return
        if progress.new_token_ids:
            for other in self._open.release(request):
                self._start(other)
        if request.grammar is not None and request.grammar.is_complete and progress.new_token_ids:
            # With "stop", the last token of a message is the one that ended the answer. Here it is a part of it.
            self._tell(request, progress, None)
            progress = RequestProgress(request=request, new_token_ids=[])
        self._send_output(request, progress, finish_reason=request.finish_reason)

    def _send_output(self, request: Request, progress: RequestProgress, *, finish_reason: str | None) -> None:
        if finish_reason is not None:
            self._close(request, finish_reason)
        elif request.takes_updates and request.is_introduced and not (progress.logprobs or progress.prompt_logprobs):
            self._gateway.update(request, progress.new_token_ids)
            return
        self._tell(request, progress, finish_reason)

    def _tell(self, request: Request, progress: RequestProgress, finish_reason: str | None) -> None:
        request.is_introduced = True
        self._gateway.send(request.client, RequestOutput(
            core_id=self._core_id,
            request_id=request.request_id,
            new_token_ids=progress.new_token_ids,
            finish_reason=finish_reason,
            stop_reason=request.stop_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(request.output_token_ids),
            seed=request.params.seed or 0,
            logprobs=progress.logprobs,
            prompt_logprobs=progress.prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens,
            index=request.index,
        ))

    def _fail(self, request: Request, error: RequestError) -> None:
        """An error of one that is nowhere any more, which ends all choices of what its client asked for."""
        for choice in self._open.find(request.client, request.request_id):
            if choice is not request:
                self._withdraw(choice, "abort")
            self._close(choice, "error")
        self._gateway.send_updates()
        self._gateway.fail(request.client, request.request_id, error)

    def _close(self, request: Request, reason: str) -> None:
        """From here on it gets no more messages."""
        request.is_closed = True
        self._metrics.ended(request, reason, time.monotonic())
        self._deadlines.discard(request)
        self._recovery.discard(request)
        following = self._open.remove(request)
        if following is not None:
            self._start(*following)

    def _fail_all(self, error: RequestError) -> None:
        for request in self._open:
            if not request.is_closed:
                self._withdraw(request, "abort")
                self._fail(request, error)

    def _drop_client(self, client: ClientId) -> None:
        gone = [request for request in self._open if request.client == client]
        for request in gone:
            self._withdraw(request, "abort")
            self._close(request, "disconnect")
        if gone:
            self._gateway.end_lost(client, dict.fromkeys(request.request_id for request in gone))
            logger.info("a client is gone or does not read; %d of its requests were ended", len(gone))
        self._waiting_to_attach.discard(client)

    # ------------------------------------------------------------------------------------------ information

    def ready_line(self) -> str:
        """The last line of start-up; scripts wait for it and read the address from it."""
        return (
            f"brigade ready: model={self._config.model_name} stages={self._config.num_stages} "
            f"listen={','.join(self._gateway.addresses)} http={self._http.url}"
        )

    def _say_ready(self) -> None:
        if self._http.has_failed:
            self._give_up("the HTTP server does not start; what it said is above")
        self._was_ready_said = self._http.has_failed or self._http.is_up
        if self._http.is_up:
            # Whoever read this may be gone; the engine serves all the same.
            with suppress(OSError):
                sys.stderr.write(self.ready_line() + "\n")
                sys.stderr.flush()

    def _model_info(self, max_model_len: int) -> ModelInfo:
        return ModelInfo(
            core_id=self._core_id,
            version=VERSION,
            name=self._config.model_name,
            num_stages=self._config.num_stages,
            vocab_size=self._config.vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            eos_token_ids=list(self._config.eos_token_ids),
            tokenizer=self._files.tokenizer,
            tokenizer_config=self._files.tokenizer_config,
            chat_template=self._files.chat_template,
            generation_config=self._files.generation_config,
            logits_processors=self._config.logits_processors,
            sampling_defaults=self._defaults.rules._asdict(),
        )

    def _answer(self, message: Control) -> ControlReply:
        values: Scalars = {}
        error = ""
        if message.op == "stats":
            values = self._stats()
        elif message.op == "health":
            is_recovering = self._scheduler is None and self._info is not None
            values = {"ready": self._scheduler is not None, "epoch": self._executor.epoch,
                      "state": "recovering" if is_recovering else self._executor.phase.value}
        elif message.op == "reset_prefix_cache":
            if self._scheduler is not None:  # without one there is no cache either
                self._scheduler.reset_prefix_cache()
        else:
            error = f"op={message.op[:64]!r} is not one of stats, health, reset_prefix_cache, timeline, requests"
        return ControlReply(core_id=self._core_id, control_id=message.control_id, error=error, values=values)

    def _stats(self) -> Scalars:
        stats = None if self._scheduler is None else self._scheduler.stats()
        reports = self._executor.stage_reports()
        values: Scalars = {
            "ready": stats is not None,
            "epoch": self._executor.epoch,
            "num_stages": self._config.num_stages,
            "requests_resumed_total": self._recovery.num_resumed,
            **self._metrics.values(stats, reports, num_outside=self._recovery.num_held + self._open.num_held),
            **{f"requests_refused_total_{code}": count for code, count in self._gateway.num_refused.items()},
            "connections_refused_total": self._gateway.num_strangers,
        }
        if stats is not None:
            values |= {f"cost_{name}": value for name, value in asdict(self._costs.coefficients).items()}
        return values | core_values(self._recorder) | stage_values(reports)
