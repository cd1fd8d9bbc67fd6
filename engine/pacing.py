"""How much goes into the next step: which decodes ride together, and how many tokens of prompts beside them?

A round is the time in which every live decode gets one token. Its decodes are split into cohorts, one step each; while
prompts wait, the steps of a round are as many as there are stages and each is filled up with chunks to the same time.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from engine.cohort_trials import CohortTrials, Tag
from engine.cost_model import Coefficients, CostModel
from ipc.errors import ConfigError

PREFILL_SHARE = 0.62
"""Of a round's time, while decodes run and one prompt is computed; the knob is ``--prefill-share``.

With 1 prompts are not throttled at all. A share s makes the streams 1 / (1 - s) times slower and the prompt 1 / s times: at 0.62 both stay bearable, 2.6 and 1.6.
"""

MAX_PREFILL_SHARE = 0.9
"""However many prompts wait: a stream is never slowed down by more than ten times by them."""

NOTICEABLE_GAIN = 0.01
"""What another number of cohorts must promise, in tokens per second, to be taken instead of one per stage."""

LOW_FREE_SHARE = 0.1
"""Of the KV blocks: with fewer free, prompts slow down in proportion, so that decodes can finish and give blocks back."""

BUBBLE_SHARE = 0.05
"""Of a step's time: what the last stage may wait because a step with prompts takes longer than the one before it."""

PATIENCE = 0.05
"""Share of what waits behind the first prompt, in stage time per step, that the last stage may wait to get on with it."""

MIN_CHUNK_TOKENS = 16
"""Nobody's prompt begins in a step that has time for fewer, unless it is the step's first."""

MANY = 1 << 30
"""More steps than there can be."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the next step is planned against."""

    num_decodes: int
    """Live: those in flight included."""
    context: float
    """Tokens that a decode looks back on, on average."""
    has_prompts: bool
    """A prompt can go on or begin now."""
    num_prompt_tokens: int
    """Of all prompts that are not computed yet."""
    num_prompt_squares: int
    """Attention's part of the same, as in ``StepShape.attention``."""
    num_tokens_behind: int
    """The first of the prompts left out."""
    num_squares_behind: int
    free_share: float
    """Of the KV blocks."""
    last_step_s: float
    """Stage time of the newest step."""
    last_step_samples: bool


@dataclass(frozen=True, slots=True)
class Pace:
    """What the next step may hold."""

    cohort_size: float
    """Decodes per step on average, rarely a whole number."""
    num_cohorts: int
    """Steps that hold all decodes together; without prompts, one more may be in flight."""
    least_decodes: int
    """Fewer ready ones wait for the next step, as long as this one has prompts to compute."""
    step_s: float
    """Stage time that decodes and chunks may take together; infinite when only the token budget counts."""
    tag: Tag | None = None
    """Set for a step of pure decode: what ``returned`` is to be told with it."""


class ChunkBudget:
    """What is left of a step's time for chunks of prompts. Its first chunk is never empty, whatever the time."""

    def __init__(self, costs: Coefficients, time_s: float) -> None:
        self._costs = costs
        self._time_s = time_s
        self._is_untouched = True

    @property
    def has_time(self) -> bool:
        """Whether it is worth another chunk."""
        return self._is_untouched or self._time_s >= self._costs.row_s + MIN_CHUNK_TOKENS * self._costs.token_s

    def take(self, context: int, end: int, tokens_left: int) -> int:
        """Tokens of a prompt, from ``context`` to at most ``end``, for which there is time; at least one."""
        most = min(end - context, tokens_left)
        if self._time_s < math.inf:
            most = min(most, max(self._costs.chunk_size(context, self._time_s), 1))
            costs = self._costs
            self._time_s -= costs.row_s + costs.token_s * most + costs.attention_s * most * (2 * context + most)
        self._is_untouched = False
        return most


class Pacing(Protocol):
    """Decides every step's size."""

    @property
    def num_cohorts(self) -> int:
        """Into how many decodes were split last."""

    def pace(self, load: Load) -> Pace:
        """For the step that is planned now."""

    def returned(self, tag: Tag | None, now: float) -> None:
        """The oldest step, sent with this tag, came back."""


class GreedyPacing:
    """Everything that is ready goes into one step, up to the token budget: what the others are measured against."""

    num_cohorts = 1

    def pace(self, load: Load) -> Pace:
        return Pace(float(max(load.num_decodes, 1)), MANY, 0, math.inf)

    def returned(self, tag: Tag | None, now: float) -> None:
        """Nothing to learn."""


