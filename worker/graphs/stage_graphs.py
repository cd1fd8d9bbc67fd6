"""How does a stage replay its forward pass? From buffers that stay, padded to a shape that was captured."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention import AttentionMetadataBuilder, CommonAttentionMetadata
from worker.graphs.dispatcher import CudagraphDispatcher, Dispatch
from worker.graphs.graph import Graph, GraphPool
from worker.graphs.modes import CudagraphMode
from worker.graphs.padding import padded_inputs, padding_alone
from worker.kv_groups import StageCaches
from worker.memory import is_out_of_memory
from worker.models import Flow, StageModel
from worker.transfer import write_to_device

logger = logging.getLogger(__name__)


class Start(NamedTuple):
    """Where a captured forward pass begins to read."""

    source: Tensor
    """Token ids [T] on the first stage, elsewhere activations [T, C]."""
    positions: Tensor
    """[T] int64"""


class Outcome(NamedTuple):
    """What a forward pass leaves, padding included; valid until the next one."""

    hidden: Tensor
    """[T, C]"""
    logits: Tensor | None
    """[T, V] of every token, where the graph ends with the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedStep:
    """A step whose inputs lie in the buffers of a graph. Valid until the next step is put there."""

    dispatch: Dispatch
    num_tokens: int
    """Without padding."""

    metadata: tuple[Any, ...]
    """For each layer, where attention runs eagerly; else empty."""

    @property
    def num_padded(self) -> int:
        """Tokens of padding."""
        return self.dispatch.descriptor.num_tokens - self.num_tokens


class _Captured(NamedTuple):
    start: Start
    graphs: tuple[Graph, ...]
    """The whole, or one for each segment."""


