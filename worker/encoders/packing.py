"""Which items are encoded in one pass, and how many tokens wide is it? Without torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from ipc.errors import ConfigError

MOST_PADDED = 2
"""Tokens computed for each real one, at most. A power of two is always near enough, unless it is the smallest budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Items that share a pass."""

    items: tuple[int, ...]
    """Their indices in the batch."""
    num_tokens: int
    """Real ones."""
    budget: int | None
    """Tokens of the pass with padding; None when no budget fits, and it is computed without padding or graph."""


def token_budgets(smallest: int, largest: int) -> tuple[int, ...]:
    """All powers of two from ``smallest`` to ``largest`` tokens, ascending.

    Raises:
        ConfigError: when there is none.
    """
    if smallest < 1:
        raise ConfigError("smallest", f"{smallest} must be at least 1 token")
    first, last = (smallest - 1).bit_length(), largest.bit_length() - 1
    if largest < smallest or last < first:
        raise ConfigError("largest", f"no power of two lies between {smallest} and {largest} tokens")
    return tuple(1 << exponent for exponent in range(first, last + 1))


def pack_items(counts: Sequence[int], budgets: Sequence[int]) -> list[Pack]:
    """Every item of ``counts`` tokens in exactly one pack; each pack is computed for at most twice its tokens.

    First fit, decreasing: the largest item first, each into the first pack of the largest budget that has room for it.
    What is larger than that is a pack of its own. Each pack then takes the smallest budget that holds it.

    ``budgets``: ascending; may be empty.
    """
    most = budgets[-1] if budgets else 0
    contents: list[list[int]] = []
    totals: list[int] = []
    for item in sorted(range(len(counts)), key=lambda index: -counts[index]):
        for pack, total in enumerate(totals):
            if total + counts[item] <= most:
                contents[pack].append(item)
                totals[pack] += counts[item]
                break
        else:
            contents.append([item])
            totals.append(counts[item])
    return [
        Pack(items=tuple(items), num_tokens=total, budget=_budget_for(total, budgets))
        for items, total in zip(contents, totals, strict=True)
    ]


def _budget_for(num_tokens: int, budgets: Sequence[int]) -> int | None:
    budget = next((budget for budget in budgets if budget >= num_tokens), None)
    return budget if budget is not None and budget <= MOST_PADDED * num_tokens else None
