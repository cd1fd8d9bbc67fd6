"""How does a rank turn a plan into activations, or into tokens?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.errors import ProtocolError
from ipc.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from worker.attention import AttentionBackend, CommonAttentionMetadata
from worker.block_table import BlockTable
from worker.bookkeeping import prompt_logprobs, raw_logits, sampled_logprobs
from worker.grammar_masks import apply_masks
from worker.graphs.dispatcher import Dispatch
from worker.graphs.graph import GraphPool
from worker.graphs.stage_graphs import PaddedStep, StageGraphs
from worker.input_batch import (
    EagerStep,
    InputBatch,
    SamplingRows,
    StepTokens,
    attention_inputs,
    gather_token_ids,
    prompt_slices,
    sampling_rows,
)
from worker.kv_groups import StageCaches
from worker.logits_processors import LogitsProcessor
from worker.model_config import ModelConfig
from worker.models import StageModel
from worker.request_states import RequestStates, Span
from worker.sampler import nan_rows, sample
from worker.sampling_states import SamplingStates
from worker.transfer import HostCopy, to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the forward pass left: activations for the next stage, or on the last stage logits to sample from."""

    hidden: Tensor
    """[T, C]."""

    logits: Tensor | None
    """[S', V] float32 of the rows that sample; None elsewhere and when no row does."""


