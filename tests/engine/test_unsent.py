"""A client that reads nothing: what waits for it is bounded in bytes, and later it hears how each request ended (P13 K12)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from engine.gateway import Gateway
from engine.request import ClientId
from engine.unsent import MAX_UNSENT_BYTES
from ipc.channel import open_socket
from ipc.codec import decode, encode
from ipc.errors import RequestError
from ipc.messages import Attach, RequestFailed, RequestOutput

MEBIBYTE = 1 << 20
NUM_TRIES = 4 * MAX_UNSENT_BYTES // MEBIBYTE


@dataclass(slots=True, kw_only=True)
class Bench:
    gateway: Gateway
    dealer: "zmq.Socket[bytes]"
    client: ClientId

    def fill(self) -> int:
        """Send big messages until there is no room; how many there was room for."""
        for count in range(NUM_TRIES):
            if self.gateway.send_frames(self.client, [bytes(MEBIBYTE)]):
                return count
        raise AssertionError(f"{NUM_TRIES} MiB were queued for a client that reads nothing")

    def finish(self, request_id: str) -> None:
        self.gateway.send(self.client, RequestOutput(
            core_id=1, request_id=request_id, new_token_ids=[5], num_prompt_tokens=1, num_output_tokens=1, seed=0,
            finish_reason="length",
        ))  # fmt: skip

    def small_messages(self, count: int) -> list[RequestFailed | RequestOutput]:
        """Read until so many have come; the gateway has its turns meanwhile."""
        found: list[RequestFailed | RequestOutput] = []
        for _ in range(2000):
            if len(found) == count:
                break
            self.gateway.take_lost()
            if self.dealer.poll(10):
                frames = self.dealer.recv_multipart()
                if len(frames) > 1:
                    found.append(decode(frames, (RequestFailed, RequestOutput)))
        return found


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("engine.unsent.RETRY_S", 0.0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateway = Gateway(context, core_id=1, max_prompt_tokens=1 << 17)
    gateway.listen([f"ipc://{tmp_path}/g"])
    dealer = open_socket(context, zmq.DEALER, high_water_mark=1)
    dealer.connect(gateway.addresses[0])
    dealer.send_multipart(encode(Attach(client="tests")))
    assert gateway.sockets[0].poll(10_000)
    [received] = gateway.receive(gateway.sockets)
    yield Bench(gateway=gateway, dealer=dealer, client=received.client)
    dealer.close()
    gateway.close(0)
    context.term()


def test_p13_bytes_for_a_client_that_reads_nothing_are_bounded(bench: Bench) -> None:
    assert MAX_UNSENT_BYTES // MEBIBYTE <= bench.fill() <= MAX_UNSENT_BYTES // MEBIBYTE + 16  # what the kernel and its end hold
    assert bench.gateway.take_lost() == {bench.client}


def test_p13_each_request_of_it_has_one_end_once_it_reads(bench: Bench) -> None:
    """One that ended for itself, one that the core ended, one that was refused."""
    bench.fill()
    bench.finish("finished")
    bench.gateway.refuse(bench.client, "refused", RequestError("too much", code="overloaded"))
    assert bench.gateway.take_lost() == {bench.client}
    bench.gateway.end_lost(bench.client, ["ended", "finished"])
    assert bench.gateway.deadline() is not None
    found = bench.small_messages(3)
    assert {m.request_id: m.code for m in found if isinstance(m, RequestFailed)} == {
        "finished": "unavailable", "ended": "unavailable", "refused": "overloaded",
    }  # fmt: skip
    bench.gateway.take_lost()
    assert bench.gateway.deadline() is None, "something is still owed"
    bench.finish("later")
    [later] = bench.small_messages(1)
    assert isinstance(later, RequestOutput) and later.request_id == "later"


def test_nothing_is_owed_to_a_client_that_is_gone(bench: Bench) -> None:
    gone = ClientId(0, b"nobody")
    bench.gateway.send_frames(gone, [b"x"])
    assert bench.gateway.take_lost() == {gone}
    bench.gateway.end_lost(gone, ["a"])
    assert bench.gateway.deadline() is None
