"""Does nobody get in, and nobody hurt, who should not? (X2 X4 X5 X6)"""

import ast
import json
import re
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import engine.openai.gate
from tests.conftest import Checkpoints
from tests.e2e.harness import Engine, EnginePool
from tests.e2e.rude import HEADERS, KEY, guarded, host_and_port, http_of, run_directories, server_of, tcp_listeners
from tests.e2e.test_http_cases import url_of

pytestmark = pytest.mark.e2e

MILLION = 10**6
MEBIBYTE = 1 << 20
LONGEST_S = 5.0
"""To a refusal, on a machine that others load, and twice as long as to the answer about health."""


@pytest.fixture
def guarded_engine(engines: EnginePool, checkpoints: Checkpoints) -> Engine:
    return guarded(engines, checkpoints)


# ---------------------------------------------------------------------------------------------- X2


def test_x2_only_loopback_listens_and_private_sockets_are_private(guarded_engine: Engine) -> None:
    """Torch's store is a file and gloo is bound to loopback: there are no exceptions to list."""
    if shutil.which("ss") is None:
        pytest.skip("needs ss")
    found = tcp_listeners(guarded_engine)
    assert len(found) >= 2, "clients and HTTP listen at least"
    for local, line in found.items():
        assert re.match(r"127\.|\[::1\]|\[::ffff:127\.", local), f"listens beyond loopback: {line}"
    for directory in run_directories(guarded_engine):
        for folder in (directory, directory.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
        names = {path.name for path in directory.iterdir() if path.is_socket()}
        assert {"workers", "http"} <= names, names


# ---------------------------------------------------------------------------------------------- X4


@contextmanager
def watched(engine: Engine, *, growth: int) -> Iterator[list[float]]:
    """Health is asked all the while: always 200, and soon. The server's and the core's memory may grow by ``growth`` bytes."""
    core = engine.tree().core
    assert core is not None
    processes = [server_of(engine), core]
    before = [process.memory_info().rss for process in processes]
    times: list[float] = []
    is_over = threading.Event()
    failures: list[object] = []

    def ask() -> None:
        with http_of(engine, timeout=20) as http:
            while not is_over.is_set():
                began = time.monotonic()
                try:
                    if (status := http.get("/health").status_code) != 200:
                        failures.append(status)
                except httpx.HTTPError as error:
                    failures.append(error)
                times.append(time.monotonic() - began)
                is_over.wait(0.02)

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        yield times
    finally:
        is_over.set()
        asker.join(30)
    assert not failures and times and max(times) < LONGEST_S / 2, (failures, max(times))
    deadline = time.monotonic() + 10
    while any(grown := [p.memory_info().rss - old > growth for p, old in zip(processes, before, strict=True)]):
        assert time.monotonic() < deadline, f"grew by more than {growth >> 20} MiB (server, core): {grown}"
        engine.raw.pump(0.05)


def million_of_everything() -> Iterator[tuple[str, dict[str, Any]]]:
    """Field to blame, and a body for completions (chats where it has messages)."""
    chat = [{"role": "user", "content": "x"}]
    ids = list(range(MILLION))
    for name in ("n", "best_of", "logprobs"):
        yield name, {"prompt": "x", name: MILLION}
    yield "max_tokens", {"prompt": "x", "max_tokens": 100 * MILLION}
    yield "top_logprobs", {"messages": chat, "logprobs": True, "top_logprobs": MILLION}
    yield "n", {"messages": chat, "n": MILLION}
    yield "stop", {"prompt": "x", "stop": ["ab"] * MILLION}
    yield "stop", {"prompt": "x", "stop": "x" * MILLION}
    yield "stop_token_ids", {"prompt": "x", "stop_token_ids": ids}
    yield "allowed_token_ids", {"prompt": "x", "allowed_token_ids": ids}
    yield "bad_words", {"prompt": "x", "bad_words": ["ab"] * MILLION}
    yield "logit_bias", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(MILLION // 2)}}
    yield "prompt", {"prompt": ["x"] * MILLION}
    yield "prompt", {"prompt": [[5]] * MILLION}
    yield "prompt", {"prompt": [5] * MILLION}
    yield "cache_salt", {"prompt": "x", "cache_salt": "x" * MILLION}
    yield "messages", {"messages": chat * (MILLION // 8)}
    yield "tools", {"messages": chat, "tools": [{"type": "function", "function": {"name": "f"}}] * (MILLION // 10)}


def test_x4_a_million_of_anything_is_refused_at_once(guarded_engine: Engine) -> None:
    bodies = [(field, "messages" in body, json.dumps(body, separators=(",", ":")).encode()) for field, body in million_of_everything()]
    with http_of(guarded_engine) as http:
        http.post("/v1/completions", content=bodies[-4][2])  # what the allocator keeps once
        with watched(guarded_engine, growth=50 * MEBIBYTE):
            for field, is_chat, body in bodies:
                began = time.monotonic()
                response = http.post("/v1/chat/completions" if is_chat else "/v1/completions", content=body)
                elapsed_s = time.monotonic() - began
                assert response.status_code == 400, (field, response.text[:200])
                error = response.json()["error"]
                assert error["param"].startswith(field) and field in error["message"] and len(response.content) < 1000, error
                assert elapsed_s < LONGEST_S, f"{field}: {elapsed_s:.1f} s"


def test_x4_a_body_of_200_mib_is_refused_at_once(guarded_engine: Engine) -> None:
    piece = b"x" * MEBIBYTE
    with http_of(guarded_engine) as http, watched(guarded_engine, growth=50 * MEBIBYTE):
        for told in (True, False):
            headers = {"content-length": str(200 * MEBIBYTE)} if told else {}
            began = time.monotonic()
            try:
                response = http.post("/v1/completions", content=iter([piece] * 200), headers=headers)
                assert response.status_code == 413 and str(8 * MEBIBYTE) in response.json()["error"]["message"]
            except httpx.WriteError:
                assert told or time.monotonic() - began < 2.0  # the connection was closed in the middle of it
            assert time.monotonic() - began < 2.0
        assert http.get("/v1/models").status_code == 200


# ---------------------------------------------------------------------------------------------- X5


def answer_to(engine: Engine, pieces: Iterator[bytes]) -> bytes:
    """What comes back for bytes that may be refused while they are sent."""
    got = bytearray()
    with socket.create_connection(host_and_port(url_of(engine)), timeout=10) as peer:
        try:
            for piece in pieces:
                peer.sendall(piece)
        except (ConnectionResetError, BrokenPipeError):
            pass
        try:
            while piece := peer.recv(1 << 16):
                got += piece
        except ConnectionResetError:
            pass
    return bytes(got)


def test_x5_headers_of_any_size_are_refused(guarded_engine: Engine) -> None:
    with watched(guarded_engine, growth=20 * MEBIBYTE):
        for size in (1, 16, 100):
            pieces = (b"y" * MEBIBYTE for _ in range(size))
            began = time.monotonic()
            got = answer_to(guarded_engine, (b"".join(p) for p in ((b"GET /v1/models HTTP/1.1\r\nx: ",), *((p,) for p in pieces))))
            # Who still sends when the connection is closed may lose the answer to it.
            assert not got or got.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431")), got[:200]
            assert time.monotonic() - began < 2.0
        got = answer_to(guarded_engine, iter([b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 60_000 + b"\r\nconnection: close\r\n\r\n"]))
        assert got.startswith(b"HTTP/1.1 431"), got[:200]


@pytest.mark.parametrize("given", ["x" * MEBIBYTE, "x" * 97, 'a"}\\', "a b", "", "é", "a\r\n b"])
def test_x5_a_request_id_is_short_and_plain_or_replaced(guarded_engine: Engine, given: str) -> None:
    num_lines = len(guarded_engine.output.lines)
    body = b'{"prompt": "x", "max_tokens": 3, "stream": true, "ignore_eos": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    got = answer_to(guarded_engine, iter([f"{head}x-request-id: {given}\r\n\r\n".encode(), body]))
    told = re.findall(rb'x-request-id: ([^\r]*)\r\n|"id":"cmpl-([^"]*)"', got)
    if got.startswith(b"HTTP/1.1 4") or (len(given) == MEBIBYTE and not got):
        assert b"cmpl-" not in got
    else:
        assert got.startswith(b"HTTP/1.1 200"), got[:200]
        names = {one for pair in told for one in pair if one}
        if given == 'a"}\\':  # visible and short: taken as it is, and quoted
            for line in got.splitlines():
                if line.startswith(b"data: {"):
                    assert json.loads(line.removeprefix(b"data: "))["id"] == f"cmpl-{given}"
        else:
            assert len(names) == 1 and re.fullmatch(rb"[0-9a-f]{32}", names.pop()), names
    assert len(got) < 4000
    assert not [line for line in guarded_engine.output.lines[num_lines:] if "Traceback" in line]


# ---------------------------------------------------------------------------------------------- X6


def routes_of(http: httpx.Client) -> set[tuple[str, str]]:
    paths = http.get("/openapi.json").json()["paths"]
    found = {(method.upper(), path.replace("{model_id}", "x")) for path, methods in paths.items() for method in methods}
    return found | {("GET", "/openapi.json"), ("GET", "/metrics"), ("GET", "/docs"), ("POST", "/abort"), ("GET", "/nowhere")}


def test_x6_every_route_asks_for_the_key_and_the_key_stays_secret(guarded_engine: Engine) -> None:
    url = url_of(guarded_engine)
    with http_of(guarded_engine) as http:
        routes = routes_of(http)
        assert len(routes) > 8 and http.get("/v1/models").status_code == 200
    wrong = [{}, *({"authorization": value} for value in ("Bearer", "Bearer x", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"Basic {KEY}", KEY))]
    with httpx.Client(base_url=url, timeout=20) as http:
        for method, path in sorted(routes):
            for headers in wrong:
                response = http.request(method, path, headers=headers, params={"api_key": KEY} if "Basic" in str(headers) else None)
                expected = 200 if path == "/health" else 401
                assert response.status_code == expected, (method, path, headers)
                assert KEY not in response.text
        assert http.get("/v1/models", headers=HEADERS).status_code == 200
    for process in guarded_engine.tree().all:
        assert KEY not in " ".join(process.cmdline())
        assert KEY not in Path(f"/proc/{process.pid}/environ").read_text(errors="replace")
    assert not [line for line in guarded_engine.output.lines if KEY in line]


def test_x6_keys_are_compared_in_constant_time() -> None:
    """No comparison of the gate's source looks at a key by an operator."""
    source = ast.parse(Path(engine.openai.gate.__file__).read_text())
    compared = [ast.unparse(node) for node in ast.walk(source) if isinstance(node, ast.Compare)]
    assert not [text for text in compared if re.search(r"\bkeys?\b|known", text)], compared
    assert "hmac.compare_digest(" in ast.unparse(source)
