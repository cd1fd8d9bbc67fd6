"""What a text client's consumer gets, and how the core's messages become it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.text.detokenizer import Detokenizer
from engine.text.stop_strings import StopStrings
from ipc.conversation import Told
from ipc.messages import RequestOutput, TokenLogprobs
from ipc.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely one token was, by log-softmax of what the request's ``logprobs_mode`` says."""

    token_id: int
    logprob: float
    rank: int
    """How many tokens were at least as likely, itself included: 1 for the most likely one."""

    token_bytes: bytes
    """What the token adds to the text. Tokens may hold parts of characters: join bytes before decoding."""

    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens, best first: id and log probability. Tokens that can't come are left out."""

    top_bytes: tuple[bytes, ...] = ()

    @property
    def text(self) -> str:
        return self.token_bytes.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a request. A stop token is counted; what the core made beyond a stop string is not."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt's, those that were not computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The state of one request, or of one of its choices, after some new tokens."""

    request_id: str
    delta: str
    """New text. It may be empty while bytes of a character, or what may become a stop string, are held back."""

    text: str
    """All so far: every delta joined. With ``echo`` it begins with the prompt's text."""

    token_ids: list[int]
    """All so far, a final stop token included."""

    num_new_tokens: int
    """How many at the end of ``token_ids`` (and ``logprobs``) are new in this output."""

    finish_reason: str | None = None
    """None while it goes on; then "stop" (end token, stop id, stop string), "length", "timeout" or "abort"."""

    stop_reason: str | int | None = None
    """The stop string, or the stop token id, that ended it; None for the model's own end token and otherwise."""

    logprobs: list[TokenLogprob] | None = None
    """One per entry of ``token_ids``, if asked for."""

    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per token of the prompt as far as known, if asked for; the first has none."""

    usage: Usage
    seed: int
    """The one in use, drawn by the engine where none was given: the same seed gives the same tokens again. Choices behind
    the first have seeds derived from the request's."""

    index: int = 0
    """Which of the request's ``n`` choices this is; everything else in here is of this choice alone."""


class Endable(Protocol):
    """A stream of a request's messages, of either client."""

    def close(self, reason: str = "abort") -> None: ...

    def end_choice(self, index: int, reason: str = "abort") -> None: ...


class Answers:
    """Builds the outputs of one request, choice by choice."""

    def __init__(self, answers: Sequence["Answer"], seed: int | None) -> None:
        """``answers``: one for each choice, in order. ``seed``: what was asked for, if anything was."""
        self.request_id = answers[0].request_id
        self._answers = answers
        self._seed = seed
        """Choice 0's, once it is known."""
        self._open = set(range(len(answers)))

    @property
    def are_over(self) -> bool:
        return not self._open

    def told(self) -> Told | None:
        """What was told of the choices that are still open, for another core to go on; None when it couldn't: only choice
        0's seed says what the others' are, and it may be the one of which nothing came yet.
        """
        outputs = {index: list(self._answers[index].token_ids) for index in sorted(self._open)}
        has_begun = len(outputs) < len(self._answers) or any(outputs.values())
        return None if self._seed is None and has_begun else Told(seed=self._seed, outputs=outputs)

    def take(self, message: RequestOutput, stream: Endable) -> Output | None:
        """The next output; None for what the core made of a choice before it heard that a stop string had ended it.

        ``stream`` is where messages come from: what a stop string ends here, it ends at the core.
        """
        if message.index not in self._open:
            return None
        if message.index == 0:
            self._seed = message.seed
        output = self._answers[message.index].take(message)
        if output.finish_reason is not None:
            self._open.remove(message.index)
            if self.are_over:
                stream.close("stop")
            elif message.finish_reason is None:
                stream.end_choice(message.index, "stop")
        return output


class Answer:
    """Builds the outputs of one choice from the core's messages."""

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        num_prompt_tokens: int,
        detokenizer: Detokenizer | None,
        token_bytes: Callable[[int], bytes],
        echoed: str = "",
    ) -> None:
        """``detokenizer`` None: the model has no tokenizer, and there is no text. ``echoed`` stands before the answer."""
        self.request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._detokenizer = detokenizer
        self._token_bytes = token_bytes
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._echoed = echoed
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprob | None] | None = None if params.prompt_logprobs is None else [None]

    @property
    def token_ids(self) -> Sequence[int]:
        """All so far."""
        return self._token_ids

    def take(self, message: RequestOutput) -> Output:
        """The next output. A finish reason in it that ``message`` has not means that a stop string matched."""
        num_before = len(self._token_ids)
        delta = self._append(message)
        finish_reason = message.finish_reason
        stop_reason: str | int | None = message.stop_reason
        if finish_reason is not None and self._stops.matched is None:
            if self._detokenizer is not None:
                delta += self._stops.push(self._detokenizer.flush())
            delta += self._stops.flush()
        if self._stops.matched is not None:
            finish_reason, stop_reason = "stop", self._stops.matched
        delta, self._echoed = self._echoed + delta, ""
        self._text += delta
        self._take_logprobs(message, len(self._token_ids) - num_before)
        return Output(
            request_id=self.request_id,
            delta=delta,
            text=self._text,
            token_ids=list(self._token_ids),
            num_new_tokens=len(self._token_ids) - num_before,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            usage=Usage(
                prompt_tokens=message.num_prompt_tokens or self._num_prompt_tokens,
                completion_tokens=len(self._token_ids),
                cached_tokens=message.num_cached_tokens,
            ),
            seed=message.seed,
            index=message.index,
        )

    def _append(self, message: RequestOutput) -> str:
        """Take tokens up to the one that completes a stop string, so that the result does not depend on batches."""
        last = len(message.new_token_ids) - 1
        pieces = []
        for index, token_id in enumerate(message.new_token_ids):
            self._token_ids.append(token_id)
            is_stop_token = index == last and message.finish_reason == "stop"
            if self._detokenizer is not None and not is_stop_token:
                heeded = len(self._token_ids) > self._min_tokens
                pieces.append(self._stops.push(self._detokenizer.add(token_id), heeded=heeded))
                if self._stops.matched is not None:
                    break
        return "".join(pieces)

    def _take_logprobs(self, message: RequestOutput, num_tokens: int) -> None:
        if self._logprobs is not None and message.logprobs is not None:
            self._logprobs += self._unpack(message.logprobs)[:num_tokens]
        if self._prompt_logprobs is not None and message.prompt_logprobs is not None:
            del self._prompt_logprobs[message.prompt_logprobs.start :]
            self._prompt_logprobs += self._unpack(message.prompt_logprobs)

    def _unpack(self, columns: TokenLogprobs) -> list[TokenLogprob]:
        ids, values, ranks = columns.token_ids.tolist(), columns.logprobs.tolist(), columns.ranks.tolist()
        width = 1 + columns.num_top
        return [
            TokenLogprob(
                token_id=ids[start],
                logprob=values[start],
                rank=rank,
                token_bytes=self._token_bytes(ids[start]),
                top=(top := _possible(ids[start + 1 : start + width], values[start + 1 : start + width])),
                top_bytes=tuple(self._token_bytes(token_id) for token_id, _ in top),
            )
            for start, rank in zip(range(0, len(ids), width), ranks, strict=True)
        ]


def _possible(token_ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    """Without tokens that can't come, as filters and masks leave them."""
    return tuple(entry for entry in zip(token_ids, logprobs, strict=True) if entry[1] > -math.inf)
