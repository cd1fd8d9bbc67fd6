"""Does an engine stay as it is under traffic: its memory, its micro-batches, and the pace of its streams?

Cases K16, F2 and F3 of the list of faults, against two real stages.
"""

import itertools
import random
import statistics
import time
from collections.abc import Sequence

import pytest

from scripts.bench.process_use import Use, read_use
from tests.conftest import Checkpoints
from tests.e2e.compare import check_stream, greedy_params
from tests.e2e.conftest import TinyOracle, random_prompt
from tests.e2e.harness import Engine, EnginePool
from tests.e2e.raw import RawClient, Stream
from tests.e2e.test_ledger_cases import SHARED
from tests.oracle import Excused, Greedy

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

NUM_ATTEMPTS = 3
"""Of what is measured in time, the best attempt counts: others use the machine too, and a defect shows in each."""


# ------------------------------------------------------------------------------------------------ K16

MOST_GROWTH = 5 << 20
CONCURRENCY = 16


def uses(engine: Engine) -> dict[int, tuple[str, Use]]:
    """What each process is, and what it holds."""
    found = {process: read_use(process.pid) for process in engine.tree().all}
    return {process.pid: (" ".join(process.cmdline())[:100], use) for process, use in found.items() if use is not None}


def wait_for_room(client: RawClient, streams: list[Stream]) -> list[Stream]:
    """Until one more may be sent; those that are not over."""
    client.pump_until(lambda: sum(not s.is_over for s in streams) < CONCURRENCY, 30, lambda: "no request ends")
    return [s for s in streams if not s.is_over]


def short_traffic(client: RawClient, draw: random.Random, count: int) -> None:
    """Of ten requests one is aborted, at once or a little later, and one is refused; every one ends as it should."""
    streams: list[Stream] = []
    open_ones: list[Stream] = []
    refused = aborted = 0
    for number in range(count):
        open_ones = wait_for_room(client, open_ones)
        params = {"max_tokens": draw.randint(2, 8), "temperature": 0.0, "ignore_eos": True}
        prompt = random_prompt(draw, draw.randint(4, 40))
        if number % 10 == 7:
            prompt = draw.choice([[5] * 2000, [5, 1 << 20], []])
            refused += 1
        elif number % 10 == 3:
            params["max_tokens"] = 400
            aborted += 1
        streams.append(client.submit(prompt, **params))
        open_ones.append(streams[-1])
        if number % 20 == 3:
            client.abort(streams[-1].request_id)
        elif number % 20 == 16:
            client.abort(streams[-4].request_id)
    client.wait(open_ones, 60)
    assert sum(s.failed is not None for s in streams) == refused
    assert sum(s.finish_reason == "abort" for s in streams) == aborted
    assert sum(s.finish_reason == "length" for s in streams) == count - refused - aborted


