"""What does a rank know about each request? Rows of preallocated arrays, changed by a step's diff alone."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ipc.errors import ProtocolError
from ipc.messages import DraftTokens, NewRequestData, RejectedDrafts
from worker.block_table import offsets_within


@dataclass(frozen=True, slots=True, kw_only=True)
class _AwaitedTokens:
    """Where the tokens sampled in a step belong, once they are there."""

    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Of each row's first token."""
    owners: NDArray[np.int64]
    """Each row's owner number when the step was planned."""
    num_drafts: NDArray[np.int64] | None
    """How many tokens more each row may sample; None when none has drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The tokens that each row of a step computes, and whether it samples behind them."""

    starts: NDArray[np.int32]
    ends: NDArray[np.int32]
    samples: NDArray[np.bool_]
    num_drafts: NDArray[np.int64] | None = None
    """Drafts at the end of each row's tokens, all of which sample too; None when no row has any."""

    def first_sampled(self) -> NDArray[np.int64]:
        """Positions that the rows that sample sample first."""
        ends = self.ends[self.samples].astype(np.int64)
        return ends if self.num_drafts is None else ends - self.num_drafts[self.samples]

    def num_drafts_sampled(self) -> NDArray[np.int64] | None:
        """Of the rows that sample."""
        return None if self.num_drafts is None else self.num_drafts[self.samples]


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
        self._num_drafts = np.zeros(num_rows, np.int64)
        """Of the row's last step that had some, until they were taken back."""
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
        self._num_drafts[row] = 0

    def take_back(self, rows: NDArray[np.int64], rejected: RejectedDrafts) -> None:
        """Drafts at the end of these of the step's rows were wrong; their slots will be written again.

        Raises ProtocolError when a row had fewer.
        """
        which, counts = _columns(rows, rejected.indices, rejected.counts, "SchedulerOutput.rejected")
        if (counts > self._num_drafts[which]).any():
            i = int((counts > self._num_drafts[which]).argmax())
            raise ProtocolError(
                "SchedulerOutput.rejected", f"row {which[i]}: {counts[i]} of {self._num_drafts[which[i]]} drafts are taken back"
            )
        self.num_known[which] -= counts
        self.num_computed[which] -= counts
        self._num_drafts[which] = 0

    def add_drafts(
        self, rows: NDArray[np.int64], num_scheduled: NDArray[np.int64], drafts: DraftTokens
    ) -> NDArray[np.int64]:
        """Behind the newest token of these of the step's rows stand drafts, as if they were known. Returns how many per row.

        Raises ProtocolError where the step computes anything but a row's newest token and all its drafts, or where a draft
        is beyond the longest context.
        """
        which, counts = _columns(rows, drafts.indices, drafts.counts, "SchedulerOutput.drafts")
        if int(counts.sum()) != len(drafts.token_ids):
            raise ProtocolError("SchedulerOutput.drafts", f"has {len(drafts.token_ids)} token ids for {counts.sum()} places")
        known = self.num_known[which].astype(np.int64)
        is_wrong = (
            (known - self.num_computed[which] != 1)
            | (num_scheduled[drafts.indices] != 1 + counts)
            | (known + counts > self._max_model_len)
        )
        if is_wrong.any():
            i = int(is_wrong.argmax())
            raise ProtocolError(
                "SchedulerOutput.drafts",
                f"row {which[i]}: {counts[i]} drafts behind {known[i]} tokens, {self.num_computed[which[i]]} of them computed, "
                f"limit {self._max_model_len}",
            )
        if self._is_first:
            places = np.repeat(known, counts) + offsets_within(counts)
            self.token_ids[np.repeat(which, counts), places] = np.asarray(drafts.token_ids, np.int32)
        self.num_known[which] += counts.astype(np.int32)
        self._num_drafts[which] = counts
        num_drafts = np.zeros(len(rows), np.int64)
        num_drafts[drafts.indices] = counts
        return num_drafts

    def advance(
        self, rows: NDArray[np.int64], num_scheduled: NDArray[np.int64], num_drafts: NDArray[np.int64] | None = None
    ) -> Span:
        """Count this step's tokens as computed. Every rank does the same, so nobody has to be told who samples.

        ``num_drafts``: what ``add_drafts`` returned; None for a step without any.
        """
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
        return Span(starts=starts, ends=ends, samples=samples, num_drafts=num_drafts)

    def await_tokens(
        self,
        step_id: int,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        num_drafts: NDArray[np.int64] | None = None,
    ) -> None:
        """First stage: the step samples at these positions of these rows, and at as many more as they have drafts;
        ``accept_tokens`` will bring the tokens."""
        self._awaited[step_id] = _AwaitedTokens(
            rows=rows, positions=positions, owners=self._owner[rows], num_drafts=num_drafts
        )

    def accept_tokens(
        self, step_id: int, rows: list[int], token_ids: list[int], counts: list[int] | None = None
    ) -> None:
        """First stage: store what a step sampled, except for rows that have another owner by now.

        ``counts``: tokens of each row; None for one each.
        """
        awaited = self._awaited.pop(step_id, None)
        if awaited is None or not np.array_equal(awaited.rows, rows):
            raise ProtocolError("SampledTokens", f"step {step_id} brings tokens for other rows than it sampled")
        is_ours = self._owner[awaited.rows] == awaited.owners
        where, positions = awaited.rows, awaited.positions
        if awaited.num_drafts is not None and counts is not None:
            of_rows = np.asarray(counts, np.int64)
            if of_rows.shape != where.shape or (of_rows < 1).any() or (of_rows > 1 + awaited.num_drafts).any():
                raise ProtocolError("SampledTokens.counts", f"step {step_id} brings more or fewer tokens than it sampled")
            positions = np.repeat(positions, of_rows) + offsets_within(of_rows)
            where, is_ours = np.repeat(where, of_rows), np.repeat(is_ours, of_rows)
        elif counts is not None and counts.count(1) != len(counts):
            raise ProtocolError("SampledTokens.counts", f"step {step_id} brings more or fewer tokens than it sampled")
        if len(token_ids) != len(where):
            raise ProtocolError("SampledTokens", f"step {step_id} brings tokens for other rows than it sampled")
        keep = is_ours & (positions < self._max_model_len)
        self.token_ids[where[keep], positions[keep]] = np.asarray(token_ids, np.int32)[keep]

    def record(self, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: list[int]) -> None:
        """Last stage, which is not the first: these are the tokens that it just sampled."""
        keep = positions < self._max_model_len
        self.token_ids[rows[keep], positions[keep]] = np.asarray(token_ids, np.int32)[keep]


def _columns(
    rows: NDArray[np.int64], indices: list[int], counts: list[int], field: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the step that a plan names by index, each once, and a positive number for each."""
    fits = len(indices) == len(counts) == len(set(indices)) and min(counts, default=1) > 0
    if not fits or not 0 <= min(indices, default=0) <= max(indices, default=-1) < len(rows):
        raise ProtocolError(field, f"has counts {counts} for rows number {indices} of {len(rows)}")
    return rows[indices], np.asarray(counts, np.int64)
