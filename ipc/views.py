"""What may a client be told about everybody's open requests? Who asks and how far it is; nothing of what was asked."""

from enum import IntEnum

from ipc.messages import U32, U64, Ints, Name, RequestId
from ipc.registry import message

MAX_VIEWED = 512
"""Requests in one answer: it must not hold up the core's loop."""


class RequestState(IntEnum):
    """What a request is doing. Numbers travel and are never reused."""

    WAITING = 0
    """In the queue, new."""
    HELD = 1
    """Waits for another choice of its request, to share what that one computes."""
    COMPILING = 2
    """The form of its answer is being made ready."""
    PREEMPTED = 3
    """In the queue again: its blocks were needed."""
    PROMPT = 4
    """Runs: its prompt is computed."""
    ANSWER = 5
    """Runs: its answer is generated."""


@message(tag=54)
class RequestsReply:
    """core -> client: the answer to a Control "requests". Columns, one entry for each choice of a request, oldest first."""

    core_id: U64
    control_id: U64
    num_open: U32
    """All that are open; more than are told where these are more than MAX_VIEWED."""
    clients: tuple[Name, ...]
    """Who asked: name of the client library, and a part of the connection's identity."""
    request_ids: tuple[RequestId, ...]
    client_indices: Ints
    """Positions in ``clients``."""
    indices: Ints
    """Which of its request's choices each is."""
    states: Ints
    """Numbers of RequestState; a client shows those that it does not know as they are."""
    ages_ms: Ints
    """Milliseconds since each arrived."""
    num_prompt_tokens: Ints
    num_cached_tokens: Ints
    """Of the prompt, those that the prefix cache had."""
    num_output_tokens: Ints
    """Generated so far."""
    num_preemptions: Ints
    """How often its blocks were taken, and what they held had to be computed again."""
