"""What is a graph? Work on tensors that stay where they are, recorded once and repeated without the host in between.

On a GPU that is a CUDA graph: a repeat launches what was recorded, on the addresses that it was recorded with. On the CPU
the work is done again, through the same buffers: everything around a graph is the same code there.

``inputs`` and results are tensors, in tuples and named tuples of any depth, with None where there is nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[Any], Any]
"""From inputs to results, without a look at any value: it must ask the device for nothing."""


class Graph(ABC):
    """One piece of work. Captured once, after it has been run as it will be captured, then replayed."""

    @abstractmethod
    def capture(self, work: Work, inputs: Any) -> Any:
        """Record it; results that hold nothing yet, to record with what comes behind this piece.

        Raises torch.OutOfMemoryError.
        """

    @abstractmethod
    def replay(self, inputs: Any) -> Any:
        """Do it again with what lies in the inputs now, which are those of the capture; the results.

        They are valid until a graph of the same pool is replayed.
        """

    def release(self) -> None:
        """All that reads the results is recorded: graphs captured from now on may use their memory again."""
        return


class GraphPool(Protocol):
    """Makes graphs that share memory: only one of them is replayed at a time."""

    def graph(self) -> Graph:
        """A new one."""


class PlainGraph(Graph):
    """Replays by doing the work."""

    def __init__(self) -> None:
        self._work: Work | None = None

    def capture(self, work: Work, inputs: Any) -> Any:
        self._work = work
        return work(inputs)

    def replay(self, inputs: Any) -> Any:
        assert self._work is not None, "captured before it is replayed"
        return self._work(inputs)


class PlainGraphPool:
    """On the CPU: memory is the allocator's business."""

    def graph(self) -> Graph:
        return PlainGraph()


class CudaGraph(Graph):
    def __init__(self, pool: Any, stream: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._stream = stream
        self._results: Any = None

    def capture(self, work: Work, inputs: Any) -> Any:
        # Other threads of this process wait for events and copies meanwhile.
        with torch.cuda.graph(
            self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            self._results = work(inputs)
        return self._results

    def replay(self, inputs: Any) -> Any:
        self._graph.replay()
        return self._results

    def release(self) -> None:
        self._results = mapped(self._results, borrowed)


class CudaGraphPool:
    """On a GPU: one pool of memory, and one stream to capture on."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def graph(self) -> Graph:
        return CudaGraph(self._pool, self._stream)


def make_pool(device: torch.device) -> GraphPool:
    """For graphs on this device."""
    return CudaGraphPool(device) if device.type == "cuda" else PlainGraphPool()


def mapped(results: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed."""
    if results is None:
        return None
    if isinstance(results, Tensor):
        return change(results)
    parts = [mapped(part, change) for part in results]
    return type(results)(*parts) if hasattr(results, "_fields") else tuple(parts)


def borrowed(tensor: Tensor) -> Tensor:
    """The same elements of a GPU, in memory that the result does not keep: whoever owns the graph keeps it."""
    if not tensor.numel():
        return tensor
    num_elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.as_tensor(_Memory(tensor.data_ptr(), num_elements * tensor.element_size()), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class _Memory:
    """Bytes at an address, as libraries tell each other of them."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
