"""What does the last stage know about how each row samples? Rows of arrays, changed by a step's diff alone."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.messages import NewRequestData
from ipc.params import ALL_LOGPROBS
from worker.logit_rules import LogitRules, Penalties, RowRules, gather_rules
from worker.logits_processors import LogitsProcessor
from worker.sampler import Filters, SamplingBatch
from worker.token_counts import TokenCounts
from worker.transfer import to_device

NO_LOGPROBS = -1

_MOST_SETS_OF_ROWS = 16
"""Whose rules are kept: some times as many as there are cohorts."""


class SamplingStates:
    """Sampling parameters and rules of the requests in all rows. Tokens are ``RequestStates``' matter."""

    def __init__(
        self,
        num_rows: int,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        processors: Mapping[str, LogitsProcessor],
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._processors = dict(processors)
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.ones(num_rows, np.float64)
        self._min_p = np.zeros(num_rows, np.float64)
        self._typical_p = np.ones(num_rows, np.float64)
        self._repetition = np.ones(num_rows, np.float32)
        self._presence = np.zeros(num_rows, np.float32)
        self._frequency = np.zeros(num_rows, np.float32)
        self._has_penalties = np.zeros(num_rows, np.bool_)
        self._seed = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.full(num_rows, NO_LOGPROBS, np.int32)
        """Top alternatives wanted with each token; NO_LOGPROBS for no logprobs at all."""
        self.num_prompt_logprobs = np.full(num_rows, NO_LOGPROBS, np.int32)
        """The same for the prompt's tokens."""
        self.wants_processed = np.zeros(num_rows, np.bool_)
        """Its logprobs are of the distribution that its tokens are drawn from."""
        self._rules: dict[int, RowRules] = {}
        """Of the rows that have some."""
        self._counts = TokenCounts(num_rows, vocab_size, device)
        self._same_rows: dict[bytes, LogitRules | None] = {}
        """By the rows of a step; forgotten when a row gets another owner."""

    def add(self, new: NewRequestData) -> None:
        """The row belongs to this request; everything that an earlier owner left is overwritten."""
        row, params, rules = new.row, new.params, new.params.draw_rules()
        self._same_rows.clear()
        self._temperature[row] = rules.temperature
        self._top_k[row] = rules.top_k
        self._top_p[row] = rules.top_p
        self._min_p[row] = rules.min_p
        self._typical_p[row] = rules.typical_p
        self._repetition[row] = rules.repetition_penalty
        self._presence[row] = params.presence_penalty
        self._frequency[row] = params.frequency_penalty
        self._seed[row] = params.seed or 0
        self.num_logprobs[row] = num_top_of(params.logprobs, self._vocab_size)
        self.num_prompt_logprobs[row] = num_top_of(params.prompt_logprobs, self._vocab_size)
        self.wants_processed[row] = params.logprobs_mode == "processed"
        self._rules.pop(row, None)
        if (row_rules := RowRules.of(new, self._vocab_size, self._eos_token_ids)) is not None:
            self._rules[row] = row_rules
        self._counts.discard(row)
        self._has_penalties[row] = (
            rules.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        if self._has_penalties[row]:
            self._counts.add(row, new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :])

    def free(self, rows: list[int]) -> None:
        """These rows have no owner now."""
        self._same_rows.clear()
        for row in rows:
            self._counts.discard(row)
            self._rules.pop(row, None)

    def batch(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> SamplingBatch:
        """Parameters of rows that are about to sample these positions."""
        temperature, typical = self._temperature[rows], np.flatnonzero(self._typical_p[rows] < 1)
        return SamplingBatch(
            filters=Filters(
                temperature=self._moved(temperature),
                top_k=self._moved(self._top_k[rows]),
                top_p=self._moved(self._top_p[rows]),
                min_p=self._moved(self._min_p[rows]),
                typical_p=self._moved(self._typical_p[rows]) if len(typical) else None,
            ),
            seed=self._moved(self._seed[rows]),
            position=self._moved(positions),
            is_greedy=not temperature.any(),
            typical_rows=self._moved(typical) if len(typical) else None,
        )

    def rules(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: NDArray[np.int32]
    ) -> LogitRules | None:
        """How these rows change their logits; None when none does. ``token_ids``: [rows, tokens] of all requests."""
        if not self._rules:
            return self._penalties_alone(rows)
        penalties = self._penalties(rows)
        own = [(place, self._rules[row]) for place, row in enumerate(rows.tolist()) if row in self._rules]
        asking = [(place, rules, token_ids[rows[place], : positions[place]]) for place, rules in own]
        return gather_rules(asking, penalties, self._processors, self._device)

    def _penalties_alone(self, rows: NDArray[np.int64]) -> LogitRules | None:
        """The rules of these rows where none has others than penalties; made once for steps that follow each other."""
        key = rows.tobytes()
        if key not in self._same_rows:
            if len(self._same_rows) == _MOST_SETS_OF_ROWS:
                self._same_rows.clear()
            self._same_rows[key] = gather_rules((), self._penalties(rows), self._processors, self._device)
        return self._same_rows[key]

    def _penalties(self, rows: NDArray[np.int64]) -> Penalties | None:
        on = np.flatnonzero(self._has_penalties[rows])
        if not len(on):
            return None
        slots = self._counts.slots(rows)
        return Penalties(
            counts=self._counts,
            slots=self._moved(slots),
            repetition=self._moved(self._repetition[rows]),
            presence=self._moved(self._presence[rows]),
            frequency=self._moved(self._frequency[rows]),
            on=self._moved(on),
            slots_on=self._moved(slots[on]),
        )

    def _moved(self, values: NDArray[np.generic]) -> Tensor:
        return to_device(torch.from_numpy(values), self._device)


def num_top_of(logprobs: int | None, vocab_size: int) -> int:
    """How many alternatives a request's ``logprobs`` stands for; NO_LOGPROBS for None."""
    if logprobs is None:
        return NO_LOGPROBS
    return vocab_size if logprobs == ALL_LOGPROBS else logprobs
