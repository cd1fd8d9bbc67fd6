"""Peers that stop reading, flood, drop connections, or come in thousands: nobody else may notice (P12 P13 P14 P15 X3)."""

import asyncio
import json
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import psutil
import pytest

from tests.conftest import Checkpoints
from tests.e2e.conftest import TinyOracle
from tests.e2e.harness import ROOT, Engine, EnginePool
from tests.e2e.raw import RawClient, add_request_frames
from tests.e2e.rude import (
    HEADERS,
    guarded,
    host_and_port,
    http_of,
    post_head,
    reset,
    run_directories,
    server_of,
    tcp_listeners,
)
from tests.e2e.test_http_cases import url_of
from tests.http_server import stream

pytestmark = pytest.mark.e2e

MEBIBYTE = 1 << 20
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def guarded_engine(engines: EnginePool, checkpoints: Checkpoints) -> Engine:
    return guarded(engines, checkpoints)


def core_of(engine: Engine) -> psutil.Process:
    core = engine.tree().core
    assert core is not None
    return core


def first_answers(engine: Engine, prompt: list[int], num_tokens: int) -> None:
    """A probe through both front doors."""
    ids = engine.raw.greedy(prompt, num_tokens)
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with http_of(engine) as http:
        made = http.post("/v1/completions", json=body).json()["choices"][0]
    assert made["token_ids"] == ids


# ---------------------------------------------------------------------------------------------- P12


def test_p12_short_many_streams_each_get_their_answer_over_few_sockets(guarded_engine: Engine) -> None:
    """150 over HTTP and 10 ZeroMQ clients, more than run at once; the server has one attachment to the core for all."""
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
    expected = guarded_engine.raw.greedy([5, 6, 7], 8)

    async def ask(http: httpx.AsyncClient) -> list[int]:
        ids: list[int] = []
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
        return ids

    async def ask_all() -> list[list[int]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url_of(guarded_engine), headers=HEADERS, limits=limits, timeout=60) as http:
            return await asyncio.gather(*(ask(http) for _ in range(150)))

    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        clients = [RawClient(guarded_engine.address) for _ in range(10)]
        for client in clients:
            stack.callback(client.close)
        core_files = core_of(guarded_engine).num_fds()
        over_http = pool.submit(asyncio.run, ask_all())
        streams = [client.submit([5, 6, 7], max_tokens=8, temperature=0, ignore_eos=True) for client in clients]
        for client, one in zip(clients, streams, strict=True):
            client.wait([one], 60)
            assert one.token_ids == expected
        assert over_http.result() == [expected] * 150
        assert core_of(guarded_engine).num_fds() <= core_files + 2, "the core has files for each HTTP request"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_p12_number_4_two_thousand_streams_under_a_limit_of_files(checkpoints: Checkpoints) -> None:
    command = [sys.executable, "-m", "scripts.bench.many_streams", str(checkpoints.fx_r), "--rounds", "1", "--check", "--bar", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


# ---------------------------------------------------------------------------------------------- P13


@pytest.mark.parametrize("silent_s, most_slowdown", [(2, None), pytest.param(30, 2.0, marks=SLOW)])
def test_p13_who_reads_nothing_slows_nobody_and_loses_nothing(
    silent_s: int, most_slowdown: float | None, guarded_engine: Engine
) -> None:
    """50 streams of a raw client, and 5 over HTTP, whose readers sleep, beside a normal client."""
    engine = guarded_engine
    core, server = core_of(engine), server_of(engine)

    def p95(num_s: float) -> float:
        """Of whole small answers, one after the other."""
        times, end = [], time.monotonic() + num_s
        while time.monotonic() < end or len(times) < 3:
            began = time.monotonic()
            engine.raw.greedy([8, 9], 10)
            times.append(time.monotonic() - began)
        return sorted(times)[int(0.95 * len(times))]

    def load(client: RawClient, count: int) -> list[object]:
        return [client.submit([5, 6, i + 10], max_tokens=200, temperature=0, ignore_eos=True) for i in range(count)]

    reading = RawClient(engine.address)
    streams = load(reading, 55)
    with ThreadPoolExecutor(1) as pool:
        is_read = pool.submit(reading.wait, streams, 120)  # type: ignore[arg-type]
        normal = p95(min(silent_s, 3))
        is_read.result()
    reading.close()
    memory = [process.memory_info().rss for process in (core, server)]
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 20}
    with ExitStack() as stack:
        silent = RawClient(engine.address)
        stack.callback(silent.close)
        streams = load(silent, 50)
        peers = []
        for _ in range(5):
            peer = stack.enter_context(socket.socket())
            # Before it connects: a window that shrinks loses what is on its way, which then comes ever later.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
            peer.settimeout(60)
            peer.connect(host_and_port(url_of(engine)))
            content = json.dumps(body).encode()
            peer.sendall(post_head("/v1/completions", len(content), "connection: close") + content)
            peers.append(peer)
        slowed = p95(silent_s)
        assert most_slowdown is None or slowed < most_slowdown * normal, f"p95 {slowed:.3f} s beside {normal:.3f} s"
        for process, before in zip((core, server), memory, strict=True):
            assert process.memory_info().rss - before < 64 * MEBIBYTE
        silent.wait(streams, 120)  # type: ignore[arg-type]
        assert all(len(s.token_ids) == 200 for s in streams)  # type: ignore[attr-defined]
        for peer in peers:
            got = b"".join(iter(lambda peer=peer: peer.recv(1 << 16), b""))  # type: ignore[misc]
            assert got.count(b'"text_offset"') and b"data: [DONE]" in got
            assert sum(len(json.loads(line[6:])["choices"][0]["logprobs"]["tokens"]) for line in got.splitlines()
                       if line.startswith(b"data: {")) == 200  # fmt: skip


