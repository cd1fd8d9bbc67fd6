"""How does a rank turn a plan into activations, or into tokens?"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ipc.errors import ProtocolError
from ipc.messages import ModelRunnerOutput, SchedulerOutput
from worker.attention import AttentionBackend
from worker.block_table import BlockTable
from worker.bookkeeping import prompt_logprobs, sampled_logprobs
from worker.input_batch import (
    InputBatch,
    StepTokens,
    attention_inputs,
    gather_token_ids,
    prompt_slices,
    sampling_rows,
)
from worker.kv_groups import StageCaches
from worker.model_config import ModelConfig
from worker.models import StageModel
from worker.request_states import RequestStates
from worker.sampler import nan_rows, sample
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
    ) -> None:
        self._model = model
        self._caches = caches
        self._device = device
        self._dtype = dtype
        self._hidden_size = config.hidden_size
        self._vocab_size = config.vocab_size
        self._is_first = is_first
        self._is_last = is_last
        self._states = RequestStates(num_rows, max_model_len, is_first=is_first, is_last=is_last)
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

    @property
    def num_groups(self) -> int:
        """KV groups of the model; a plan has the blocks of all of them."""
        return len(self._tables)

    def prepare(self, plan: SchedulerOutput) -> InputBatch:
        """Apply the plan's diff to the rows, and build from them all of the step's inputs but its token ids.

        Tokens of earlier steps may still be on their way: those for a row that this plan gives away are dropped when
        they come. Raises ProtocolError for a plan that contradicts the rows.
        """
        if plan.has_grammar:
            raise ProtocolError("SchedulerOutput.has_grammar", "this version samples without grammars")
        self.update_states(plan)
        rows = np.asarray(plan.rows, np.int64)
        num_scheduled = np.asarray(plan.num_scheduled_tokens, np.int64)
        if rows.shape != num_scheduled.shape:
            raise ProtocolError("SchedulerOutput.rows", f"{len(rows)} rows with {len(num_scheduled)} counts")
        step = StepTokens.of(rows, num_scheduled, self._states.advance(rows, num_scheduled))
        if self._is_first:
            chosen = step.span.samples
            self._states.await_tokens(plan.step_id, rows[chosen], step.span.ends[chosen].astype(np.int64))
        return InputBatch(
            plan=plan,
            tokens=step,
            num_tokens=len(step.positions),
            positions=to_device(torch.from_numpy(step.positions), self._device),
            metadata=self._metadata(step) if len(rows) else (),
            sampling=sampling_rows(self._states, step, self._device) if self._is_last else None,
            prompt_slices=prompt_slices(self._states, step) if self._is_last else (),
        )

    def update_states(self, plan: SchedulerOutput) -> None:
        """Rows are freed, new requests take rows, tables grow; in this order."""
        self._states.free(plan.freed_rows)
        for new in plan.new_requests:
            self._check_groups("NewRequestData.block_ids", new.block_ids)
            self._states.add(new)
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

    def _check_groups(self, field: str, of_groups: tuple[list[int], ...]) -> None:
        if len(of_groups) != self.num_groups:
            raise ProtocolError(field, f"has {len(of_groups)} KV groups, this model has {self.num_groups}")

    def _metadata(self, step: StepTokens) -> tuple[Any, ...]:
        """For each layer of the stage that of its group."""
        of_group = {
            group: self._builders[group].build(attention_inputs(self._tables[group], step))
            for group in set(self._caches.group_of_layer)
        }
        return tuple(of_group[group] for group in self._caches.group_of_layer)

    @torch.inference_mode()
    def execute_model(self, batch: InputBatch, received: Tensor | None) -> StepResult:
        """The forward pass of this stage.

        ``received``: [T, C] from the stage before; None on the first stage, which must have accepted the tokens of all
        steps that the plan needs.
        """
        if not batch.num_tokens:
            return StepResult(hidden=torch.empty(0, self._hidden_size, dtype=self._dtype), logits=None)
        if self._is_first:
            token_ids = torch.from_numpy(gather_token_ids(self._states, batch.tokens))
            hidden = self._model.embed(to_device(token_ids, self._device))
        else:
            assert received is not None, "a stage behind the first one needs activations"
            hidden = received.to(self._device, non_blocking=True)
        hidden = self._model(hidden, batch.positions, self._caches.tensors, batch.metadata)
        logits = None if batch.sampling is None else self._model.logits(hidden[batch.sampling.hidden_index])
        return StepResult(hidden=hidden, logits=logits)

    @torch.inference_mode()
    def sample_tokens(self, batch: InputBatch, result: StepResult) -> ModelRunnerOutput:
        """Last stage: one token for each row that samples, with what else those rows asked for."""
        plan, sampling, logits = batch.plan, batch.sampling, result.logits
        columns, broken = prompt_logprobs(result.hidden, batch.prompt_slices, self._model.logits, self._vocab_size)
        rows: list[int] = []
        token_ids: list[int] = []
        logprobs = None
        if sampling is not None and logits is not None:
            rows = sampling.rows.tolist()
            # A broken row gets some token all the same, so that steps in flight behind this one have their input.
            is_broken = HostCopy(nan_rows(logits))
            sampled = sample(logits, sampling.params)
            token_copy = HostCopy(sampled)
            logprobs = sampled_logprobs(logits, sampled, sampling)
            token_ids = token_copy.numpy().tolist()
            broken += [row for row in sampling.rows[is_broken.numpy()].tolist() if row not in broken]
        return ModelRunnerOutput(
            core_id=plan.core_id,
            epoch=plan.epoch,
            step_id=plan.step_id,
            rows=rows,
            token_ids=token_ids,
            counts=[1] * len(rows),
            logprobs=logprobs,
            prompt_logprobs=columns,
            nan_rows=broken,
        )

    def accept_tokens(self, step_id: int, rows: list[int], token_ids: list[int]) -> None:
        """First stage: these are the tokens that a step sampled. Every step's are accepted once, also empty ones.

        Raises ProtocolError for other rows than the step sampled and for ids outside the vocabulary.
        """
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ProtocolError("SampledTokens.token_ids", f"step {step_id}: an id is outside 0 to {self._vocab_size - 1}")
        self._states.accept_tokens(step_id, rows, token_ids)
