"""Which transport do ranks agree on, and what does each of them say when its wish can't be met?"""

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

from ipc.errors import ConfigError, PeerLost, ProtocolError
from worker.links import nccl
from worker.links.choice import Choice, Offer, choose_transport, exchange_offers
from worker.links.nccl import connect_pair, nccl_version
from worker.links.streams import CudaStreams
from worker.settings import TRANSPORTS

CPU, A, B = "cpu", "cuda:a", "cuda:b"


def offers(*devices: str, wish: str | list[str] = "auto", hosts: str = "", **changes: Any) -> list[Offer]:
    """One rank a device; ``hosts``: a letter a rank."""
    made = []
    for rank, device in enumerate(devices):
        values = {"rank": rank, "host": hosts[rank : rank + 1] or "x", "device": device}
        values["wish"] = wish if isinstance(wish, str) else wish[rank]
        values["nccl"] = "" if device == CPU else "2.27.5"
        made.append(Offer(**(values | {name: value[rank] for name, value in changes.items()})))
    return made


@pytest.mark.parametrize(
    ("made", "transport", "reason"),
    [
        (offers(CPU, CPU, CPU), "gloo", "every rank computes on the CPU"),
        (offers(A, B), "nccl", "every rank has a GPU of its own"),
        (offers(A, A, hosts="xy"), "nccl", "every rank has a GPU of its own"),
        (offers(A, A), "staged", "no NCCL, since ranks 0, 1 share cuda:a"),
        (offers(A, B, B, hosts="xyy"), "staged", "no NCCL, since ranks 1, 2 share cuda:b"),
        (offers(A, CPU), "staged", "no NCCL, since rank 1 computes on the CPU"),
        (offers(A, B, nccl=["2.27.5", ""]), "staged", "no NCCL, since rank 1 has no NCCL"),
        (offers(A, B, nccl=["2.27.5", "2.28.1"]), "staged", "no NCCL, since rank 0 has NCCL 2.27.5, rank 1 has 2.28.1"),
        (offers(A, B, wish="staged"), "staged", "as --transport says"),
        (offers(CPU, CPU, wish="staged"), "staged", "as --transport says"),
        (offers(CPU, CPU, wish="gloo"), "gloo", "as --transport says"),
        (offers(A, B, wish="nccl"), "nccl", "as --transport says"),
    ],
)
def test_the_choice_and_its_reason(made, transport, reason):
    assert choose_transport(made) == Choice(transport=transport, reason=reason)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (offers(A, A, wish="nccl"), "nccl needs one GPU for each rank, and NCCL: ranks 0, 1 share cuda:a; use staged or auto"),
        (offers(A, CPU, wish="nccl"), "nccl needs .*: rank 1 computes on the CPU; use staged or auto"),
        (offers(CPU, B, wish="gloo"), "gloo carries tensors of the CPU, rank 1 computes on cuda:b; use staged"),
        (offers(A, B, A, wish=["auto", "nccl", "nccl"]), "must be the same on every rank, it is auto on rank 0, nccl on rank 1"),
    ],
)
def test_a_wish_that_can_not_be_met_names_value_and_rule(made, words):
    with pytest.raises(ConfigError, match=f"^--transport: {words}"):
        choose_transport(made)


def store_of(tmp_path, num_ranks: int) -> FileStore:
    return FileStore(str(tmp_path / "store"), num_ranks)


def test_every_rank_reads_the_same_offers_in_order(tmp_path):
    made, got = offers(A, B, CPU), {}

    def exchange(offer: Offer) -> None:
        got[offer.rank] = exchange_offers(store_of(tmp_path, 3), offer, 3, 20)

    threads = [threading.Thread(target=exchange, args=(offer,)) for offer in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == dict.fromkeys(range(3), made)


def test_a_rank_that_does_not_come_is_named_at_the_deadline(tmp_path):
    with pytest.raises(PeerLost, match="rank 0: could not connect to the other 1 ranks: nothing from rank 1 in the epoch's store"):
        exchange_offers(store_of(tmp_path, 2), offers(CPU)[0], 2, 0.3)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff", b"[]", b"{}", b"null", b'{"rank": 1}',
        json.dumps({"rank": 0, "host": "x", "device": "cpu", "nccl": "", "wish": "auto"}).encode(),
        json.dumps({"rank": True, "host": "x", "device": "cpu", "nccl": "", "wish": "auto"}).encode(),
        json.dumps({"rank": 1, "host": 5, "device": "cpu", "nccl": "", "wish": "auto"}).encode(),
        json.dumps({"rank": 1, "host": "x", "device": "cpu", "nccl": "", "wish": "pigeon"}).encode(),
        json.dumps({"rank": 1, "host": "x" * 5000, "device": "cpu", "nccl": "", "wish": "auto"}).encode(),
    ],
)  # fmt: skip
def test_an_offer_of_another_version_is_refused(tmp_path, data):
    store_of(tmp_path, 2).set("links/1", data)
    with pytest.raises(ProtocolError, match="links/1: is no offer of rank 1; it may run another version"):
        exchange_offers(store_of(tmp_path, 2), offers(CPU)[0], 2, 5)


