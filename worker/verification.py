"""Which drafts stand? Those that are what was sampled in their place, up to the first that is not."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_DRAFT = -1
"""Equal to no token: behind a row's last draft nothing is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlaces:
    """How the places that a step samples at belong to rows, some of which have drafts. R rows, S' places."""

    starts: NDArray[np.int64]
    """[R]: each row's first place; its others follow."""

    expected: NDArray[np.int32]
    """[S']: the draft for the position that a place samples; NO_DRAFT at a row's last one."""

    def verify(self, sampled: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens that each row gets, [R]: the drafts that stand and one more; and the places, [S'], that these are from."""
        wrong = np.flatnonzero(sampled != self.expected)
        # Every row has a last place, which is wrong at any rate.
        lasts = wrong[np.searchsorted(wrong, self.starts)]
        counts = lasts - self.starts + 1
        num_places = np.diff(self.starts, append=len(sampled))
        return counts, np.arange(len(sampled)) <= np.repeat(lasts, num_places)
