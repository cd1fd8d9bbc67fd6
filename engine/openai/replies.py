"""What the answers to a request have in common: their head, the state of each choice, and usage."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.openai.generations import Batch
from engine.openai.logprobs import TextOffsets
from engine.openai.server_events import DONE, around, dumps, event
from engine.outputs import Output
from engine.prompts import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What stands at the top of an answer, and in every event of a stream."""

    answer_id: str
    kind: str
    """"text_completion", "chat.completion"; events of chats are of "chat.completion.chunk"."""
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""
    includes_usage: bool = False
    """In a stream: null in every event, and the numbers in one of their own at the end."""
    returns_token_ids: bool = False

    def content(self, choices: Sequence[Any], *, kind: str, **more: Any) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model, "choices": choices} | more


@dataclass(slots=True)
class Choice:
    """One choice of one prompt on its way."""

    index: int
    prompt_index: int
    fill: Callable[[str], bytes]
    """The event for text alone."""
    num_told: int = 0
    """Tokens that events told of."""
    has_begun: bool = False
    last: Output | None = None
    held: list[Output] = field(default_factory=list)
    """What can't be told yet."""
    offsets: TextOffsets | None = None
    parser: Any = None


class Reply(ABC):
    """Makes one HTTP answer of outputs: either events as they come, or one body at the end."""

    def __init__(self, head: Head, prompts: Sequence[Prepared], num_choices: int) -> None:
        """``num_choices`` for each prompt; choices are numbered prompt by prompt."""
        self._head = head
        self._prompts = prompts
        self.params = prompts[0].params
        """What all prompts were sent with."""
        self._num_choices = num_choices
        self._choices = [
            Choice(index, index // num_choices, self._text_event(index)) for index in range(len(prompts) * num_choices)
        ]

    def events(self, batch: Batch) -> Iterator[bytes]:
        """The events for some outputs, in pieces that don't take long to make; they may be empty."""
        for prompt_index, output in batch:
            yield from self._take(prompt_index, output)

    def last_events(self) -> bytes:
        """Behind those of all outputs."""
        if not self._head.includes_usage:
            return DONE
        return event(self._head.content([], kind=self._chunk_kind, usage=self.usage())) + DONE

    def keep(self, batch: Batch) -> None:
        """For the body at the end."""
        for prompt_index, output in batch:
            self._choice_of(prompt_index, output).last = output

    def body(self) -> Iterator[bytes]:
        """The whole answer, once all is over, in pieces that don't take long to make."""
        before, after = around(lambda choice: self._head.content([choice], kind=self._head.kind, usage=self.usage()))
        yield before
        for choice in self._choices:
            yield b"," * (choice.index > 0) + dumps(self._whole(choice))
        yield after

    def usage(self) -> dict[str, Any]:
        """Tokens of each prompt are counted once, those of all choices added up."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        last = [choice.last for choice in self._choices]
        completion_tokens = sum(one.usage.completion_tokens for one in last if one is not None)
        cached = sum(one.usage.cached_tokens for one in last[:: self._num_choices] if one is not None)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    @abstractmethod
    def _chunk_kind(self) -> str:
        """Of the events."""

    @abstractmethod
    def _text_event(self, index: int) -> Callable[[str], bytes]:
        """Makes the event of a choice that has text and nothing else."""

    @abstractmethod
    def _take(self, prompt_index: int, output: Output) -> Iterable[bytes]:
        """The events for one output."""

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]:
        """A choice of the body."""

    def _choice_of(self, prompt_index: int, output: Output) -> Choice:
        return self._choices[prompt_index * self._num_choices + output.index]

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        return event(self._chunk(choices))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        more = {"usage": None} if self._head.includes_usage else {}
        return self._head.content(choices, kind=self._chunk_kind, **more)
