"""What do sampling parameters mean? docs/sampling.md once more, in numpy and float64, one row at a time, without regard for speed."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ipc.params import SamplingParams

Array = NDArray[np.float64]


def shares_of(logits: Array, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams, eos: Sequence[int]) -> Array:
    """The distribution that the token behind prompt and answer is drawn from; at temperature 0 before its argmax is taken."""
    changed, rules = changed_logits(logits, prompt, answer, params, eos), params.draw_rules()
    if rules.temperature == 0:
        return softmax(changed, 1.0)
    return filtered(changed, float(np.float32(rules.temperature)), rules.top_k, rules.top_p, rules.min_p, rules.typical_p)


def changed_logits(
    logits: Array, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams, eos: Sequence[int]
) -> Array:
    """After biases, penalties and what can't come."""
    changed = logits.astype(np.float64).copy()
    for token_id, bias in params.logit_bias:
        changed[token_id] += bias
    said, repetition = Counter(answer), params.draw_rules().repetition_penalty
    for token_id in {*prompt, *answer}:
        changed[token_id] = changed[token_id] / repetition if changed[token_id] > 0 else changed[token_id] * repetition
    for token_id, times in said.items():
        changed[token_id] -= times * params.frequency_penalty + params.presence_penalty
    for token_id in barred_ids(len(logits), answer, params, eos):
        changed[token_id] = -np.inf
    return changed


def barred_ids(vocab_size: int, answer: Sequence[int], params: SamplingParams, eos: Sequence[int]) -> set[int]:
    barred: set[int] = set()
    if params.allowed_token_ids is not None:
        barred |= set(range(vocab_size)) - set(params.allowed_token_ids)
    if len(answer) < params.min_tokens:
        barred |= set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    for *beginning, last in params.bad_word_ids:
        if list(answer[len(answer) - len(beginning) :]) == beginning:
            barred.add(last)
    return barred


def filtered(
    logits: Array, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, typical_p: float = 1.0
) -> Array:
    """Shares of the tokens that the filters leave, each looking at what is left."""
    shares = softmax(logits, temperature)

    def leave(kept: set[int]) -> None:
        nonlocal shares
        shares = np.where(np.isin(np.arange(len(shares)), list(kept)), shares, 0.0)
        shares /= shares.sum()

    ranking = np.lexsort((np.arange(len(logits)), -logits))
    if top_k:
        leave(set(ranking[:top_k].tolist()))
    if top_p < 1:
        leave(smallest_set(ranking, shares, top_p))
    if min_p > 0:
        leave(set(np.flatnonzero(shares >= min_p * shares.max()).tolist()))
    if typical_p < 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(shares)
            mean = np.nansum(shares * surprise)
        order = np.lexsort((np.arange(len(logits)), np.abs(surprise - mean)))
        leave(smallest_set(order, shares, typical_p))
    return shares


def smallest_set(order: NDArray[np.int64], shares: Array, p: float) -> set[int]:
    """The shortest beginning of this order with at least this share."""
    reached = np.cumsum(shares[order]) >= p * (1 - 1e-12)  # sums of thousands are not exact
    return set(order[: int(reached.argmax()) + 1 if reached.any() else len(order)].tolist())


def softmax(logits: Array, temperature: float) -> Array:
    weights = np.exp((logits - logits.max()) / temperature)
    return np.asarray(weights / weights.sum())