@pytest.mark.parametrize(
    "num_warm, num_requests",
    [(120, 200), pytest.param(500, 3000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_k16_nothing_grows_with_the_number_of_requests(
    num_warm: int, num_requests: int, engines: EnginePool, checkpoints: Checkpoints
) -> None:
    engine = engines.get(checkpoints.fx_r, flags=SHARED)
    draw = random.Random(16)
    short_traffic(engine.raw, draw, num_warm)
    engine.settle()
    before = uses(engine)
    assert len(before) >= 4
    short_traffic(engine.raw, draw, num_requests)
    engine.settle()
    after = uses(engine)
    assert after.keys() == before.keys()
    for pid, (name, old) in before.items():
        new = after[pid][1]
        grown = new.anonymous_bytes - old.anonymous_bytes
        print(f"{grown / 1024:+.0f} KiB, {new.num_files} files, {new.num_sockets} sockets: {name}")
        assert grown < MOST_GROWTH, f"{grown} bytes more after {num_requests} requests: {name}"
        assert (new.num_files, new.num_sockets) == (old.num_files, old.num_sockets), name


# ------------------------------------------------------------------------------------------------ F2

MAX_COHORTS = 3
"""Stages + 1."""
EVEN_SHARE = 0.7


def evenness(steps: Sequence[tuple[str, ...]], num_streams: int) -> float:
    """Share of the tokens that came in even rounds: steps that bring each stream one token, as many as may be in flight
    at most, and of one size but for one. Into how many a round is split is up to the cost model, and may change."""
    num_even, sizes, seen = 0, list[int](), set[str]()
    for step in steps:
        if not seen.isdisjoint(step):
            sizes, seen = [], set()
        sizes.append(len(step))
        seen.update(step)
        if len(seen) == num_streams:
            num_even += num_streams if len(sizes) <= MAX_COHORTS and max(sizes) - min(sizes) <= 1 else 0
            sizes, seen = [], set()
    return num_even / sum(map(len, steps))


@pytest.mark.parametrize(
    ("steps", "share"),
    [
        (["abc", "de"] * 3, 1.0), (["abcde"], 1.0), (["abcd", "e"], 0.0), (["ab", "bc", "de"], 0.0), (["ab", "c", "d", "e"], 0.0),
        (["abc", "de", "abcd", "e"], 0.5),
    ],
)  # fmt: skip
def test_what_counts_as_even(steps: list[str], share: float) -> None:
    assert evenness([tuple(step) for step in steps], 5) == share


def test_f2_max_num_seqs_counts_all_micro_batches_together(engines: EnginePool, checkpoints: Checkpoints) -> None:
    """32 requests, eight run at a time in all, never eight per micro-batch, and all of the eight seats are used."""
    engine = engines.get(checkpoints.fx_r, flags=SHARED)
    client, draw = engine.raw, random.Random(2)
    streams = [
        client.submit(random_prompt(draw, 8), max_tokens=24, temperature=0.0, ignore_eos=True) for _ in range(32)
    ]
    running = []
    while not all(stream.is_over for stream in streams):
        running.append(client.stats()["requests_running"])
        client.pump(0.02)
    assert max(running) == 8
    assert statistics.median(running) >= 7, running
    assert all(stream.finish_reason == "length" for stream in streams)
    engine.settle()


def before_and_after_a_long_prefill(client: RawClient, draw: random.Random) -> tuple[float, float]:
    """Evenness of seven streams, then of eight, the last of which began with 700 tokens."""

    def start(num_prompt_tokens: int, num_tokens: int) -> Stream:
        prompt = random_prompt(draw, num_prompt_tokens)
        return client.submit(
            prompt, takes_updates=True, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, prefix_caching=False
        )

    def steps_until(num_tokens: int) -> list[tuple[str, ...]]:
        since = len(client.updates)
        client.pump_until(lambda: len(streams[-1].token_ids) >= num_tokens, 60, lambda: "the streams are slow")
        return client.updates[since:]

    streams = [start(8, 170) for _ in range(7)]
    steps_until(20)
    calm = evenness(steps_until(70), 7)
    streams.append(start(700, 60))
    steps_until(10)
    afterwards = evenness(steps_until(50), 8)
    client.wait(streams, 60)
    return calm, afterwards


def test_f2_micro_batches_are_even_also_after_a_long_prefill(engines: EnginePool, checkpoints: Checkpoints) -> None:
    """A few large steps between many small ones would leave a stage idle in each round."""
    engine = engines.get(checkpoints.fx_r, flags=SHARED)
    draw = random.Random(22)
    shares: list[tuple[float, float]] = []
    while len(shares) < NUM_ATTEMPTS and (not shares or min(shares[-1]) < EVEN_SHARE):
        shares.append(before_and_after_a_long_prefill(engine.raw, draw))
        engine.settle()
    assert min(shares[-1]) >= EVEN_SHARE, f"share of tokens in even micro-batches, before and after: {shares}"


# ------------------------------------------------------------------------------------------------ F3

CHUNK = 64
CHUNKS_OF_64 = ("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8", "--num-kv-blocks", "160")
LONG = 800


def gaps(stream: Stream, since: float, until: float) -> list[float]:
    """Between tokens of which the later one came in this time."""
    return [b - a for a, b in itertools.pairwise(stream.times) if since < b <= until]


def largest_gap_and_bound(
    client: RawClient, long: Greedy, beside: Sequence[Greedy], excused: list[Excused]
) -> tuple[float, float]:
    """Four streams with a long prompt in the middle; all tokens must be right. The bound is 3 normal gaps and a chunk."""
    params = greedy_params(len(long.token_ids)) | {"prefix_caching": False}
    sent = time.monotonic()
    alone = client.submit(long.prompt, **params)
    client.wait([alone], 30)
    chunk_s = (alone.times[0] - sent) / (LONG / CHUNK)
    streams = [client.submit(e.prompt, **greedy_params(len(e.token_ids))) for e in beside]
    client.pump_until(lambda: all(len(s.token_ids) >= 40 for s in streams), 30, lambda: "the streams are slow")
    since, until = max(s.times[9] for s in streams), min(s.times[-1] for s in streams)
    prompt = client.submit(long.prompt, **params)
    client.wait([prompt, *streams], 60)
    normal = statistics.mean(gap for s in streams for gap in gaps(s, since, until))
    during = [gaps(s, until, prompt.times[0]) for s in streams]
    assert all(len(found) >= 5 for found in during), f"the streams stood still: {during}"
    for e, stream in zip([long, long, *beside], [alone, prompt, *streams], strict=True):
        excused += check_stream(client, e, stream)
    return max(map(max, during)), 3 * normal + chunk_s


def test_f3_streams_go_on_while_a_long_prompt_is_computed(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    """A prefill that the streams must sit out would be a gap of a dozen chunks."""
    engine = engines.get(checkpoints.fx_r, flags=CHUNKS_OF_64)
    [long] = tiny_oracle.expect(3, [LONG], 8)
    beside = tiny_oracle.expect(33, [6, 9, 12, 15], 120)
    tries: list[tuple[float, float]] = []
    while len(tries) < 2 * NUM_ATTEMPTS and (not tries or tries[-1][0] >= tries[-1][1]):
        tries.append(largest_gap_and_bound(engine.raw, long, beside, excused))
        engine.settle()
    assert tries[-1][0] < tries[-1][1], f"largest gap and its bound, each try: {tries}"
