"""Which requests can never be served? They are refused when they come; none of them reaches a worker."""

import math
from collections.abc import Sequence

from ipc.errors import RequestError
from ipc.messages import AddRequest, ModelInfo
from ipc.params import ALL_LOGPROBS, SamplingParams

MAX_PROMPT_LOGPROBS = 1 << 24
"""Entries of all positions of a prompt together, 8 bytes each."""


def check_request(message: AddRequest, info: ModelInfo) -> None:
    """Raises RequestError naming field, value and rule."""
    for name in ("prompt_token_ids", "output_token_ids"):
        ids = getattr(message, name)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < info.vocab_size:
            wrong = int(ids[(ids < 0) | (ids >= info.vocab_size)][0])
            raise RequestError(f"{name} holds {wrong}; ids must be between 0 and {info.vocab_size - 1}", field=name)
    if not message.prompt_token_ids.size:
        raise RequestError("prompt_token_ids is empty; at least one token is needed", field="prompt_token_ids")
    _check_choices(message)
    most_outputs = max(message.counts, default=message.output_token_ids.size)
    num_tokens = message.prompt_token_ids.size + most_outputs
    if num_tokens >= info.max_model_len:
        raise RequestError(
            f"prompt_token_ids has {num_tokens} tokens; the context limit is {info.max_model_len} with at least one "
            "token for the answer",
            field="prompt_token_ids",
        )
    timeout_s = message.timeout_s
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise RequestError(f"timeout_s={timeout_s} must be a finite number of seconds above 0", field="timeout_s")
    most = message.params.max_tokens
    if most is not None and most_outputs >= most:
        raise RequestError(
            f"output_token_ids has {most_outputs} tokens, max_tokens={most} leaves none to generate", field="output_token_ids"
        )
    _check_params(message.params, info)
    _check_prompt_logprobs(message, info.vocab_size)


def _check_choices(message: AddRequest) -> None:
    """Of a resubmission: whose are the tokens that it brings?"""
    n, indices, counts = message.params.n, message.indices, message.counts
    if n > 1 and message.output_token_ids.size and not indices:
        raise RequestError(
            f"output_token_ids has {message.output_token_ids.size} tokens, and n={n}: indices and counts must say to which "
            "choices they belong",
            field="indices",
        )
    if indices != sorted(set(indices)) or (indices and not 0 <= indices[0] <= indices[-1] < n):
        raise RequestError(f"indices={indices!r:.80} must be ascending numbers from 0 to n-1={n - 1}", field="indices")
    if len(counts) != len(indices):
        raise RequestError(f"counts has {len(counts)} entries for {len(indices)} of indices", field="counts")
    if indices and (min(counts) < 0 or sum(counts) != message.output_token_ids.size):
        raise RequestError(
            f"counts={counts!r:.80} must add up to the {message.output_token_ids.size} tokens of output_token_ids", field="counts"
        )


def _check_params(params: SamplingParams, info: ModelInfo) -> None:
    _check_ids("stop_token_ids", params.stop_token_ids, info.vocab_size)
    _check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], info.vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), info.vocab_size)
    _check_ids("bad_word_ids", [token_id for word in params.bad_word_ids for token_id in word], info.vocab_size)
    if params.bad_words:
        raise RequestError(
            f"bad_words={params.bad_words[0]!r} is text, which the engine does not read; send bad_word_ids", field="bad_words"
        )
    for name, _ in params.logits_processors:
        if name not in info.logits_processors:
            known = ", ".join(info.logits_processors) or "none"
            raise RequestError(
                f"logits_processors={name[:80]!r} is not among those that the engine was started with ({known})",
                field="logits_processors",
            )
    _check_something_is_allowed(params, tuple(info.eos_token_ids))


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise RequestError(f"{field} holds {token_id}; ids must be between 0 and {vocab_size - 1}", field=field)


def _check_something_is_allowed(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> None:
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids).difference(word[0] for word in params.bad_word_ids if len(word) == 1)
    if not left:
        raise RequestError("bad_word_ids bars every one of allowed_token_ids", field="bad_word_ids")
    if params.min_tokens and left.issubset(params.ending_token_ids(eos_token_ids)):
        raise RequestError(
            f"min_tokens={params.min_tokens} bars every one of allowed_token_ids: they all end the answer", field="min_tokens"
        )


def _check_prompt_logprobs(message: AddRequest, vocab_size: int) -> None:
    if message.params.prompt_logprobs == ALL_LOGPROBS:
        num_entries = message.prompt_token_ids.size * vocab_size
        if num_entries > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"prompt_logprobs={ALL_LOGPROBS} asks for {num_entries} values; at most {MAX_PROMPT_LOGPROBS} are given",
                field="prompt_logprobs",
            )
