"""Are the tokens those of transformers, whatever the split, the batch and the chunks? (C1 C2 C6 C12 C13 C16)"""

import random
from typing import Any

import pytest

from tests.conftest import Checkpoints
from tests.e2e.compare import check_against, check_stream, greedy_params
from tests.e2e.conftest import TinyOracle, random_prompt
from tests.e2e.harness import Engine, EnginePool, serve
from tests.oracle import Excused

pytestmark = pytest.mark.e2e

FLAGS = ("--num-kv-blocks", "512", "--max-num-seqs", "32")
"""Of the engine that most tests share."""

BYTES_PER_LAYER_AND_BLOCK = 2 * 16 * 2 * 16 * 4
"""Of ``fx_r``: keys and values, 16 tokens, 2 heads of size 16, float32."""


@pytest.mark.parametrize("head", ["none", "garbage"])
def test_c1_tied_head_is_the_embedding(
    head: str, engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    model = checkpoints.fx_r if head == "none" else checkpoints.garbage_head
    lengths = random.Random(1).sample(range(8, 201), 20)
    expected = tiny_oracle.expect(1, lengths, 32)
    excused += check_against(engines.get(model, flags=FLAGS).raw, expected, concurrency=8)


@pytest.mark.parametrize(
    "partition", ["auto", "4,1", *(pytest.param(p, marks=pytest.mark.slow) for p in ("2,3", "3,2", "1,4"))]
)
def test_c2_every_layer_once_for_any_split(
    partition: str, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    memory = 4 << 20
    flags = ["--kv-cache-memory", str(memory), "--pipeline-partition", partition]
    with serve(checkpoints.fx_r, flags=flags) as engine:
        excused += check_against(engine.raw, tiny_oracle.expect(2, [5, 16, 40, 77, 120], 32), concurrency=5)
        most_layers = max(map(int, partition.split(","))) if "," in partition else 3
        expected_blocks = memory / (most_layers * BYTES_PER_LAYER_AND_BLOCK)
        assert engine.settle()["kv_blocks_total"] == pytest.approx(expected_blocks, rel=0.02)


def test_c2_three_stages(checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]) -> None:
    with serve(checkpoints.fx_r, pp=3, flags=FLAGS) as engine:
        excused += check_against(engine.raw, tiny_oracle.expect(2, [5, 16, 40, 77, 120], 32), concurrency=5)


def test_c2_sharded_checkpoint(checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]) -> None:
    with serve(checkpoints.sharded, flags=FLAGS) as engine:
        excused += check_against(engine.raw, tiny_oracle.expect(2, [5, 40], 32), concurrency=2)


