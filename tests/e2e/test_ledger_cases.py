"""Ids that clash, ends while work is in flight, chunks that sample nothing, who may pass whom, and how large the pool is.

Cases K8, K9, K10, K11 and K13 of the list of faults, against two real stages.
"""

import asyncio
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from engine import AsyncClient, SamplingParams
from engine.policies import MAX_PASSES
from tests import tiny
from tests.conftest import Checkpoints
from tests.e2e.compare import check_stream, greedy_params
from tests.e2e.conftest import TinyOracle, random_prompt
from tests.e2e.harness import Engine, EnginePool, serve
from tests.e2e.raw import RawClient, Stream, add_request_frames
from tests.e2e.test_parity import BYTES_PER_LAYER_AND_BLOCK
from tests.e2e.test_text import CHAIN_FLAGS, decoded
from tests.oracle import Excused, Greedy

pytestmark = pytest.mark.e2e

SHARED = ("--max-num-seqs", "8", "--num-kv-blocks", "160")
"""Blocks so few that a short warm-up has touched all of them."""


# ------------------------------------------------------------------------------------------------ K9

STOP_TOKEN = tiny.SCRIPT.index(b":") + 1
STEPS = range(1, 16)
FULL = len(tiny.SCRIPT) + 1
"""Tokens of the whole script, its end token included."""


async def stop_strings(address: str, steps: Sequence[int]) -> list[tuple[str, list[int], str | None]]:
    """One request per step at which its stop string is complete, all at once; 0 for one without a stop string.

    After a prompt that ends in token k the chain goes on with token k + 1, so the prompt says how far the stop is.
    """

    async def one(client: AsyncClient, step: int) -> tuple[str, list[int], str | None]:
        text = " tail" if step > STOP_TOKEN else ":"
        begin = STOP_TOKEN + (step > STOP_TOKEN) - step if step else 0
        params = SamplingParams(temperature=0, max_tokens=64, stop=(text,) if step else ())
        outputs = [output async for output in client.generate([begin], params)]
        output = outputs[-1]
        return output.text, list(output.token_ids), output.finish_reason

    async with AsyncClient(address) as client:
        return await asyncio.wait_for(asyncio.gather(*(one(client, step) for step in steps)), 60)


def check_stopped(model: Path, step: int, text: str, token_ids: list[int], reason: str | None) -> None:
    assert reason == "stop"
    if not step:
        assert token_ids == list(range(1, FULL + 1))
        assert text == decoded(model, token_ids)
        return
    last, stop = (STOP_TOKEN, ":") if step <= STOP_TOKEN else (STOP_TOKEN + 1, " tail")
    begin = last - step
    assert len(token_ids) >= step, "the stop string came with this token"
    assert token_ids == list(range(begin + 1, begin + 1 + len(token_ids)))
    assert text == decoded(model, token_ids).partition(stop)[0]


def stop_tokens(client: RawClient, steps: Sequence[int]) -> None:
    """The same with stops that the core sees itself, when the request's next step may be on its way."""
    streams = [
        client.submit([STOP_TOKEN - step], temperature=0.0, max_tokens=64, stop_token_ids=(STOP_TOKEN,))
        for step in steps if step <= STOP_TOKEN
    ]  # fmt: skip
    whole = client.submit([0], temperature=0.0, max_tokens=64)
    client.wait([*streams, whole], 60)
    for stream in streams:
        [begin] = stream.prompt
        assert stream.token_ids == list(range(begin + 1, STOP_TOKEN + 1))
        assert (stream.finish_reason, stream.stop_reason) == ("stop", STOP_TOKEN)
    assert whole.token_ids == list(range(1, FULL + 1))


