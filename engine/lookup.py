"""Which tokens will a request go on with, if it repeats what stands in its prompt or in its answer so far?

Drafts are earned. With each token that comes, the lookup says which one it expects next, at no cost to anybody; only when
its expectations were right some times in a row are tokens computed on their account.
"""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NGRAM = 3
"""Equal tokens that make two places look alike."""

LEAST_RUN = 2
"""Right expectations in a row that earn drafts: then NGRAM + 2 tokens have been repeated."""

_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_WORD = 0xFFFFFFFF
_LEAST_BITS = 8
"""Of a place in the table."""


class Lookup:
    """One request's tokens, and where each group of NGRAM of them stood last. Twenty to forty bytes a token.

    ``append`` takes constant time, but for the moments when the table is doubled.
    """

    def __init__(self, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        self._tokens = array("i", np.asarray(token_ids, np.int32).tobytes())
        self._bits = _LEAST_BITS
        self._table = array("i")
        """By hash of NGRAM tokens, the place behind the newest ones, or behind others whose hash is the same; 0 for none.
        What is lost to others, about one in six, is found a token later."""
        self._next = 0
        """Place of an earlier token, which is expected to come next; 0 for no expectation."""
        self.run = 0
        """Expectations that were right in a row, up to the newest token."""
        self._build()
        self._look(True)

    def append(self, token_id: int) -> None:
        """The sequence goes on with this token."""
        tokens, place = self._tokens, self._next
        is_right = place > 0 and tokens[place] == token_id
        self.run = self.run + 1 if is_right else 0
        if place:
            # Behind one token that was changed the rest may be repeated as before, until something looks more alike.
            self._next = place + 1
        tokens.append(token_id)
        if len(tokens) >> (self._bits - 2):
            self._build()
        self._look(not is_right)

    def num_earned(self, most: int) -> int:
        """Drafts that may be made now."""
        return min(self.run, most) if self.run >= LEAST_RUN else 0

    def drafts(self, count: int) -> list[int]:
        """The tokens that are expected next; where the sequence ends, what was found repeats itself. Empty without an
        expectation."""
        tokens, place = self._tokens, self._next
        if not place or count < 1:
            return []
        found = tokens[place : place + count].tolist()
        while len(found) < count:
            found.append(found[len(found) + place - len(tokens)])
        return found

    def _look(self, wants_place: bool) -> None:
        """For a place that looks like the end, if one is wanted; from now on the end is such a place itself."""
        tokens = self._tokens
        if len(tokens) < NGRAM:
            return
        end = tokens[-NGRAM:]
        first, second, third = end
        mixed = first * _FACTORS[0] + second * _FACTORS[1] + third * _FACTORS[2]
        key = (mixed & _WORD) >> (32 - self._bits)
        if wants_place:
            place = self._table[key]
            if place and tokens[place - NGRAM : place] == end:
                self._next = place
        self._table[key] = len(tokens)

    def _build(self) -> None:
        """A table of at least four times as many entries as there are tokens; the end is not in it yet."""
        while len(self._tokens) >> (self._bits - 2):
            self._bits += 1
        table = np.zeros(1 << self._bits, np.int32)
        tokens = np.frombuffer(self._tokens, np.int32).astype(np.uint64)
        num_groups = len(tokens) - NGRAM
        if num_groups > 0:
            mixed = sum(tokens[i : i + num_groups] * np.uint64(factor) for i, factor in enumerate(_FACTORS))
            keys = (mixed & np.uint64(_WORD)) >> np.uint64(32 - self._bits)
            table[keys] = np.arange(NGRAM, NGRAM + num_groups)
        self._table = array("i", table.tobytes())
