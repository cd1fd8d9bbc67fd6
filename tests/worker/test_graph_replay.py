"""Are CUDA graphs asked for what they need? There is no GPU: torch's own part is replaced by what records the calls."""

from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from worker.graphs.graph import CudaGraphPool, PlainGraphPool, borrowed, make_pool, mapped


class Pair(NamedTuple):
    first: torch.Tensor
    second: tuple[torch.Tensor, None] | None


class FakeCudaGraph:
    num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was captured, and how."""
    calls: list[tuple[Any, ...]] = []

    @contextmanager
    def capturing(graph: Any, *, pool: Any, stream: Any, capture_error_mode: str):  # type: ignore[no-untyped-def]
        calls.append((graph, pool, stream, capture_error_mode))
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeCudaGraph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream", device.index))
    monkeypatch.setattr("worker.graphs.graph.borrowed", lambda tensor: tensor.detach())
    return calls


def test_all_graphs_of_a_pool_share_its_memory_and_stream(cuda: list[tuple[Any, ...]]) -> None:
    pool = make_pool(torch.device("cuda", 1))
    assert isinstance(pool, CudaGraphPool)
    for _ in range(2):
        pool.graph().capture(lambda inputs: inputs, ())
    assert [call[1:] for call in cuda] == [((0, 7), ("stream", 1), "thread_local")] * 2
    assert cuda[0][0] is not cuda[1][0]


def test_a_replay_launches_and_gives_the_results_of_the_capture(cuda: list[tuple[Any, ...]]) -> None:
    graph, numbers = make_pool(torch.device("cuda")).graph(), []

    def work(inputs: torch.Tensor) -> Pair:
        numbers.append(len(numbers))
        return Pair(inputs + 1, (inputs, None))

    inputs = torch.zeros(3)
    results = graph.capture(work, inputs)
    assert graph.replay(inputs) is results
    graph.release()
    kept = graph.replay(inputs)
    assert isinstance(kept, Pair) and kept.first.data_ptr() == results.first.data_ptr()
    assert kept.first is not results.first, "whoever keeps the graph does not keep its results' memory"
    assert numbers == [0]
    assert cuda[0][0].num_replays == 2


def test_a_plain_graph_works_again_on_what_the_inputs_hold() -> None:
    graph = make_pool(torch.device("cpu")).graph()
    assert isinstance(make_pool(torch.device("cpu")), PlainGraphPool)
    inputs = torch.zeros(3)
    assert graph.capture(lambda x: x + 1, inputs).tolist() == [1, 1, 1]
    graph.release()
    inputs.fill_(4)
    assert graph.replay(inputs).tolist() == [5, 5, 5]


def test_structure_is_kept() -> None:
    doubled = mapped(Pair(torch.ones(1), (torch.ones(2), None)), lambda tensor: tensor * 2)
    assert isinstance(doubled, Pair)
    assert doubled.first.tolist() == [2] and doubled.second[0].tolist() == [2, 2] and doubled.second[1] is None
    assert mapped(None, torch.clone) is None
    assert type(mapped((torch.ones(1),), torch.clone)) is tuple


def test_borrowed_memory_has_the_same_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the host's form of the interface, which numpy reads."""
    whole = torch.arange(60, dtype=torch.float32).view(6, 10)
    as_tensor = torch.as_tensor

    class OnHost:
        def __init__(self, memory: Any) -> None:
            self.__array_interface__ = memory.__cuda_array_interface__

    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: as_tensor(np.asarray(OnHost(memory))))
    for tensor in (whole, whole[2:5, 3:7], whole.t()[4:], whole[1, 1:2], whole.bfloat16()[1:]):
        again = borrowed(tensor)
        assert again.data_ptr() == tensor.data_ptr()
        assert (again.shape, again.stride(), again.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert torch.equal(again, tensor)
    empty = whole[:0]
    assert borrowed(empty) is empty

