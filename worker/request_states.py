"""What does a rank know about each request? Rows of preallocated arrays, changed by a step's diff alone."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ipc.errors import ProtocolError
from ipc.messages import NewRequestData


@dataclass(frozen=True, slots=True, kw_only=True)
class _AwaitedTokens:
    """Where the tokens sampled in a step belong, once they are there."""

    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    owners: NDArray[np.int64]
    """Each row's owner number when the step was planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The tokens that each row of a step computes, and whether it samples behind them."""

    starts: NDArray[np.int32]
    ends: NDArray[np.int32]
    samples: NDArray[np.bool_]


class RequestStates:
    """State of the requests in all rows.

    Token ids are kept on the first stage, which embeds them, and on the last one, whose rows may look back on them;
    elsewhere lengths suffice.
    """

    def __init__(self, num_rows: int, max_model_len: int, *, is_first: bool, is_last: bool) -> None:
        self._is_first = is_first
        self._is_last = is_last
        self._max_model_len = max_model_len
        # Untouched pages of a zeroed array cost no memory, so a long limit is free until somebody uses it.
        self.token_ids = np.zeros((num_rows if is_first or is_last else 0, max_model_len), np.int32)
        self.num_prompt = np.zeros(num_rows, np.int32)
        self.num_known = np.zeros(num_rows, np.int32)
        """Tokens that exist or are promised by a step before: a row that computed them all samples the next one."""
        self.num_computed = np.zeros(num_rows, np.int32)
        self._owner = np.zeros(num_rows, np.int64)
        self._awaited: dict[int, _AwaitedTokens] = {}

    def free(self, rows: list[int]) -> None:
        """These rows have no owner now; tokens still on their way to them are dropped."""
        if not rows:
            return
        self._owner[rows] += 1
        self.num_known[rows] = 0
        self.num_computed[rows] = 0

    def add(self, new: NewRequestData) -> None:
        """The row belongs to this request; everything that an earlier owner left is overwritten."""
        row, num_tokens = new.row, len(new.token_ids)
        if not 0 < num_tokens <= self._max_model_len or new.num_computed_tokens >= num_tokens:
            raise ProtocolError(
                "new_requests", f"row {row}: {new.num_computed_tokens} of {num_tokens} tokens computed, limit {self._max_model_len}"
            )
        if self._is_first or self._is_last:
            self.token_ids[row, :num_tokens] = new.token_ids
        self._owner[row] += 1
        self.num_prompt[row] = new.num_prompt_tokens
        self.num_known[row] = num_tokens
        self.num_computed[row] = new.num_computed_tokens

    def advance(self, rows: NDArray[np.int64], num_scheduled: NDArray[np.int64]) -> Span:
        """Count this step's tokens as computed. Every rank does the same, so nobody has to be told who samples."""
        starts = self.num_computed[rows]
        ends = (starts + num_scheduled).astype(np.int32)
        known = self.num_known[rows]
        if (ends > known).any() or (num_scheduled < 1).any():
            i = int(np.flatnonzero((ends > known) | (num_scheduled < 1))[0])
            raise ProtocolError(
                "num_scheduled_tokens", f"row {rows[i]}: {num_scheduled[i]} tokens from {starts[i]} on, {known[i]} are known"
            )
        samples = ends == known
        self.num_computed[rows] = ends
        self.num_known[rows] = known + samples
        return Span(starts=starts, ends=ends, samples=samples)

    def await_tokens(self, step_id: int, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """First stage: the step samples these positions of these rows; ``accept_tokens`` will bring them."""
        self._awaited[step_id] = _AwaitedTokens(rows=rows, positions=positions, owners=self._owner[rows])

    def accept_tokens(self, step_id: int, rows: list[int], token_ids: list[int]) -> None:
        """First stage: store what a step sampled, except for rows that have another owner by now."""
        awaited = self._awaited.pop(step_id, None)
        if awaited is None or not np.array_equal(awaited.rows, rows) or len(token_ids) != len(rows):
            raise ProtocolError("SampledTokens", f"step {step_id} brings tokens for other rows than it sampled")
        keep = (self._owner[awaited.rows] == awaited.owners) & (awaited.positions < self._max_model_len)
        self.token_ids[awaited.rows[keep], awaited.positions[keep]] = np.asarray(token_ids, np.int32)[keep]

    def record(self, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: list[int]) -> None:
        """Last stage, which is not the first: these are the tokens that it just sampled."""
        keep = positions < self._max_model_len
        self.token_ids[rows[keep], positions[keep]] = np.asarray(token_ids, np.int32)[keep]
