"""What is one request to the engine: what was asked, what came of it so far, and where does it stand?"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from engine.lookup import Lookup
from ipc.messages import IdBuffer, MaskBuffer
from ipc.params import SamplingParams

NO_ROW = -1
"""The row of a request that workers hold nothing for."""

NO_CACHE_NODE = -2
"""Not in the prefix cache, not even at its root."""

NEVER = sys.maxsize
"""A number of tokens that no sequence reaches."""


class ClientId(NamedTuple):
    """Who asked: a listening socket of the core, and the identity that ZeroMQ gave the peer there."""

    listener: int
    identity: bytes


class RequestStatus(Enum):
    """Where a request stands; it only ever ends once."""

    WAITING = "waiting"
    """In the queue: new, preempted, or back after a lost epoch."""
    RUNNING = "running"
    """Holds a row and blocks."""
    FINISHED = "finished"
    """Over: holds nothing, and whatever is still in flight for it is discarded."""


class AnswerGrammar(Protocol):
    """What a request's answer must look like, followed token by token; of one request alone, through all of its lives."""

    @property
    def is_complete(self) -> bool:
        """The answer is whole: nothing but an end token may follow."""

    @property
    def mask(self) -> MaskBuffer:
        """Which tokens may come next; meaningless once it is complete. A new array after each token."""

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token. Raises RequestError when the grammar does not allow it."""

    def fork(self) -> "AnswerGrammar":
        """The same for another answer, which goes on from here."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request from arrival to its end. Everything below ``arrival_time`` belongs to the scheduler.

    One *life* of a request is the time it holds one row: preemption and a lost epoch end a life, not the request.
    """

    request_id: str
    """Chosen by the client."""
    internal_id: int
    """Chosen by the core; unique for its lifetime."""
    client: ClientId
    """Who asked; opaque here."""
    prompt_token_ids: Sequence[int] | IdBuffer
    params: SamplingParams
    """``seed`` is set."""
    output_token_ids: list[int] = field(default_factory=list)
    priority: int = 0
    index: int = 0
    """Which of the answers to its prompt it is: choices share ``request_id`` and differ in their seeds."""
    arrival_time: float = 0.0
    takes_updates: bool = False
    """Whether its client reads TokenUpdates."""
    deadline: float | None = None
    """On the core's monotonic clock; a request that is not over by then ends with reason "timeout"."""
    cache_key_parts: tuple[tuple[int, bytes], ...] = ()
    """Beside tokens, what decides the content of KV blocks: from a position on, these bytes (a salt or an adapter at 0,
    the hash of an image where its tokens begin). Only equal parts share blocks."""
    grammar: AnswerGrammar | None = None
    """Has accepted all of ``output_token_ids``; None where any text is allowed."""

    num_prompt_tokens: int = field(init=False)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None
    """"stop", "length", what ``Scheduler.finish`` was given, or "error"."""
    stop_reason: int | None = None
    """The stop token id that ended it, if one of its own did."""
    row: int = NO_ROW
    block_ids: tuple[list[int], ...] = ()
    """Per KV group, in the order of the tokens."""
    max_num_tokens: int = NEVER
    """Of prompt and answer together: known ahead, so nothing is scheduled past it."""
    num_passes: int = 0
    """Requests that overtook this one while it was the head of the queue and did not fit."""
    num_scheduled_tokens: int = 0
    """Leading tokens of the sequence that steps of this life compute, steps in flight included."""
    num_computed_tokens: int = 0
    """The same without steps in flight."""
    num_steps_in_flight: int = 0
    """Of any life; a preempted request waits for zero before it gets a new row."""
    last_step_id: int = 0
    """Newest step of this life that names the row."""
    sampled_by_step: int = 0
    """Step that samples the newest token; 0 when workers are told that token with the request."""
    is_closed: bool = False
    """The client has had its final message, or is gone."""
    is_introduced: bool = False
    """The client has had a RequestOutput for it, from this core."""
    num_prompt_logprobs_told: int = 1
    """Prompt positions whose log probabilities the client has; the first position has none. Survives preemption."""
    has_started: bool = False
    """Ran at least once, in this epoch or an earlier one."""
    started_at: float = 0.0
    """When it first ran, on the scheduler's clock."""
    last_token_at: float = 0.0
    """When its newest token came from the workers, on the clock of ``arrival_time``; 0 before its first one."""
    num_cached_tokens: int = 0
    """Of the prompt, those that were there when the request first ran."""
    cache_node: int = NO_CACHE_NODE
    """The prefix cache's node of the last full block with applied output; pinned by this life."""
    next_block_edge: int = NEVER
    """Computed tokens at which the KV ledger wants to hear of this life again."""
    num_blocks_wanted: int = 0
    """Free blocks that were too few at the last try to admit this request."""
    num_preemptions: int = 0
    lookup: Lookup | None = None
    """Knows what the tokens repeat; where drafts are made, and once it has sampled. Survives preemption."""
    awaits_token: bool = False
    """Has earned drafts, which stand behind a known token: it is not scheduled before its newest token is back."""
    num_rejected_drafts: int = 0
    """Of its last step; workers are told with the next one."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and what was generated."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def all_token_ids(self) -> IdBuffer:
        """Prompt and output in one array of its own."""
        return np.concatenate((
            np.asarray(self.prompt_token_ids, dtype=np.int32),
            np.asarray(self.output_token_ids, dtype=np.int32),
        ))

    def token_bytes(self, start: int, end: int) -> bytes:
        """Known tokens as int32, as they stand in memory. O(end - start)."""
        num_prompt = self.num_prompt_tokens
        if end <= num_prompt:
            return np.asarray(self.prompt_token_ids[start:end], dtype=np.int32).tobytes()
        outputs = self.output_token_ids[max(0, start - num_prompt) : end - num_prompt]
        head = self.prompt_token_ids[start:num_prompt] if start < num_prompt else ()
        return np.asarray([*head, *outputs], dtype=np.int32).tobytes()

    def extra_key(self, start: int, end: int) -> bytes:
        """What of ``cache_key_parts`` begins between these positions, in a form that no other parts have."""
        if not self.cache_key_parts:
            return b""
        return b"".join(
            b"%d:%d:%s" % (position, len(part), part) for position, part in self.cache_key_parts if start <= position < end
        )

    def requeue(self) -> None:
        """Back to the waiting queue with the tokens it has; whatever was in flight for it never returns."""
        self.end_life()
        self.num_steps_in_flight = 0
        self.status = RequestStatus.WAITING

    def end_life(self) -> None:
        """Forget what belonged to the row; steps in flight still count, their output is still right."""
        self.row = NO_ROW
        self.block_ids = ()
        self.cache_node = NO_CACHE_NODE
        self.next_block_edge = NEVER
        self.num_blocks_wanted = 0
        self.num_scheduled_tokens = 0
        self.num_computed_tokens = 0
        self.last_step_id = 0
        self.sampled_by_step = 0
        self.num_rejected_drafts = 0


def ending_of(request: Request, eos_token_ids: frozenset[int], max_model_len: int) -> tuple[str, int | None] | None:
    """Finish reason and stop reason that the newest output token brings, or None when generation goes on."""
    outputs = request.output_token_ids
    if not outputs:
        return None
    params = request.params
    token_id = outputs[-1]
    if token_id in eos_token_ids and not params.ignore_eos:
        return "stop", None
    if token_id in params.stop_token_ids:
        return "stop", token_id
    if request.num_prompt_tokens + len(outputs) >= max_model_len or len(outputs) == params.max_tokens:
        return "length", None
    return None
