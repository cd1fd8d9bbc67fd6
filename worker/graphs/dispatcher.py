"""Which graph serves a step? The smallest captured one that has room for it, found in a table."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from worker.graphs.modes import CudagraphMode


class BatchDescriptor(NamedTuple):
    """The shape of a step, padding included."""

    num_tokens: int
    num_requests: int | None
    """None: any number, as attention isn't captured."""
    is_uniform_decode: bool
    """Every request has one query."""


class Dispatch(NamedTuple):
    """How a step is computed: with a graph of this shape, or eagerly (mode NONE) as it is."""

    mode: CudagraphMode
    """NONE, PIECEWISE or FULL."""
    descriptor: BatchDescriptor


class CudagraphDispatcher:
    """Knows what is captured. Without a graph that has room a step runs eagerly."""

    def __init__(self, captured: Iterable[Dispatch]) -> None:
        captured = sorted(captured, key=lambda dispatch: dispatch.descriptor.num_tokens)
        self._decodes = _table([dispatch for dispatch in captured if dispatch.descriptor.is_uniform_decode])
        self._others = _table([dispatch for dispatch in captured if not dispatch.descriptor.is_uniform_decode])

    def dispatch(self, num_tokens: int, num_requests: int, *, is_uniform_decode: bool) -> Dispatch:
        """For a step of at least one token."""
        if is_uniform_decode and num_tokens < len(self._decodes):
            return self._decodes[num_tokens]
        if num_tokens < len(self._others):
            found = self._others[num_tokens]
            if found.descriptor.num_requests is None or num_requests <= found.descriptor.num_requests:
                return found
        return Dispatch(CudagraphMode.NONE, BatchDescriptor(num_tokens, num_requests, is_uniform_decode))


def shapes_to_capture(mode: CudagraphMode, sizes: Sequence[int], *, max_num_seqs: int) -> list[Dispatch]:
    """All that a mode wants, largest first, so that smaller graphs find the memory of larger ones.

    Steps of decodes have no more tokens than there are sequences: of larger sizes one is enough. A step whose attention
    runs eagerly needs no graphs of its own for decodes.
    """
    shapes = []
    if mode.of_decodes is CudagraphMode.FULL:
        largest = min((size for size in sizes if size >= max_num_seqs), default=sizes[-1])
        shapes += [
            Dispatch(CudagraphMode.FULL, BatchDescriptor(size, size, True)) for size in sizes if size <= largest
        ]
    if mode.of_mixed is CudagraphMode.FULL:
        shapes += [
            Dispatch(CudagraphMode.FULL, BatchDescriptor(size, min(size, max_num_seqs), False)) for size in sizes
        ]
    elif mode.of_mixed is CudagraphMode.PIECEWISE:
        shapes += [Dispatch(CudagraphMode.PIECEWISE, BatchDescriptor(size, None, False)) for size in sizes]
    return sorted(shapes, key=lambda dispatch: -dispatch.descriptor.num_tokens)


def _table(ascending: Sequence[Dispatch]) -> list[Dispatch]:
    """By number of tokens, from 0 up to the largest size."""
    table: list[Dispatch] = []
    for dispatch in ascending:
        table += [dispatch] * (dispatch.descriptor.num_tokens + 1 - len(table))
    return table