class CohortPacing:
    """Even cohorts, steps of constant time, by the cost model."""

    def __init__(
        self,
        num_stages: int,
        costs: CostModel,
        *,
        num_cohorts: int | None = None,
        prefill_share: float = PREFILL_SHARE,
    ) -> None:
        if num_cohorts is not None and not 1 <= num_cohorts <= num_stages + 1:
            raise ConfigError("num_cohorts", f"must be between 1 and {num_stages + 1} (stages + 1), got {num_cohorts}")
        if not 0 < prefill_share <= 1:
            raise ConfigError("prefill_share", f"must be above 0 and at most 1, got {prefill_share}")
        self._num_stages = num_stages
        self._costs = costs
        self._fixed_cohorts = num_cohorts
        self._prefill_share = prefill_share
        self._trials = CohortTrials(num_stages)
        self._load: Load | None = None
        """The latest one with decodes alone."""
        self._known: tuple[int, int, int, int] | None = None
        """For which decodes, context and fit the next three hold."""
        self._num_cohorts = num_stages
        self._round_s = 0.0
        """Of decodes alone."""

    @property
    def num_cohorts(self) -> int:
        """Into how many the decodes were split last."""
        return self._num_cohorts

    def pace(self, load: Load) -> Pace:
        self._update_round(load)
        if not load.has_prompts:
            self._load = load
            size = load.num_decodes / self._num_cohorts
            return Pace(size, self._num_cohorts, 0, math.inf, (load.num_decodes, self._num_cohorts))
        if not load.num_decodes:
            return Pace(1.0, 1, 0, self._lone_prompt_step(load))
        if self._prefill_share == 1:
            return Pace(load.num_decodes / self._num_cohorts, self._num_cohorts, 0, math.inf)
        costs = self._costs.coefficients
        pressure = costs.prompt_time(load.num_tokens_behind, load.num_squares_behind) / self._num_stages
        least = self._round_s / (1 - self._prefill_share)
        most = max(least, self._round_s / (1 - MAX_PREFILL_SHARE))
        decodes_s = load.num_decodes * costs.decode_time(load.context) / self._num_stages
        num_cohorts = self._cohorts_beside_prompts(load, least)
        heads_s = num_cohorts * costs.head_s / self._num_stages
        step_s = max(least / self._num_stages - heads_s, costs.step_s + decodes_s + pressure)
        step_s = min(step_s, most / self._num_stages - heads_s)
        idle_s = costs.step_s + decodes_s
        step_s = idle_s + (step_s - idle_s) * min(1.0, load.free_share / LOW_FREE_SHARE)
        step_s = min(step_s, self._after(load, pressure))
        size = load.num_decodes / num_cohorts
        return Pace(size, num_cohorts, math.ceil(size / 2), step_s)

    def returned(self, tag: Tag | None, now: float) -> None:
        """Steps of decodes alone tell how fast their number of cohorts is."""
        if self._num_stages > 1 and self._fixed_cohorts is None and not self._costs.is_known:
            load = self._load
            self._trials.returned(tag, now, lambda count: 0.0 if load is None else self._round_time(load, count))

    def _update_round(self, load: Load) -> None:
        key = (load.num_decodes, int(load.context) >> 7, self._costs.num_fits, self._trials.num_changes)
        if key == self._known or not load.num_decodes:
            return
        self._known = key
        most = min(self._num_stages + 1, load.num_decodes)
        if self._fixed_cohorts is not None:
            best = min(self._fixed_cohorts, most)
        else:
            usual = min(self._num_stages, most)
            best = min(range(1, most + 1), key=lambda count: self._round_time(load, count))
            if self._round_time(load, best) * (1 + NOTICEABLE_GAIN) > self._round_time(load, usual):
                best = usual
            best = self._trials.choose(load.num_decodes, best)
        self._num_cohorts = best
        self._round_s = self._round_time(load, best)

    def _round_time(self, load: Load, num_cohorts: int) -> float:
        """One token for everybody, without prompts: the last stage is busy all the time, or waits for what comes round."""
        costs = self._costs.coefficients
        decode_s = costs.decode_time(load.context)
        largest_s = costs.step_s + math.ceil(load.num_decodes / num_cohorts) * decode_s
        return max(
            num_cohorts * (costs.step_s + costs.head_s) + load.num_decodes * decode_s,
            self._num_stages * largest_s + costs.head_s + costs.return_s,
        )

    def _after(self, load: Load, pressure: float) -> float:
        """How long a step may take behind the newest one.

        A step that takes d longer on each stage reaches the last one (P - 1) * d late. The head of the step in front
        covers for that; more must be worth the wait, which it is the more prompts stand behind.
        """
        if self._num_stages == 1:
            return math.inf
        head_s = self._costs.coefficients.head_s if load.last_step_samples else 0.0
        return load.last_step_s + max(head_s, BUBBLE_SHARE * load.last_step_s, PATIENCE * pressure) / (self._num_stages - 1)

    def _cohorts_beside_prompts(self, load: Load, round_s: float) -> int:
        """As few as fit into steps of equal time: each step that samples costs the last stage a head."""
        usual = min(self._num_stages, load.num_decodes)
        if self._fixed_cohorts is not None:
            return min(self._fixed_cohorts, load.num_decodes)
        costs = self._costs.coefficients
        decode_s = costs.decode_time(load.context)
        for count in range(self._num_cohorts, usual):
            step_s = (round_s - count * costs.head_s) / self._num_stages
            if costs.step_s + math.ceil(load.num_decodes / count) * decode_s <= step_s:
                gain = (usual - count) * costs.head_s / round_s
                return count if gain > NOTICEABLE_GAIN else usual
        return usual

    def _lone_prompt_step(self, load: Load) -> float:
        """The step time with which a pipeline is through with these prompts soonest.

        Work w in m steps over P stages takes (P + m - 1) * (c + w / m): least at m = sqrt((P - 1) * w / c), at least 1.
        """
        costs = self._costs.coefficients
        if self._num_stages == 1:
            return math.inf
        work_s = costs.prompt_time(load.num_prompt_tokens, load.num_prompt_squares)
        num_steps = math.sqrt((self._num_stages - 1) * work_s / costs.step_s) if costs.step_s else work_s / 1e-3
        return math.inf if num_steps <= 1 else costs.step_s + work_s / num_steps
