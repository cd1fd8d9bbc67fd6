"""What does one step compute? From rows and a plan to the step's flat tensors."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.errors import ProtocolError
from ipc.messages import DraftTokens, SchedulerOutput
from worker.attention import CommonAttentionMetadata
from worker.block_table import BlockTable, offsets_within
from worker.graphs.stage_graphs import PaddedStep
from worker.logit_rules import LogitRules
from worker.request_states import RequestStates, Span
from worker.sampler import SamplingBatch
from worker.sampling_states import NO_LOGPROBS, SamplingStates
from worker.transfer import to_device
from worker.verification import NO_DRAFT, DraftPlaces


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """The rows of a step that get a token, in batch order; a row with drafts once for each place that it samples at."""

    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Index in its sequence of the token that each place samples."""

    hidden_index: Tensor
    """[S'] int64: where each place's last token is among the step's tokens."""

    params: SamplingBatch
    rules: LogitRules | None
    """What the rows want changed before a token is drawn; None when no row does."""

    num_logprobs: NDArray[np.int32]
    """Top alternatives wanted with each token; NO_LOGPROBS for no logprobs at all."""

    wants_processed: NDArray[np.bool_]
    """Logprobs are of the distribution that the token is drawn from."""

    drafts: DraftPlaces | None = None
    """None when no row has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSlice:
    """Consecutive tokens of one row's prompt whose log probabilities this step yields."""

    row: int
    start: int
    """Number of the first of these tokens in its sequence; the hidden state before it predicts it."""

    hidden_start: int
    """Place of that hidden state among the step's tokens."""

    token_ids: NDArray[np.int32]
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """Rows and counts of a plan beside what they mean for the sequences."""

    rows: NDArray[np.int64]
    num_scheduled: NDArray[np.int64]
    query_starts: NDArray[np.int64]
    """[S + 1] cumulative."""

    span: Span
    positions: NDArray[np.int64]
    """[T]."""

    owners: NDArray[np.int64]
    """[T]: which row of the step each token is of."""

    @property
    def has_one_each(self) -> bool:
        """Whether every row computes one token."""
        return len(self.positions) == len(self.rows)

    def num_decodes(self) -> int:
        """Leading rows that compute one token."""
        if self.has_one_each:
            return len(self.rows)
        longer = np.flatnonzero(self.num_scheduled != 1)
        return int(longer[0]) if len(longer) else len(self.rows)

    @classmethod
    def of(cls, rows: NDArray[np.int64], num_scheduled: NDArray[np.int64], span: Span) -> "StepTokens":
        positions, owners = span.starts.astype(np.int64), np.arange(len(rows))
        if len(rows) and int(num_scheduled.max()) == 1:
            # Steps of decodes alone are many and small: what each operation costs beside its work counts.
            query_starts = np.arange(len(rows) + 1)
        else:
            query_starts = np.zeros(len(rows) + 1, np.int64)
            np.cumsum(num_scheduled, out=query_starts[1:])
            positions = np.repeat(positions, num_scheduled) + offsets_within(num_scheduled)
            owners = np.repeat(owners, num_scheduled)
        return cls(
            rows=rows, num_scheduled=num_scheduled, query_starts=query_starts, span=span, positions=positions, owners=owners
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerStep:
    """A step's inputs as they are, for a forward pass that no graph serves."""

    positions: Tensor
    """[T] int64."""

    metadata: tuple[Any, ...]
    """For each layer of the stage, from the attention backend's builder; empty when there are no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """One step, ready to be computed; tensors of the model are on its device. Valid for this step alone."""

    plan: SchedulerOutput
    tokens: StepTokens
    num_tokens: int
    forward: EagerStep | PaddedStep

    sampling: SamplingRows | None
    """Last stage only, and None when no row samples."""

    prompt_slices: tuple[PromptSlice, ...]
    """Last stage only."""


def gather_token_ids(states: RequestStates, step: StepTokens) -> NDArray[np.int64]:
    """[T]: the tokens that the first stage embeds."""
    return states.token_ids[step.rows[step.owners], step.positions].astype(np.int64)


def attention_inputs(table: BlockTable, step: StepTokens) -> CommonAttentionMetadata:
    """Where the step's keys and values go in the layers of one KV group, and what each sequence may look at.

    Raises ProtocolError when a token has no block.
    """
    seq_lens = step.span.ends
    block_table = table.gather(step.rows, seq_lens)
    owners = step.owners
    blocks = block_table[owners, step.positions // table.block_size].astype(np.int64)
    if len(blocks) and blocks.min() < 0:
        raise ProtocolError("block_ids", f"row {step.rows[owners[blocks.argmin()]]} computes a token that has no block")
    slots = blocks * table.block_size + step.positions % table.block_size
    return CommonAttentionMetadata(
        query_starts=torch.from_numpy(step.query_starts.astype(np.int32)),
        seq_lens=torch.from_numpy(seq_lens),
        block_table=torch.from_numpy(block_table),
        slots=torch.from_numpy(slots),
        num_decodes=step.num_decodes(),
        max_seq_len=int(seq_lens.max()),
    )


def sampling_rows(
    states: RequestStates, sampling: SamplingStates, step: StepTokens, device: torch.device, drafts: DraftTokens | None
) -> SamplingRows | None:
    """Parameters of the rows that computed their last known token; None when there is no such row."""
    chosen = np.flatnonzero(step.span.samples)
    if not len(chosen):
        return None
    rows, positions = step.rows[chosen], step.span.ends[chosen].astype(np.int64)
    hidden_index, places = step.query_starts[chosen + 1] - 1, None
    num_drafts = step.span.num_drafts
    if drafts is not None and num_drafts is not None:
        counts = 1 + num_drafts[chosen]
        places = _draft_places(counts, num_drafts[chosen], drafts)
        back = np.repeat(counts, counts) - 1 - offsets_within(counts)
        rows = np.repeat(rows, counts)
        positions = np.repeat(positions, counts) - back
        hidden_index = np.repeat(hidden_index, counts) - back
    return SamplingRows(
        rows=rows,
        positions=positions,
        hidden_index=to_device(torch.from_numpy(hidden_index), device),
        params=sampling.batch(rows, positions),
        rules=sampling.rules(rows, positions, states.token_ids),
        num_logprobs=sampling.num_logprobs[rows],
        wants_processed=sampling.wants_processed[rows],
        drafts=places,
    )


def _draft_places(counts: NDArray[np.int64], num_drafts: NDArray[np.int64], drafts: DraftTokens) -> DraftPlaces:
    """``counts``: places of each row that samples, its newest token's and those of its drafts."""
    ends = np.cumsum(counts)
    expected = np.full(int(ends[-1]), NO_DRAFT, np.int32)
    order = np.argsort(drafts.indices, kind="stable")
    token_ids = np.split(np.asarray(drafts.token_ids, np.int32), np.cumsum(drafts.counts)[:-1])
    is_draft = offsets_within(counts) < np.repeat(num_drafts, counts)
    expected[is_draft] = np.concatenate([token_ids[i] for i in order])
    return DraftPlaces(starts=ends - counts, expected=expected)


def prompt_slices(states: RequestStates, sampling: SamplingStates, step: StepTokens) -> tuple[PromptSlice, ...]:
    """What rows that ask for logprobs of their prompt get from this chunk of it."""
    asking = np.flatnonzero(sampling.num_prompt_logprobs[step.rows] != NO_LOGPROBS)
    slices = []
    for i in asking.tolist():
        row, start = int(step.rows[i]), int(step.span.starts[i]) + 1
        end = min(int(step.span.ends[i]) + 1, int(states.num_prompt[row]))
        if end > start:
            slices.append(PromptSlice(
                row=row,
                start=start,
                hidden_start=int(step.query_starts[i]),
                token_ids=states.token_ids[row, start:end].copy(),
                num_top=int(sampling.num_prompt_logprobs[row]),
            ))
    return tuple(slices)