class ModelRunner:
    """Rows, tables and the forward pass of one stage.

    One step is ``prepare`` (which needs neither activations nor the newest tokens), ``execute_model``, and on the last
    stage ``sample_tokens``; steps in order. On the first stage ``accept_tokens`` brings in between what steps sampled.
    """

    def __init__(
        self,
        model: StageModel,
        backend: AttentionBackend,
        caches: StageCaches,
        *,
        config: ModelConfig,
        is_first: bool,
        is_last: bool,
        device: torch.device,
        dtype: torch.dtype,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        processors: Mapping[str, LogitsProcessor] | None = None,
    ) -> None:
        """``processors``: those that requests may name, on the last stage."""
        self._model = model
        self._caches = caches
        self._device = device
        self._dtype = dtype
        self._hidden_size = config.hidden_size
        self._vocab_size = config.vocab_size
        self._is_first = is_first
        self._is_last = is_last
        self._max_model_len = max_model_len
        self._states = RequestStates(num_rows, max_model_len, is_first=is_first, is_last=is_last)
        self._sampling: SamplingStates | None = None
        """On the last stage."""
        if is_last:
            self._sampling = SamplingStates(
                num_rows,
                vocab_size=config.vocab_size,
                eos_token_ids=config.eos_token_ids,
                device=device,
                processors=processors or {},
            )
        self._tables = [BlockTable(num_rows, max_model_len, block_size) for _ in caches.windows]
        self._builders = [
            backend.make_builder(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_size=config.head_size,
                block_size=block_size,
                dtype=dtype,
                device=device,
                window=window,
            )
            for window in caches.windows
        ]
        self._graphs: StageGraphs | None = None

    @property
    def num_groups(self) -> int:
        """KV groups of the model; a plan has the blocks of all of them."""
        return len(self._tables)

    def capture_graphs(
        self,
        shapes: Sequence[Dispatch],
        *,
        receive_buffers: Sequence[Tensor],
        pool: GraphPool,
        progress: Callable[[int, int], None],
    ) -> int:
        """Serve steps of these shapes, largest first, by graphs from now on, as far as there is memory for them.

        ``receive_buffers``: all that activations may be received into, [max tokens, C] each; none on the first stage.
        Returns how many forward passes were captured. Writes to no slot of the cache.
        """
        graphs = StageGraphs(
            self._model,
            self._caches,
            self._builders,
            shapes,
            receive_buffers=receive_buffers,
            is_last=self._is_last,
            device=self._device,
            max_model_len=self._max_model_len,
            pool=pool,
        )
        graphs.capture(progress)
        self._graphs = graphs if graphs.num_graphs else None
        return graphs.num_graphs

    def prepare(self, plan: SchedulerOutput) -> InputBatch:
        """Apply the plan's diff to the rows, and build from them all of the step's inputs but its token ids.

        Tokens of earlier steps may still be on their way: those for a row that this plan gives away are dropped when
        they come. Raises ProtocolError for a plan that contradicts the rows.
        """
        self.update_states(plan)
        sampling = self._sampling
        rows = np.asarray(plan.rows, np.int64)
        num_scheduled = np.asarray(plan.num_scheduled_tokens, np.int64)
        if rows.shape != num_scheduled.shape:
            raise ProtocolError("SchedulerOutput.rows", f"{len(rows)} rows with {len(num_scheduled)} counts")
        step = StepTokens.of(rows, num_scheduled, self._advance(plan, rows, num_scheduled))
        if self._is_first:
            span = step.span
            self._states.await_tokens(plan.step_id, rows[span.samples], span.first_sampled(), span.num_drafts_sampled())
        return InputBatch(
            plan=plan,
            tokens=step,
            num_tokens=len(step.positions),
            forward=self._forward_inputs(step),
            sampling=None if sampling is None else sampling_rows(
                self._states, sampling, step, self._device, plan.drafts
            ),
            prompt_slices=prompt_slices(self._states, sampling, step) if sampling is not None else (),
        )

    def update_states(self, plan: SchedulerOutput) -> None:
        """Rows are freed, new requests take rows, tables grow; in this order."""
        self._states.free(plan.freed_rows)
        if self._sampling is not None:
            self._sampling.free(plan.freed_rows)
        for new in plan.new_requests:
            self._check_groups("NewRequestData.block_ids", new.block_ids)
            self._states.add(new)
            if self._sampling is not None:
                self._sampling.add(new)
            for table, block_ids in zip(self._tables, new.block_ids, strict=True):
                table.set_row(new.row, block_ids)
        cached = plan.cached_requests
        if cached.indices:
            self._check_groups("CachedRequestData.num_new_blocks", cached.num_new_blocks)
            self._check_groups("CachedRequestData.new_block_ids", cached.new_block_ids)
            rows = np.asarray(plan.rows, np.int64)[cached.indices]
            for table, num_new, block_ids in zip(
                self._tables, cached.num_new_blocks, cached.new_block_ids, strict=True
            ):
                table.append(rows, np.asarray(num_new, np.int64), np.asarray(block_ids, np.int32))

    def _advance(self, plan: SchedulerOutput, rows: NDArray[np.int64], num_scheduled: NDArray[np.int64]) -> Span:
        if plan.rejected is not None:
            self._states.take_back(rows, plan.rejected)
        num_drafts = None
        if plan.drafts is not None:
            self._check_ids("SchedulerOutput.drafts", plan.step_id, plan.drafts.token_ids)
            num_drafts = self._states.add_drafts(rows, num_scheduled, plan.drafts)
        return self._states.advance(rows, num_scheduled, num_drafts)

    def _check_groups(self, field: str, of_groups: tuple[list[int], ...]) -> None:
        if len(of_groups) != self.num_groups:
            raise ProtocolError(field, f"has {len(of_groups)} KV groups, this model has {self.num_groups}")

    def _forward_inputs(self, step: StepTokens) -> EagerStep | PaddedStep:
        num_seqs = len(step.rows)
        if self._graphs is not None and num_seqs:
            padded = self._graphs.prepare(step.positions, num_seqs, partial(self._attention_inputs, step))
            if padded is not None:
                return padded
        return EagerStep(
            positions=to_device(torch.from_numpy(step.positions), self._device),
            metadata=self._caches.for_layers(partial(self._metadata, step)) if num_seqs else (),
        )

    def _metadata(self, step: StepTokens, group: int) -> Any:
        return self._builders[group].build(self._attention_inputs(step, group))

    def _attention_inputs(self, step: StepTokens, group: int) -> CommonAttentionMetadata:
        return attention_inputs(self._tables[group], step)

    @torch.inference_mode()
    def execute_model(self, batch: InputBatch, received: Tensor | None) -> StepResult:
        """The forward pass of this stage.

        ``received``: [T, C] from the stage before; None on the first stage, which must have accepted the tokens of all
        steps that the plan needs.
        """
        if not batch.num_tokens:
            return StepResult(hidden=torch.empty(0, self._hidden_size, dtype=self._dtype), logits=None)
        token_ids = gather_token_ids(self._states, batch.tokens) if self._is_first else None
        if isinstance(batch.forward, PaddedStep):
            assert self._graphs is not None, "prepared by graphs"
            padded, all_logits = self._graphs.replay(batch.forward, token_ids, received)
            hidden = padded[: batch.num_tokens]
        else:
            hidden, all_logits = self._run_eagerly(batch.forward, token_ids, received), None
        return StepResult(hidden=hidden, logits=self._logits(batch, hidden, all_logits))

    def _run_eagerly(self, step: EagerStep, token_ids: NDArray[np.int64] | None, received: Tensor | None) -> Tensor:
        if token_ids is not None:
            hidden = self._model.embed(to_device(torch.from_numpy(token_ids), self._device))
        else:
            assert received is not None, "a stage behind the first one needs activations"
            hidden = received.to(self._device, non_blocking=True)
        outcome: Tensor = self._model(hidden, step.positions, self._caches.tensors, step.metadata)
        return outcome

    def _logits(self, batch: InputBatch, hidden: Tensor, all_logits: Tensor | None) -> Tensor | None:
        """Of the rows that sample. ``all_logits``: of every token, if they were computed with it."""
        if batch.sampling is None:
            return None
        index = batch.sampling.hidden_index
        if all_logits is None:
            return self._model.logits(hidden[index])
        return all_logits[: batch.num_tokens] if len(index) == batch.num_tokens else all_logits[index]

    @torch.inference_mode()
    def sample_tokens(
        self, batch: InputBatch, result: StepResult, grammar: GrammarOutput | None = None
    ) -> ModelRunnerOutput:
        """Last stage: one token for each row that samples, more where drafts stand, with what else those rows asked for.

        ``grammar``: the masks of a plan with ``has_grammar``. Raises ProtocolError when they don't fit the plan.
        """
        plan, sampling, logits = batch.plan, batch.sampling, result.logits
        columns, broken = prompt_logprobs(result.hidden, batch.prompt_slices, self._model.logits, self._vocab_size)
        rows: list[int] = []
        token_ids: list[int] = []
        counts: list[int] = []
        logprobs = None
        if sampling is not None and logits is not None:
            of_rows, positions = sampling.rows, sampling.positions
            # A broken row gets some token all the same, so that steps in flight behind this one have their input.
            raw = raw_logits(logits, sampling)
            broken_copy = HostCopy(_changed(logits, sampling, grammar))
            sampled = sample(logits, sampling.params)
            token_copy = HostCopy(sampled)
            if sampling.rules is not None:
                sampling.rules.count(sampled)
            logprobs = sampled_logprobs(raw, logits, sampled, sampling)
            chosen, is_broken = token_copy.numpy(), broken_copy.numpy()
            if sampling.drafts is None:
                rows, counts = of_rows.tolist(), [1] * len(of_rows)
            else:
                num_tokens, stands = sampling.drafts.verify(chosen)
                rows, counts = of_rows[sampling.drafts.starts].tolist(), num_tokens.tolist()
                of_rows, positions, chosen, is_broken = of_rows[stands], positions[stands], chosen[stands], is_broken[stands]
            token_ids = chosen.tolist()
            if not self._is_first:
                self._states.record(of_rows, positions, token_ids)
            broken += [row for row in dict.fromkeys(of_rows[is_broken].tolist()) if row not in broken]
        return ModelRunnerOutput(
            core_id=plan.core_id,
            epoch=plan.epoch,
            step_id=plan.step_id,
            rows=rows,
            token_ids=token_ids,
            counts=counts,
            logprobs=logprobs,
            prompt_logprobs=columns,
            nan_rows=broken,
        )

    def rehearse(self, plan: SchedulerOutput) -> None:
        """Compute a step that nobody asked for: what comes from other stages is made up, and nothing is handed on.

        Not behind ``capture_graphs``: graphs know no other activations than those of receive buffers.
        """
        batch = self.prepare(plan)
        received = None
        if not self._is_first:
            received = torch.zeros(batch.num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        result = self.execute_model(batch, received)
        if self._is_last:
            self.sample_tokens(batch, result)
        if self._is_first:
            rows = batch.tokens.rows[batch.tokens.span.samples].tolist()
            self.accept_tokens(plan.step_id, rows, [0] * len(rows))

    def accept_tokens(
        self, step_id: int, rows: list[int], token_ids: list[int], counts: list[int] | None = None
    ) -> None:
        """First stage: these are the tokens that a step sampled. Every step's are accepted once, also empty ones.

        ``counts``: tokens of each row; None for one each. Raises ProtocolError for other rows or other numbers of tokens
        than the step sampled, and for ids outside the vocabulary.
        """
        self._check_ids("SampledTokens.token_ids", step_id, token_ids)
        self._states.accept_tokens(step_id, rows, token_ids, counts)

    def _check_ids(self, field: str, step_id: int, token_ids: list[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ProtocolError(field, f"step {step_id}: an id is outside 0 to {self._vocab_size - 1}")


def _changed(logits: Tensor, sampling: SamplingRows, grammar: GrammarOutput | None) -> Tensor:
    """Let rules and masks change the logits. Returns [S'] bool: rows that have no token to draw, from the model or by now."""
    is_broken = nan_rows(logits)
    narrowed: list[Tensor | None] = []
    if sampling.rules is not None:
        sampling.rules.apply(logits)
        narrowed.append(sampling.rules.narrowed)
    narrowed.append(apply_masks(logits, sampling.rows, grammar))
    for places in narrowed:
        if places is not None:
            is_broken[places] |= nan_rows(logits[places])
    return is_broken
