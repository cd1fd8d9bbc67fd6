"""Is streamed text whole characters, never repeated, whatever the tokens hold? (D3 D4 D5)"""

import asyncio
import itertools
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine import AsyncClient, Client, Output, SamplingParams
from tests import tiny
from tests.conftest import Checkpoints
from tests.e2e.harness import EnginePool
from tests.e2e.test_parity import FLAGS

pytestmark = pytest.mark.e2e

CUT = "\ufffd"
CHAIN_FLAGS = ("--num-kv-blocks", "256", "--max-num-seqs", "16")
GREEDY = SamplingParams(temperature=0, max_tokens=64)


def decoded(model: Path, token_ids: list[int]) -> str:
    """What the tokenizers library makes of all tokens at once."""
    text: str = Tokenizer.from_file(str(model / "tokenizer.json")).decode(token_ids, skip_special_tokens=True)
    return text


def check_script(deltas: list[str], text: str, token_ids: list[int]) -> None:
    assert text == "".join(deltas) == tiny.SCRIPT_TEXT + CUT
    assert not any(CUT in delta for delta in deltas[:-1])
    assert token_ids[: len(tiny.SCRIPT)] == list(range(1, len(tiny.SCRIPT) + 1))


def test_d3_no_broken_characters_in_a_stream(engines: EnginePool, checkpoints: Checkpoints) -> None:
    with engines.get(checkpoints.chain, flags=CHAIN_FLAGS).client() as client:
        outputs = list(client.generate([0], GREEDY))
    last = outputs[-1]
    assert last.finish_reason == "stop"
    check_script([o.delta for o in outputs if o.delta], last.text, list(last.token_ids))
    assert last.text == decoded(checkpoints.chain, list(last.token_ids))


def test_d3_eight_streams_at_once(engines: EnginePool, checkpoints: Checkpoints) -> None:
    address = engines.get(checkpoints.chain, flags=CHAIN_FLAGS).address

    async def one(client: AsyncClient) -> tuple[list[str], str, list[int]]:
        deltas = []
        async for output in client.generate([3, 2, 0], GREEDY):
            deltas += [output.delta] if output.delta else []
        return deltas, output.text, list(output.token_ids)

    async def all_of_them() -> list[tuple[list[str], str, list[int]]]:
        async with AsyncClient(address) as client:
            return await asyncio.wait_for(asyncio.gather(*(one(client) for _ in range(8))), 30)

    for deltas, text, token_ids in asyncio.run(all_of_them()):
        check_script(deltas, text, token_ids)


def by_choice(outputs: Iterable[Output]) -> dict[int, list[Output]]:
    found: dict[int, list[Output]] = {}
    for output in outputs:
        found.setdefault(output.index, []).append(output)
    return found


def test_d3_two_choices_in_one_stream(engines: EnginePool, checkpoints: Checkpoints) -> None:
    with engines.get(checkpoints.chain, flags=CHAIN_FLAGS).client() as client:
        outputs = by_choice(client.generate([3, 2, 0], SamplingParams(temperature=0, max_tokens=64, n=2)))
    assert sorted(outputs) == [0, 1]
    for own in outputs.values():
        assert [output.finish_reason for output in own] == [None] * (len(own) - 1) + ["stop"]
        check_script([output.delta for output in own if output.delta], own[-1].text, own[-1].token_ids)


def test_d3_two_choices_of_random_bytes(engines: EnginePool, checkpoints: Checkpoints) -> None:
    """Each text is what its own tokens say: nothing of one choice reaches the other."""
    params = SamplingParams(temperature=1.0, max_tokens=48, seed=5, ignore_eos=True, n=2)
    with engines.get(checkpoints.fx_r, flags=FLAGS).client() as client:
        outputs = by_choice(client.generate([tiny.BOS, 9], params))
    first, second = outputs[0][-1], outputs[1][-1]
    assert first.token_ids != second.token_ids
    for own in outputs.values():
        assert "".join(output.delta for output in own) == own[-1].text == decoded(checkpoints.fx_r, own[-1].token_ids)


def test_d3_a_stop_string_inside_tokens(engines: EnginePool, checkpoints: Checkpoints) -> None:
    """The stop string lies across two tokens; nothing of it, and nothing behind it, reaches the stream."""
    engine = engines.get(checkpoints.chain, flags=CHAIN_FLAGS)
    with engine.client() as client:
        stop = SamplingParams(temperature=0, max_tokens=64, stop=("bserv",))
        outputs = list(client.generate([0], stop))
    assert outputs[-1].finish_reason == "stop"
    assert "".join(o.delta for o in outputs) == outputs[-1].text == tiny.SCRIPT_TEXT.partition("bserv")[0]
    engine.settle()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A chain whose script is a mixed-script text cut at random places, each piece a token of its own."""
    draw = random.Random(44)
    alphabets = [(0x20, 0x7E), (0xC0, 0x17F), (0x3B1, 0x3C9), (0x430, 0x44F), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
                 (0x1F600, 0x1F64F)]  # fmt: skip
    characters: Iterator[str] = (chr(draw.randint(*draw.choice(alphabets))) for _ in range(900))
    text = "A 世" + "".join(characters)
    data = text.encode()
    cuts = sorted(draw.sample(range(1, len(data)), 560))
    pieces = join_repeated([data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])])
    assert len(pieces) >= 400
    return tiny.chain(tmp_path_factory.mktemp("scripted") / "chain", pieces), text


def join_repeated(pieces: list[bytes]) -> list[bytes]:
    """The same text in pieces that all differ: one that was there before is joined to the next."""
    result: list[bytes] = []
    carried = b""
    for piece in pieces:
        carried += piece
        if carried not in result:
            result.append(carried)
            carried = b""
    if carried:
        result[-1] += carried
    return result


def test_d4_what_was_sent_is_never_sent_again(engines: EnginePool, scripted: tuple[Path, str]) -> None:
    model, text = scripted
    with engines.get(model, flags=CHAIN_FLAGS).client() as client:
        sent = ""
        for output in client.generate([0], SamplingParams(temperature=0, max_tokens=900)):
            sent += output.delta
            assert text.startswith(sent), f"{sent[-20:]!r} is not the text"
            assert output.text == sent
    assert sent == text


def random_bytes(client: Client, model: Path, count: int) -> int:
    """Random tokens, most of which are no text; returns how many replacement characters came."""

    def one(seed: int) -> int:
        params = SamplingParams(temperature=1.0, max_tokens=32, seed=seed, ignore_eos=True)
        outputs = list(client.generate([tiny.BOS, 3 + seed % 256], params))
        last = outputs[-1]
        assert (last.finish_reason, len(last.token_ids)) == ("length", 32)
        text = "".join(o.delta for o in outputs)
        text.encode("utf-8")
        assert text == last.text == decoded(model, list(last.token_ids))
        return text.count(CUT)

    with ThreadPoolExecutor(8) as threads:
        return sum(threads.map(one, range(count)))


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_d5_bytes_that_are_no_text(count: int, engines: EnginePool, checkpoints: Checkpoints) -> None:
    with engines.get(checkpoints.fx_r, flags=FLAGS).client() as client:
        assert random_bytes(client, checkpoints.fx_r, count) > count
