"""What goes into the step that is being built, and how does it read on the wire?"""

from dataclasses import dataclass

from engine.cost_model import StepShape
from engine.in_flight import InFlightStep
from engine.request import Request
from ipc.messages import CachedRequestData, DraftTokens, NewRequestData, RejectedDrafts, SchedulerOutput

PlanEntry = tuple[Request, int, tuple[list[int], ...]]
"""Who, how many tokens, and the blocks per group that the request gained for them."""


@dataclass(slots=True, kw_only=True)
class StepIdentity:
    """What every message to the workers carries."""

    core_id: int
    epoch: int
    step_id: int


class BatchPlan:
    """A step in the making: entries may still be taken out, nothing about their requests has moved."""

    def __init__(self, token_budget: int) -> None:
        self.tokens_left = token_budget
        self._singles: dict[int, PlanEntry] = {}
        self._chunks: dict[int, PlanEntry] = {}
        self._drafts: dict[int, list[int]] = {}
        self._new: dict[int, NewRequestData] = {}
        self._needs_tokens_of_step = 0

    def __len__(self) -> int:
        return len(self._singles) + len(self._chunks)

    @property
    def num_drafts(self) -> int:
        """Of all entries."""
        return sum(map(len, self._drafts.values()))

    def add(self, request: Request, num_tokens: int, gained: tuple[list[int], ...]) -> None:
        """Schedule the next ``num_tokens`` of a request; its row stands where the batch's order wants it."""
        entries = self._singles if num_tokens == 1 else self._chunks
        entries[request.internal_id] = (request, num_tokens, gained)
        self.tokens_left -= num_tokens

    def add_drafts(self, request: Request, drafts: list[int], gained: tuple[list[int], ...]) -> None:
        """Schedule the newest token of a request and, in the slots behind it, guesses of those that follow."""
        self._chunks[request.internal_id] = (request, 1, gained)
        self._drafts[request.internal_id] = drafts
        self.tokens_left -= 1 + len(drafts)

    def add_new(self, request: Request, num_tokens: int, row_named_by_step: int) -> None:
        """The same for a request that begins a life: its row and tables are set.

        Stage 0 applies tokens by row. It must have consumed those of the row's last owner before the row changes hands.
        """
        self.add(request, num_tokens, ())
        self._needs_tokens_of_step = max(self._needs_tokens_of_step, row_named_by_step)
        self._new[request.internal_id] = NewRequestData(
            row=request.row,
            request_id=request.request_id,
            token_ids=request.all_token_ids(),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_scheduled_tokens,
            block_ids=tuple([list(table) for table in request.block_ids]),
            params=request.params,
        )

    def remove(self, request: Request) -> None:
        """Take a victim out, if it is in, and refund its tokens."""
        entry = self._singles.pop(request.internal_id, None) or self._chunks.pop(request.internal_id, None)
        if entry is not None:
            self.tokens_left += entry[1] + len(self._drafts.pop(request.internal_id, ()))

    def commit(self, identity: StepIdentity, freed_rows: list[int], num_groups: int) -> tuple[SchedulerOutput, InFlightStep]:
        """Move the requests forward; the message for the workers and the record for its return."""
        step_id = identity.step_id
        entries = [*self._singles.values(), *self._chunks.values()]
        requests = [entry[0] for entry in entries]
        rows = [request.row for request in requests]
        counts = [entry[1] for entry in entries]
        samples: list[bool] = []
        needs = self._needs_tokens_of_step
        constrained: list[tuple[Request, int, int]] = []
        attention = 0
        rejected: list[tuple[int, int]] = []
        for index, (request, num_tokens, _) in enumerate(entries):
            context = request.num_scheduled_tokens
            attention += num_tokens * (2 * context + num_tokens)
            request.num_scheduled_tokens = end = context + num_tokens
            request.num_steps_in_flight += 1
            request.last_step_id = step_id
            # Beyond the known tokens stands at most one that an earlier step promised.
            reaches_end = end >= request.num_prompt_tokens + len(request.output_token_ids)
            samples.append(reaches_end)
            if reaches_end:
                # The newest token is an input of this step, known to the core or not; the next one comes from this step.
                if request.sampled_by_step > needs:
                    needs = request.sampled_by_step
                request.sampled_by_step = step_id
                if request.grammar is not None:
                    constrained.append((request, request.row, end))
            if request.num_rejected_drafts:
                rejected.append((index, request.num_rejected_drafts))
                request.num_rejected_drafts = 0
        drafts = [
            (index, self._drafts[request.internal_id])
            for index, request in enumerate(requests)
            if request.internal_id in self._drafts
        ] if self._drafts else []
        num_tokens_of = counts.copy() if drafts else counts
        for index, of_row in drafts:
            num_tokens_of[index] += len(of_row)
            attention += len(of_row) * (2 * requests[index].num_scheduled_tokens + len(of_row))
        output = SchedulerOutput(
            core_id=identity.core_id,
            epoch=identity.epoch,
            step_id=step_id,
            freed_rows=freed_rows,
            new_requests=tuple(self._new.values()),
            cached_requests=_deltas(entries, num_groups),
            rows=rows,
            num_scheduled_tokens=num_tokens_of,
            needs_tokens_of_step=needs,
            has_grammar=bool(constrained),
            drafts=_draft_columns(drafts) if drafts else None,
            rejected=RejectedDrafts(indices=[i for i, _ in rejected], counts=[n for _, n in rejected]) if rejected else None,
        )
        shape = StepShape(len(rows), sum(num_tokens_of), attention, True in samples)
        of_rows = {rows[index]: of_row for index, of_row in drafts}
        return output, InFlightStep(step_id, requests, rows, counts, samples, shape, constrained, of_rows)


def _draft_columns(drafts: list[tuple[int, list[int]]]) -> DraftTokens:
    return DraftTokens(
        indices=[index for index, _ in drafts],
        counts=[len(of_row) for _, of_row in drafts],
        token_ids=[token_id for _, of_row in drafts for token_id in of_row],
    )


def _deltas(entries: list[PlanEntry], num_groups: int) -> CachedRequestData:
    growing = [(index, entry[2]) for index, entry in enumerate(entries) if entry[2]]
    return CachedRequestData(
        indices=[index for index, _ in growing],
        num_new_blocks=tuple([[len(gained[group]) for _, gained in growing] for group in range(num_groups)]),
        new_block_ids=tuple([
            [block_id for _, gained in growing for block_id in gained[group]] for group in range(num_groups)
        ]),
    )