@pytest.mark.parametrize("num_rounds", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_k9_stops_while_the_next_step_is_in_flight(
    num_rounds: int, engines: EnginePool, checkpoints: Checkpoints
) -> None:
    """Sixteen at once: every token of the script is unique, so a doubled, skipped or foreign one shows."""
    engine = engines.get(checkpoints.chain, flags=CHAIN_FLAGS)
    draw = random.Random(9)
    for _ in range(num_rounds):
        steps = draw.sample([0, *STEPS], 16)
        for step, (text, token_ids, reason) in zip(
            steps, asyncio.run(stop_strings(engine.address, steps)), strict=True
        ):
            check_stopped(checkpoints.chain, step, text, token_ids, reason)
        engine.settle()
        stop_tokens(engine.raw, draw.sample(STEPS, 15))
        engine.settle()
    assert not engine.raw.unclaimed


# ------------------------------------------------------------------------------------------------ K10

CHUNKS_OF_16 = ("--max-num-batched-tokens", "16", "--max-num-seqs", "8", "--num-kv-blocks", "128")


def test_k10_steps_that_hold_only_unfinished_chunks(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    """A 200-token prompt alone, four at once, and with an answer of one token; a whole number of chunks as well."""
    engine = engines.get(checkpoints.fx_r, flags=CHUNKS_OF_16)
    client = engine.raw
    expected = tiny_oracle.expect(10, [200, 192, 200, 201], 16)
    one = [tiny_oracle.greedy(e.prompt, 1) for e in expected]
    for batch in ([expected[0]], expected, [one[0]], one):
        streams = [client.submit(e.prompt, prefix_caching=False, **greedy_params(len(e.token_ids))) for e in batch]
        client.wait(streams, 30)
        for e, stream in zip(batch, streams, strict=True):
            excused += check_stream(client, e, stream)
    engine.settle()


# ------------------------------------------------------------------------------------------------ K11

TWELVE_LARGE = (
    "--block-size", "128", "--num-kv-blocks", "12", "--max-model-len", "1024", "--max-num-seqs", "16",
)  # fmt: skip


def large_head_and_small_ones(
    engine: Engine, tiny_oracle: TinyOracle, excused: list[Excused], num_small: int
) -> tuple[Stream, Stream, list[Stream]]:
    """A takes 8 of 12 blocks and keeps on for 120 tokens; B needs 6; then many that fit into one block."""
    client = engine.raw
    a, b = tiny_oracle.expect(11, [900, 700], [120, 4])
    small = tiny_oracle.expect(111, [5] * num_small, 2)
    first = client.submit(a.prompt, **greedy_params(120))
    client.pump_until(lambda: bool(first.token_ids), 20, lambda: "A did not start")
    head = client.submit(b.prompt, **greedy_params(4))
    others = [client.submit(e.prompt, **greedy_params(2)) for e in small]
    client.wait([first, head, *others], 60)
    for e, stream in zip([a, b, *small], [first, head, *others], strict=True):
        excused += check_stream(client, e, stream)
    assert head.times[0] > first.times[-1], "B can't have had six blocks beside A's eight"
    assert engine.settle()["kv_blocks_total"] == 12
    return first, head, others


def test_k11_small_ones_pass_a_head_that_does_not_fit(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    engine = engines.get(checkpoints.fx_r, flags=TWELVE_LARGE)
    before = engine.raw.stats()["preemptions_total"]
    first, _, others = large_head_and_small_ones(engine, tiny_oracle, excused, 20)
    late = sum(stream.times[-1] > first.times[-1] for stream in others)
    assert not late, f"{late} of 20 small ones waited for A although they fitted"
    assert engine.raw.stats()["preemptions_total"] == before, "a passer cost somebody a preemption"


def test_k11_the_head_is_passed_by_a_bounded_number(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    engine = engines.get(checkpoints.fx_r, flags=TWELVE_LARGE)
    first, head, others = large_head_and_small_ones(engine, tiny_oracle, excused, MAX_PASSES + 24)
    passed = sum(stream.times[0] < first.times[-1] for stream in others)
    assert passed == MAX_PASSES, "the rest waits, although A still runs and they fit"
    assert sum(stream.times[-1] < head.times[0] for stream in others) <= MAX_PASSES


# ------------------------------------------------------------------------------------------------ K13

NUM_BLOCKS = 12
STAGE_LINE = (
    r"stage {rank}: weights (?P<weights>[\d.]+) MB, KV (?P<block>\d+) bytes per block, room for (?P<room>\d+) blocks"
)


def large_head(folder: Path) -> Path:
    """The random Llama with 50,000 tokens: embedding and head are 99 % of it."""
    return tiny.random_llama(folder / "large-head", vocab_size=50_000)


def weight_bytes(model: Path, layers: range, *, is_first: bool, is_last: bool) -> int:
    """What one stage holds by the tensors on disk; a tied head is a copy of the embedding."""
    sizes = {name: tensor.nbytes for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
    names = [name for name in sizes if any(name.startswith(f"model.layers.{layer}.") for layer in layers)]
    names += ["model.embed_tokens.weight"] * (is_first + is_last) + ["model.norm.weight"] * is_last
    return sum(sizes[name] for name in names)


def preemptions_of(client: RawClient, lengths: Sequence[int], seed: int) -> int:
    """Requests that run side by side, each with an answer of 47 tokens."""
    before = client.stats()["preemptions_total"]
    draw = random.Random(seed)
    requests = [
        (random_prompt(draw, length), {"max_tokens": 47, "temperature": 0.0, "ignore_eos": True}) for length in lengths
    ]
    streams = client.run(requests, concurrency=len(requests), timeout_s=60)
    assert all(len(stream.token_ids) == 47 for stream in streams)
    return int(client.stats()["preemptions_total"] - before)


def test_k13_the_pool_is_what_the_tightest_stage_holds(tmp_path: Path) -> None:
    """Told per stage at start, and kept to: preemption begins with the first block that is one too many."""
    model = large_head(tmp_path)
    memory = NUM_BLOCKS * 3 * BYTES_PER_LAYER_AND_BLOCK + 100
    flags = ("--kv-cache-memory", str(memory), "--max-model-len", "128", "--max-num-seqs", "8",
             "--pipeline-partition", "3,2")  # fmt: skip
    with serve(model, flags=flags) as engine:
        log = "\n".join(engine.output.lines)
        for rank, layers in enumerate((range(3), range(3, 5))):
            found = re.search(STAGE_LINE.format(rank=rank), log)
            assert found is not None, log
            bytes_per_block = len(layers) * BYTES_PER_LAYER_AND_BLOCK
            assert int(found["block"]) == bytes_per_block
            assert int(found["room"]) == memory // bytes_per_block
            expected = weight_bytes(model, layers, is_first=rank == 0, is_last=rank == 1)
            assert float(found["weights"]) * 1e6 == pytest.approx(expected, rel=0.02)
        assert f"KV pool: {NUM_BLOCKS} blocks of 16 tokens (limited by memory)" in log
        assert engine.settle()["kv_blocks_total"] == NUM_BLOCKS

        assert preemptions_of(engine.raw, [17, 17, 17], 13) == 0, "4 + 4 + 4 blocks are the pool"
        engine.settle()
        # The oldest grows last, when the others hold four: a newest one would wait for a block, not take it.
        assert preemptions_of(engine.raw, [22, 17, 17], 131) > 0, "5 + 4 + 4 blocks are more than the pool"
        engine.settle()


# ------------------------------------------------------------------------------------------------ K8


def one_id_twice(client: RawClient, first: Greedy, second: Greedy, *, request_id: str, delay_s: float) -> list[Excused]:
    """The second is refused and the first goes on; once that is over, the same id serves the second prompt."""
    endless = {"max_tokens": 900, "temperature": 0.0, "ignore_eos": True}
    open_one = client.submit(first.prompt, request_id=request_id, **endless)
    client.pump_for(delay_s)
    client.send_frames(add_request_frames(request_id=request_id, prompt=second.prompt, params=endless))
    refusal = client.next_refusal(request_id)
    assert (refusal.code, refusal.field) == ("duplicate", "request_id")
    assert not open_one.is_over
    num_told = len(open_one.token_ids)
    client.pump_until(lambda: len(open_one.token_ids) >= num_told + 8, 20, lambda: "the first does not go on")
    client.abort(request_id)
    client.wait([open_one], 10)
    assert open_one.finish_reason == "abort"
    num_known = min(len(first.token_ids), len(open_one.token_ids))
    assert open_one.token_ids[:num_known] == first.token_ids[:num_known]

    again = client.submit(second.prompt, request_id=request_id, **greedy_params(len(second.token_ids)))
    client.wait([again], 20)
    return check_stream(client, second, again)


@pytest.mark.parametrize("num_pairs", [6, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_k8_two_requests_under_one_id(
    num_pairs: int, engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    engine = engines.get(checkpoints.fx_r, flags=SHARED)
    draw = random.Random(8)
    for number in range(num_pairs):
        first, second = tiny_oracle.expect(800 + number, [9, 14], 24)
        delay_s = 0.0 if number % 3 == 0 else draw.uniform(0, 0.5)
        excused += one_id_twice(engine.raw, first, second, request_id=f"same-{number}", delay_s=delay_s)
    stats = engine.settle()
    assert (stats["requests_running"], stats["requests_waiting"]) == (0, 0)
    assert not engine.raw.unclaimed, "one refusal each, and nothing under an id that nobody waits for"


def test_k8_one_id_from_two_clients(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    """Ids belong to a client: both are served, side by side, and an abort reaches only its own."""
    engine = engines.get(checkpoints.fx_r, flags=SHARED)
    first, second = tiny_oracle.expect(81, [11, 17], 60)
    other = RawClient(engine.address)
    try:
        mine = engine.raw.submit(first.prompt, request_id="both", **greedy_params(60))
        theirs = other.submit(second.prompt, request_id="both", **greedy_params(60))
        engine.raw.wait([mine], 30)
        other.wait([theirs], 30)
        excused += check_stream(engine.raw, first, mine)
        excused += check_stream(other, second, theirs)

        mine = engine.raw.submit(first.prompt, request_id="both", **{**greedy_params(60), "max_tokens": 900})
        theirs = other.submit(second.prompt, request_id="both", **greedy_params(60))
        engine.raw.abort("both")
        engine.raw.wait([mine], 10)
        other.wait([theirs], 30)
        assert mine.finish_reason == "abort"
        excused += check_stream(other, second, theirs)
    finally:
        other.close()
    engine.settle()
