"""Which token does each row get?"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Sampling parameters of S rows, one entry a row; CPU or the logits' device."""

    temperature: Tensor
    """[S] float32; 0 is greedy."""
    top_k: Tensor
    """[S] int64; 0 is off."""
    top_p: Tensor
    """[S] float32 in (0, 1]; 1 is off."""
    seed: Tensor
    """[S] int64."""
    position: Tensor
    """[S] int64: index in its sequence of the token being sampled."""
    num_logprobs: list[int]
    """Top alternatives wanted with each token; -1 for no logprobs at all. Not used by ``sample``."""


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """[S, V] float32 -> [S] int64."""
    return torch.argmax(logits, dim=-1)


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """[N, V], [N] -> ids [N, 1 + num_top] int32, logprobs [N, 1 + num_top] float32, ranks [N] int32."""
    raise NotImplementedError


def nan_rows(logits: Tensor) -> Tensor:
    """[S, V] -> [S] bool."""
    return torch.isnan(logits).any(dim=-1)
