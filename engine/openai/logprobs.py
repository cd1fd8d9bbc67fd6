"""Log probabilities in the two forms that OpenAI's endpoints have."""

from collections.abc import Sequence
from typing import Any

from engine.outputs import TokenLogprob
from engine.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for what JSON has no number for."""


def token_text(raw: bytes) -> str:
    """A token as text; a part of a character is spelled ``bytes:\\xe2\\x98``."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def whole_text(raw: bytes) -> str:
    """A token that is no part of a character; empty if it is."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""


def chat_entries(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """``logprobs.content`` of a chat."""
    return [
        _entry(one.token_bytes, one.logprob)
        | {"top_logprobs": [_entry(raw, value) for raw, (_, value) in zip(one.top_bytes, one.top, strict=True)]}
        for one in logprobs
    ]


def _entry(raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(raw), "logprob": max(logprob, LEAST), "bytes": list(raw)}


class TextOffsets:
    """Where in the text does each token begin? Characters, from the start of what the choice's texts join to.

    A token that goes on with a character begins where that character does. Tokens behind the text (an end token, the rest of
    a stop string) are counted as if they were shown.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        self._end = start

    def next(self, token_id: int) -> int:
        """Of the next token."""
        text = self._detokenizer.add(token_id)
        offset = self._end
        self._end += len(text)
        own = whole_text(self._token_bytes(token_id))
        # In front of it stand marks for bytes before that form no character.
        return self._end - len(own) if own and text.endswith(own) else offset


def completion_logprobs(logprobs: Sequence[TokenLogprob | None], first_id: int, first: bytes, offsets: TextOffsets) -> dict[str, Any]:
    """``logprobs`` of a completion: four columns. None stands for a prompt's first token, which is ``first``."""
    tokens = [token_text(first if one is None else one.token_bytes) for one in logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [None if one is None else max(one.logprob, LEAST) for one in logprobs],
        "top_logprobs": [None if one is None else _top(one) for one in logprobs],
        "text_offset": [offsets.next(first_id if one is None else one.token_id) for one in logprobs],
    }


def _top(one: TokenLogprob) -> dict[str, float]:
    """The likeliest ones, and the token itself wherever it ranks."""
    found: dict[str, float] = {}
    for raw, (_, value) in zip(one.top_bytes, one.top, strict=True):
        found.setdefault(token_text(raw), max(value, LEAST))
    found.setdefault(token_text(one.token_bytes), max(one.logprob, LEAST))
    return found
