"""Trials of numbers of cohorts: what is faster in truth is found, whatever the model says, and rarely asked again."""

import random

import pytest

from engine.cohort_trials import FIRST_PAUSE, MEASURED_ROUNDS, SETTLING_ROUNDS, CohortTrials


class Decoding:
    """Steps of pure decode that return at the pace of a true round time, by number of cohorts."""

    def __init__(self, num_stages: int, true_s: dict[int, float], model_s: dict[int, float], *, noise: float = 0.0) -> None:
        self.trials = CohortTrials(num_stages)
        self.true_s = true_s
        self.model_s = model_s
        self.noise = noise
        self.now = 0.0
        self.rng = random.Random(5)
        self.used: list[int] = []
        """The number that was in force in each round."""

    def model_choice(self) -> int:
        return min(self.model_s, key=lambda count: self.model_s[count])

    def run(self, num_rounds: int, num_decodes: int = 16) -> int:
        """Run, and return the number in force afterwards."""
        for _ in range(num_rounds):
            count = self.trials.choose(num_decodes, self.model_choice())
            self.used.append(count)
            for step in range(count):
                # The second cohort comes right behind the first, as with an unbalanced split.
                share = 0.8 if step == 0 and count > 1 else (1.0 if count == 1 else 0.2 / (count - 1))
                self.now += self.true_s[count] * share * (1 + self.noise * self.rng.uniform(-1, 1))
                self.trials.returned((num_decodes, count), self.now, lambda n: self.model_s.get(n, 1.0))
        return self.trials.choose(num_decodes, self.model_choice())


@pytest.mark.parametrize("best", [1, 2, 3])
def test_the_fastest_number_is_found_and_kept(best: int) -> None:
    true_s = {count: 0.010 if count == best else 0.014 for count in (1, 2, 3)}
    decoding = Decoding(2, true_s, {1: 0.011, 2: 0.010, 3: 0.012})
    assert decoding.run(4 * (SETTLING_ROUNDS + MEASURED_ROUNDS + 2)) == best
    decoding.used.clear()
    decoding.run(5000)
    assert decoding.used.count(best) > 0.97 * len(decoding.used), "trials become rare"


def test_differences_within_the_noise_change_nothing_for_long() -> None:
    decoding = Decoding(2, {1: 0.01, 2: 0.01, 3: 0.01}, {1: 0.011, 2: 0.010, 3: 0.012}, noise=0.005)
    decoding.run(2000)
    assert decoding.used.count(2) > 0.9 * len(decoding.used)


def test_a_number_that_the_model_thinks_hopeless_is_not_tried() -> None:
    decoding = Decoding(8, dict.fromkeys(range(1, 10), 0.01), {count: 0.08 / count for count in range(1, 9)} | {9: 0.011})
    decoding.run(3 * FIRST_PAUSE)
    assert 1 not in decoding.used and set(decoding.used) >= {7, 8, 9}


def test_a_disturbance_costs_a_number_its_place_for_a_few_rounds_only() -> None:
    """While the number in force was measured something else ran; the worse one that won meanwhile is challenged at once."""
    decoding = Decoding(2, dict.fromkeys((1, 2, 3), 0.030), {1: 0.011, 2: 0.010, 3: 0.012})
    while decoding.run(1) == 2:
        pass
    decoding.true_s = {1: 0.012, 2: 0.010, 3: 0.014}
    decoding.run(FIRST_PAUSE // 4)
    decoding.used.clear()
    decoding.run(FIRST_PAUSE // 4)
    assert set(decoding.used) == {2}


def test_a_change_of_the_load_ends_a_trial_without_a_verdict() -> None:
    decoding = Decoding(2, {1: 0.005, 2: 0.01, 3: 0.01}, {1: 0.011, 2: 0.010, 3: 0.012})
    while decoding.run(1) == 2:
        pass
    on_trial = decoding.trials.choose(16, 2)
    assert on_trial != 2
    decoding.trials.returned(None, decoding.now, lambda n: 1.0)
    assert decoding.trials.choose(16, 2) == 2
    assert decoding.run(60) == 1, "it gets another one"


def test_what_was_found_is_a_start_for_similar_loads_only() -> None:
    decoding = Decoding(2, {1: 0.005, 2: 0.01, 3: 0.01}, {1: 0.011, 2: 0.010, 3: 0.012})
    decoding.run(100)
    assert decoding.trials.choose(18, 2) == 1
    assert decoding.trials.choose(64, 2) == 2
    assert decoding.trials.choose(1, 1) == 1


def test_never_more_cohorts_than_decodes() -> None:
    decoding = Decoding(4, {1: 0.02, 2: 0.02, 3: 0.01, 4: 0.02, 5: 0.02}, {1: 0.02, 2: 0.02, 3: 0.02, 4: 0.02, 5: 0.02})
    decoding.run(300, num_decodes=3)
    assert decoding.trials.choose(3, 3) == 3
    assert max(decoding.used) <= 3
