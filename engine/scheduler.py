"""Who computes which tokens in the next step, and what does a returned step mean for its requests?

There is no prefill phase and no decode phase: each request has tokens known and tokens scheduled, and every step lets
it catch up within one token budget. ``running`` is always the older part of all requests and ``waiting`` the newer one.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass

from engine.batch_plan import BatchPlan, StepIdentity
from engine.in_flight import RowPool, StepsInFlight
from engine.kv_cache_manager import KVCacheManager
from engine.kv_spec import FullAttention, KVSpec, most_blocks
from engine.logprobs import rows_of, untold_part
from engine.request import Request, RequestStatus, ending_of
from ipc.errors import ConfigError, ProtocolError, RequestError
from ipc.messages import ModelRunnerOutput, SchedulerOutput, TokenLogprobs

logger = logging.getLogger(__name__)

ROWS_PER_SEQUENCE = 2
"""A freed row rests while steps that named it are in flight; meanwhile its successor needs another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one epoch."""

    num_stages: int
    max_num_seqs: int
    """Running requests in all, over every step in flight."""
    max_num_batched_tokens: int
    """Tokens per step."""
    max_model_len: int
    """Most tokens of a prompt and its answer together."""
    block_size: int
    num_blocks: int
    eos_token_ids: frozenset[int] = frozenset()
    kv_groups: tuple[KVSpec, ...] = (FullAttention(),)
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("num_stages", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, got {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ConfigError("max_model_len", f"must be at least 2 (a prompt and one answer token), got {self.max_model_len}")
        needed = most_blocks(self.kv_groups, self.max_model_len, self.block_size, self.max_num_batched_tokens)
        if self.num_blocks < needed:
            raise ConfigError(
                "num_blocks",
                f"{self.num_blocks} blocks of {self.block_size} tokens hold less than one request of max_model_len="
                f"{self.max_model_len}, which takes {needed}; lower max_model_len or give the cache more memory",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts of now, and totals since this scheduler began."""

    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    steps_in_flight: int
    preemptions: int
    num_generated_tokens: int
    num_prompt_tokens: int
    """Of requests when they run for the first time."""
    prefix_query_tokens: int
    """Tokens for which a computed beginning was looked for, when their request ran for the first time."""
    prefix_hit_tokens: int
    """Those of them that were found."""


@dataclass(slots=True, kw_only=True)
class RequestProgress:
    """What a returned step brought one request; whether and why it ended stands on the request."""

    request: Request
    new_token_ids: list[int]
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    error: RequestError | None = None


