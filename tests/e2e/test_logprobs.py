"""Does each token come with its log probabilities, once, in streams that run together? (S9 D6)"""

import asyncio
import random

import pytest

from engine import AsyncClient, Client, Output, SamplingParams
from tests import tiny
from tests.conftest import Checkpoints
from tests.e2e.conftest import TinyOracle, random_prompt
from tests.e2e.harness import EnginePool
from tests.e2e.test_parity import FLAGS
from tests.e2e.test_text import CHAIN_FLAGS
from tests.oracle import LOGPROB_TOLERANCE, Oracle

pytestmark = pytest.mark.e2e

NUM_TOPS = (0, 1, 5, 20)


def check_answer(oracle: Oracle, prompt: list[int], outputs: list[Output], num_top: int) -> None:
    """One entry for each token, told with it; the token itself and the most likely ones as transformers has them."""
    last, told = outputs[-1], 0
    for output in outputs:
        assert output.logprobs is not None
        told += output.num_new_tokens
        assert len(output.logprobs) == len(output.token_ids) == told
    assert last.logprobs is not None
    assert [entry.token_id for entry in last.logprobs] == list(last.token_ids)
    right = oracle.logprobs([*prompt, *last.token_ids])[len(prompt) - 1 : -1]
    for entry, of_all in zip(last.logprobs, right, strict=True):
        assert entry.logprob == pytest.approx(float(of_all[entry.token_id]), abs=LOGPROB_TOLERANCE)
        best = of_all.topk(num_top).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=LOGPROB_TOLERANCE)
        assert all(value == pytest.approx(float(of_all[i]), abs=LOGPROB_TOLERANCE) for i, value in entry.top)


@pytest.mark.parametrize("pp", [1, 2])
def test_s9_eight_streams_at_once(
    pp: int, engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle
) -> None:
    draw = random.Random(9)
    asked = [(random_prompt(draw, draw.randint(5, 60)), num_top) for num_top in 2 * NUM_TOPS]

    async def one(client: AsyncClient, prompt: list[int], num_top: int) -> list[Output]:
        params = SamplingParams(temperature=1.0, seed=num_top, max_tokens=24, ignore_eos=True, logprobs=num_top)
        return [output async for output in client.generate(prompt, params)]

    async def all_of_them(address: str) -> list[list[Output]]:
        async with AsyncClient(address) as client:
            return await asyncio.wait_for(asyncio.gather(*(one(client, *request) for request in asked)), 60)

    answers = asyncio.run(all_of_them(engines.get(checkpoints.fx_r, pp=pp, flags=FLAGS).address))
    for (prompt, num_top), outputs in zip(asked, answers, strict=True):
        check_answer(tiny_oracle.oracle, prompt, outputs, num_top)


def told_of_the_script(client: Client, num_top: int) -> list[tuple[int, bytes, float]]:
    *_, last = client.generate([0], SamplingParams(temperature=0, max_tokens=64, logprobs=num_top))
    assert last.logprobs is not None
    return [(entry.token_id, entry.token_bytes, entry.logprob) for entry in last.logprobs]


def test_d6_bytes_of_tokens_that_are_parts_of_characters(engines: EnginePool, checkpoints: Checkpoints) -> None:
    """Joined they are the text's, whatever else is asked for."""
    with engines.get(checkpoints.chain, flags=CHAIN_FLAGS).client() as client:
        told = told_of_the_script(client, 0)
        assert told == told_of_the_script(client, 5)
    assert b"".join(token_bytes for _, token_bytes, _ in told[: len(tiny.SCRIPT)]) == b"".join(tiny.SCRIPT)
    assert [token_bytes for _, token_bytes, _ in told[: len(tiny.SCRIPT)]] == list(tiny.SCRIPT)
