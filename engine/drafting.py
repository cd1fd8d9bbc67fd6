"""Whose next tokens are guessed in a step, how many of them, and what is said of the guesses when the step returns?

Drafts never change what the KV ledger knows: they stay within the block of the token before them, and count as scheduled
and computed only when they were accepted. So nothing is taken back when they were not.
"""

from engine.cost_model import Coefficients
from engine.in_flight import InFlightStep
from engine.lookup import Lookup
from engine.request import Request
from ipc.errors import ProtocolError
from ipc.messages import ModelRunnerOutput
from ipc.params import SamplingParams


class Drafter:
    """Follows what requests sample, and drafts for those that repeat themselves; ``most`` tokens each, 0 for never."""

    def __init__(self, most: int, *, block_size: int, max_num_seqs: int) -> None:
        self.is_on = most > 0
        self._most = most
        self._block_size = block_size
        self._max_positions = max(max_num_seqs, 1 + most)
        self.num_drafted = 0
        """Drafts that were computed, and have returned."""
        self.num_accepted = 0
        """Those of them that stood."""

    def follow(self, request: Request, token_id: int) -> None:
        """The request goes on with this token, which is the newest of its outputs."""
        if request.lookup is not None:
            request.lookup.append(token_id)
        elif takes_drafts(request):
            request.lookup = Lookup(request.all_token_ids())
        else:
            return
        request.awaits_token = request.lookup.num_earned(self._most) > 0

    def room_beside(self, num_decodes: int, tokens_left: int, costs: Coefficients, context: float) -> int:
        """Drafts that a step of so many decodes has room for.

        All of them together must not cost a stage more than a step of one row does, its head included: a fit may take the one
        for the other. And the step samples at no more positions than there may be requests, since the memory for logits was
        measured with as many.
        """
        draft_s = costs.token_s + 2 * costs.attention_s * context
        room = min(tokens_left, self._max_positions) - num_decodes
        least_s = costs.step_s + costs.row_s + costs.head_s
        return max(0, min(room, int(least_s / draft_s)) if draft_s > 0 else room)

    def drafts_for(self, request: Request, room: int) -> list[int]:
        """For a request whose newest token is known, and about to be computed."""
        lookup, num_tokens = request.lookup, request.num_tokens
        if lookup is None or request.num_scheduled_tokens + 1 != num_tokens:
            return []
        # What is sampled behind the last draft is at most the last token that the request may have.
        room = min(room, -num_tokens % self._block_size, request.max_num_tokens - 1 - num_tokens)
        return lookup.drafts(min(room, lookup.num_earned(self._most)))


def sampled_tokens(output: ModelRunnerOutput, step: InFlightStep) -> tuple[dict[int, int], dict[int, list[int]]]:
    """By row the token that it sampled first, and the further ones of rows whose drafts stood.

    Raises ProtocolError when there are fewer or more of them than the step could have sampled.
    """
    rows, counts, token_ids = output.rows, output.counts, output.token_ids
    if len(rows) == len(counts) == len(token_ids) and counts.count(1) == len(rows):
        return dict(zip(rows, token_ids, strict=True)), {}
    if not step.drafts:
        raise ProtocolError("ModelRunnerOutput.counts", "must be one token for each row")
    if len(rows) != len(counts) or sum(counts) != len(token_ids):
        raise ProtocolError("ModelRunnerOutput.counts", f"are of {len(counts)} rows, {len(rows)} rows have {len(token_ids)} tokens")
    first: dict[int, int] = {}
    further: dict[int, list[int]] = {}
    start = 0
    for row, count in zip(rows, counts, strict=True):
        drafts = step.drafts.get(row, [])
        sampled = token_ids[start : start + count]
        if not 1 <= count <= 1 + len(drafts) or sampled[:-1] != drafts[: count - 1]:
            raise ProtocolError("ModelRunnerOutput.counts", f"row {row} has {count} tokens, which are not its drafts and one more")
        first[row] = sampled[0]
        if count > 1:
            further[row] = sampled[1:]
        start += count
    return first, further


def takes_drafts(request: Request) -> bool:
    """Whether each of its tokens depends on the ones before through the model alone, so that several can be sampled at once.

    A grammar's mask, penalties, barred words and logits processors are made from the tokens before; log probabilities are
    told for one token a step.
    """
    return request.grammar is None and _has_fixed_rules(request.params)


def _has_fixed_rules(params: SamplingParams) -> bool:
    has_penalties = params.repetition_penalty not in (None, 1) or params.presence_penalty != 0 or params.frequency_penalty != 0
    return not (has_penalties or params.bad_word_ids or params.logits_processors) and params.logprobs is None