class StageGraphs:
    """The graphs of one stage.

    A graph reads at fixed addresses. On stages behind the first these are the buffers that the link receives into: each
    shape is captured once for each buffer, and nothing is copied between a receive and the first layer.

    The head is part of a graph where every token of it samples, as in decodes.
    """

    def __init__(
        self,
        model: StageModel,
        caches: StageCaches,
        builders: Sequence[AttentionMetadataBuilder],
        shapes: Sequence[Dispatch],
        *,
        receive_buffers: Sequence[Tensor],
        is_last: bool,
        device: torch.device,
        max_model_len: int,
        pool: GraphPool,
    ) -> None:
        """``shapes``: to be captured, largest first. ``receive_buffers``: [max tokens, C] each, none on the first stage."""
        self._model, self._caches, self._builders = model, caches, builders
        self._shapes = shapes
        self._is_first, self._is_last = not receive_buffers, is_last
        self._pool = pool
        largest = shapes[0].descriptor.num_tokens
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._sources = receive_buffers or [self._token_ids]
        with_attention = [shape.descriptor for shape in shapes if shape.mode is CudagraphMode.FULL]
        if with_attention:
            for builder in builders:
                builder.reserve(
                    max_tokens=max(shape.num_tokens for shape in with_attention),
                    max_seqs=max(shape.num_requests or 0 for shape in with_attention),
                    max_seq_len=max_model_len,
                )
        self._captured: dict[tuple[Dispatch, int], _Captured] = {}
        self._dispatcher = CudagraphDispatcher([])

    @property
    def num_graphs(self) -> int:
        """Forward passes that are captured."""
        return len(self._captured)

    # ------------------------------------------------------------------------------------------ capture

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture every shape, or as many as there is memory for. Writes to no slot of the cache.

        ``progress(done, total)`` is called behind each.
        """
        captured: list[Dispatch] = []
        failed: list[Dispatch] = []
        with _collector_frozen():
            for done, dispatch in enumerate(self._shapes, start=1):
                (captured if self._has_memory_for(dispatch) else failed).append(dispatch)
                progress(done, len(self._shapes))
        if failed:
            logger.warning(
                "no memory to capture steps of %s tokens; they use a larger graph where there is one, else run eagerly",
                ", ".join(map(_shown, failed)),
            )
        self._dispatcher = CudagraphDispatcher(captured)

    def _has_memory_for(self, dispatch: Dispatch) -> bool:
        try:
            for source in self._sources:
                self._captured[dispatch, source.data_ptr()] = self._capture(dispatch, source)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            for source in self._sources:
                self._captured.pop((dispatch, source.data_ptr()), None)
            return False
        return True

    def _capture(self, dispatch: Dispatch, source: Tensor) -> _Captured:
        num_tokens = dispatch.descriptor.num_tokens
        start = Start(source[:num_tokens], self._positions[:num_tokens])
        metadata = self._metadata(dispatch, lambda group: padding_alone(dispatch.descriptor))
        # Compiles what has to be compiled, and lets libraries make what a capture must not see them make.
        self._forward(dispatch, start, metadata)
        if dispatch.mode is CudagraphMode.FULL:
            whole = self._pool.graph()
            whole.capture(partial(self._forward, dispatch, metadata=metadata), start)
            whole.release()
            return _Captured(start, (whole,))
        return _Captured(start, self._capture_segments(start, metadata))

    def _capture_segments(self, start: Start, metadata: tuple[Any, ...]) -> tuple[Graph, ...]:
        graphs = [self._pool.graph()]
        flow = graphs[0].capture(self._begin, start)
        for index, (cache, of_layer) in enumerate(zip(self._caches.tensors, metadata, strict=True)):
            self._model.attend(index, flow, cache, of_layer)
            graphs.append(self._pool.graph())
            flow = graphs[-1].capture(partial(self._model.resume, index), flow)
        for graph in graphs:
            graph.release()
        return tuple(graphs)

    def _begin(self, start: Start) -> Flow:
        hidden = self._model.embed(start.source) if self._is_first else start.source
        return self._model.begin(hidden, start.positions)

    def _forward(self, dispatch: Dispatch, start: Start, metadata: tuple[Any, ...]) -> Outcome:
        flow = self._begin(start)
        for index, (cache, of_layer) in enumerate(zip(self._caches.tensors, metadata, strict=True)):
            self._model.attend(index, flow, cache, of_layer)
            flow = self._model.resume(index, flow)
        has_head = self._is_last and dispatch.descriptor.is_uniform_decode
        return Outcome(flow.hidden, self._model.logits(flow.hidden) if has_head else None)

    # ------------------------------------------------------------------------------------------ steps

    def prepare(
        self,
        positions: NDArray[np.int64],
        num_requests: int,
        attention_inputs: Callable[[int], CommonAttentionMetadata],
    ) -> PaddedStep | None:
        """Put the step into the buffers of the graph that serves it; None when it has to run eagerly.

        ``positions``: [T]. ``attention_inputs``: those of a KV group.
        """
        num_tokens = len(positions)
        dispatch = self._dispatcher.dispatch(num_tokens, num_requests, is_uniform_decode=num_tokens == num_requests)
        if dispatch.mode is CudagraphMode.NONE:
            return None
        padded = _padded(positions, dispatch.descriptor.num_tokens)
        write_to_device(self._positions[: len(padded)], padded)
        metadata = self._metadata(dispatch, lambda group: padded_inputs(attention_inputs(group), dispatch.descriptor))
        is_eager = dispatch.mode is CudagraphMode.PIECEWISE
        return PaddedStep(dispatch=dispatch, num_tokens=num_tokens, metadata=metadata if is_eager else ())

    @torch.inference_mode()
    def replay(self, step: PaddedStep, token_ids: NDArray[np.int64] | None, received: Tensor | None) -> Outcome:
        """Compute the step: from token ids [T] on the first stage, elsewhere from what lies in a receive buffer."""
        if token_ids is not None:
            source = self._token_ids
            padded = _padded(token_ids, step.dispatch.descriptor.num_tokens)
            write_to_device(source[: len(padded)], padded)
        else:
            assert received is not None, "a stage behind the first one needs activations"
            source = received
        start, graphs = self._captured[step.dispatch, source.data_ptr()]
        if received is not None:
            # What another step left there might be anything, and rows of zeros stay finite.
            start.source[step.num_tokens :].zero_()
        if step.dispatch.mode is CudagraphMode.FULL:
            outcome: Outcome = graphs[0].replay(start)
            return outcome
        flow: Flow = graphs[0].replay(start)
        for index, (cache, of_layer) in enumerate(zip(self._caches.tensors, step.metadata, strict=True)):
            self._model.attend(index, flow, cache, of_layer)
            flow = graphs[index + 1].replay(flow)
        return Outcome(flow.hidden, None)

    def _metadata(
        self, dispatch: Dispatch, inputs: Callable[[int], CommonAttentionMetadata]
    ) -> tuple[Any, ...]:
        """For each layer of the stage that of its group."""

        def build(group: int) -> Any:
            builder = self._builders[group]
            return (builder.build_in_place if dispatch.mode is CudagraphMode.FULL else builder.build)(inputs(group))

        return self._caches.for_layers(build)


def _shown(dispatch: Dispatch) -> str:
    kind = ", decodes" if dispatch.descriptor.is_uniform_decode else ""
    return f"{dispatch.descriptor.num_tokens} ({dispatch.mode.value}{kind})"


def _padded(values: NDArray[np.int64], length: int) -> Tensor:
    padded = torch.zeros(length, dtype=torch.int64)
    padded.numpy()[: len(values)] = values
    return padded


@contextmanager
def _collector_frozen() -> Iterator[None]:
    """Let the garbage collector pass over all that exists: looking through it takes longer than a capture, and before
    each there is a collection."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
