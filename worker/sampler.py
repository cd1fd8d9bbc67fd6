"""Which token does each row get?

Sampling is a pure function of a row's logits, seed and position; docs/sampling.md has the order of all that happens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling import draw, kept_tokens, most_likely, top_tokens

_ELEMENTS_AT_ONCE = 1 << 18
"""Rows are worked on in pieces of this size: they stay in a core's cache while a dozen passes go over them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What is left of a row's distribution; one entry a row, as ``kernels.sampling.kept_tokens`` has them."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor | None = None
    """None when it is off in all rows."""

    def of(self, index: Tensor) -> "Filters":
        """Those of some rows."""
        return Filters(
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            typical_p=None if self.typical_p is None else self.typical_p[index],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Sampling parameters of S rows, one entry a row, on the logits' device."""

    filters: Filters

    seed: Tensor
    """[S] int64."""

    position: Tensor
    """[S] int64: index in its sequence of the token being sampled."""

    is_greedy: bool
    """Every row has temperature 0."""

    typical_rows: Tensor | None = None
    """[N] int64: rows with a typical_p below 1, which need their whole distribution in order; None for none."""


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """One token id for each row.

    Shapes:
        logits: [S, V] float32; not changed. Rows for which ``nan_rows`` holds get some id in range
        returns [S] int64
    """
    if batch.is_greedy:
        return most_likely(logits)
    filters = batch.filters
    if batch.typical_rows is not None:
        rows = batch.typical_rows
        logits = logits.index_copy(0, rows, _left(logits[rows], filters.of(rows)))
        filters = _without_filters(filters, rows)
    return draw(
        logits, filters.temperature, filters.top_k, filters.top_p, filters.min_p, batch.seed, batch.position
    )


def processed_logits(logits: Tensor, filters: Filters) -> Tensor:
    """[N, V] logits of the distribution that a token is drawn from; those of a greedy row as they are.

    Logits are below their row's maximum, which becomes 0, and -inf where a filter left a token out.
    """
    heat = torch.where(filters.temperature > 0, filters.temperature, 1.0)[:, None]
    return _left(logits, filters).sub_(logits.amax(dim=1, keepdim=True)).div_(heat)


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of logits for given tokens and for the most likely ones.

    Shapes:
        logits:    [N, V] float32; token_ids: [N]
        returns    ids [N, 1 + num_top] int32: the given token, then the most likely in order (ties: lower id first)
                   logprobs [N, 1 + num_top] float32
                   ranks [N] int32: how many tokens are at least as likely as the given one, itself included
    """
    num_top = min(num_top, logits.shape[1])
    size = max(1, _ELEMENTS_AT_ONCE // logits.shape[1])
    pieces = zip(logits.split(size), token_ids.split(size), strict=True)
    ids, logprobs, ranks = zip(*(_piece_logprobs(*piece, num_top) for piece in pieces), strict=True)
    return torch.cat(ids), torch.cat(logprobs), torch.cat(ranks)


def nan_rows(logits: Tensor) -> Tensor:
    """[S, V] -> [S] bool: rows from which no token can be drawn, as they hold NaN or +inf, or -inf alone."""
    return ~torch.isfinite(logits.amax(dim=1))


def _piece_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits - logits.amax(dim=1, keepdim=True)  # what is likely keeps its precision
    own_ids = token_ids.to(torch.int64)[:, None]
    own = logits.gather(1, own_ids)
    top, top_ids = top_tokens(logits, num_top) if num_top else (own[:, :0], own_ids[:, :0])
    ids = torch.cat((own_ids, top_ids), dim=1).to(torch.int32)
    logprobs = torch.cat((own, top), dim=1) - logits.logsumexp(dim=1, keepdim=True)
    return ids, logprobs, (logits >= own).sum(dim=1).to(torch.int32)


def _left(logits: Tensor, filters: Filters) -> Tensor:
    kept = kept_tokens(
        logits, filters.temperature, filters.top_k, filters.top_p, filters.min_p, filters.typical_p
    )
    return logits.masked_fill(~kept, -torch.inf)


def _without_filters(filters: Filters, rows: Tensor) -> Filters:
    """These rows keep all tokens that they have."""
    return Filters(
        temperature=filters.temperature,
        top_k=filters.top_k.index_fill(0, rows, 0),
        top_p=filters.top_p.index_fill(0, rows, 1.0),
        min_p=filters.min_p.index_fill(0, rows, 0.0),
    )