# ---------------------------------------------------------------------------------------------- P14


def test_p14_connections_that_drop_leave_nothing(guarded_engine: Engine) -> None:
    """100 on each client socket: nothing sent, half a message, a request whose answer nobody waits for; FIN and RST."""
    engine = guarded_engine
    core, server = core_of(engine), server_of(engine)
    first_answers(engine, [5, 6, 7], 4)
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
    whole = post_head("/v1/completions", len(body)) + body
    greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    frames = b"".join(
        bytes((0x01 if index < 4 else 0x00, len(frame))) + frame for index, frame in enumerate(add_request_frames(params={"max_tokens": 900}))
    )
    sent = {
        engine.address: [b"", b"\xff", greeting[:30], greeting, greeting + ready[:9], greeting + ready, greeting + ready + frames[:7],
                         greeting + ready + frames],
        url_of(engine): [b"", b"POST", whole[:40], whole[:-20], whole, b"\x16\x03\x01", b"\r\n" * 50],
    }  # fmt: skip
    num_whole = engine.raw.stats()["requests_finished_total_length"]
    files = [process.num_fds() for process in (core, server)]
    memory = [process.memory_info().rss for process in (core, server)]
    for address, starts in sent.items():
        for number in range(100):
            peer = socket.create_connection(host_and_port(address), timeout=10)
            peer.sendall(starts[number % len(starts)])
            if number % 3 == 0:
                peer.settimeout(0.02)
                try:
                    peer.recv(100)
                except TimeoutError:
                    pass
            if number % 2:
                reset(peer)
            else:
                peer.close()
    first_answers(engine, [5, 6, 7], 4)
    whole_since = engine.settle(20)["requests_finished_total_length"] - num_whole
    assert whole_since == 2, f"{whole_since - 2} answers were computed to their end for nobody"
    deadline = time.monotonic() + 20
    while any(process.num_fds() > before + 2 for process, before in zip((core, server), files, strict=True)):
        assert time.monotonic() < deadline, [process.num_fds() for process in (core, server)]
        engine.raw.pump(0.05)
    for process, before in zip((core, server), memory, strict=True):
        assert process.memory_info().rss - before < 32 * MEBIBYTE


# ---------------------------------------------------------------------------------------------- P15


