"""How does a request for several answers become requests of the scheduler, and which of them wait for which?

The first choice goes ahead. The others are queued when it has its first token: by then the prefix cache has the full
blocks of the prompt, and nobody computes them twice. Where nothing can be shared all go at once. If the one that goes
ahead ends before that, the next one takes its place.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.request import AnswerGrammar, ClientId, Request
from ipc.messages import AddRequest
from ipc.params import DrawRules
from ipc.structured import StructuredOutput

NO_DEFAULTS = DrawRules()

_MASK64 = (1 << 64) - 1


def seed_of_choice(seed: int, index: int) -> int:
    """The request's own for choice 0; for others the index-th output of splitmix64 from that seed, without its lowest bit."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK64
    return (z ^ z >> 31) >> 1


def choices_of(
    message: AddRequest, client: ClientId, *, first_id: int, seed: int, now: float, defaults: DrawRules = NO_DEFAULTS
) -> list[Request]:
    """A request for each answer, with internal ids from ``first_id`` on.

    Their parameters are what workers need: nothing is unset that has a default, a salt becomes a part of the cache key, a
    form becomes masks. Of a resubmission only those that are still open.
    """
    asked = message.params
    cache_key_parts = () if asked.cache_salt is None else ((0, b"salt:" + asked.cache_salt.encode()),)
    params = asked.resolved(defaults, seed=seed, n=1, cache_salt=None, structured=None)
    return [
        Request(
            request_id=message.request_id,
            internal_id=first_id + index,
            client=client,
            prompt_token_ids=message.prompt_token_ids,
            params=params if index == 0 else replace(params, seed=seed_of_choice(seed, index), prompt_logprobs=None),
            output_token_ids=output_token_ids,
            priority=message.priority,
            index=index,
            takes_updates=message.takes_updates,
            arrival_time=now,
            deadline=None if message.timeout_s is None else now + message.timeout_s,
            cache_key_parts=cache_key_parts,
        )
        for index, output_token_ids in outputs_by_choice(message)
    ]


def outputs_by_choice(message: AddRequest) -> Iterator[tuple[int, list[int]]]:
    """Index of each choice that is to be computed, and the tokens that it has; for a message that was checked."""
    if not message.indices:
        yield from ((index, message.output_token_ids.tolist()) for index in range(message.params.n))
        return
    start = 0
    for index, count in zip(message.indices, message.counts, strict=True):
        yield index, message.output_token_ids[start : start + count].tolist()
        start += count


@dataclass(slots=True, kw_only=True)
class _Held:
    """Choices that wait for one that went ahead, in order."""

    requests: list[Request]
    structured: StructuredOutput | None
    waits_for_blocks: bool
    """Whether they wait for the first token; otherwise for the grammar alone."""
    grammar: AnswerGrammar | None = None
    """At its start; each choice gets a copy."""


class Next(NamedTuple):
    """The choice that goes ahead now, and the form that must be compiled for it first."""

    request: Request
    structured: StructuredOutput | None


class OpenRequests:
    """Every open choice of every request. Those that are held are in no queue and no scheduler."""

    def __init__(self) -> None:
        self._choices: dict[tuple[ClientId, str], dict[int, Request]] = {}
        self._held: dict[int, _Held] = {}
        """By the internal id of the one that went ahead."""
        self._ahead: dict[int, int] = {}
        """By the internal id of each that is held: the key of the above."""
        self._num_open = 0
        self.num_held_tokens = 0

    def __len__(self) -> int:
        """Choices, not requests."""
        return self._num_open

    def __contains__(self, key: tuple[ClientId, str]) -> bool:
        return key in self._choices

    def __iter__(self) -> Iterator[Request]:
        """All, newest first, so that who ends them in this order ends those that wait before whom they wait for."""
        return iter([request for choices in reversed(self._choices.values()) for request in reversed(choices.values())])

    def oldest_first(self) -> Iterator[Request]:
        """All in order of arrival; nothing may be added or removed meanwhile."""
        return (request for choices in self._choices.values() for request in choices.values())

    def is_held(self, request: Request) -> bool:
        return request.internal_id in self._ahead

    @property
    def num_held(self) -> int:
        return len(self._ahead)

    def find(self, client: ClientId, request_id: str, index: int | None = None) -> list[Request]:
        """The open choices of a request in the same order, or one of them; empty when there is none."""
        choices = self._choices.get((client, request_id), {})
        return [request for request in reversed(choices.values()) if index is None or request.index == index]

    def add(self, requests: list[Request]) -> None:
        """All choices of one request."""
        first = requests[0]
        self._choices[first.client, first.request_id] = {request.index: request for request in requests}
        self._num_open += len(requests)

    def hold(self, requests: list[Request], structured: StructuredOutput | None, *, waits_for_blocks: bool) -> None:
        """All but the first wait: for its first token, or only for the grammar if there are no blocks to share."""
        ahead, *others = requests
        if not others:
            return
        self._held[ahead.internal_id] = _Held(
            requests=others, structured=structured, waits_for_blocks=waits_for_blocks
        )
        for request in others:
            self._ahead[request.internal_id] = ahead.internal_id
            self.num_held_tokens += request.num_tokens

    def compiled(self, ahead: Request, grammar: AnswerGrammar) -> list[Request]:
        """Its grammar is there, which nothing was accepted by yet; returns those that may go now."""
        held = self._held.get(ahead.internal_id)
        if held is None:
            return []
        held.grammar = grammar.fork()
        return [] if held.waits_for_blocks else self.release(ahead)

    def release(self, ahead: Request) -> list[Request]:
        """Those that wait for this one, with their grammars; they wait no longer."""
        held = self._held.pop(ahead.internal_id, None)
        if held is None:
            return []
        for request in held.requests:
            self._let_go(request)
            if held.grammar is not None:
                request.grammar = held.grammar.fork()
        return held.requests

    def cancel(self, request: Request) -> bool:
        """Hold it no longer; false if it isn't held."""
        ahead = self._ahead.get(request.internal_id)
        if ahead is None:
            return False
        held = self._held[ahead]
        held.requests.remove(request)
        if not held.requests:
            del self._held[ahead]
        self._let_go(request)
        return True

    def remove(self, request: Request) -> Next | None:
        """It is over. If others waited for it, the first of them goes ahead and the rest wait for that one."""
        key = (request.client, request.request_id)
        del self._choices[key][request.index]
        if not self._choices[key]:
            del self._choices[key]
        self._num_open -= 1
        held = self._held.pop(request.internal_id, None)
        if held is None:
            return None
        ahead = held.requests.pop(0)
        self._let_go(ahead)
        if held.requests:
            self._held[ahead.internal_id] = held
            for other in held.requests:
                self._ahead[other.internal_id] = ahead.internal_id
        if held.grammar is not None:
            ahead.grammar = held.grammar.fork()
            return Next(ahead, None)
        return Next(ahead, held.structured)

    def _let_go(self, request: Request) -> None:
        del self._ahead[request.internal_id]
        self.num_held_tokens -= request.num_tokens
