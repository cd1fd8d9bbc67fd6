"""Does the gap rule excuse what it should, and nothing else?"""

import pytest

from tests.oracle import Greedy, check_greedy


def expected(gaps: list[float]) -> Greedy:
    return Greedy(
        prompt=[7], token_ids=[1, 2, 3], gaps=gaps, second_ids=[9, 9, 9], logprobs=[0.0] * 3, prompt_end_top=[]
    )


def never(prompt: list[int], num_tokens: int) -> list[int]:
    raise AssertionError("nothing had to be generated again")


def test_equal_ids_need_no_excuse() -> None:
    assert check_greedy(expected([1.0, 1e-4, 1.0]), never, [1, 2, 3]) == []


def test_a_close_decision_is_excused_and_the_rest_is_compared_on_the_oracles_ids() -> None:
    asked = []

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        asked.append((prompt, num_tokens))
        return [3]

    [found] = check_greedy(expected([1.0, 1e-4, 1.0]), generate, [1, 9, 8])
    assert (found.position, found.expected, found.got, found.gap) == (1, 2, 9, 1e-4)
    assert asked == [([7, 1, 2], 1)]


def test_a_clear_decision_is_not_excused() -> None:
    with pytest.raises(AssertionError, match="although the gap is 0.01"):
        check_greedy(expected([1.0, 0.01, 1.0]), never, [1, 9, 3])


def test_what_follows_an_excuse_must_be_right() -> None:
    with pytest.raises(AssertionError, match="generated token 2"):
        check_greedy(expected([1.0, 1e-4, 1.0]), lambda prompt, num_tokens: [5], [1, 9, 3])


def test_a_missing_token_is_no_match() -> None:
    with pytest.raises(AssertionError, match="2 tokens where 3"):
        check_greedy(expected([1.0, 1.0, 1.0]), never, [1, 2])
