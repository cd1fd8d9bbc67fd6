"""How do a step's log probabilities get into the columns that travel to the core?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.messages import LogprobColumns
from worker.input_batch import PromptSlice, SamplingRows
from worker.sampler import gather_logprobs, nan_rows, processed_logits
from worker.sampling_states import NO_LOGPROBS

MAX_LOGITS_BYTES = 64 << 20
"""Logits of prompt positions that exist at once: more would save no time and take gigabytes for a long chunk."""

Gathered = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]
"""[N, 1 + num_top] ids and logprobs, [N] ranks."""


class _Columns:
    """LogprobColumns being filled, entry by entry."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.starts: list[int] = []
        self.num_positions: list[int] = []
        self.num_top: list[int] = []
        self.token_ids: list[NDArray[np.int32]] = []
        self.logprobs: list[NDArray[np.float32]] = []
        self.ranks: list[NDArray[np.int32]] = []

    def add(self, row: int, start: int, num_top: int, gathered: Gathered) -> None:
        token_ids, logprobs, ranks = gathered
        num_top = min(num_top, token_ids.shape[1] - 1)  # a tiny vocabulary has no more
        self.rows.append(row)
        self.starts.append(start)
        self.num_positions.append(len(ranks))
        self.num_top.append(num_top)
        self.token_ids.append(token_ids[:, : 1 + num_top].reshape(-1))
        self.logprobs.append(logprobs[:, : 1 + num_top].reshape(-1))
        self.ranks.append(ranks)

    def freeze(self) -> LogprobColumns:
        return LogprobColumns(
            rows=self.rows,
            starts=self.starts,
            num_positions=self.num_positions,
            num_top=self.num_top,
            token_ids=np.concatenate(self.token_ids),
            logprobs=np.concatenate(self.logprobs),
            ranks=np.concatenate(self.ranks),
        )


@dataclass(frozen=True, slots=True)
class RawLogits:
    """Logits of rows that want log probabilities of them, as they were before rules changed them."""

    places: list[int]
    """Of these rows among those that sample."""

    logits: Tensor
    """[N, V]."""


def raw_logits(logits: Tensor, sampling: SamplingRows) -> RawLogits | None:
    """Of rows that ask; None when none does. ``logits``: [S', V]."""
    places = np.flatnonzero((sampling.num_logprobs != NO_LOGPROBS) & ~sampling.wants_processed).tolist()
    return RawLogits(places, logits[torch.tensor(places, device=logits.device)]) if places else None


def sampled_logprobs(
    raw: RawLogits | None, logits: Tensor, sampled: Tensor, sampling: SamplingRows
) -> LogprobColumns | None:
    """Of the tokens just sampled, for rows that ask; None when none does. ``logits``: [S', V] after all rules."""
    found = [] if raw is None else _of_places(raw.places, raw.logits, sampled, sampling)
    places = np.flatnonzero((sampling.num_logprobs != NO_LOGPROBS) & sampling.wants_processed).tolist()
    if places:
        index = torch.tensor(places, device=logits.device)
        found += _of_places(places, processed_logits(logits[index], sampling.params.filters.of(index)), sampled, sampling)
    columns = _Columns()
    for place, gathered in sorted(found, key=itemgetter(0)):
        num_top = int(sampling.num_logprobs[place])
        columns.add(int(sampling.rows[place]), int(sampling.positions[place]), num_top, gathered)
    return columns.freeze() if found else None


def _of_places(
    places: list[int], logits: Tensor, sampled: Tensor, sampling: SamplingRows
) -> list[tuple[int, Gathered]]:
    """Rows that want as many alternatives are worked on together."""
    wanted, found = sampling.num_logprobs[places], []
    for num_top in np.unique(wanted).tolist():
        some = np.flatnonzero(wanted == num_top).tolist()
        chosen = [places[i] for i in some]
        token_ids = sampled[torch.tensor(chosen, device=logits.device)]
        ids, logprobs, ranks = _gather(logits[torch.tensor(some, device=logits.device)], token_ids, num_top)
        ones = [slice(k, k + 1) for k in range(len(chosen))]
        found += [(place, (ids[one], logprobs[one], ranks[one])) for place, one in zip(chosen, ones, strict=True)]
    return found


def prompt_logprobs(
    hidden: Tensor, slices: Sequence[PromptSlice], head: Callable[[Tensor], Tensor], vocab_size: int
) -> tuple[LogprobColumns | None, list[int]]:
    """Of prompt tokens, and the rows where a logit was NaN. ``hidden``: [T, C] of the step; ``head`` makes logits."""
    if not slices:
        return None, []
    columns, broken = _Columns(), []
    most = max(16, MAX_LOGITS_BYTES // (4 * vocab_size))
    for part in slices:
        token_ids = torch.from_numpy(part.token_ids.astype(np.int64)).to(hidden.device)
        pieces: list[Gathered] = []
        for start in range(0, len(part.token_ids), most):
            end = min(start + most, len(part.token_ids))
            logits = head(hidden[part.hidden_start + start : part.hidden_start + end])
            if bool(nan_rows(logits).any()) and part.row not in broken:
                broken.append(part.row)
            pieces.append(_gather(logits, token_ids[start:end], part.num_top))
        ids, logprobs, ranks = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        columns.add(part.row, part.start, part.num_top, (ids, logprobs, ranks))
    return columns.freeze(), broken


def _gather(logits: Tensor, token_ids: Tensor, num_top: int) -> Gathered:
    ids, logprobs, ranks = gather_logprobs(logits, token_ids, num_top)
    return ids.cpu().numpy(), logprobs.cpu().numpy(), ranks.cpu().numpy()
