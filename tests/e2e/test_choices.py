"""Several answers to one request, from two stages and from one. (S12)"""

import random
from collections.abc import Iterable

import pytest

from engine import Client, Output, SamplingParams
from engine.choices import seed_of_choice
from tests.conftest import Checkpoints
from tests.e2e.conftest import TinyOracle, random_prompt
from tests.e2e.harness import EnginePool
from tests.e2e.test_parity import FLAGS

pytestmark = pytest.mark.e2e

PROMPT = random_prompt(random.Random(12), 70)
"""Four full blocks of 16, and some more."""

SEEDED = SamplingParams(temperature=1.0, max_tokens=24, seed=7, ignore_eos=True, n=4)


def last_ones(outputs: Iterable[Output]) -> dict[int, Output]:
    """The last output of each choice."""
    return {output.index: output for output in outputs if output.finish_reason is not None}


def ids_of(client: Client, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    found = last_ones(client.generate(prompt, params))
    return [found[index].token_ids for index in range(params.n)]


@pytest.fixture(scope="module")
def of_two_stages(engines: EnginePool, checkpoints: Checkpoints) -> list[list[int]]:
    with engines.get(checkpoints.fx_r, flags=FLAGS).client() as client:
        return ids_of(client, PROMPT, SEEDED)


def alone(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=24, seed=seed, ignore_eos=True)


def test_s12_four_choices_differ_repeat_and_share_the_prompt(
    engines: EnginePool, checkpoints: Checkpoints, of_two_stages: list[list[int]]
) -> None:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    assert len({tuple(ids) for ids in of_two_stages}) == 4
    with engine.client() as client:
        client.reset_prefix_cache()
        before = client.stats()["prefix_cache_hit_tokens_total"]
        last = last_ones(client.generate(PROMPT, SEEDED))
        assert [last[index].token_ids for index in range(4)] == of_two_stages
        assert [last[index].usage.cached_tokens for index in range(4)] == [0, 64, 64, 64]
        assert client.stats()["prefix_cache_hit_tokens_total"] - before == 3 * 64
        assert [last[index].seed for index in range(4)] == [seed_of_choice(7, index) for index in range(4)]
        assert ids_of(client, PROMPT, alone(7)) == of_two_stages[:1], "choice 0 is what n=1 gives"
        assert ids_of(client, PROMPT, alone(last[3].seed)) == of_two_stages[3:]
    engine.settle()


def test_s12_the_same_from_one_stage(engines: EnginePool, checkpoints: Checkpoints, of_two_stages: list[list[int]]) -> None:
    with engines.get(checkpoints.fx_r, pp=1, flags=FLAGS).client() as client:
        assert ids_of(client, PROMPT, SEEDED) == of_two_stages


def test_s12_a_list_of_prompts_with_one_seed_is_as_many_calls(engines: EnginePool, checkpoints: Checkpoints) -> None:
    prompts = [random_prompt(random.Random(13 + i), 20) for i in range(3)]
    with engines.get(checkpoints.fx_r, flags=FLAGS).client() as client:
        each = [ids_of(client, prompt, alone(7)) for prompt in prompts]
        streams = [client.generate(prompt, alone(7)) for prompt in prompts]
        assert [[last_ones(stream)[0].token_ids] for stream in streams] == each


def test_greedy_choices_are_all_the_same(engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle) -> None:
    expected = tiny_oracle.greedy(PROMPT, 8).token_ids
    with engines.get(checkpoints.fx_r, flags=FLAGS).client() as client:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=3)
        assert ids_of(client, PROMPT, params) == [list(expected)] * 3


def test_one_choice_or_all_can_be_aborted(
    engines: EnginePool, checkpoints: Checkpoints, of_two_stages: list[list[int]]
) -> None:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    with engine.client() as client:
        stream = client.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=300, seed=7, ignore_eos=True, n=4))
        first = next(stream)
        client.abort(stream.request_id, index=2)
        others = []
        for output in stream:
            if output.index == 2 and output.finish_reason is not None:
                assert output.finish_reason == "abort"
                break
            others.append(output)
        assert all(output.finish_reason is None for output in others)
        client.abort(stream.request_id)
        rest = last_ones(stream)
        assert {index: output.finish_reason for index, output in rest.items()} == dict.fromkeys((0, 1, 3), "abort")
        shared = min(24, len(rest[0].token_ids))
        assert rest[0].token_ids[:shared] == of_two_stages[0][:shared] and first.index == 0
    engine.settle()
