"""To which reader goes what a core says of requests, and when has a reader heard everything? Shared by both clients."""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from ipc.conversation import Failure, Outcome, error_of, is_final
from ipc.errors import PeerLost
from ipc.messages import RequestFailed, RequestOutput, TokenUpdates

log = logging.getLogger(__name__)

Inbox = TypeVar("Inbox")


@dataclass(frozen=True, slots=True)
class Last:
    """The output behind which nothing comes in a stream: the last one of its last open choice."""

    output: RequestOutput


Item = RequestOutput | Last | Failure
"""What a reader finds in its inbox."""


class ToldOutputs:
    """What the core told last of each open choice: its updates say only what is new."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, int], RequestOutput] = {}

    def expand(self, answer: Outcome | TokenUpdates) -> list[Outcome]:
        """The same as one message per request."""
        if isinstance(answer, TokenUpdates):
            return list(self._outputs_of(answer))
        if isinstance(answer, RequestFailed):
            for key in [key for key in self._latest if key[0] == answer.request_id]:
                del self._latest[key]
        elif answer.finish_reason is not None:
            self._latest.pop((answer.request_id, answer.index), None)
        else:
            self._latest[answer.request_id, answer.index] = answer
        return [answer]

    def _outputs_of(self, updates: TokenUpdates) -> Iterator[RequestOutput]:
        end = 0
        indices = updates.indices or [0] * len(updates.request_ids)
        for request_id, count, total, index in zip(
            updates.request_ids, updates.counts, updates.num_output_tokens, indices, strict=True
        ):
            start, end = end, end + count
            if (latest := self._latest.get((request_id, index))) is not None:
                yield RequestOutput(
                    core_id=latest.core_id,
                    request_id=request_id,
                    new_token_ids=updates.token_ids[start:end],
                    num_prompt_tokens=latest.num_prompt_tokens,
                    num_output_tokens=total,
                    seed=latest.seed,
                    num_cached_tokens=latest.num_cached_tokens,
                    index=index,
                )


@dataclass(slots=True)
class _Stream(Generic[Inbox]):
    inbox: Inbox
    num_open: int
    """Choices without a last output."""


class Routes(Generic[Inbox]):
    """Open streams by request id, and those that were abandoned while the core still owed them something."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream[Inbox]] = {}
        self._abandoned: dict[str, deque[int]] = {}
        """How many last outputs are still to come for each namesake, oldest first."""
        self._told = ToldOutputs()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._streams))

    def open(self, request_id: str, inbox: Inbox, num_choices: int) -> None:
        self._streams[request_id] = _Stream(inbox, num_choices)

    def abandon(self, request_id: str, inbox: Inbox) -> bool:
        """Drop what still comes for it: its last outputs, before any of a later namesake. False if it is over."""
        stream = self._streams.get(request_id)
        if stream is None or stream.inbox is not inbox:
            return False
        del self._streams[request_id]
        self._abandoned.setdefault(request_id, deque()).append(stream.num_open)
        return True

    def has(self, request_id: str, inbox: Inbox) -> bool:
        """Whether this very stream is open."""
        stream = self._streams.get(request_id)
        return stream is not None and stream.inbox is inbox

    def take(self, answer: Outcome | TokenUpdates) -> list[tuple[Inbox, Item]]:
        """What an answer brings, and whom."""
        outcomes = self._told.expand(answer)
        return [delivery for outcome in outcomes if (delivery := self._delivery(outcome)) is not None]

    def end_all(self, error: PeerLost) -> list[tuple[Inbox, Item]]:
        """The same for the end of the connection."""
        streams, self._streams = self._streams, {}
        return [(stream.inbox, Failure(error)) for stream in streams.values()]

    def _delivery(self, answer: Outcome) -> tuple[Inbox, Item] | None:
        request_id = answer.request_id
        if request_id in self._abandoned:
            self._note_abandoned(request_id, answer)
            return None
        stream = self._streams.get(request_id)
        if stream is None:
            if isinstance(answer, RequestFailed):
                log.warning("the core refused a message: %s", answer.reason)
            return None
        if isinstance(answer, RequestFailed):
            del self._streams[request_id]
            return stream.inbox, Failure(error_of(answer))
        stream.num_open -= is_final(answer)
        if stream.num_open:
            return stream.inbox, answer
        del self._streams[request_id]
        return stream.inbox, Last(answer)

    def _note_abandoned(self, request_id: str, answer: Outcome) -> None:
        namesakes = self._abandoned[request_id]
        if isinstance(answer, RequestFailed):
            namesakes.popleft()
        elif is_final(answer):
            namesakes[0] -= 1
            if not namesakes[0]:
                namesakes.popleft()
        if not namesakes:
            del self._abandoned[request_id]
