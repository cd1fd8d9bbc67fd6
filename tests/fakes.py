"""Stand-ins for what the engine talks to: workers that keep a simulated KV cache and check every rule, and a clock."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.kv_spec import ABSENT, FullAttention, KVSpec, SlidingWindow
from engine.scheduler import ROWS_PER_SEQUENCE, SchedulerConfig
from ipc.errors import RequestError
from ipc.messages import (
    CachedRequestData,
    GrammarOutput,
    LogprobColumns,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from ipc.params import SamplingParams

VOCAB_SIZE = 500
REPEATING = 1000
"""Requests with this seed or a higher one say the same few tokens again and again, so that drafts are earned."""


class RuleBroken(AssertionError):
    """The scheduler asked for something that real workers would have answered with wrong tokens."""


class FakeClock:
    """A monotonic clock that only moves when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def chain(previous: int, token_id: int) -> int:
    """What a slot holds: depends on its token and on all tokens before it, as keys and values do."""
    return hash((previous, token_id))


def chain_of(token_ids: Sequence[int]) -> int:
    """What the last token's slot of this sequence holds."""
    value = 0
    for token_id in token_ids:
        value = chain(value, token_id)
    return value


def pseudo_token(value: int, seed: int | None, vocab_size: int = VOCAB_SIZE) -> int:
    """The token that follows a sequence whose last slot holds ``value``."""
    mixed = hash((value, -2 if seed is None else seed, 7))
    if seed is not None and seed >= REPEATING and (rare := mixed // vocab_size % 16):
        return 5 if rare > 2 else 6
    return mixed % vocab_size


def pseudo_logprobs(value: int, token_id: int, num_top: int) -> tuple[list[int], list[float], int]:
    """Ids, log probabilities and rank at one position, for the token that stands there."""
    ids = [token_id, *((value + step) % VOCAB_SIZE for step in range(num_top))]
    return ids, [-float(hash((value, i)) % 1000) / 8 for i in ids], hash((value, token_id)) % VOCAB_SIZE + 1


class FakeGrammar:
    """Allows a few tokens, others after each answer; complete after some of them."""

    def __init__(self, num_tokens: int, key: int = 0) -> None:
        self.num_tokens = num_tokens
        self.accepted: list[int] = []
        self._key = key

    def copy(self, params: SamplingParams | None = None) -> "FakeGrammar":
        return FakeGrammar(self.num_tokens, self._key)

    def fork(self) -> "FakeGrammar":
        twin = FakeGrammar(self.num_tokens, self._key)
        twin.accepted = list(self.accepted)
        return twin

    @property
    def is_complete(self) -> bool:
        return len(self.accepted) >= self.num_tokens

    @property
    def mask(self) -> NDArray[np.int32]:
        allowed = self.allowed()
        return sum_of_bits(allowed)

    def allowed(self) -> list[int]:
        return sorted({hash((self._key, i, *self.accepted)) % VOCAB_SIZE for i in range(5)})

    def accept(self, token_id: int) -> None:
        if token_id not in self.allowed():
            raise RequestError(f"token {token_id} is not one of {self.allowed()}", code="internal")
        self.accepted.append(token_id)


def sum_of_bits(token_ids: Sequence[int]) -> NDArray[np.int32]:
    """A mask of these tokens."""
    bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def pseudo_choice(value: int, seed: int | None, allowed: Sequence[int]) -> int:
    """The same under a mask."""
    return allowed[pseudo_token(value, seed) % len(allowed)]


def expected_output(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos_token_ids: frozenset[int],
    max_model_len: int,
    outputs: Sequence[int] = (),
    grammar: FakeGrammar | None = None,
) -> tuple[list[int], str, int | None]:
    """All output tokens, finish reason and stop reason of a request that nobody disturbs; ``grammar`` at its start."""
    tokens = list(outputs)
    value = chain_of([*prompt, *tokens])
    for token_id in tokens if grammar else ():
        grammar.accept(token_id)
    while True:
        if grammar is None:
            tokens.append(pseudo_token(value, params.seed))
        else:
            tokens.append(pseudo_choice(value, params.seed, grammar.allowed()))
        value = chain(value, tokens[-1])
        if tokens[-1] in eos_token_ids and not params.ignore_eos:
            return tokens, "stop", None
        if tokens[-1] in params.stop_token_ids:
            return tokens, "stop", tokens[-1]
        if grammar is not None:
            grammar.accept(tokens[-1])
            if grammar.is_complete:
                return tokens, "stop", None
        if len(tokens) == params.max_tokens or len(prompt) + len(tokens) == max_model_len:
            return tokens, "length", None


SlotContent = tuple[int, int, tuple[tuple[int, bytes], ...]]
"""KV group (one memory serves all), a value that depends on all tokens so far, and the key parts so far."""


def oldest_read(spec: KVSpec, position: int) -> int:
    """The oldest position that a token there attends to; deliberately not asked of the ledger's own rule."""
    return max(0, position - spec.window + 1) if isinstance(spec, SlidingWindow) else 0


@dataclass(eq=False)
class FakeRow:
    """One life of a request as the workers see it."""

    request_id: str
    params: SamplingParams
    num_prompt_tokens: int
    token_ids: list[int]
    """Stage 0's: grows when SampledTokens are consumed."""
    num_known: int
    """Every rank's: grows when a step samples."""
    num_computed: int
    tables: list[list[int]]
    """Block ids per KV group."""
    values: list[int] = field(default_factory=list)
    """What each position's slot must hold."""
    drafts: list[int] = field(default_factory=list)
    """Those of its newest step."""

    def value_at(self, position: int) -> int:
        while len(self.values) <= position:
            previous = self.values[-1] if self.values else 0
            self.values.append(chain(previous, self.token_ids[len(self.values)]))
        return self.values[position]

    def forget_behind(self, num_tokens: int) -> None:
        """What stands behind so many tokens was a guess."""
        del self.token_ids[num_tokens:], self.values[num_tokens:]


class FakeWorker:
    """All stages in one: executes each plan when it is sent, hands outputs back in order when asked.

    Executing at once is the same as executing later, because every stage runs steps in order. A step with a grammar, and
    what is behind it, waits for its masks. Tokens return to stage 0 as late as the plans permit, and are applied by row
    alone, as a simple worker does.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        depth: int,
        allow_placeholders: bool = False,
        groups: Sequence[KVSpec] = (FullAttention(),),
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.depth = depth
        self.allow_placeholders = allow_placeholders
        self.groups = tuple(groups)
        self.nan_requests: set[str] = set()
        """Requests whose logits hold a NaN from now on."""
        self.rows: list[FakeRow | None] = [None] * num_rows
        self.key_parts: dict[str, tuple[tuple[int, bytes], ...]] = {}
        """By request: what beside tokens decides what slots hold, as real workers see an adapter or an image."""
        self.slots: dict[int, SlotContent] = {}
        self.written_by: dict[int, int] = {}
        """Step that wrote the slot last."""
        self.last_step_id = 0
        self.last_returned_id = 0
        self.forgotten_up_to_step = 0
        """What this step and earlier ones wrote must not be found any more."""
        self.num_shared_tokens = 0
        """Tokens that new rows found computed, over all groups."""
        self.pending: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        """Executed, not handed back yet."""
        self.unexecuted: deque[SchedulerOutput] = deque()
        """The first one waits for its masks."""
        self.masks: dict[int, GrammarOutput] = {}
        """By step, of those that are not executed yet."""
        self._sampled: deque[tuple[int, list[tuple[int, FakeRow, list[int]]]]] = deque()
        """SampledTokens on their way to stage 0: step, then row, owner at that time (to detect, not to decide) and tokens."""
        self.num_drafts = 0
        self.num_accepted = 0
        self._samples_in_flight: dict[int, list[FakeRow]] = {}

    @classmethod
    def for_config(cls, config: SchedulerConfig, depth: int) -> "FakeWorker":
        return cls(
            num_rows=ROWS_PER_SEQUENCE * config.max_num_seqs,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            depth=depth,
            allow_placeholders=config.async_scheduling,
            groups=config.kv_groups,
        )

    def send(self, plan: SchedulerOutput) -> None:
        """Execute a plan; its output waits in ``pending``."""
        _require(plan.step_id == self.last_step_id + 1, f"step {plan.step_id} follows step {self.last_step_id}")
        _require(self.num_in_flight < self.depth, f"more than {self.depth} steps in flight")
        self.last_step_id = plan.step_id
        for new in plan.new_requests:
            sent = [*(step for step, _ in self.pending), *self.unexecuted]
            named = [step.step_id for step in sent if new.row in step.rows]
            _require(not named, f"row {new.row} is taken while steps {named} that name it are in flight")
        self.unexecuted.append(plan)
        self._execute_what_can_be()

    def take_masks(self, masks: GrammarOutput) -> None:
        """What was promised for a step."""
        promised = [plan.step_id for plan in self.unexecuted if plan.has_grammar and plan.step_id not in self.masks]
        _require(masks.step_id in promised, f"masks of step {masks.step_id} come, those of steps {promised} were promised")
        self.masks[masks.step_id] = masks
        self._execute_what_can_be()

    @property
    def num_in_flight(self) -> int:
        return len(self.pending) + len(self.unexecuted)

    def _execute_what_can_be(self) -> None:
        while self.unexecuted and (not self.unexecuted[0].has_grammar or self.unexecuted[0].step_id in self.masks):
            self._execute(self.unexecuted.popleft())

    def _execute(self, plan: SchedulerOutput) -> None:
        self._consume_sampled(plan)
        for row in plan.freed_rows:
            _require(self.rows[row] is not None, f"row {row} is freed but nobody has it")
            self.rows[row] = None
        for new in plan.new_requests:
            self._take_row(new)
        self._grow_tables(plan.rows, plan.cached_requests)
        self._check_batch(plan)
        self._take_drafts(plan)
        batch = [(row, self._owner(row), count) for row, count in zip(plan.rows, plan.num_scheduled_tokens, strict=True)]
        self._check_tables()
        for row, owner, count in batch:
            self._write(plan.step_id, row, owner, count)
        for row, owner, count in batch:
            self._read(row, owner, owner.num_computed + count)
        self.pending.append((plan, self._compute(plan, batch)))

    def receive(self) -> ModelRunnerOutput:
        """The oldest output that was not handed back yet."""
        plan, output = self.pending.popleft()
        self._samples_in_flight.pop(plan.step_id)
        self.last_returned_id = plan.step_id
        return output

    def _consume_sampled(self, plan: SchedulerOutput) -> None:
        _require(plan.needs_tokens_of_step < plan.step_id, "a step needs tokens of its own or of a later step")
        while self._sampled and self._sampled[0][0] <= plan.needs_tokens_of_step:
            _, tokens = self._sampled.popleft()
            for row, sampled_for, token_ids in tokens:
                owner = self.rows[row]
                if owner is not None:
                    _require(owner is sampled_for, f"a token of {sampled_for.request_id} reaches {owner.request_id} in row {row}")
                    owner.token_ids.extend(token_ids)

    def _take_row(self, new: NewRequestData) -> None:
        row = new.row
        _require(self.rows[row] is None, f"row {row} is taken while it has an owner")
        _require(0 <= new.num_computed_tokens < len(new.token_ids), "a request comes with nothing left to compute")
        _require(len(new.block_ids) == len(self.groups), f"{len(new.block_ids)} tables for {len(self.groups)} groups")
        owner = self.rows[row] = FakeRow(
            request_id=new.request_id,
            params=new.params,
            num_prompt_tokens=new.num_prompt_tokens,
            token_ids=[int(t) for t in new.token_ids],
            num_known=len(new.token_ids),
            num_computed=new.num_computed_tokens,
            tables=[list(table) for table in new.block_ids],
        )
        for group, spec in enumerate(self.groups):
            for position in range(oldest_read(spec, new.num_computed_tokens), new.num_computed_tokens):
                slot = self._slot(owner, group, position)
                written_by = self.written_by.get(slot, 0)
                _require(0 < written_by <= self.last_returned_id, f"row {row} shares slot {slot} before step {written_by} is back")
                _require(written_by > self.forgotten_up_to_step, f"row {row} shares slot {slot}, which was to be forgotten")
                self.num_shared_tokens += 1

    def _grow_tables(self, rows: list[int], deltas: CachedRequestData) -> None:
        _require(len(deltas.num_new_blocks) == len(deltas.new_block_ids), "groups of counts and of blocks differ")
        for group, counts in enumerate(deltas.num_new_blocks):
            gained = deque(deltas.new_block_ids[group])
            for index, count in zip(deltas.indices, counts, strict=True):
                self._owner(rows[index]).tables[group].extend(gained.popleft() for _ in range(count))
            _require(not gained, "more new blocks than counts name")

    def _take_drafts(self, plan: SchedulerOutput) -> None:
        if (rejected := plan.rejected) is not None:
            for index, count in zip(rejected.indices, rejected.counts, strict=True):
                owner = self._owner(plan.rows[index])
                _require(0 < count <= len(owner.drafts), f"{count} of {len(owner.drafts)} drafts are taken back")
                owner.num_known -= count
                owner.num_computed -= count
        for row in plan.rows:
            self._owner(row).drafts = []
        if (drafts := plan.drafts) is None:
            return
        token_ids = deque(drafts.token_ids)
        for index, count in zip(drafts.indices, drafts.counts, strict=True):
            owner = self._owner(plan.rows[index])
            _require(plan.num_scheduled_tokens[index] == 1 + count, "drafts are counted with their token")
            _require(owner.num_known == len(owner.token_ids) == owner.num_computed + 1, "drafts stand behind an unknown token")
            owner.drafts = [token_ids.popleft() for _ in range(count)]
            owner.token_ids.extend(owner.drafts)
            owner.num_known += count
        _require(not token_ids, "more drafts than counts name")

    def _check_batch(self, plan: SchedulerOutput) -> None:
        counts = plan.num_scheduled_tokens
        _require(len(set(plan.rows)) == len(plan.rows) == len(counts) > 0, "rows of the batch are doubled or absent")
        _require(min(counts) >= 1 and sum(counts) <= self.max_num_batched_tokens, f"token counts {counts} break the budget")
        _require(counts == [c for c in counts if c == 1] + [c for c in counts if c > 1], "rows with one token must come first")
        _require({new.row for new in plan.new_requests} <= set(plan.rows), "a new request is not in the batch")
        drafted = set(_rows_with_drafts(plan))
        for step, _ in self.pending:
            doubled = set(_rows_with_drafts(step)) & set(plan.rows) | drafted & set(step.rows)
            _require(not doubled, f"rows {doubled} have drafts in one of two steps in flight")
        if not self.allow_placeholders:
            for owners in self._samples_in_flight.values():
                for row in plan.rows:
                    _require(self.rows[row] not in owners, f"row {row} goes on before its sampled token is back")

    def _check_tables(self) -> None:
        """A block that somebody may still read has one owner, or only owners that have it computed in the same place."""
        owners: dict[int, list[tuple[int, FakeRow, int, int]]] = {}
        for row, owner in enumerate(self.rows):
            if owner is None:
                continue
            for group, (spec, table) in enumerate(zip(self.groups, owner.tables, strict=True)):
                for index in range(oldest_read(spec, owner.num_computed) // self.block_size, len(table)):
                    _require(0 <= table[index] < self.num_blocks, f"block {table[index]} of row {row} does not exist")
                    owners.setdefault(table[index], []).append((row, owner, group, index))
        for block_id, holders in owners.items():
            if len(holders) == 1:
                continue
            rows = [row for row, *_ in holders]
            places = {(group, index) for _, _, group, index in holders}
            _require(len(places) == 1, f"block {block_id} is held by rows {rows} in different places")
            end = (holders[0][3] + 1) * self.block_size
            _require(
                all(owner.num_computed >= end for _, owner, _, _ in holders),
                f"block {block_id} is held by rows {rows}, one of which writes to it",
            )

    def _write(self, step_id: int, row: int, owner: FakeRow, count: int) -> None:
        end = owner.num_computed + count
        _require(end <= owner.num_known, f"row {row} is asked for {end} tokens and has {owner.num_known}")
        _require(end <= len(owner.token_ids), f"stage 0 does not have token {end - 1} of row {row}: needs_tokens_of_step is too small")
        for group, table in enumerate(owner.tables):
            _require(end <= len(table) * self.block_size, f"row {row} has no slot for token {end - 1}")
            for position in range(owner.num_computed, end):
                slot = self._slot(owner, group, position)
                self.slots[slot] = self._content(owner, group, position)
                self.written_by[slot] = step_id

    def _read(self, row: int, owner: FakeRow, end: int) -> None:
        for group, spec in enumerate(self.groups):
            for position in range(oldest_read(spec, owner.num_computed), end):
                slot = self._slot(owner, group, position)
                _require(
                    self.slots.get(slot) == self._content(owner, group, position),
                    f"row {row} reads a foreign or stale slot {slot} at {position}",
                )

    def _compute(self, plan: SchedulerOutput, batch: list[tuple[int, FakeRow, int]]) -> ModelRunnerOutput:
        sampled: list[tuple[int, FakeRow, list[int]]] = []
        allowed = _allowed_ids(self.masks.pop(plan.step_id, None))
        logprobs, prompt_logprobs = ColumnBuilder(), ColumnBuilder()
        for row, owner, count in batch:
            start, end = owner.num_computed, owner.num_computed + count
            owner.num_computed = end
            if owner.params.prompt_logprobs is not None:
                last = min(end, owner.num_prompt_tokens - 1)
                prompt_logprobs.add(row, owner, start + 1, owner.token_ids[start + 1 : last + 1], owner.params.prompt_logprobs)
            if end == owner.num_known:
                value, seed = owner.value_at(end - 1), owner.params.seed
                token_id = pseudo_choice(value, seed, allowed.pop(row)) if row in allowed else pseudo_token(value, seed)
                token_ids = self._verified(owner, end) if owner.drafts else [token_id]
                sampled.append((row, owner, token_ids))
                owner.num_known += 1
                most = owner.params.max_tokens
                _require(owner.num_known <= self.max_model_len, f"row {row} samples past max_model_len")
                _require(most is None or owner.num_known - owner.num_prompt_tokens <= most, f"row {row} samples past max_tokens")
                if owner.params.logprobs is not None:
                    logprobs.add(row, owner, end, [token_id], owner.params.logprobs)
        _require(not allowed, f"masks for rows {list(allowed)}, which do not sample")
        self._sampled.append((plan.step_id, sampled))
        self._samples_in_flight[plan.step_id] = [owner for _, owner, _ in sampled]
        return ModelRunnerOutput(
            core_id=plan.core_id,
            epoch=plan.epoch,
            step_id=plan.step_id,
            rows=[row for row, _, _ in sampled],
            token_ids=[token_id for _, _, token_ids in sampled for token_id in token_ids],
            counts=[len(token_ids) for _, _, token_ids in sampled],
            logprobs=logprobs.build(),
            prompt_logprobs=prompt_logprobs.build(),
            nan_rows=[row for row, owner, _ in batch if owner.request_id in self.nan_requests],
        )

    def _verified(self, owner: FakeRow, end: int) -> list[int]:
        """The drafts that are what would have been sampled, and the token behind them; they are unknown again."""
        num_sure = end - len(owner.drafts)
        token_ids: list[int] = []
        for index in range(len(owner.drafts) + 1):
            token_ids.append(pseudo_token(owner.value_at(num_sure - 1 + index), owner.params.seed))
            if token_ids[index : index + 1] != owner.drafts[index : index + 1]:
                break
        owner.forget_behind(num_sure)
        self.num_drafts += len(owner.drafts)
        self.num_accepted += len(token_ids) - 1
        return token_ids

    def _owner(self, row: int) -> FakeRow:
        owner = self.rows[row]
        if owner is None:
            raise RuleBroken(f"row {row} is in the batch and nobody has it")
        return owner

    def _content(self, owner: FakeRow, group: int, position: int) -> SlotContent:
        parts = self.key_parts.get(owner.request_id, ())
        return group, owner.value_at(position), tuple(part for part in parts if part[0] <= position)

    def _slot(self, owner: FakeRow, group: int, position: int) -> int:
        block_id = owner.tables[group][position // self.block_size]
        _require(block_id != ABSENT, f"{owner.request_id} touches position {position}, which group {group} has given back")
        return block_id * self.block_size + position % self.block_size


def _rows_with_drafts(plan: SchedulerOutput) -> list[int]:
    return [] if plan.drafts is None else [plan.rows[index] for index in plan.drafts.indices]


def _allowed_ids(masks: GrammarOutput | None) -> dict[int, list[int]]:
    if masks is None or not masks.rows:
        return {}
    bits = np.unpackbits(masks.masks.reshape(len(masks.rows), -1).view(np.uint8), axis=1, bitorder="little")
    return {row: np.flatnonzero(of_row).tolist() for row, of_row in zip(masks.rows, bits, strict=True)}


class ColumnBuilder:
    """Collects log probabilities in the layout of LogprobColumns."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, int, int, int]] = []
        self.ids: list[int] = []
        self.values: list[float] = []
        self.ranks: list[int] = []

    def add(self, row: int, owner: FakeRow, start: int, token_ids: list[int], num_top: int) -> None:
        if not token_ids:
            return
        self.heads.append((row, start, len(token_ids), num_top))
        for position, token_id in enumerate(token_ids, start):
            ids, values, rank = pseudo_logprobs(owner.value_at(position - 1), token_id, num_top)
            self.ids.extend(ids)
            self.values.extend(values)
            self.ranks.append(rank)

    def build(self) -> LogprobColumns | None:
        if not self.heads:
            return None
        rows, starts, counts, tops = (list(column) for column in zip(*self.heads, strict=True))
        return LogprobColumns(
            rows=rows,
            starts=starts,
            num_positions=counts,
            num_top=tops,
            token_ids=np.asarray(self.ids, np.int32),
            logprobs=np.asarray(self.values, np.float32),
            ranks=np.asarray(self.ranks, np.int32),
        )


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise RuleBroken(complaint)
