"""The real scheduler drives real stages in this process: requests with parameters come and go between steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.request import Request
from engine.scheduler import Scheduler, SchedulerConfig
from ipc.messages import TokenLogprobs
from ipc.params import SamplingParams
from tests.worker.pipeline import Pipeline
from worker.model_config import read_model_config


@dataclass(slots=True)
class Asked:
    """One request and what came of it."""

    prompt: list[int]
    params: SamplingParams
    aborted_after: int | None = None
    """Tokens after which its client gives up."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


class Engine:
    """A scheduler and its stages; requests come and go between steps."""

    def __init__(
        self, path: Path, num_stages: int, *, num_blocks: int = 60, max_num_seqs: int = 48, budget: int = 96
    ) -> None:
        """``budget``: tokens a step."""
        self.config = SchedulerConfig(
            num_stages=num_stages, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=128, block_size=16,
            num_blocks=num_blocks, eos_token_ids=frozenset(read_model_config(str(path)).eos_token_ids),
        )  # fmt: skip
        self.scheduler = Scheduler(self.config, core_id=7, epoch=3)
        self.pipeline = Pipeline(
            path, num_stages, num_blocks=num_blocks, max_model_len=128, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        self._in_flight: list[Any] = []
        self._asked: dict[int, Asked] = {}
        self._requests: dict[int, Request] = {}

    def ask(self, prompt: Sequence[int], **params: Any) -> Asked:
        """Add a request; ``run_all`` or ``step`` go on with it."""
        asked = Asked(list(prompt), SamplingParams(**({"seed": 0} | params)))
        self.add(asked)
        return asked

    def add(self, asked: Asked) -> None:
        key = len(self._asked) + 1
        self._asked[key] = asked
        self._requests[key] = Request(
            request_id=f"r{key}", internal_id=key, client=b"c", prompt_token_ids=asked.prompt, params=asked.params  # type: ignore[arg-type]
        )
        self.scheduler.add(self._requests[key])

    def step(self) -> None:
        while (plan := self.scheduler.schedule()) is not None:
            self._in_flight.append(plan)
        if not self._in_flight:
            return
        for progress in self.scheduler.update(self.pipeline.run(self._in_flight.pop(0))):
            assert progress.error is None, progress.error
            asked = self._asked[progress.request.internal_id]
            asked.token_ids += progress.new_token_ids
            asked.logprobs += [progress.logprobs] if progress.logprobs is not None else []
            asked.prompt_logprobs += [progress.prompt_logprobs] if progress.prompt_logprobs is not None else []
            asked.finish_reason = progress.request.finish_reason
            if asked.aborted_after is not None and len(asked.token_ids) >= asked.aborted_after:
                self.scheduler.finish(progress.request, "abort")
        self.scheduler.check_books()

    def run_all(self) -> None:
        while self.scheduler.has_unfinished():
            self.step()
