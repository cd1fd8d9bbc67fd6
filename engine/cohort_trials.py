"""Into how many cohorts should decodes be split? What the cost model says, checked against what is measured.

A model of stages doesn't know everything: on a CPU a stage that works alone takes the idle cores as well, and fewer
cohorts are better than it thinks. So in steady decode the number in force is measured for some rounds, then another one,
and the faster stays. Trials become rarer the longer nothing changes.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

SETTLING_ROUNDS = 1
"""Not measured after a change: cohorts merge or split."""

MEASURED_ROUNDS = 5
"""Whose median is a measurement."""

ROUNDS_TO_FAIL = 2
"""A trial ends after so many, if it loses clearly: it costs what it loses."""

LEAST_GAIN = 0.03
"""Of a round's time: what a trial must win to change the number. Less is noise."""

CLEAR_LOSS = 0.06
"""Of a round's time: what a trial must lose to end before it has been measured in full."""

PLAUSIBLE = 1.3
"""A number whose predicted round takes this many times longer than the one in force is not tried."""

FIRST_PAUSE = 512
"""Rounds between trials, once every number was tried; doubled with each trial that changes nothing."""

LONGEST_PAUSE = 16384

BUCKETS_PER_OCTAVE = 8
"""What holds for so many decodes holds for nine per cent more."""

NEIGHBOURS = 4
"""Buckets away from which an answer is taken over for a start."""

Tag = tuple[int, int]
"""Live decodes, and the number of cohorts in force: what a step of pure decode was planned for."""


@dataclass(slots=True)
class _Bucket:
    """What is known for about so many decodes."""

    best: int
    untried: list[int]
    pause: int = FIRST_PAUSE
    rounds_left: int = 0
    """Until the next trial."""


class CohortTrials:
    """Chooses among 1, P, P + 1 and the neighbours of the number in force."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._buckets: dict[int, _Bucket] = {}
        self._challenger: tuple[int, int] | None = None
        """Bucket and number on trial."""
        self._champion_s = 0.0
        """Time of a round with the number that was in force before the trial, per decode."""
        self._tag: Tag | None = None
        self._times: list[float] = []
        """When the latest steps of this tag returned."""
        self.num_changes = 0
        """Of what ``choose`` would answer."""

    def choose(self, num_decodes: int, model_choice: int) -> int:
        """The number of cohorts in force for so many decodes, at least one."""
        key = _bucket_of(num_decodes)
        if self._challenger is not None and self._challenger[0] == key:
            return min(self._challenger[1], num_decodes)
        bucket = self._buckets.get(key) or self._nearest(key)
        return model_choice if bucket is None else min(bucket.best, num_decodes)

    def returned(self, tag: Tag | None, now: float, round_time: Callable[[int], float]) -> None:
        """A step came back; ``tag`` is None unless it was one of pure decode. ``round_time`` predicts, by cohorts."""
        if tag != self._tag:
            if tag is None or self._tag is None or _bucket_of(tag[0]) != _bucket_of(self._tag[0]):
                self._give_up_trial()
            self._tag, self._times = tag, []
        if tag is None:
            return
        self._times.append(now)
        num_decodes, num_cohorts = tag
        num_rounds, is_whole = divmod(len(self._times) - 1, num_cohorts)
        num_rounds -= SETTLING_ROUNDS
        if is_whole != 0 or num_rounds < ROUNDS_TO_FAIL:
            return
        round_s = self._median_round(num_cohorts) / num_decodes
        key = _bucket_of(num_decodes)
        if self._challenger == (key, num_cohorts):
            if num_rounds >= MEASURED_ROUNDS or round_s > self._champion_s * (1 + CLEAR_LOSS):
                self._end_trial(self._buckets[key], num_cohorts, round_s)
        elif num_rounds >= MEASURED_ROUNDS:
            if self._challenger is None:
                self._go_on(key, tag, round_s, round_time)
            self._times = self._times[num_cohorts:]

    def _go_on(self, key: int, tag: Tag, round_s: float, round_time: Callable[[int], float]) -> None:
        num_decodes, num_cohorts = tag
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(num_cohorts, self._rivals(num_cohorts, num_decodes, round_time))
        if bucket.best != num_cohorts:
            return  # a step that was planned before the last change
        bucket.rounds_left -= 1
        if bucket.rounds_left > 0:
            return
        if not bucket.untried:
            bucket.untried = self._rivals(bucket.best, num_decodes, round_time)
        if bucket.untried:
            self._challenger = (key, bucket.untried.pop(0))
            self._champion_s = round_s
            self.num_changes += 1
        else:
            bucket.rounds_left = LONGEST_PAUSE

    def _end_trial(self, bucket: _Bucket, num_cohorts: int, round_s: float) -> None:
        if round_s < self._champion_s * (1 - LEAST_GAIN):
            # The loser may try again at once: it could have met with a disturbance.
            bucket.untried.insert(0, bucket.best)
            bucket.best, bucket.pause = num_cohorts, FIRST_PAUSE
        if bucket.untried:
            bucket.rounds_left = MEASURED_ROUNDS
        else:
            bucket.rounds_left = bucket.pause
            bucket.pause = min(2 * bucket.pause, LONGEST_PAUSE)
        self._challenger = None
        self.num_changes += 1

    def _give_up_trial(self) -> None:
        if self._challenger is not None:
            key, number = self._challenger
            self._buckets[key].untried.append(number)
            self._challenger = None
            self.num_changes += 1

    def _rivals(self, best: int, num_decodes: int, round_time: Callable[[int], float]) -> list[int]:
        """Numbers worth a trial, the most promising first."""
        most = min(self._num_stages + 1, num_decodes)
        known = {1, min(self._num_stages, most), most, best - 1, best + 1} - {best}
        limit = PLAUSIBLE * round_time(best)
        return sorted((n for n in known if 1 <= n <= most and round_time(n) <= limit), key=round_time)

    def _nearest(self, key: int) -> _Bucket | None:
        near = min(self._buckets, key=lambda other: abs(other - key), default=None)
        return None if near is None or abs(near - key) > NEIGHBOURS else self._buckets[near]

    def _median_round(self, num_cohorts: int) -> float:
        """Cohorts may return in bunches, so a round is measured from each step to the one a round later."""
        times = self._times[SETTLING_ROUNDS * num_cohorts :]
        return statistics.median(after - before for before, after in zip(times, times[num_cohorts:], strict=False))


def _bucket_of(num_decodes: int) -> int:
    return int(BUCKETS_PER_OCTAVE * math.log2(num_decodes))
