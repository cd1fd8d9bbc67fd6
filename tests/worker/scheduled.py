"""The core's own scheduler drives stages in this process: chunks, growth, preemption and reuse as in the whole engine."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.kv_spec import spec_of
from engine.request import Request
from engine.scheduler import Scheduler, SchedulerConfig
from ipc.params import SamplingParams
from tests.native import INSTRUCTION_SETS
from tests.worker.pipeline import Pipeline
from worker.kv_groups import kv_groups
from worker.model_config import read_model_config

BACKENDS = [
    "torch",
    pytest.param("cpu", marks=pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")),
]
"""Of attention, that run on a CPU at full speed."""


class Engine:
    """Scheduler and stages in this process."""

    def __init__(
        self, path: Path, num_stages: int = 1, *, num_blocks: int = 96, max_num_seqs: int = 4, budget: int = 32,
        max_model_len: int = 256, rules: Mapping[str, Any] | None = None, **changes: object,
    ) -> None:  # fmt: skip
        """``rules``: more of the scheduler's configuration."""
        config = read_model_config(str(path))
        groups = kv_groups(config, range(config.num_layers))
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_stages=num_stages, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
                max_model_len=max_model_len, block_size=16, num_blocks=num_blocks, eos_token_ids=frozenset(),
                kv_groups=tuple(map(spec_of, groups)), **(rules or {}),
            ),
            core_id=7, epoch=3,
        )  # fmt: skip
        self.pipeline = Pipeline(
            path, num_stages, num_blocks=num_blocks, max_model_len=max_model_len, max_num_seqs=max_num_seqs, **changes
        )
        self.num_requests = 0

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[tuple[list[int], list[float]]]:
        """Ids and their log probabilities; as many steps in flight as the engine allows."""
        requests = [self._request(prompt, num_tokens) for prompt in prompts]
        logprobs: dict[int, list[float]] = {request.internal_id: [] for request in requests}
        in_flight = []
        while self.scheduler.has_unfinished():
            while (plan := self.scheduler.schedule()) is not None:
                in_flight.append(plan)
            for progress in self.scheduler.update(self.pipeline.run(in_flight.pop(0))):
                if progress.logprobs is not None:
                    logprobs[progress.request.internal_id] += progress.logprobs.logprobs.tolist()
        return [(list(request.output_token_ids), logprobs[request.internal_id]) for request in requests]

    def _request(self, prompt: Sequence[int], num_tokens: int) -> Request:
        request = Request(
            request_id=str(self.num_requests), internal_id=self.num_requests, client=b"c",
            prompt_token_ids=np.asarray(prompt, np.int32),
            params=SamplingParams(temperature=0.0, max_tokens=num_tokens, seed=0, logprobs=0),
        )  # fmt: skip
        self.num_requests += 1
        self.scheduler.add(request)
        return request

    def prompt_logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of all tokens but the first."""
        request = Request(
            request_id="p", internal_id=self.num_requests, client=b"c", prompt_token_ids=np.asarray(tokens, np.int32),
            params=SamplingParams(temperature=0.0, max_tokens=1, seed=0, prompt_logprobs=0),
        )  # fmt: skip
        self.num_requests += 1
        self.scheduler.add(request)
        found: list[float] = []
        while self.scheduler.has_unfinished():
            plan = self.scheduler.schedule()
            assert plan is not None
            for progress in self.scheduler.update(self.pipeline.run(plan)):
                if progress.prompt_logprobs is not None:
                    found += progress.prompt_logprobs.logprobs.tolist()
        return torch.tensor(found)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(3, 512), k=length)
