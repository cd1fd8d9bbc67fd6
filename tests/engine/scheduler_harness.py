"""A scheduler and fake workers, driven by hand: every message crosses the codec, every rule is checked at every turn."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np

from engine.cost_model import CostModel
from engine.policies import rank_function
from engine.prefix_cache import DIGEST_BYTES, HashFunction
from engine.request import Request
from engine.scheduler import RequestProgress, Scheduler, SchedulerConfig, SchedulerStats
from ipc import codec
from ipc.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from ipc.params import SamplingParams
from tests.fakes import FakeClock, FakeGrammar, FakeWorker, chain_of, expected_output, pseudo_logprobs

EOS = frozenset({3, 77})


def make_config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "num_stages": 2,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 200,
    }
    values |= changes
    if values["max_num_batched_tokens"] >= 1:
        # A smaller budget than running requests is refused; here it is the budget that a test is about.
        values["max_num_seqs"] = min(values["max_num_seqs"], values["max_num_batched_tokens"])
    return SchedulerConfig(**values)


def constant_hash(salt: bytes) -> HashFunction:
    """The worst hash there is: right answers must not depend on a good one."""
    return lambda parent, tokens, extra: bytes(DIGEST_BYTES)


class Harness:
    """What a core does with a scheduler, and what clients see of it."""

    def __init__(self, *, has_constant_hash: bool = False, costs: CostModel | None = None, **changes: Any) -> None:
        self.config = make_config(**changes)
        self.has_constant_hash = has_constant_hash
        self.costs = costs
        self.epoch = 0
        self.clock = FakeClock()
        self.past: list[SchedulerStats] = []
        """Of epochs that were lost."""
        self._begin_epoch()
        self.requests: list[Request] = []
        self.seen: dict[int, list[int]] = {}
        self.told_prompt_logprobs: dict[int, int] = {}
        self.endings: dict[int, list[str]] = {}
        self.plans: list[SchedulerOutput] = []
        self.masks: list[GrammarOutput] = []

    def _begin_epoch(self) -> None:
        self.epoch += 1
        hashing = patch("engine.kv_cache_manager.keyed_hash", constant_hash) if self.has_constant_hash else nullcontext()
        with hashing:
            self.scheduler = Scheduler(self.config, core_id=5, epoch=self.epoch, costs=self.costs, clock=self.clock)
        self.worker = FakeWorker.for_config(self.config, self.scheduler.depth)

    def lose_workers(self) -> None:
        """The worker group dies: a new scheduler gets what is not over, nothing that was in flight comes back."""
        self.past.append(self.scheduler.stats())
        unfinished = self.scheduler.unfinished()
        lost = self.worker
        self._begin_epoch()
        self.worker.nan_requests, self.worker.key_parts = lost.nan_requests, lost.key_parts
        for request in unfinished:
            request.requeue()
            self.scheduler.add(request)
        self.scheduler.check_books()

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        self.worker.forgotten_up_to_step = self.worker.last_step_id
        self.scheduler.check_books()

    def total(self, name: str) -> int:
        """A counter of SchedulerStats over all epochs."""
        return sum(getattr(stats, name) for stats in [*self.past, self.scheduler.stats()])

    def add(
        self,
        prompt: Sequence[int] | int,
        *,
        key_parts: tuple[tuple[int, bytes], ...] = (),
        priority: int = 0,
        grammar: FakeGrammar | None = None,
        **params: Any,
    ) -> Request:
        """A request with this prompt, or with a prompt of that many tokens that nobody else has."""
        number = len(self.requests)
        token_ids = [(number * 37 + i * 11) % 400 + 5 for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
        request = Request(
            request_id=f"r{number}",
            internal_id=number,
            client=b"c",
            prompt_token_ids=np.asarray(token_ids, np.int32),
            params=SamplingParams(**({"seed": number, "max_tokens": 12} | params)),
            priority=priority,
            cache_key_parts=key_parts,
            grammar=grammar,
        )
        self.requests.append(request)
        self.worker.key_parts[request.request_id] = key_parts
        self.seen[number] = []
        self.endings[number] = []
        self.scheduler.add(request)
        return request

    def abort(self, request: Request, reason: str = "abort") -> None:
        was_over = request.is_finished
        self.scheduler.finish(request, reason)
        if not was_over:
            self.endings[request.internal_id].append(reason)
        self.scheduler.check_books()
        self.send_masks()

    def send_masks(self) -> None:
        """Keep the promises that can be kept, as a core does at the end of each turn."""
        for masks in self.scheduler.take_masks():
            self.masks.append(masks)
            self.worker.take_masks(codec.decode(codec.encode(masks), [GrammarOutput]))

    def send(self) -> SchedulerOutput | None:
        """Schedule and send one step, if there is one."""
        plan = self.scheduler.schedule()
        self.scheduler.check_books()
        order = list(map(rank_function(self.config.policy), self.scheduler.unfinished()))
        assert order == sorted(order)
        if plan is not None:
            self.plans.append(plan)
            self.worker.send(codec.decode(codec.encode(plan), [SchedulerOutput]))
            self.send_masks()
        return plan

    def send_all(self) -> list[SchedulerOutput]:
        """Fill the pipeline."""
        plans = []
        while (plan := self.send()) is not None:
            plans.append(plan)
        return plans

    def receive(self) -> list[RequestProgress]:
        """Let the oldest step return."""
        output = codec.decode(codec.encode(self.worker.receive()), [ModelRunnerOutput])
        self.clock.advance(0.001)
        progress = self.scheduler.update(output)
        self.scheduler.check_books()
        for item in progress:
            self._see(item)
        self.send_masks()
        return progress

    def drain(self, most_steps: int = 5000) -> None:
        """Run until all is over, the pipeline as full as the scheduler wants."""
        for _ in range(most_steps):
            self.send_all()
            if not self.worker.num_in_flight:
                break
            self.receive()
        assert not self.scheduler.has_unfinished(), "nothing in flight, nothing to send, requests left"
        self.check_end()

    def check_end(self) -> None:
        """All requests are over, saw exactly their own tokens and one ending, and hold nothing."""
        for request in self.requests:
            assert len(self.endings[request.internal_id]) == 1, f"{request.request_id}: {self.endings[request.internal_id]}"
            self.check_seen(request)
        assert self.scheduler.stats().free_blocks == self.config.num_blocks
        assert self.scheduler.stats().running == self.scheduler.stats().waiting == 0

    def check_seen(self, request: Request) -> None:
        tokens, finish_reason, stop_reason = expected_output(
            request.prompt_token_ids.tolist(),
            request.params,
            eos_token_ids=self.config.eos_token_ids,
            max_model_len=self.config.max_model_len,
            grammar=request.grammar.copy() if isinstance(request.grammar, FakeGrammar) else None,
        )
        seen = self.seen[request.internal_id]
        assert seen == tokens[: len(seen)], f"{request.request_id} saw foreign tokens"
        if request.finish_reason in ("stop", "length"):
            assert (seen, request.finish_reason, request.stop_reason) == (tokens, finish_reason, stop_reason)
            if request.params.prompt_logprobs is not None:
                assert self.told_prompt_logprobs.get(request.internal_id, 1) == len(request.prompt_token_ids)

    def _see(self, item: RequestProgress) -> None:
        request = item.request
        key = request.internal_id
        assert not self.endings[key], "a request gets something after its end"
        before = [*request.prompt_token_ids.tolist(), *self.seen[key]]
        self.seen[key].extend(item.new_token_ids)
        if item.logprobs is not None:
            num_top = request.params.logprobs
            expected = pseudo_logprobs(chain_of(before), item.new_token_ids[0], num_top)
            _assert_logprobs(item.logprobs, len(before), [expected])
        assert (item.logprobs is not None) == (request.params.logprobs is not None and bool(item.new_token_ids))
        if item.prompt_logprobs is not None:
            start = self.told_prompt_logprobs.get(key, 1)
            end = start + len(item.prompt_logprobs.ranks)
            prompt = request.prompt_token_ids.tolist()
            expected_all = [
                pseudo_logprobs(chain_of(prompt[:i]), prompt[i], request.params.prompt_logprobs) for i in range(start, end)
            ]
            _assert_logprobs(item.prompt_logprobs, start, expected_all)
            self.told_prompt_logprobs[key] = end
        if request.is_finished:
            self.endings[key].append("error" if item.error else str(request.finish_reason))
        assert item.error is None or request.is_finished


def _assert_logprobs(piece: Any, start: int, expected: list[tuple[list[int], list[float], int]]) -> None:
    assert piece.start == start
    assert piece.token_ids.tolist() == [i for ids, _, _ in expected for i in ids]
    assert piece.logprobs.tolist() == [v for _, values, _ in expected for v in values]
    assert piece.ranks.tolist() == [rank for _, _, rank in expected]