@pytest.mark.parametrize("duration_s", [4, pytest.param(300, marks=SLOW)])
def test_p15_health_never_lies_under_bad_requests_and_disconnects(
    duration_s: int, guarded_engine: Engine, tiny_oracle: TinyOracle
) -> None:
    """Eight streams, and rude peers of every kind, while a probe follows every question about health."""
    engine = guarded_engine
    [expected] = tiny_oracle.expect(15, [12], 60)
    is_over = threading.Event()
    counts = {"bad": 0, "streams": 0}

    def load(number: int) -> None:
        body = {"prompt": expected.prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        with http_of(engine) as http:
            while not is_over.is_set():
                events = stream(http, "/v1/completions", body)
                ids = sum((c["token_ids"] for e in events if e != "[DONE]" for c in e["choices"]), [])
                assert ids == expected.token_ids
                counts["streams"] += 1

    def be_rude() -> None:
        draw = random.Random(15)
        bodies = [b"{", b"", b'{"prompt": 7}', b'{"prompt": "x", "n": -1}', b'{"prompt": "x", "stop_token_ids": [100000]}', b"[" * 5000]
        raw = RawClient(engine.address)
        with http_of(engine) as http:
            while not is_over.is_set():
                for body in bodies:
                    assert http.post("/v1/completions", content=body).status_code == 400
                with socket.create_connection(host_and_port(url_of(engine)), timeout=10) as peer:
                    content = b'{"prompt": "x", "max_tokens": 400, "ignore_eos": true, "stream": true}'
                    size = draw.choice((30, 150, 1000))
                    peer.sendall((post_head("/v1/completions", len(content)) + content)[:size])
                    if size == 1000 and draw.random() < 0.4:
                        peer.recv(500)
                    if draw.random() < 0.5:
                        reset(peer)
                raw.send_frames([draw.randbytes(draw.randrange(1, 60)) for _ in range(draw.randrange(1, 6))])
                raw.submit([5, 6], max_tokens=300, ignore_eos=True)
                if draw.random() < 0.3:
                    raw.close()
                    raw = RawClient(engine.address)
                counts["bad"] += 1
        raw.close()

    with ThreadPoolExecutor(9) as pool, http_of(engine) as http:
        work = [*(pool.submit(load, number) for number in range(8)), pool.submit(be_rude)]
        try:
            end, num_probes = time.monotonic() + duration_s, 0
            while time.monotonic() < end and not any(one.done() for one in work):
                assert http.get("/health").status_code == 200
                body = {"prompt": expected.prompt, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
                made = http.post("/v1/completions", json=body)
                assert made.status_code == 200 and made.json()["choices"][0]["token_ids"] == expected.token_ids[:2]
                num_probes += 1
        finally:
            is_over.set()
        for one in work:
            one.result()
    assert num_probes >= 3 and counts["bad"] >= 2 and counts["streams"] >= 8, (num_probes, counts)


# ---------------------------------------------------------------------------------------------- X3


def connected_to_everything(engine: Engine, count: int) -> Iterator[socket.socket]:
    """That many connections to every port and every private socket, which say nothing and read nothing."""
    for local in tcp_listeners(engine):
        host, _, port = local.rpartition(":")
        for _ in range(count):
            yield socket.create_connection((host.strip("[]"), int(port)), timeout=10)
    for directory in run_directories(engine):
        for path in directory.iterdir():
            if path.is_socket():
                for _ in range(count):
                    peer = socket.socket(socket.AF_UNIX)
                    peer.connect(str(path))  # waits for room in the backlog; with a timeout it would fail instead
                    yield peer


@pytest.mark.parametrize("count, span_s, least", [(30, 1.0, None), pytest.param(200, 60.0, 0.8, marks=SLOW)])
def test_x3_peers_that_say_nothing_slow_nobody(count: int, span_s: float, least: float | None, guarded_engine: Engine) -> None:
    if shutil.which("ss") is None:
        pytest.skip("needs ss")
    engine = guarded_engine

    def rate() -> float:
        """Tokens per second of eight streams."""
        num_tokens, began = 0, time.monotonic()
        while time.monotonic() - began < span_s:
            streams = engine.raw.run([([5, 6, i + 9], {"max_tokens": 40, "ignore_eos": True}) for i in range(8)], concurrency=8, timeout_s=60)
            num_tokens += sum(len(s.token_ids) for s in streams)
        return num_tokens / (time.monotonic() - began)

    before = rate()
    with ExitStack() as stack:
        peers = [stack.enter_context(peer) for peer in connected_to_everything(engine, count)]
        assert len(peers) >= 4 * count, "clients, HTTP, and the core's two private sockets at least"
        beside = rate()
        assert least is None or beside >= least * before, f"{beside:.0f} tokens/s, {before:.0f} without them"
        first_answers(engine, [5, 6, 7], 4)
