"""What becomes of connections whose requests don't come, or come in dribs and drabs, and of those that nobody reads?"""

import json
import socket
from collections.abc import Iterator

import pytest

from engine.openai import web_server
from engine.text.sources import read_text_files
from ipc.messages import AbortRequest, AddRequest
from tests.conftest import Checkpoints
from tests.fake_core import FakeCore, model_info, stay_silent
from tests.http_server import DEADLINE_S, serving
from tests.tiny import text_ids

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
WHOLE = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr(web_server, "REQUEST_S", 0.3)
    with FakeCore(reply=stay_silent) as core, serving(core.address) as url:
        host, _, port = url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as found:
            yield found


@pytest.mark.parametrize("begun", [HEAD[:20], HEAD, HEAD + b"\r\n", HEAD + b'\r\n{"prompt": '], ids=["name", "head", "no body", "half a body"])
def test_a_request_that_does_not_come_whole_is_refused(connection: socket.socket, begun: bytes) -> None:
    connection.sendall(begun)
    head, body = until_closed(connection).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert (error["code"], error["message"]) == ("request_timeout", "the request did not come whole within 0.3 s")


def test_a_byte_now_and_then_gains_no_time(connection: socket.socket) -> None:
    answer = b""
    connection.settimeout(0.05)
    for _ in range(200):
        try:
            connection.sendall(b"G")
            answer += connection.recv(1 << 16)
            break
        except TimeoutError:
            continue
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_who_says_nothing_is_told_nothing(connection: socket.socket) -> None:
    assert until_closed(connection) == b""


def test_a_connection_may_idle_between_requests(connection: socket.socket) -> None:
    for _ in range(2):
        connection.settimeout(DEADLINE_S)
        connection.sendall(WHOLE)
        assert b"HTTP/1.1 200 OK" in connection.recv(1 << 16)
        connection.settimeout(0.6)
        with pytest.raises(TimeoutError):
            while connection.recv(1 << 16):
                continue
            pytest.fail("it was closed")


def until_closed(connection: socket.socket) -> bytes:
    found = b""
    while piece := connection.recv(1 << 16):
        found += piece
    return found


def test_p13_who_stops_reading_loses_its_connection_and_its_request_ends(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "STALLED_S", 0.3)
    files = read_text_files(checkpoints.fx_r)
    info = model_info(tokenizer=files.tokenizer, tokenizer_config=files.tokenizer_config, max_model_len=2048)
    piece = text_ids("x" * 5_000)

    def never_end(core: FakeCore, client: bytes, request: AddRequest) -> None:
        for count in range(1, 201):
            core.output(client, request.request_id, piece, num_prompt_tokens=1, num_output_tokens=count * len(piece), seed=0)

    with FakeCore(info=info, reply=never_end) as core, serving(core.address) as url:
        host, port = url.removeprefix("http://").split(":")
        body = b'{"prompt": "x", "stream": true, "max_tokens": 1000000, "return_token_ids": true}'
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.settimeout(20)
            peer.connect((host, int(port)))
            peer.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            _, added = core.next(AddRequest)
            _, aborted = core.next(AbortRequest)
            assert aborted.request_id == added.request_id
