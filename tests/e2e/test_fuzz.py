"""Does anything that a stranger sends to any socket of an engine end, change or fatten it, while eight streams run?

A few hundred messages to each socket; with ``-m slow`` 100,000 to each.
"""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import zmq

from ipc.channel import open_socket, receive_now, send_within
from ipc.codec import encode
from ipc.endpoints import host_id
from ipc.messages import AddRequest, SampledTokens, WorkerHello
from ipc.params import SamplingParams
from scripts.bench.process_use import read_use
from tests.conftest import Checkpoints
from tests.e2e.harness import Engine, EnginePool
from tests.e2e.raw import RawClient, Stream
from tests.e2e.test_bad_input import FLAGS
from tests.ipc.mutations import Frames, Mutator, with_fields
from tests.wire_samples import SAMPLES

pytestmark = pytest.mark.e2e

NUM_STREAMS = 8
MAX_GROWTH_BYTES = 20 << 20
PER_TURN = 50
"""Messages between two looks at the streams."""

SEED = 20

PROMPTS = [[5 + (7 * i + 3 * j) % 500 for j in range(4 + i)] for i in range(NUM_STREAMS)]


@dataclass(slots=True)
class Streams:
    """Eight streams at any time, greedy and seeded in turn, each compared with its undisturbed run."""

    client: RawClient
    expected: list[list[int]] = field(default_factory=list)
    open: list[Stream] = field(default_factory=list)
    num_over: int = 0

    def run_undisturbed(self) -> None:
        self.open = [self._submit(i) for i in range(NUM_STREAMS)]
        self.client.wait(self.open, 60)
        self.expected = [stream.token_ids for stream in self.open]

    def keep_running(self) -> None:
        self.client.pump(0)
        for i, stream in enumerate(self.open):
            if stream.is_over:
                self._check(i, stream)
                self.open[i] = self._submit(i)

    def finish(self) -> None:
        self.client.wait(self.open, 120)
        for i, stream in enumerate(self.open):
            self._check(i, stream)

    def _submit(self, i: int) -> Stream:
        return self.client.submit(
            PROMPTS[i], max_tokens=100 + 10 * i, temperature=0.7 * (i % 2), seed=i, ignore_eos=True, takes_updates=bool(i % 2)
        )

    def _check(self, i: int, stream: Stream) -> None:
        assert (stream.failed, stream.finish_reason) == (None, "length")
        assert stream.token_ids == self.expected[i], f"stream {i}, round {self.num_over // NUM_STREAMS}"
        self.num_over += 1


@pytest.fixture
def engine(engines: EnginePool, checkpoints: Checkpoints) -> Engine:
    return engines.get(checkpoints.fx_r, flags=FLAGS)


def sockets_of(engine: Engine) -> dict[str, tuple[int, str]]:
    """Every socket at which the engine listens with ZeroMQ: its kind of peer, and its address."""
    paths = [path for path in engine.tmp.rglob("brigade-*/*/*") if stat.S_ISSOCK(path.lstat().st_mode)]
    found = {path.name.partition("-")[0]: (zmq.PUSH if path.name.startswith("tokens") else zmq.DEALER, f"ipc://{path}") for path in paths}
    assert {"workers", "tokens"} <= set(found)
    return {"clients": (zmq.DEALER, engine.address), **found}


def stolen(engine: Engine) -> list[Frames]:
    """Valid messages of this very engine and epoch, as far as somebody who runs as the same user can know them without
    reading the memory of its processes: not the random names of its sockets, nor the key of its tokens.
    """
    life = {"core_id": engine.raw.info.core_id, "epoch": engine.raw.ask("health").values["epoch"]}
    found = []
    for sample in SAMPLES:
        known = {name: value for name, value in life.items() if hasattr(sample, name)}
        ranks: list[dict[str, Any]] = [{"rank": 0}, {"rank": 1}] if hasattr(sample, "rank") else [{}]
        found += [with_fields(frames_of(sample), **known, **rank) for rank in ranks]
    ranks_of = engine.tree().ranks
    for rank, pid in ((0, ranks_of[0].pid), (1, ranks_of[1].pid), (1, 1)):
        found.append(frames_of(WorkerHello(
            rank=rank, world_size=2, local_world_size=2, nonce=7, pid=pid, host=host_id(), key="", token_address="ipc://none",
        )))  # fmt: skip
    for step_id in (0, 1, 10**6):
        found.append(frames_of(SampledTokens(epoch=life["epoch"], step_id=step_id, rows=[0], token_ids=[5], counts=[1])))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    found.append(frames_of(AddRequest(request_id="f", prompt_token_ids=np.array([5, 6], np.int32), params=params)))
    return found


def frames_of(message: Any) -> Frames:
    return [bytes(frame) for frame in encode(message)]


@contextmanager
def stranger(kind: int, address: str) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, open_socket(context, kind) as socket:
        socket.connect(address)
        yield socket


def memory(engine: Engine) -> dict[int, int]:
    uses = {process.pid: read_use(process.pid) for process in engine.tree().all}
    return {pid: use.anonymous_bytes for pid, use in uses.items() if use is not None}


def throw(mutator: Mutator, name: str, socket: "zmq.Socket[bytes]", streams: Streams, num_messages: int) -> None:
    """What is stolen as it is, then that and the samples broken in all ways; what is answered is read."""
    queue = list(mutator.samples)
    for number in range(num_messages):
        send_within(socket, queue.pop() if queue else mutator.next(), 30.0, f"{name}, message {number}")
        if number % PER_TURN == 0:
            streams.keep_running()
        while socket.type != zmq.PUSH and receive_now(socket) is not None:
            pass


def fuzz(engine: Engine, num_messages: int) -> None:
    """So many to each socket."""
    before = engine.raw.ask("health").values
    client = RawClient(engine.address)
    streams = Streams(client)
    streams.run_undisturbed()
    samples = [*stolen(engine), *map(frames_of, SAMPLES)]
    processes = engine.tree().all
    at_first: dict[int, int] = {}
    for name, (kind, address) in sockets_of(engine).items():
        with stranger(kind, address) as socket:
            mutator = Mutator(SEED, samples)
            throw(mutator, name, socket, streams, num_messages // 10)
            at_first = at_first or memory(engine)
            throw(mutator, name, socket, streams, num_messages - num_messages // 10)
        health = engine.raw.ask("health").values
        assert health == before and health["ready"], f"after the socket of {name}: {health}, {engine.output.tail(10)}"
    streams.finish()
    client.close()
    assert streams.num_over > NUM_STREAMS
    engine.settle(30.0)
    assert [process.pid for process in engine.tree().all] == [process.pid for process in processes]
    growth = {pid: now - at_first[pid] for pid, now in memory(engine).items()}
    print(f"{num_messages} messages to each of {sorted(sockets_of(engine))}, {streams.num_over} streams, growth in bytes {growth}")
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth


def test_a_thousand_broken_foreign_and_stolen_messages_to_each_socket(engine: Engine) -> None:
    fuzz(engine, 700)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_to_each_socket(engine: Engine) -> None:
    fuzz(engine, 100_000)