class Scheduler:
    """Decides steps and applies their outputs. Touches no socket; one per epoch."""

    def __init__(self, config: SchedulerConfig, *, core_id: int, epoch: int) -> None:
        self.config = config
        self.core_id = core_id
        self.epoch = epoch
        self.num_cohorts = config.num_stages
        self.depth = config.num_stages
        """Steps that may be in flight."""
        self._kv = KVCacheManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            groups=config.kv_groups,
            max_chunk=config.max_num_batched_tokens,
            prefix_caching=config.prefix_caching,
        )
        self._rows = RowPool(ROWS_PER_SEQUENCE * config.max_num_seqs)
        self._in_flight = StepsInFlight()
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._running: OrderedDict[int, Request] = OrderedDict()
        self._prefilling: OrderedDict[int, Request] = OrderedDict()
        """Running requests with tokens that no step computes yet, before they sample."""
        self._ready: OrderedDict[int, Request] = OrderedDict()
        """Running requests whose newest token came back and is not scheduled, in the order of return."""
        self._preemptions = 0
        self._num_generated_tokens = 0
        self._num_prompt_tokens = 0

    # ---------------------------------------------------------------------------------------- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request; also one that an earlier epoch left unfinished, with the tokens it has.

        Raises:
            RequestError: no room for one more token within max_model_len; the request is not queued.
        """
        if request.num_tokens + 1 > self.config.max_model_len:
            raise RequestError(
                f"prompt and answer have {request.num_tokens} tokens; with max_model_len={self.config.max_model_len} "
                f"at most {self.config.max_model_len - 1} leave room for a next one",
                field="prompt_token_ids",
            )
        assert request.num_prompt_tokens > 0 and not request.is_finished
        assert request.internal_id not in self._waiting and request.internal_id not in self._running
        request.end_life()
        request.num_steps_in_flight = 0
        request.status = RequestStatus.WAITING
        self._waiting[request.internal_id] = request

    def finish(self, request: Request, reason: str) -> None:
        """End a request from outside, in whatever state it is; once it is over this does nothing."""
        if not request.is_finished:
            self._end(request, reason)

    def has_unfinished(self) -> bool:
        return bool(self._running or self._waiting)

    def unfinished(self) -> list[Request]:
        """All requests that are not over, oldest first."""
        return [*self._running.values(), *self._waiting.values()]

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            free_blocks=self._kv.pool.num_free,
            total_blocks=self.config.num_blocks,
            steps_in_flight=len(self._in_flight),
            preemptions=self._preemptions,
            num_generated_tokens=self._num_generated_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            prefix_query_tokens=self._kv.stats.query_tokens,
            prefix_hit_tokens=self._kv.stats.hit_tokens,
        )

    def reset_prefix_cache(self) -> None:
        """Forget what finished requests left; those that run keep what they hold and share it no more."""
        self._kv.reset()

    # ------------------------------------------------------------------------------------------------ the next step

    def schedule(self) -> SchedulerOutput | None:
        """The next step, which the caller sends now; None when there is nothing to do or enough is in flight."""
        if len(self._in_flight) >= self.depth:
            return None
        plan = BatchPlan(self.config.max_num_batched_tokens)
        self._plan_decodes(plan)
        if self._plan_chunks(plan):
            self._admit(plan)
        if not len(plan):
            return None
        identity = StepIdentity(core_id=self.core_id, epoch=self.epoch, step_id=self._in_flight.last_sent_id + 1)
        output, step = plan.commit(identity, self._rows.tell_freed(), self._kv.num_groups)
        for request, samples in zip(step.requests, step.samples, strict=True):
            if samples:
                self._prefilling.pop(request.internal_id, None)
        self._in_flight.send(step)
        return output

    def _plan_decodes(self, plan: BatchPlan) -> None:
        most = min(self._cohort_size(), plan.tokens_left)
        stalled: list[Request] = []
        while self._ready and len(plan) < most:
            _, request = self._ready.popitem(last=False)
            gained = self._allocate(request, 1, plan)
            if gained is None:
                stalled.append(request)
            else:
                plan.add(request, 1, gained)
        for request in reversed(stalled):
            if request.status is RequestStatus.RUNNING:
                self._ready[request.internal_id] = request
                self._ready.move_to_end(request.internal_id, last=False)

    def _cohort_size(self) -> int:
        """An even share of all live decodes; fewer when those that are ready can be spread over the steps to come."""
        num_decodes = len(self._running) - len(self._prefilling)
        steps_open = self.depth - len(self._in_flight)
        return min(-(-num_decodes // self.num_cohorts), -(-len(self._ready) // steps_open))

    def _plan_chunks(self, plan: BatchPlan) -> bool:
        """False when one of them lacks blocks: then nobody newer shall take any."""
        all_have_blocks = True
        # A copy: making room may preempt requests of this very list. It is short, since a prompt is only admitted
        # when the budget has outlasted all others.
        for request in list(self._prefilling.values()):
            if not plan.tokens_left:
                break
            if request.status is not RequestStatus.RUNNING:
                continue
            num_tokens = min(request.num_tokens - request.num_scheduled_tokens, plan.tokens_left)
            gained = self._allocate(request, num_tokens, plan)
            if gained is None:
                all_have_blocks = False
            else:
                plan.add(request, num_tokens, gained)
        return all_have_blocks

    def _admit(self, plan: BatchPlan) -> None:
        """First come, first served: the first request that cannot run yet holds up those behind it."""
        while self._waiting and plan.tokens_left and self._rows.num_free and len(self._running) < self.config.max_num_seqs:
            request = next(iter(self._waiting.values()))
            if request.num_steps_in_flight:
                # Preempted with output still to come: that output decides what there is to compute.
                return
            # One block for each running request: what is admitted now shall not be preempted at the next block's edge.
            if not self._kv.admit(request, request.num_tokens + 1, spare=len(self._running)):
                return
            num_tokens = min(request.num_tokens - request.num_scheduled_tokens, plan.tokens_left)
            self._start(request, num_tokens, plan)

    def _start(self, request: Request, num_tokens: int, plan: BatchPlan) -> None:
        del self._waiting[request.internal_id]
        self._running[request.internal_id] = request
        self._prefilling[request.internal_id] = request
        request.status = RequestStatus.RUNNING
        request.row, named_by_step = self._rows.take()
        gained = self._kv.allocate(request, request.num_scheduled_tokens + num_tokens)
        assert gained is not None, "admission counted these blocks as free"
        if not request.has_started:
            request.has_started = True
            self._num_prompt_tokens += request.num_prompt_tokens
        plan.add_new(request, num_tokens, named_by_step)

    def _allocate(self, request: Request, num_tokens: int, plan: BatchPlan) -> tuple[list[int], ...] | None:
        """Blocks for the next tokens, at the cost of newer requests; None when the newest itself must wait.

        The oldest request can take everybody's blocks and the pool holds any one request, so it always advances.
        """
        end = request.num_scheduled_tokens + num_tokens
        while (gained := self._kv.allocate(request, end)) is None:
            newest = next(reversed(self._running.values()))
            if newest is request:
                return None
            self._preempt(newest, plan)
        return gained

    def _preempt(self, victim: Request, plan: BatchPlan) -> None:
        plan.remove(victim)
        self._leave(victim)
        victim.status = RequestStatus.WAITING
        victim.num_preemptions += 1
        self._preemptions += 1
        self._waiting[victim.internal_id] = victim
        self._waiting.move_to_end(victim.internal_id, last=False)

    # ------------------------------------------------------------------------------------------------ a step returns

    def update(self, output: ModelRunnerOutput) -> list[RequestProgress]:
        """Apply the oldest step's output; one entry per request that got something or ended.

        Raises:
            ProtocolError: the output is not one of the step that is due; the worker group can't be trusted further.
        """
        tokens = _tokens_by_row(output)
        logprobs = rows_of(output.logprobs, "ModelRunnerOutput.logprobs")
        prompt_logprobs = rows_of(output.prompt_logprobs, "ModelRunnerOutput.prompt_logprobs")
        nan_rows = frozenset(output.nan_rows)
        step = self._in_flight.take_back(output.step_id)
        self._rows.step_returned(step.step_id)
        progress: list[RequestProgress] = []
        for request, row, num_tokens, samples in zip(
            step.requests, step.rows, step.num_scheduled_tokens, step.samples, strict=True
        ):
            request.num_steps_in_flight -= 1
            if request.is_finished:
                continue
            item = RequestProgress(request=request, new_token_ids=[])
            try:
                if row in nan_rows:
                    raise RequestError("the model produced NaN", code="internal")
                if request.row == row:
                    request.num_computed_tokens += num_tokens
                    if request.num_computed_tokens >= request.next_block_edge:
                        self._kv.advance(request)
                if row in prompt_logprobs:
                    item.prompt_logprobs = untold_part(request, prompt_logprobs[row])
                if samples:
                    self._apply_token(item, row, tokens, logprobs.get(row))
            except Exception as error:  # noqa: BLE001 one request's output must not stop the loop
                item = self._fail(request, error)
            if item.new_token_ids or item.prompt_logprobs is not None or request.is_finished:
                progress.append(item)
        return progress

    def _apply_token(
        self, item: RequestProgress, row: int, tokens: dict[int, int], logprobs: TokenLogprobs | None
    ) -> None:
        request = item.request
        if row not in tokens:
            raise RequestError("the workers sent no token where one was due", code="internal")
        request.output_token_ids.append(tokens[row])
        item.new_token_ids.append(tokens[row])
        item.logprobs = logprobs
        self._num_generated_tokens += 1
        ending = ending_of(request, self.config.eos_token_ids, self.config.max_model_len)
        if ending is not None:
            self._end(request, ending[0])
            request.stop_reason = ending[1]
        elif request.row == row:
            self._ready[request.internal_id] = request

    def _fail(self, request: Request, error: Exception) -> RequestProgress:
        if isinstance(error, RequestError):
            logger.error("request %s failed: %s", request.request_id, error)
        else:
            logger.error("request %s failed while its output was applied", request.request_id, exc_info=error)
            error = RequestError(f"applying its output failed ({type(error).__name__})", code="internal")
        if not request.is_finished:
            self._end(request, "error")
        request.finish_reason = "error"
        return RequestProgress(request=request, new_token_ids=[], error=error)

    def _end(self, request: Request, reason: str) -> None:
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        self._waiting.pop(request.internal_id, None)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def _leave(self, request: Request) -> None:
        """End a life: blocks are free for any later step, the row rests."""
        del self._running[request.internal_id]
        self._prefilling.pop(request.internal_id, None)
        self._ready.pop(request.internal_id, None)
        self._kv.free(request)
        self._rows.give_back(request.row, request.last_step_id, self._in_flight.last_returned_id)
        request.end_life()

    # ------------------------------------------------------------------------------------------------------- books

    def check_books(self) -> None:
        """Assert every invariant of this state; for tests, since it looks at everything."""
        running = list(self._running.values())
        self._kv.check_books(running)
        self._rows.check_books([request.row for request in running])
        assert len(running) <= self.config.max_num_seqs
        assert len(self._in_flight) <= self.depth
        in_flight: dict[int, list[tuple[int, bool]]] = {}
        for step in self._in_flight:
            for request, row, num_tokens, samples in zip(
                step.requests, step.rows, step.num_scheduled_tokens, step.samples, strict=True
            ):
                entries = in_flight.setdefault(request.internal_id, [])
                entries.append((num_tokens if row == request.row else 0, samples))
                assert request.num_steps_in_flight >= len(entries)
        for request in self._waiting.values():
            assert request.status is RequestStatus.WAITING and not request.block_ids
            assert request.num_steps_in_flight == len(in_flight.get(request.internal_id, ()))
        for request in running:
            self._check_running(request, in_flight.get(request.internal_id, []))

    def _check_running(self, request: Request, in_flight: list[tuple[int, bool]]) -> None:
        key = request.internal_id
        assert request.status is RequestStatus.RUNNING and key not in self._waiting
        assert request.num_steps_in_flight == len(in_flight)
        assert request.num_scheduled_tokens == request.num_computed_tokens + sum(count for count, _ in in_flight)
        assert [samples for _, samples in in_flight[:-1]] == [False] * (len(in_flight) - 1), "two steps of one decode"
        samples_in_flight = bool(in_flight) and in_flight[-1][1]
        places = [key in self._prefilling, key in self._ready, samples_in_flight]
        assert places.count(True) == 1, f"a running request is in {places} of prefilling, ready, in flight"


def _tokens_by_row(output: ModelRunnerOutput) -> dict[int, int]:
    if not len(output.rows) == len(output.counts) == len(output.token_ids) or any(c != 1 for c in output.counts):
        raise ProtocolError("ModelRunnerOutput.counts", "must be one token for each row")
    return dict(zip(output.rows, output.token_ids, strict=True))
