"""How do requests change their logits before a token is drawn? In the order of ``LogitRules.apply``."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.messages import NewRequestData
from ipc.params import SamplingParams
from kernels.penalties import apply_penalties
from kernels.token_mask import apply_token_mask
from worker.logits_processors import LogitsProcessor, ProcessedRow
from worker.token_counts import TokenCounts, token_bits
from worker.transfer import to_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """One request's rules, but for the penalties; made when it takes its row."""

    request_id: str
    num_prompt: int
    params: SamplingParams
    bias_ids: NDArray[np.int64]
    biases: NDArray[np.float32]
    allowed: NDArray[np.int32] | None
    """Bit i of word w: token 32 w + i may come; None for all."""

    ending_ids: tuple[int, ...]
    """Barred from the first ``min_tokens`` tokens."""

    @classmethod
    def of(cls, new: NewRequestData, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "RowRules | None":
        """None when it has none of these rules."""
        params = new.params
        allowed = params.allowed_token_ids
        if not (params.logit_bias or allowed or params.min_tokens or params.bad_word_ids or params.logits_processors):
            return None
        return cls(
            request_id=new.request_id,
            num_prompt=new.num_prompt_tokens,
            params=params,
            bias_ids=np.array([token_id for token_id, _ in params.logit_bias], np.int64),
            biases=np.array([bias for _, bias in params.logit_bias], np.float32),
            allowed=None if allowed is None else token_bits(allowed, vocab_size),
            ending_ids=params.ending_token_ids(eos_token_ids),
        )

    def barred(self, answer: NDArray[np.int32]) -> list[int]:
        """Tokens that can't follow this answer."""
        found = [word[-1] for word in self.params.bad_word_ids if _ends_with(answer, word[:-1])]
        if len(answer) < self.params.min_tokens:
            found += self.ending_ids
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Of S rows, as ``kernels.penalties`` has them."""

    counts: TokenCounts
    slots: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    on: Tensor
    """[N] int64: places among the S rows of those that count."""
    slots_on: Tensor
    """[N] int64: their slots."""

    def apply(self, logits: Tensor) -> None:
        apply_penalties(
            logits, self.slots, self.counts.in_prompt, self.counts.counts, self.repetition, self.presence, self.frequency
        )

    def count(self, sampled: Tensor) -> None:
        """Their answers got these tokens, [S]."""
        self.counts.count(self.slots_on, sampled[self.on])


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRules:
    """What the rows of one step ask for, on the logits' device; each part only where a row does. ``[N] places`` are among
    the rows that sample."""

    processed: tuple[tuple[LogitsProcessor, Tensor, list[ProcessedRow]], ...]
    """Processors with the places and descriptions of their rows."""

    bias: tuple[Tensor, Tensor, Tensor] | None
    """Places, token ids, and what is added."""

    penalties: Penalties | None
    allowed: tuple[Tensor, Tensor] | None
    """Masks [N, V / 32] and places."""

    barred: tuple[Tensor, Tensor] | None
    """Places and token ids."""

    narrowed: Tensor | None
    """Places of rows that may be left without any token."""

    def apply(self, logits: Tensor) -> None:
        """Change [S, V] logits: processors first, then biases, penalties, and last of all what can't come."""
        for process, places, rows in self.processed:
            logits[places] = _processed(process, logits[places], rows)
        if self.bias is not None:
            places, token_ids, biases = self.bias
            logits.index_put_((places, token_ids), biases, accumulate=True)
        if self.penalties is not None:
            self.penalties.apply(logits)
        if self.allowed is not None:
            masks, places = self.allowed
            apply_token_mask(logits, masks, places)
        if self.barred is not None:
            logits[self.barred] = -torch.inf

    def count(self, sampled: Tensor) -> None:
        """These are the tokens, [S], that the rows got: later steps' penalties know of them."""
        if self.penalties is not None:
            self.penalties.count(sampled)


AskingRow = tuple[int, RowRules, NDArray[np.int32]]
"""A row that has rules: its place, the rules, and all of its tokens so far, prompt and answer."""


def gather_rules(
    asking: Sequence[AskingRow],
    penalties: Penalties | None,
    processors: dict[str, LogitsProcessor],
    device: torch.device,
) -> LogitRules | None:
    """The rules of a step's rows; None when there are none."""
    if not asking and penalties is None:
        return None
    biased = [(place, own) for place, own, _ in asking if len(own.biases)]
    allowed = [(place, own.allowed) for place, own, _ in asking if own.allowed is not None]
    barred = [(place, own.barred(tokens[own.num_prompt :])) for place, own, tokens in asking]
    barred = [(place, token_ids) for place, token_ids in barred if token_ids]

    def moved(values: NDArray[np.generic]) -> Tensor:
        return to_device(torch.from_numpy(values), device)

    def repeated(counts: Sequence[tuple[int, int]]) -> Tensor:
        places, times = np.array(counts, np.int64).T
        return moved(np.repeat(places, times))

    return LogitRules(
        processed=tuple(_calls(asking, processors, device)),
        bias=(
            repeated([(place, len(own.biases)) for place, own in biased]),
            moved(np.concatenate([own.bias_ids for _, own in biased])),
            moved(np.concatenate([own.biases for _, own in biased])),
        ) if biased else None,
        penalties=penalties,
        allowed=(
            moved(np.stack([mask for _, mask in allowed])), moved(np.array([place for place, _ in allowed], np.int64))
        ) if allowed else None,
        barred=(
            repeated([(place, len(token_ids)) for place, token_ids in barred]),
            moved(np.concatenate([np.array(token_ids, np.int64) for _, token_ids in barred])),
        ) if barred else None,
        narrowed=moved(np.array([place for place, *_ in asking], np.int64)) if asking else None,
    )  # fmt: skip


def _processed(process: LogitsProcessor, logits: Tensor, rows: list[ProcessedRow]) -> Tensor:
    try:
        process(logits, rows)
    except Exception:  # noqa: BLE001 what a request gave as arguments must not end the stage
        logger.exception("a logits processor failed; the requests that it was called for end with an error")
        logits.fill_(torch.nan)
    return logits


def _calls(
    asking: Sequence[AskingRow],
    processors: dict[str, LogitsProcessor],
    device: torch.device,
) -> list[tuple[LogitsProcessor, Tensor, list[ProcessedRow]]]:
    of_name: dict[str, list[tuple[int, ProcessedRow]]] = {}
    for place, own, tokens in asking:
        for name, arguments in own.params.logits_processors:
            row = ProcessedRow(
                request_id=own.request_id, token_ids=tokens, num_prompt_tokens=own.num_prompt,
                arguments=dict(arguments),
            )  # fmt: skip
            of_name.setdefault(name, []).append((place, row))
    return [
        (process, to_device(torch.tensor([place for place, _ in of_name[name]]), device), [row for _, row in of_name[name]])
        for name, process in processors.items()
        if name in of_name
    ]


def _ends_with(answer: NDArray[np.int32], beginning: tuple[int, ...]) -> bool:
    return not beginning or tuple(answer[-len(beginning) :].tolist()) == beginning
