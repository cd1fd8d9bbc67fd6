"""Graphs on the CPU that are as strict as a GPU's: they know addresses, not tensors, and capturing computes nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from worker.graphs.graph import Graph, Work


def tensors_of(values: Any) -> list[Tensor]:
    """In order, whatever tuples they are in."""
    if values is None:
        return []
    return [values] if isinstance(values, Tensor) else [tensor for value in values for tensor in tensors_of(value)]


def places(values: Any) -> list[tuple[int, torch.Size, tuple[int, ...], torch.dtype]]:
    return [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors_of(values)]


class FakePool:
    """Records what is done with its graphs, in order: their numbers by what was done."""

    def __init__(self, has_memory: Callable[[int], bool] = lambda number: True) -> None:
        """``has_memory``: whether the graph of this number can be captured."""
        self.graphs: list[FakeGraph] = []
        self.captured: list[int] = []
        self.released: list[int] = []
        self.replayed: list[int] = []
        self.has_memory = has_memory

    def graph(self) -> "FakeGraph":
        self.graphs.append(FakeGraph(self, len(self.graphs)))
        return self.graphs[-1]


class FakeGraph(Graph):
    def __init__(self, pool: FakePool, number: int) -> None:
        self._pool = pool
        self._number = number

    def capture(self, work: Work, inputs: Any) -> Any:
        if not self._pool.has_memory(self._number):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        self._work, self._inputs = work, inputs
        self._results = work(inputs)
        taken = {place[0] for place in places(inputs)}
        for tensor in tensors_of(self._results):
            # Nothing was computed: what is there now must not be used. What only passes through is as it was.
            if tensor.is_floating_point() and tensor.data_ptr() not in taken:
                tensor.fill_(torch.nan)
        self._pool.captured.append(self._number)
        return self._results

    def replay(self, inputs: Any) -> Any:
        assert places(inputs) == places(self._inputs), "a graph reads where it read when it was captured"
        assert self._number in self._pool.released, "released before it is used"
        for kept, new in zip(tensors_of(self._results), tensors_of(self._work(self._inputs)), strict=True):
            if kept.data_ptr() != new.data_ptr():
                kept.copy_(new)
        self._pool.replayed.append(self._number)
        return self._results

    def release(self) -> None:
        assert self._number in self._pool.captured
        self._pool.released.append(self._number)
