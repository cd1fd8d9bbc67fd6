"""Which token does each row get?

Sampling is a pure function of a row's logits, seed and position. The filters act in this order: temperature, top_k
(exactly k tokens), top_p (the smallest set of the k, renormalised, that reaches p); then one draw. Where logits tie,
lower ids are preferred.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.dispatch import triton_for
from kernels.sampling import draw, gumbel_noise, most_likely, nucleus, top_tokens

_ELEMENTS_AT_ONCE = 1 << 18
"""Rows are worked on in pieces of this size: they stay in a core's cache while a dozen passes go over them."""

_FIRST_CANDIDATES = 256
"""Tokens looked at for top_p at first; most rows' nucleus is smaller, and others look at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Sampling parameters of S rows, one entry a row, on the logits' device."""

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
    """One token id for each row.

    Shapes:
        logits: [S, V] float32; not changed. Rows for which ``nan_rows`` holds get some id in range
        returns [S] int64
    """
    if triton_for(logits) is not None:
        # In one launch, and the host need not know which rows have which filters.
        return draw(logits, batch.temperature, batch.top_k, batch.top_p, batch.seed, batch.position)
    greedy = batch.temperature == 0
    filtered = ~greedy & ((batch.top_k > 0) & (batch.top_k < logits.shape[1]) | (batch.top_p < 1))
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for rows, choose in (
        (greedy, _argmax),
        (~greedy & ~filtered, _draw_from_all),
        (filtered, _draw_filtered),
    ):
        indices = rows.nonzero()[:, 0]
        if len(indices) == logits.shape[0]:
            return choose(logits, batch, indices)
        if len(indices):
            tokens[indices] = choose(logits, batch, indices)
    return tokens


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of raw logits for given tokens and for the most likely ones.

    Shapes:
        logits:    [N, V] float32; token_ids: [N]
        returns    ids [N, 1 + num_top] int32: the given token, then the most likely in order (ties: lower id first)
                   logprobs [N, 1 + num_top] float32
                   ranks [N] int32: how many tokens are at least as likely as the given one, itself included
    """
    num_top = min(num_top, logits.shape[1])
    size = _rows_at_once(logits.shape[1])
    pieces = zip(logits.split(size), token_ids.split(size), strict=True)
    ids, logprobs, ranks = zip(*(_piece_logprobs(*piece, num_top) for piece in pieces), strict=True)
    return torch.cat(ids), torch.cat(logprobs), torch.cat(ranks)


def nan_rows(logits: Tensor) -> Tensor:
    """[S, V] -> [S] bool: rows from which no token can be drawn, as they hold NaN or +inf, or -inf alone."""
    return ~torch.isfinite(logits.amax(dim=1))


def _piece_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    own_ids = token_ids.to(torch.int64)[:, None]
    own = logits.gather(1, own_ids)
    top, top_ids = top_tokens(logits, num_top) if num_top else (own[:, :0], own_ids[:, :0])
    ids = torch.cat((own_ids, top_ids), dim=1).to(torch.int32)
    logprobs = torch.cat((own, top), dim=1) - logits.logsumexp(dim=1, keepdim=True)
    return ids, logprobs, (logits >= own).sum(dim=1).to(torch.int32)


def _argmax(logits: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    return most_likely(logits if len(rows) == logits.shape[0] else logits[rows])


def _draw_from_all(logits: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    token_ids = torch.arange(logits.shape[1], device=logits.device)[None]
    tokens = []
    for piece in _pieces(rows, logits.shape[1]):
        noise = gumbel_noise(batch.seed[piece], batch.position[piece], token_ids)
        tokens.append(_scaled(logits, batch, piece).add_(noise).argmax(dim=1))
    return torch.cat(tokens)


def _draw_filtered(logits: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    return torch.cat([_draw_filtered_piece(logits, batch, piece) for piece in _pieces(rows, logits.shape[1])])


def _draw_filtered_piece(logits: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    """Looks at a row's most likely tokens only: at k of them, or as many as it takes to reach p."""
    vocab_size = logits.shape[1]
    top_k = torch.where(batch.top_k[rows] > 0, batch.top_k[rows], vocab_size).clamp(max=vocab_size)
    count = min(vocab_size, max(_FIRST_CANDIDATES, int(torch.where(top_k < vocab_size, top_k, 0).max())))
    tokens, settled = _draw_from_top(logits, batch, rows, top_k, count)
    while not settled.all():
        count = min(vocab_size, count * 16)
        left = (~settled).nonzero()[:, 0]
        tokens[left], settled[left] = _draw_from_top(logits, batch, rows[left], top_k[left], count)
    return tokens


def _draw_from_top(
    logits: Tensor, batch: SamplingBatch, rows: Tensor, top_k: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Draws from the ``count`` most likely tokens, and whether these were enough to know the filters' outcome."""
    vocab_size = logits.shape[1]
    scaled = _scaled(logits, batch, rows)
    values, ids = top_tokens(scaled, count)
    within_k = torch.arange(count, device=rows.device) < top_k[:, None]
    totals = torch.where(top_k <= count, (values.exp() * within_k).sum(dim=1), scaled.exp_().sum(dim=1))
    kept, reached = nucleus(values, totals, batch.top_p[rows])
    scores = values + gumbel_noise(batch.seed[rows], batch.position[rows], ids)
    scores.masked_fill_(~(kept & within_k), -torch.inf)
    best = scores.amax(dim=1, keepdim=True)
    drawn = torch.where(scores == best, ids, vocab_size - 1).amin(dim=1)
    return drawn, reached | (top_k <= count) | (count == vocab_size)


def _scaled(logits: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    """Logits below their row's maximum, which becomes 0, so that the smallest temperature overflows to -inf only."""
    values = logits[rows]
    return values.sub_(values.amax(dim=1, keepdim=True)).div_(batch.temperature[rows][:, None])


def _pieces(rows: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
    return rows.split(_rows_at_once(vocab_size))


def _rows_at_once(vocab_size: int) -> int:
    return max(1, _ELEMENTS_AT_ONCE // vocab_size)
