"""Which stage holds which layers?

``split_layers`` knows the splits that need no measuring. ``choose_split`` finds the best one for given costs and memory;
it is pure, so that it can be tried on costs made by hand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ipc.errors import ConfigError

FIELD = "--pipeline-partition"

FREE_POOL_LOSS = 0.1
"""Share of the largest possible KV pool that is given up for any gain in time, however small."""

_TIE = 1e-9
"""Relative difference below which two times are the same: sums in another order differ in their last digits."""

Split = tuple[range, ...]


def split_layers(num_layers: int, num_stages: int, partition: str) -> Split:
    """Every layer exactly once, in order, at least one for each stage.

    ``partition`` is ``even``, ``auto`` (the same: what holds before anything was measured) or the number of layers of
    each stage, as in ``16,14``. An even split gives what is left over to the first stages: the last one has the head
    to compute.

    Raises:
        ConfigError: naming the layer count, the rank count and the split that was asked for.
    """
    sizes = _even_sizes(num_layers, num_stages) if partition in ("even", "auto") else _parse_sizes(partition)
    problem = _problem(sizes, num_layers, num_stages)
    if problem:
        raise ConfigError(
            FIELD, f"cannot split {num_layers} layers over {num_stages} ranks as {partition!r}: {problem}"
        )
    return _ranges([0, *accumulate(sizes)])


def sizes_of(split: Split) -> str:
    """As ``split_layers`` reads it: ``16,14``."""
    return ",".join(str(len(layers)) for layers in split)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds that a step spends in each part of a model."""

    layers: tuple[float, ...]
    embedding: float
    head: float
    """With the norm before it."""

    sampler: float

    engine: float = 0.0
    """What the core's process and the threads of its sockets take of the last stage's processor, whose output wakes them."""

    def __post_init__(self) -> None:
        if not self.layers or min(*self.layers, self.embedding, self.head, self.sampler, self.engine) < 0:
            raise ValueError(f"costs must be at least 0 and name a layer, got {self}")

    def of_stages(self, split: Split) -> tuple[float, ...]:
        """Seconds on each stage: the first one embeds, the last one has head and sampler, and the engine beside it."""
        seconds = [sum(self.layers[stage.start : stage.stop]) for stage in split]
        seconds[0] += self.embedding
        seconds[-1] += self.last
        return tuple(seconds)

    @property
    def last(self) -> float:
        """Seconds on the last stage besides its layers."""
        return self.head + self.sampler + self.engine

    def waiting(self, split: Split) -> tuple[float, ...]:
        """Share of its time that each stage waits for the slowest one when every step is of this kind."""
        seconds = self.of_stages(split)
        slowest = max(seconds)
        return tuple(1 - own / slowest if slowest else 0.0 for own in seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The traffic that stages are balanced for: so many equal requests at any time, all stages together."""

    num_running: int
    prompt_tokens: int
    output_tokens: int
    prefill_tokens: int
    """Prompt tokens of a step that computes prompts; whole prompts."""

    drawn_share: float
    """Rows whose token is drawn; the others are greedy."""

    def decode_rows(self, num_stages: int) -> int:
        """Rows of a decode step: requests go round in as many cohorts as there are stages."""
        return max(1, self.num_running // num_stages)

    @property
    def context(self) -> int:
        """Tokens in a request's cache half-way through its answer."""
        return self.prompt_tokens + self.output_tokens // 2


MIX = Mix(num_running=32, prompt_tokens=128, output_tokens=128, prefill_tokens=256, drawn_share=0.25)
"""Short questions with answers as long, on a server that is neither idle nor full. Decode decides then, as it does in
practice: its steps are bound by reading weights, where a small model's head weighs as much as many layers, and in
prefill it weighs next to nothing. The more a server is filled, the nearer the two come. A drawn token costs about ten
times as much as a greedy one and nobody knows beforehand who will ask for which; at a quarter, traffic that is all
greedy loses little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Both kinds of step, of the sizes that a mix gives them."""

    decode: StepCosts
    prefill: StepCosts

    def of_request(self, mix: Mix, num_stages: int) -> StepCosts:
        """Seconds that one request of the mix takes up in each part: its shares in decode and prefill steps."""
        decodes = mix.output_tokens / mix.decode_rows(num_stages)
        prefills = mix.prompt_tokens / mix.prefill_tokens

        def mixed(decode: float, prefill: float) -> float:
            return decodes * decode + prefills * prefill

        return StepCosts(
            layers=tuple(map(mixed, self.decode.layers, self.prefill.layers)),
            embedding=mixed(self.decode.embedding, self.prefill.embedding),
            head=mixed(self.decode.head, self.prefill.head),
            sampler=mixed(self.decode.sampler, self.prefill.sampler),
            engine=mixed(self.decode.engine, self.prefill.engine),
        )

    def beside_engine(self, seconds: float) -> "ModelCosts":
        """The same where the engine's own work per step takes so much of the last stage's processor."""
        return ModelCosts(decode=replace(self.decode, engine=seconds), prefill=replace(self.prefill, engine=seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What weights and KV pool are cut from. A *place* is one memory, which the stages of one host may share."""

    layer_bytes: tuple[int, ...]
    """Weights of each layer."""

    first_bytes: int
    """Weights that the first stage has besides its layers."""

    last_bytes: int
    """Weights that the last stage has besides its layers."""

    block_bytes: tuple[int, ...]
    """Of each layer: what a KV block takes from its place. More than the block's own size where the pool may have
    only a share of what is free."""

    budgets: tuple[int, ...]
    """Bytes of each place, before weights."""

    place_of_stage: tuple[int, ...]
    """Index into ``budgets``; stages of one place are neighbours."""

    most_blocks: int
    """A pool beyond this is of no use."""

    def num_blocks(self, split: Split) -> int:
        """Blocks in the pool, which is the minimum over all places; below 1 when weights leave no room."""
        left, wanted = self._after_ends(), [0] * len(self.budgets)
        for layers, place in zip(split, self.place_of_stage, strict=True):
            left[place] -= sum(self.layer_bytes[layers.start : layers.stop])
            wanted[place] += sum(self.block_bytes[layers.start : layers.stop])
        return min(self.most_blocks, *(have // need for have, need in zip(left, wanted, strict=True) if need))

    def room_for(self, num_blocks: int) -> tuple[list[int], list[int]]:
        """With a pool of this size: bytes that layers may take in each place, and what each layer takes."""
        needs = [own + num_blocks * block for own, block in zip(self.layer_bytes, self.block_bytes, strict=True)]
        return self._after_ends(), needs

    def _after_ends(self) -> list[int]:
        left = list(self.budgets)
        left[self.place_of_stage[0]] -= self.first_bytes
        left[self.place_of_stage[-1]] -= self.last_bytes
        return left


def choose_split(
    costs: ModelCosts, num_layers: int, num_stages: int, mix: Mix, memory: Memory | None = None
) -> Split:
    """The split whose slowest stage has the least to do per request of the mix, unless its KV pool is too small.

    A pool counts up to ``1 - FREE_POOL_LOSS`` of the largest that any split allows, and never beyond
    ``memory.most_blocks``. Beyond that, pool and time are worth the same: a split that is x % faster may have a pool
    that is x % smaller, no more. Among equally fast splits the most even one is taken. Where no split leaves room for
    a single block, memory is left out of account: loading will say what is wrong.

    Raises:
        ConfigError: more stages than layers.
    """
    even = split_layers(num_layers, num_stages, "even")
    search = _Search(costs.of_request(mix, num_stages), num_stages, memory)
    if memory is None or (largest := search.largest_pool()) < 1:
        return _Search(search.price, num_stages, None).fastest(0) or even
    useful = min(memory.most_blocks, max(1, int((1 - FREE_POOL_LOSS) * largest)))
    best, best_score, required = even, 0.0, 1
    # From the fastest split on, each with a larger pool than the one before.
    while required <= largest and (split := search.fastest(required)) is not None:
        seconds, num_blocks = max(search.price.of_stages(split)), memory.num_blocks(split)
        score = min(num_blocks, useful) / max(seconds, 1e-12)
        if score > best_score * (1 + _TIE):
            best, best_score = split, score
        if num_blocks >= useful or useful / max(seconds, 1e-12) <= best_score:
            break
        required = num_blocks + 1
    return best


class _Search:
    """Splits of one model over so many stages; both limits, time and memory, only grow with a stage's layers."""

    def __init__(self, price: StepCosts, num_stages: int, memory: Memory | None) -> None:
        self.price = price
        self.num_stages = num_stages
        self.memory = memory
        self.num_layers = len(price.layers)
        self._times = [0.0, *accumulate(price.layers)]

    def fastest(self, num_blocks: int) -> Split | None:
        """Whose slowest stage is the least slow, with a pool of at least this size; None if there is none."""
        packed = self._pack(float("inf"), num_blocks)
        if packed is None:
            return None
        low, high = 0.0, self._slowest(packed)
        while high - low > _TIE * high:
            limit = (low + high) / 2
            tighter = self._pack(limit, num_blocks)
            if tighter is None:
                low = limit
            else:
                packed, high = tighter, self._slowest(tighter)
        balanced = self._balance(high * (1 + _TIE), num_blocks)
        if self.memory is None or self.memory.num_blocks(balanced) >= num_blocks:
            return balanced
        return packed

    def largest_pool(self) -> int:
        """Blocks that some split has room for, however slow it is; at most what is of use."""
        assert self.memory is not None
        low, high = 0, self.memory.most_blocks
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (low, middle - 1) if self._pack(float("inf"), middle) is None else (middle, high)
        return low

    def _slowest(self, split: Split) -> float:
        return max(self.price.of_stages(split))

    def _pack(self, limit: float, num_blocks: int) -> Split | None:
        """Each stage takes all that time and memory allow and that leaves the later ones a layer each.

        So each prefix of stages covers as many layers as it can: if the last stage can't take the rest, no split can.
        """
        places, left, taken = self._room(num_blocks)
        bounds = [0]
        for stage in range(self.num_stages):
            later, place, start = self.num_stages - 1 - stage, places[stage], bounds[-1]
            later_here = places[stage + 1 :].count(place)
            end = start
            while (
                end < self.num_layers - later
                and self._seconds(stage, start, end + 1) <= limit
                and taken[end + 1 + later_here] - taken[start] <= left[place]
            ):
                end += 1
            if end == start:
                return None
            left[place] -= taken[end] - taken[start]
            bounds.append(end)
        return _ranges(bounds) if bounds[-1] == self.num_layers else None

    def _balance(self, limit: float, num_blocks: int) -> Split:
        """Of the splits within the time limit (there is at least one) that with the least sum of squared times.

        Memory is heeded where a stage has its own.
        """
        num_layers, last = self.num_layers, self.num_stages - 1
        places, left, taken = self._room(num_blocks)
        room = [left[place] if places.count(place) == 1 else 1 << 80 for place in places]
        infinite = float("inf")
        rest = [infinite] * num_layers + [0.0]  # least sum of the stages behind, if they start at this layer
        ends: list[list[int]] = []
        for stage in range(last, -1, -1):
            sums, stage_ends = [infinite] * (num_layers + 1), [0] * (num_layers + 1)
            for start in range(stage, num_layers):
                for end in range(start + 1, num_layers + 1):
                    seconds = self._seconds(stage, start, end)
                    if seconds > limit or taken[end] - taken[start] > room[stage]:
                        break
                    total = seconds * seconds + rest[end]
                    # Of equal ones that with more layers on the earlier stage, as in an even split.
                    if total < infinite and total <= sums[start] * (1 + _TIE):
                        sums[start], stage_ends[start] = total, end
            rest = sums
            ends.append(stage_ends)
        bounds = [0]
        for stage_ends in reversed(ends):
            bounds.append(stage_ends[bounds[-1]])
        return _ranges(bounds)

    def _room(self, num_blocks: int) -> tuple[tuple[int, ...], list[int], list[int]]:
        """Place of each stage, bytes for layers in each place, and what the first n layers take with so large a pool."""
        if self.memory is None:
            return (0,) * self.num_stages, [0], [0] * (self.num_layers + 1)
        left, needs = self.memory.room_for(num_blocks)
        return self.memory.place_of_stage, left, [0, *accumulate(needs)]

    def _seconds(self, stage: int, start: int, end: int) -> float:
        seconds = self._times[end] - self._times[start]
        if stage == 0:
            seconds += self.price.embedding
        if stage == self.num_stages - 1:
            seconds += self.price.last
        return seconds


def _ranges(bounds: Sequence[int]) -> Split:
    return tuple(range(start, end) for start, end in pairwise(bounds))


def _even_sizes(num_layers: int, num_stages: int) -> list[int]:
    if num_stages < 1:
        return []
    size, num_longer = divmod(num_layers, num_stages)
    return [size + (stage < num_longer) for stage in range(num_stages)]


def _parse_sizes(partition: str) -> list[int]:
    texts = [text.strip() for text in partition.split(",")]
    if not all(text.isascii() and text.isdigit() and len(text) < 7 for text in texts):
        return []
    return [int(text) for text in texts]


def _problem(sizes: list[int], num_layers: int, num_stages: int) -> str:
    if not sizes:
        return "give even, auto, or layers per rank separated by commas, such as 16,14"
    if num_stages > num_layers:
        return "every rank needs at least one layer; start fewer ranks"
    if len(sizes) != num_stages:
        return f"it names {len(sizes)} ranks"
    if min(sizes) < 1:
        return "every rank needs at least one layer"
    if sum(sizes) != num_layers:
        return f"it adds up to {sum(sizes)} layers"
    return ""
