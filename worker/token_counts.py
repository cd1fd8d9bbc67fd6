"""How often does each token occur in a row's prompt and answer? For the rows that ask for penalties."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.transfer import to_device

_FIRST_SLOTS = 4
_NO_SLOT = -1


class TokenCounts:
    """Counts on the logits' device, in slots that exist only for rows with penalties: a vocabulary each, as the kernel reads it."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._slot_of_row = np.full(num_rows, _NO_SLOT, np.int64)
        self._unused: list[int] = []
        self.in_prompt = torch.zeros(0, -(-vocab_size // 32), dtype=torch.int32, device=device)
        """[slots, V / 32], bit i of word w: token 32 w + i is in the prompt."""
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        """[slots, V]: how often the answer has each token."""

    def add(self, row: int, prompt: NDArray[np.int32], answer: NDArray[np.int32]) -> None:
        """The row counts from here on, starting from these tokens."""
        if not self._unused:
            self._grow()
        slot = self._slot_of_row[row] = self._unused.pop()
        words = token_bits(prompt, self._vocab_size)
        counts = np.bincount(answer, minlength=self._vocab_size).astype(np.int32)
        self.in_prompt[slot] = to_device(torch.from_numpy(words), self._device)
        self.counts[slot] = to_device(torch.from_numpy(counts), self._device)

    def discard(self, row: int) -> None:
        """The row counts no more, if it did."""
        if (slot := int(self._slot_of_row[row])) != _NO_SLOT:
            self._unused.append(slot)
            self._slot_of_row[row] = _NO_SLOT

    def slots(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of each row; 0 for those that don't count, whose penalties are off."""
        return np.maximum(self._slot_of_row[rows], 0)

    def count(self, slots: Tensor, token_ids: Tensor) -> None:
        """These slots' answers got these tokens; both [N]."""
        self.counts.index_put_((slots, token_ids), self._one, accumulate=True)

    def _grow(self) -> None:
        num_slots = len(self.counts)
        num_more = max(_FIRST_SLOTS, num_slots)
        self.in_prompt = torch.cat((self.in_prompt, self.in_prompt.new_zeros(num_more, self.in_prompt.shape[1])))
        self.counts = torch.cat((self.counts, self.counts.new_zeros(num_more, self._vocab_size)))
        self._unused += range(num_slots + num_more - 1, num_slots - 1, -1)


def token_bits(token_ids: Sequence[int] | NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """[V / 32]: bit i of word w is set if token 32 w + i is among these."""
    is_in = np.zeros(32 * -(-vocab_size // 32), np.bool_)
    is_in[np.asarray(token_ids, np.int64)] = True
    return np.packbits(is_in, bitorder="little").view(np.int32)