def mixed_requests(seed: int, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of 1 to 300 tokens, answers of 1 to 64; every second one is greedy, the others are seeded."""
    draw = random.Random(seed)
    requests = []
    for index in range(count):
        params: dict[str, Any] = greedy_params(draw.randint(1, 64))
        if index % 2:
            params |= {
                "temperature": draw.choice([0.7, 1.0, 1.3]), "seed": draw.randrange(1 << 40),
                "top_k": draw.choice([0, 5, 50]), "top_p": draw.choice([1.0, 0.9]),
            }  # fmt: skip
        requests.append((random_prompt(draw, draw.randint(1, 300)), params))
    return requests


def sweep_c6(engines: EnginePool, checkpoints: Checkpoints, oracle: TinyOracle, count: int) -> list[Excused]:
    requests = mixed_requests(6, count)
    found: list[Excused] = []
    seeded: dict[int, list[int]] = {}
    for pp in (1, 2):
        client = engines.get(checkpoints.fx_r, pp=pp, flags=FLAGS).raw
        for concurrency in (1, 16):
            streams = client.run(requests, concurrency=concurrency, timeout_s=60 + 3 * count)
            for index, ((prompt, params), stream) in enumerate(zip(requests, streams, strict=True)):
                if params["temperature"] == 0:
                    found += check_stream(client, oracle.greedy(prompt, params["max_tokens"]), stream)
                else:
                    first = seeded.setdefault(index, stream.token_ids)
                    assert stream.token_ids == first, f"request {index}, {pp} stages, {concurrency} at a time"
                    assert stream.seed == params["seed"]
    return found


def test_c6_pipeline_is_invisible(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    excused += sweep_c6(engines, checkpoints, tiny_oracle, 10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_c6_pipeline_is_invisible_in_200_requests(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    excused += sweep_c6(engines, checkpoints, tiny_oracle, 200)


@pytest.mark.parametrize("max_num_seqs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_c12_a_row_taken_again_knows_nothing_of_its_last_owner(
    max_num_seqs: int, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    flags = ["--max-num-seqs", str(max_num_seqs), "--num-kv-blocks", "20", "--max-model-len", "320"]
    with serve(checkpoints.fx_r, flags=flags) as engine:
        for round_ in range(2):
            a, b, c = tiny_oracle.expect(12 + round_, [200, 5, 170], [2, 60, 60])
            excused += check_against(engine.raw, [a], concurrency=1)
            excused += check_against(engine.raw, [b, c], concurrency=2)
        assert engine.settle()["kv_blocks_total"] == 20


CHUNK_FLAGS = ("--max-num-batched-tokens", "32", "--num-kv-blocks", "256", "--max-num-seqs", "16")
CHUNK_LENGTHS = [31, 32, 33, 63, 64, 65, 97]


def test_c13_chunks_do_not_change_results(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    engine = engines.get(checkpoints.fx_r, flags=CHUNK_FLAGS)
    excused += check_against(engine.raw, tiny_oracle.expect(13, CHUNK_LENGTHS, 24), concurrency=1)


def test_c13_chunks_beside_decodes(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    client = engines.get(checkpoints.fx_r, flags=CHUNK_FLAGS).raw
    decoding = tiny_oracle.expect(131, [4, 9, 20, 27], 150)
    beside = [client.submit(e.prompt, **greedy_params(150)) for e in decoding]
    client.pump_until(lambda: all(s.token_ids for s in beside), 20, lambda: "the decodes did not start")
    excused += check_against(client, tiny_oracle.expect(13, CHUNK_LENGTHS, 24), concurrency=4)
    client.wait(beside, 60)
    for expected, stream in zip(decoding, beside, strict=True):
        excused += check_stream(client, expected, stream)


def limited(engines: EnginePool, checkpoints: Checkpoints) -> Engine:
    return engines.get(checkpoints.fx_r, flags=("--max-model-len", "64", "--num-kv-blocks", "64"))


@pytest.mark.parametrize("max_tokens", [1, 10, None])
@pytest.mark.parametrize("length", [61, 62, 63])
def test_c16_the_context_limit_ends_an_answer(
    length: int, max_tokens: int | None, engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle,
    excused: list[Excused],
) -> None:  # fmt: skip
    client = limited(engines, checkpoints).raw
    room = 64 - length
    [expected] = tiny_oracle.expect(16 + length, [length], min(room, max_tokens or room))
    stream = client.submit(expected.prompt, **{**greedy_params(1), "max_tokens": max_tokens})
    client.wait([stream], 20)
    excused += check_stream(client, expected, stream)


@pytest.mark.parametrize("max_tokens", [1, 10, None])
@pytest.mark.parametrize("length", [64, 65, 66])
def test_c16_a_prompt_over_the_limit_is_refused(
    length: int, max_tokens: int | None, engines: EnginePool, checkpoints: Checkpoints
) -> None:
    client = limited(engines, checkpoints).raw
    stream = client.submit([5] * length, max_tokens=max_tokens)
    client.wait([stream], 20)
    assert stream.failed is not None and stream.failed.code == "bad_request"
    assert stream.failed.field == "prompt_token_ids"
    assert str(length) in stream.failed.reason and "64" in stream.failed.reason
