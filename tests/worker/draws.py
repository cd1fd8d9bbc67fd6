"""Are draws those of a distribution? The chi-square test."""

import torch
from torch import Tensor

from tests.sampling_reference import Array

UNFAIR = 1e-4
"""Of fair tables so many are called unfair; seeds are fixed, so that none is."""

FEWEST = 10
"""Expected draws of a token that is looked at alone; rarer ones are put together."""


def assert_fair(tokens: Tensor, shares: Array) -> None:
    """None was drawn whose share is 0, and the others as often as their shares make likely."""
    expected = torch.from_numpy(shares) * len(tokens)
    counts = torch.bincount(tokens, minlength=len(shares)).double()
    assert counts[expected == 0].sum() == 0, "a token was drawn that can't come"
    is_common = expected >= FEWEST
    counts, expected = (torch.cat((x[is_common], x[~is_common].sum()[None])) for x in (counts, expected))
    if expected[-1] < FEWEST:
        counts, expected = counts[:-1], expected[:-1]
    assert len(expected) > 1, "the test is too small to see anything"
    chi_square = ((counts - expected) ** 2 / expected).sum()
    p = torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), chi_square / 2)
    assert p > UNFAIR, f"chi-square {chi_square:.1f} with {len(expected) - 1} degrees of freedom: p = {p:.2g}"
