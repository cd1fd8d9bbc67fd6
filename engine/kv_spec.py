"""By which rule does the cache of a group of layers grow, and which of it does a token still read?

A *spec* answers for one KV group. New kinds of layers register here; nothing else in the ledger asks for a kind.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ipc.errors import ConfigError
from ipc.messages import KVCacheGroup

ABSENT = -1
"""In a table: no block, because no token to come reads that place."""


class KVSpec(Protocol):
    """The rule of one group. Positions count tokens from the start of the sequence."""

    def first_read(self, position: int) -> int:
        """The oldest position that computing ``position`` reads; it never falls as ``position`` rises."""

    def most_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Most blocks that a sequence of this length holds at once when a step computes at most ``max_chunk`` tokens.

        It never falls as ``num_tokens`` rises.
        """


SpecFactory = Callable[[KVCacheGroup], KVSpec]

SPECS: dict[str, SpecFactory] = {}
"""By ``KVCacheGroup.kind``."""


def register_spec(kind: str) -> Callable[[SpecFactory], SpecFactory]:
    """Let groups of ``kind`` be made by the decorated function."""

    def register(factory: SpecFactory) -> SpecFactory:
        if kind in SPECS:
            raise ValueError(f"KV group kind {kind!r} is registered already")
        SPECS[kind] = factory
        return factory

    return register


def spec_of(group: KVCacheGroup) -> KVSpec:
    """The rule of a group that workers reported. Raises ConfigError for an unknown kind or a window that makes no sense."""
    if group.kind not in SPECS:
        raise ConfigError("KVCacheGroup.kind", f"{group.kind!r} is not one of {', '.join(sorted(SPECS))}")
    return SPECS[group.kind](group)


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token reads all tokens before it."""

    def first_read(self, position: int) -> int:
        return 0

    def most_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A token reads itself and the ``window - 1`` tokens before it."""

    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError("KVCacheGroup.window", f"must be at least 1, got {self.window}")

    def first_read(self, position: int) -> int:
        return max(0, position - self.window + 1)

    def most_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        # An interval of n tokens touches at most (n - 2) // block_size + 2 blocks: its first and last token may stand
        # anywhere in theirs.
        interval = self.window - 1 + max_chunk
        return min(-(-num_tokens // block_size), (interval - 2 + block_size) // block_size + 1)


@register_spec("full")
def _full(group: KVCacheGroup) -> KVSpec:
    return FullAttention()


@register_spec("window")
def _window(group: KVCacheGroup) -> KVSpec:
    return SlidingWindow(group.window)


def most_blocks(specs: Iterable[KVSpec], num_tokens: int, block_size: int, max_chunk: int) -> int:
    """The same over all groups: what the pool must have for one request of this length to run alone."""
    return sum(spec.most_blocks(num_tokens, block_size, max_chunk) for spec in specs)