# ------------------------------------------------------------------------- what needs a GPU, up to torch's own calls


class FakeNccl:
    """Stands in for ProcessGroupNCCL; remembers how it was made."""

    class Options:
        pass

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.connected_to: Any = None

    def eager_connect_single_device(self, device: Any) -> None:
        self.connected_to = device


def test_each_pair_of_neighbours_has_a_communicator_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(nccl, "ProcessGroupNCCL", FakeNccl)
    device, store = torch.device("cuda", 1), store_of(tmp_path, 3)
    middle = {peer: connect_pair(store, rank=1, peer=peer, device=device, timeout_s=20) for peer in (0, 2)}
    assert [(group.rank, group.size) for group in middle.values()] == [(1, 2), (0, 2)]
    assert [group.connected_to for group in middle.values()] == [device, device]
    # Our own deadline comes first, and names the step.
    assert {group.options._timeout for group in middle.values()} == {timedelta(seconds=60)}
    middle[0].store.set("k", "of 0 and 1")
    middle[2].store.set("k", "of 1 and 2")
    assert middle[0].store.get("k") == b"of 0 and 1"


def test_a_communicator_that_can_not_be_made_names_both_ranks(tmp_path, monkeypatch):
    def fail(self, device):
        raise RuntimeError("NCCL error in: x.cpp:1, unhandled system error\nmore")

    monkeypatch.setattr(nccl, "ProcessGroupNCCL", FakeNccl)
    monkeypatch.setattr(FakeNccl, "eager_connect_single_device", fail)
    with pytest.raises(PeerLost, match="^rank 1: could not connect to rank 2 by NCCL: NCCL error in: x.cpp:1, unhandled system error$"):
        connect_pair(store_of(tmp_path, 3), rank=1, peer=2, device=torch.device("cuda", 0), timeout_s=20)


def test_without_cuda_there_is_no_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert nccl_version() == ""
    assert set(TRANSPORTS) == {"auto", "gloo", "staged", "nccl"}


class FakeCuda:
    """The few calls of torch.cuda that streams take, as a list of what was asked for in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.current = "compute"
        cuda = self

        class Event:
            def __init__(self, blocking: bool) -> None:
                self.looks = 0

            def record(self, stream: "Stream") -> None:
                cuda.calls.append(f"record on {stream.name}")

            def query(self) -> bool:
                self.looks += 1
                return self.looks > 3

            def synchronize(self) -> None:
                cuda.calls.append("synchronize")

        class Stream:
            def __init__(self, device: Any, name: str = "side") -> None:
                self.name = name

            def wait_event(self, event: Event) -> None:
                cuda.calls.append(f"{self.name} waits")

            def wait_stream(self, other: "Stream") -> None:
                cuda.calls.append(f"{self.name} waits for {other.name}")

        class Current:
            def __init__(self, stream: Stream) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                self.before, cuda.current = cuda.current, self.stream.name

            def __exit__(self, *_: object) -> None:
                cuda.current = self.before

        for name, value in {
            "Event": Event, "Stream": Stream, "stream": Current, "current_stream": lambda device: Stream(device, "compute"),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)


def test_cuda_streams_ask_for_what_the_rules_say(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    streams = CudaStreams(torch.device("cpu"))

    def act() -> None:
        cuda.calls.append(f"act on {cuda.current}")

    streams.device_bytes(8)
    streams.queue(act)
    event = streams.mark()
    done = streams.beside(act, after=[event])
    streams.hold(done)
    assert cuda.calls == [
        "side waits for compute", "act on compute", "record on compute", "side waits", "act on side", "record on side",
        "compute waits",
    ]  # fmt: skip
    assert done.wait(5)
    assert not streams.mark().wait(0)
    assert streams.mark().wait(None)
    assert cuda.calls[-1] == "synchronize"
