"""Who computes which tokens in the next step, and what does a returned step mean for its requests?

There is no prefill phase and no decode phase: each request has tokens known and tokens scheduled, and every step lets
it catch up within one token budget. How much a step holds says ``pacing``, who comes first say ``policies``.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine.batch_plan import BatchPlan, StepIdentity
from engine.cost_model import CostModel, FittedCosts
from engine.drafting import Drafter, sampled_tokens
from engine.in_flight import InFlightStep, RowPool, StepsInFlight
from engine.kv_cache_manager import NO_BLOCKS, KVCacheManager
from engine.logprobs import rows_of, untold_part
from engine.owed_masks import OwedMasks
from engine.pacing import ChunkBudget, CohortPacing, GreedyPacing, Load, Pace
from engine.policies import LOOK_AHEAD, MAX_PASSES, RunningSet, SchedulingPolicy, WaitingQueue, rank_function
from engine.request import Request, RequestStatus, ending_of
from engine.scheduler_config import SchedulerConfig, SchedulerStats
from ipc.errors import RequestError
from ipc.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput, TokenLogprobs

__all__ = ["ROWS_PER_SEQUENCE", "RequestProgress", "Scheduler", "SchedulerConfig", "SchedulerStats"]

logger = logging.getLogger(__name__)

ROWS_PER_SEQUENCE = 2
"""A freed row rests while steps that named it are in flight; meanwhile its successor needs another."""

ROUNDING = 1e-9
"""Sums of fractions may fall short of a whole number by this."""


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

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        core_id: int,
        epoch: int,
        costs: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.core_id = core_id
        self.epoch = epoch
        self.depth = config.depth
        """Steps that may be in flight."""
        self.costs = costs or FittedCosts(config.num_stages)
        self._clock = clock
        self._pacing = GreedyPacing() if config.is_greedy else CohortPacing(
            config.num_stages, self.costs, num_cohorts=config.num_cohorts, prefill_share=config.prefill_share
        )
        self._kv = KVCacheManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            groups=config.kv_groups,
            max_chunk=config.max_num_batched_tokens,
            prefix_caching=config.prefix_caching,
        )
        self._rows = RowPool(ROWS_PER_SEQUENCE * config.max_num_seqs)
        self._in_flight = StepsInFlight()
        self._drafter = Drafter(
            config.speculative_lookup_tokens, block_size=config.block_size, max_num_seqs=config.max_num_seqs
        )
        self._owed_masks = OwedMasks(core_id=core_id, epoch=epoch)
        rank = rank_function(config.policy)
        self._waiting = WaitingQueue(rank)
        self._running = RunningSet(rank)
        self._prefilling: OrderedDict[int, Request] = OrderedDict()
        """Running requests with tokens that no step computes yet, before they sample."""
        self._decodes: OrderedDict[int, Request] = OrderedDict()
        """Running requests that will sample again, in the order of the steps that sample their newest tokens."""
        self._credit = 0.0
        """What rounding down has left of cohorts' sizes."""
        self._context = 0.0
        """Tokens that decodes of the newest step with any look back on, on average."""
        self._last_step_s = 0.0
        """Stage time of the newest step, by the cost model."""
        self._last_step_samples = False
        self._blocked = (-1, 0, 0)
        """Which head of the queue did not fit last, with how many blocks to spare, and in front of how many."""
        self._preemptions = 0
        self._num_generated_tokens = 0
        self._num_prompt_tokens = 0

    # ---------------------------------------------------------------------------------------- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request; also one that was requeued or set aside, with the tokens it has, once nothing of it is in flight.

        Raises:
            RequestError: no room for one more token within max_model_len; the request is not queued.
        """
        if request.num_tokens + 1 > self.config.max_model_len:
            raise RequestError(
                f"prompt and answer have {request.num_tokens} tokens; with max_model_len={self.config.max_model_len} "
                f"at most {self.config.max_model_len - 1} leave room for a next one",
                field="prompt_token_ids",
            )
        assert request.num_prompt_tokens > 0 and request.status is RequestStatus.WAITING
        assert not request.block_ids and not request.num_steps_in_flight
        assert request not in self._waiting and request not in self._running
        max_tokens = request.params.max_tokens
        request.max_num_tokens = self.config.max_model_len if max_tokens is None else min(
            self.config.max_model_len, request.num_prompt_tokens + max_tokens
        )
        self._waiting.push(request)

    def set_aside(self, request: Request) -> None:
        """Let go of a request that isn't over; output of its steps in flight is still right, and comes."""
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        self._waiting.discard(request)
        request.status = RequestStatus.WAITING

    def finish(self, request: Request, reason: str) -> None:
        """End a request from outside, in whatever state it is; once it is over this does nothing."""
        if not request.is_finished:
            self._end(request, reason)

    def has_unfinished(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def is_idle(self) -> bool:
        """There is nothing to do, and nothing in flight."""
        return not (self._running or self._waiting or self._in_flight)

    def unreturned(self) -> list[tuple[Request, int]]:
        """Requests in steps in flight that are not over, each with how many tokens it has for all that is known or guessed."""
        return self._in_flight.reaches()

    def unfinished(self) -> list[Request]:
        """All requests that are not over, in the order of the policy."""
        return sorted([*self._running, *self._waiting], key=rank_function(self.config.policy))

    @property
    def num_waiting_tokens(self) -> int:
        """Of all requests in the queue."""
        return self._waiting.num_tokens

    @property
    def newest_step(self) -> InFlightStep:
        """What was sent last, while it is in flight."""
        return self._in_flight.newest

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.num_tokens,
            free_blocks=self._kv.pool.num_free,
            total_blocks=self.config.num_blocks,
            steps_in_flight=len(self._in_flight),
            num_cohorts=self._pacing.num_cohorts,
            preemptions=self._preemptions,
            num_generated_tokens=self._num_generated_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            prefix_query_tokens=self._kv.stats.query_tokens,
            prefix_hit_tokens=self._kv.stats.hit_tokens,
            num_draft_tokens=self._drafter.num_drafted,
            num_accepted_draft_tokens=self._drafter.num_accepted,
        )

    def reset_prefix_cache(self) -> None:
        """Forget what finished requests left; those that run keep what they hold and share it no more."""
        self._kv.reset()

    # ------------------------------------------------------------------------------------------------ the next step

    def schedule(self) -> SchedulerOutput | None:
        """The next step, which the caller sends now; None when there is nothing to do or enough is in flight."""
        if len(self._in_flight) >= self.depth:
            return None
        load = self._load()
        pace = self._pacing.pace(load)
        plan = BatchPlan(self.config.max_num_batched_tokens)
        self._plan_decodes(plan, pace, load.has_prompts)
        if load.has_prompts:
            chunks = self._chunk_budget(pace, len(plan) + plan.num_drafts)
            if self._plan_chunks(plan, chunks):
                self._admit(plan, chunks)
            if not len(plan):
                # No prompt came of it that decodes should wait for.
                self._plan_decodes(plan, pace, False)
        return self._commit(plan, pace) if len(plan) else None

    def _load(self) -> Load:
        waiting, first = self._waiting, next(iter(self._prefilling.values()), None)
        num_tokens, squares = waiting.num_tokens, waiting.num_squares
        for request in self._prefilling.values():
            num_tokens += request.num_tokens - request.num_scheduled_tokens
            squares += request.num_tokens**2 - request.num_scheduled_tokens**2
        if first is None:
            first = waiting.head()
        done, end = (0, 0) if first is None else (first.num_scheduled_tokens, first.num_tokens)
        return Load(
            num_decodes=len(self._decodes),
            context=self._context,
            has_prompts=bool(self._prefilling) or self._may_admit(),
            num_prompt_tokens=num_tokens,
            num_prompt_squares=squares,
            num_tokens_behind=num_tokens - (end - done),
            num_squares_behind=squares - (end * end - done * done),
            free_share=self._kv.pool.num_free / self.config.num_blocks,
            last_step_s=self._last_step_s,
            last_step_samples=self._last_step_samples,
        )

    def _may_admit(self) -> bool:
        """Whether it is worth a try; false as well when only a running request of lower priority could make room."""
        head = self._waiting.head()
        return head is not None and not head.num_steps_in_flight and (
            self._has_seat() or self.config.policy is SchedulingPolicy.PRIORITY
        ) and not self._is_blocked(head)

    def _has_seat(self) -> bool:
        return len(self._running) < self.config.max_num_seqs and self._rows.num_free > 0

    def _is_blocked(self, head: Request) -> bool:
        """The head was too large at the last try, nobody behind it could pass, and there is no more room since then."""
        key, num_spare, num_waiting = self._blocked
        return key == head.internal_id and self._num_spare <= num_spare and len(self._waiting) <= num_waiting

    @property
    def _num_spare(self) -> int:
        """Free blocks beyond one for each running request."""
        return self._kv.pool.num_free - len(self._running)

    def _plan_decodes(self, plan: BatchPlan, pace: Pace, has_prompts: bool) -> None:
        most = min(max(1, int(self._credit + pace.cohort_size + ROUNDING)), plan.tokens_left)
        ready = self._ready_decodes(most, has_prompts)
        if has_prompts:
            if len(ready) < pace.least_decodes and not self._is_overdue(ready):
                return
        elif not self._has_room_for_cohort(pace, len(ready)):
            return
        block_size = self.config.block_size
        room_for_drafts = 0
        if self._drafter.is_on:
            room_for_drafts = self._drafter.room_beside(most, plan.tokens_left, self.costs.coefficients, self._context)
        for request in ready:
            if len(plan) == most:
                return
            if request.status is not RequestStatus.RUNNING:
                continue
            # Within a block there is nothing to allocate: asking costs a step of thousands of decodes a tenth of its time.
            gained = NO_BLOCKS if request.num_scheduled_tokens % block_size else self._allocate(request, 1, plan)
            if gained is not None:
                del self._decodes[request.internal_id]
                if request.awaits_token and (drafts := self._drafter.drafts_for(request, room_for_drafts)):
                    room_for_drafts -= len(drafts)
                    plan.add_drafts(request, drafts, gained)
                else:
                    plan.add(request, 1, gained)

    def _ready_decodes(self, most: int, has_prompts: bool) -> list[Request]:
        """Those that may sample again, longest unserved first.

        In the pipeline's extra step these may be requests whose token is not back yet. Stage 0 will wait for that token
        and hold up what comes behind, so it must be the one that is due next, and there must be nothing better to do.
        """
        last_returned = newest_usable = self._in_flight.last_returned_id
        if self.config.async_scheduling and (not has_prompts or len(self._in_flight) >= self.config.num_stages):
            newest_usable += 1
        ready: list[Request] = []
        for request in self._decodes.values():
            # One more than can go: one at a time may lack blocks, the one whose turn it is to give way.
            if request.sampled_by_step > newest_usable or len(ready) > most:
                break
            if request.awaits_token and request.sampled_by_step > last_returned:
                continue
            ready.append(request)
        return ready

    def _has_room_for_cohort(self, pace: Pace, num_ready: int) -> bool:
        """Beyond all cohorts, only a full one goes ahead: so that small groups meet, and wait for no later step's tokens."""
        num_ahead = self._in_flight.num_sampling - pace.num_cohorts
        return num_ahead < 0 or (num_ahead == 0 and num_ready >= int(pace.cohort_size + ROUNDING))

    def _is_overdue(self, ready: list[Request]) -> bool:
        """Two rounds are long enough to wait for company."""
        return bool(ready) and ready[0].sampled_by_step + 2 * self.config.num_stages <= self._in_flight.last_sent_id

    def _chunk_budget(self, pace: Pace, num_decodes: int) -> ChunkBudget:
        costs = self.costs.coefficients
        return ChunkBudget(costs, pace.step_s - costs.step_s - num_decodes * costs.decode_time(self._context))

    def _plan_chunks(self, plan: BatchPlan, chunks: ChunkBudget) -> bool:
        """False when one of them lacks blocks: then nobody newer shall take any."""
        all_have_blocks = True
        # A copy: making room may preempt requests of this very list. It is short, since a prompt is only admitted
        # when the budget has outlasted all others.
        for request in list(self._prefilling.values()):
            if request.status is not RequestStatus.RUNNING:
                continue
            if not (chunks.has_time and plan.tokens_left):
                break
            num_tokens = chunks.take(request.num_scheduled_tokens, request.num_tokens, plan.tokens_left)
            gained = self._allocate(request, num_tokens, plan)
            if gained is None:
                all_have_blocks = False
            else:
                plan.add(request, num_tokens, gained)
        return all_have_blocks

    def _admit(self, plan: BatchPlan, chunks: ChunkBudget) -> None:
        """The queue's head as long as it fits; then some smaller ones behind it, within the bound of ``MAX_PASSES``."""
        while plan.tokens_left and chunks.has_time and (head := self._waiting.head()) is not None:
            if head.num_steps_in_flight:
                # Preempted with output still to come: that output decides what there is to compute.
                return
            # One block for each running request: what is admitted now shall not be preempted at the next block's edge.
            if self._has_seat() and self._kv.admit(head, head.num_tokens + 1, spare=len(self._running)):
                self._start(head, plan, chunks)
            elif not self._make_room(head, plan):
                if self._has_seat():
                    self._let_pass(head, plan, chunks)
                    self._blocked = (head.internal_id, self._num_spare, len(self._waiting))
                return

    def _make_room(self, head: Request, plan: BatchPlan) -> bool:
        """Preempt as few requests of lower priority as the head needs; false when all of them would not do."""
        if self.config.policy is not SchedulingPolicy.PRIORITY or not self._rows.num_free:
            return False
        missing = self._kv.num_blocks_for(head.num_tokens + 1) - self._kv.pool.num_free

        def enough(victims: list[Request]) -> bool:
            num_running = len(self._running) - len(victims)
            gained = sum(self._kv.num_blocks_held_alone(victim) for victim in victims)
            return num_running < self.config.max_num_seqs and gained >= missing + num_running

        victims = self._running.ranked_below(head, enough)
        for victim in victims:
            self._preempt(victim, plan)
        return bool(victims)

    def _let_pass(self, head: Request, plan: BatchPlan, chunks: ChunkBudget) -> None:
        """Small requests whose every token finds room in what is free now; see ``MAX_PASSES``."""
        for request in self._waiting.first(1 + LOOK_AHEAD)[1:]:
            if head.num_passes >= MAX_PASSES or not (self._has_seat() and plan.tokens_left and chunks.has_time):
                return
            if request.num_steps_in_flight or request.max_num_tokens > head.num_tokens:
                continue
            if self._kv.admit(request, request.max_num_tokens, spare=len(self._running)):
                head.num_passes += 1
                self._start(request, plan, chunks)
            else:
                # As the head it will ask for less.
                request.num_blocks_wanted = 0

    def _start(self, request: Request, plan: BatchPlan, chunks: ChunkBudget) -> None:
        self._waiting.discard(request)
        self._running.add(request)
        self._prefilling[request.internal_id] = request
        request.status = RequestStatus.RUNNING
        request.row, named_by_step = self._rows.take()
        num_tokens = chunks.take(request.num_scheduled_tokens, request.num_tokens, plan.tokens_left)
        gained = self._kv.allocate(request, request.num_scheduled_tokens + num_tokens)
        assert num_tokens and gained is not None, "admission made sure of time and blocks"
        if not request.has_started:
            request.has_started = True
            request.started_at = self._clock()
            self._num_prompt_tokens += request.num_prompt_tokens
        plan.add_new(request, num_tokens, named_by_step)

    def _allocate(self, request: Request, num_tokens: int, plan: BatchPlan) -> tuple[list[int], ...] | None:
        """Blocks for the next tokens, at the cost of others; None when it is this request's turn to give way.

        The first in the policy's order can take everybody's blocks and the pool holds any one request: it always advances.
        """
        end = request.num_scheduled_tokens + num_tokens
        while (gained := self._kv.allocate(request, end)) is None:
            victim = self._running.victim()
            if victim is request:
                return None
            self._preempt(victim, plan)
        return gained

    def _preempt(self, victim: Request, plan: BatchPlan) -> None:
        plan.remove(victim)
        self._leave(victim)
        victim.status = RequestStatus.WAITING
        victim.num_preemptions += 1
        self._preemptions += 1
        self._waiting.push(victim)

    def _commit(self, plan: BatchPlan, pace: Pace) -> SchedulerOutput:
        identity = StepIdentity(core_id=self.core_id, epoch=self.epoch, step_id=self._in_flight.last_sent_id + 1)
        output, step = plan.commit(identity, self._rows.tell_freed(), self._kv.num_groups)
        decodes, prefilling = self._decodes, self._prefilling
        num_decodes = 0
        context = 0
        for request, samples in zip(step.requests, step.samples, strict=True):
            if samples:
                key = request.internal_id
                if prefilling.pop(key, None) is None:
                    num_decodes += 1
                    context += request.num_scheduled_tokens
                # Lengths are known ahead: nothing is scheduled past them.
                if request.num_scheduled_tokens + 1 < request.max_num_tokens:
                    decodes[key] = request
        if num_decodes:
            # Less than one: what a small cohort lacked is not made up for by a large one.
            self._credit = min(max(self._credit + pace.cohort_size - num_decodes, 0.0), 1.0 - 1e-6)
            self._context = context / num_decodes
        # Steps with drafts bring more than a token each: they tell nothing of cohorts.
        step.tag = None if step.drafts else pace.tag
        self._last_step_s = self.costs.coefficients.stage_time(step.shape)
        self._last_step_samples = step.shape.samples
        self._in_flight.send(step)
        if output.has_grammar:
            self._owed_masks.promise(step)
        self.costs.sent(step.step_id, step.shape, self._clock(), output.needs_tokens_of_step)
        return output

    def take_masks(self) -> list[GrammarOutput]:
        """Masks that can be sent now, of steps that were sent; to be asked for whenever a step went, came, or lost a request."""
        return self._owed_masks.take_due()

    # ------------------------------------------------------------------------------------------------ a step returns

    def update(self, output: ModelRunnerOutput) -> list[RequestProgress]:
        """Apply the oldest step's output; one entry per request that got something or ended.

        Raises:
            ProtocolError: the output is not one of the step that is due; the worker group can't be trusted further.
        """
        logprobs = rows_of(output.logprobs, "ModelRunnerOutput.logprobs")
        prompt_logprobs = rows_of(output.prompt_logprobs, "ModelRunnerOutput.prompt_logprobs")
        nan_rows = frozenset(output.nan_rows)
        step = self._in_flight.take_back(output.step_id)
        tokens, further = sampled_tokens(output, step)
        now = self._clock()
        self.costs.returned(step.step_id, now)
        self._pacing.returned(step.tag, now)
        self._rows.step_returned(step.step_id)
        progress: list[RequestProgress] = []
        finished = RequestStatus.FINISHED
        for request, row, num_tokens, samples in zip(
            step.requests, step.rows, step.num_scheduled_tokens, step.samples, strict=True
        ):
            request.num_steps_in_flight -= 1
            if request.status is finished:
                continue
            item = RequestProgress(request=request, new_token_ids=[])
            try:
                if row in nan_rows:
                    raise RequestError("no token can be chosen: the model produced NaN, or rules bar all", code="internal")
                if request.row == row:
                    request.num_computed_tokens += num_tokens
                    if request.num_computed_tokens >= request.next_block_edge:
                        self._kv.advance(request)
                if row in prompt_logprobs:
                    item.prompt_logprobs = untold_part(request, prompt_logprobs[row])
                if samples:
                    if row not in tokens:
                        raise RequestError("the workers sent no token where one was due", code="internal")
                    item.logprobs = logprobs.get(row)
                    self._apply_token(item, tokens[row])
                    if row in step.drafts:
                        self._apply_drafts(item, row, len(step.drafts[row]), further.get(row, []))
            except Exception as error:  # noqa: BLE001 one request's output must not stop the loop
                item = self._fail(request, error)
            if item.new_token_ids or item.prompt_logprobs is not None or request.status is finished:
                progress.append(item)
        return progress

    def _apply_token(self, item: RequestProgress, token_id: int) -> None:
        request = item.request
        request.output_token_ids.append(token_id)
        item.new_token_ids.append(token_id)
        self._num_generated_tokens += 1
        ending = ending_of(request, self.config.eos_token_ids, self.config.max_model_len)
        if request.grammar is not None and (ending is None or ending[0] == "length"):
            request.grammar.accept(token_id)
            if request.grammar.is_complete:
                ending = ("stop", None)
        if ending is not None:
            self._end(request, ending[0])
            request.stop_reason = ending[1]
        elif self._drafter.is_on:
            self._drafter.follow(request, token_id)

    def _apply_drafts(self, item: RequestProgress, row: int, num_drafts: int, further: list[int]) -> None:
        """``further``: what was sampled behind the drafts that stood, one token behind each."""
        request = item.request
        self._drafter.num_drafted += num_drafts
        self._drafter.num_accepted += len(further)
        if request.row == row:
            request.num_rejected_drafts = num_drafts - len(further)
        for token_id in further:
            if request.is_finished:
                return
            if request.row == row:
                # The token before was a draft that stood, so it is computed as well.
                request.num_scheduled_tokens += 1
                request.num_computed_tokens += 1
                if request.num_computed_tokens >= request.next_block_edge:
                    self._kv.advance(request)
            self._apply_token(item, token_id)

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
        self._waiting.discard(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def _leave(self, request: Request) -> None:
        """End a life: blocks are free for any later step, the row rests."""
        self._running.remove(request)
        self._prefilling.pop(request.internal_id, None)
        self._decodes.pop(request.internal_id, None)
        self._kv.free(request)
        self._rows.give_back(request.row, request.last_step_id, self._in_flight.last_returned_id)
        request.end_life()

    # ------------------------------------------------------------------------------------------------------- books

    def check_books(self) -> None:
        """Assert every invariant of this state; for tests, since it looks at everything."""
        running = list(self._running)
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
        for request in self._waiting:
            assert request.status is RequestStatus.WAITING and not request.block_ids
            assert request.num_steps_in_flight == len(in_flight.get(request.internal_id, ()))
        for request in running:
            self._check_running(request, in_flight.get(request.internal_id, []))

    def _check_running(self, request: Request, in_flight: list[tuple[int, bool]]) -> None:
        key = request.internal_id
        assert request.status is RequestStatus.RUNNING and request not in self._waiting
        assert request.num_steps_in_flight == len(in_flight)
        assert request.num_scheduled_tokens == request.num_computed_tokens + sum(count for count, _ in in_flight)
        num_sampling = sum(samples for _, samples in in_flight)
        assert num_sampling <= 2, "more than one placeholder"
        assert [samples for _, samples in in_flight[len(in_flight) - num_sampling :]] == [True] * num_sampling
        known = request.num_tokens + num_sampling
        is_complete = known >= request.max_num_tokens
        places = [key in self._prefilling, key in self._decodes, is_complete and key not in self._prefilling]
        assert places.count(True) == 1, f"a running request is in {places} of prefilling, decodes, complete"
        assert key in self._prefilling or request.num_scheduled_tokens == known - 1
