"""Does every field out of range end its own request alone, with field, value and rule, beside a long stream?"""

import math
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgpack
import pytest

from engine import SamplingParams
from ipc.codec import PROTOCOL_VERSION, encode
from ipc.errors import RequestError
from ipc.messages import Control, Heartbeat
from tests.conftest import Checkpoints
from tests.e2e.compare import check_against, check_stream, greedy_params
from tests.e2e.conftest import TinyOracle
from tests.e2e.harness import Engine, EnginePool, start
from tests.e2e.raw import RawClient, Stream, add_request_frames
from tests.e2e.test_http_cases import url_of
from tests.oracle import Excused, Greedy

pytestmark = pytest.mark.e2e

FLAGS = ("--num-kv-blocks", "256", "--max-num-seqs", "8", "--max-model-len", "1024")
VOCABULARY = 512
NAN, INFINITY = math.nan, math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """One broken request: the frames, and what its refusal must say."""

    field: str
    frames: dict[str, Any]
    shown: str = ""
    """How the value must appear; empty when it is too long or too odd to be shown."""
    request_id: str = "bad"


def bad_params() -> Iterator[Bad]:
    values: dict[str, list[Any]] = {
        "max_tokens": [0, -1, 1 << 40, "7", 1.5, True, [1]],
        "temperature": [-1, -0.01, NAN, INFINITY, 1e9, "0", [0.5]],
        "top_k": [-1, 1 << 40, 1.5, "5"],
        "top_p": [0, -0.1, 1.1, NAN, "x"],
        "seed": [-1, 1 << 63, "a", 1.5],
        "stop": [[""], [1], 5, ["x" * 2000], ["x"] * 17, {"a": 1}],
        "stop_token_ids": [[-1], [1 << 40], ["a"], [1] * 300, "a"],
        "ignore_eos": ["yes", 1, 0],
        "include_stop_str_in_output": [1],
        "skip_special_tokens": ["no"],
        "logprobs": [-2, 21, 10**6, "a", True],
        "prompt_logprobs": [-2, 21, "a"],
        "min_p": [-0.1, 1.5, "x", NAN],
        "typical_p": [0, 1.5, "x"],
        "presence_penalty": [-2.5, 3, "x", NAN],
        "frequency_penalty": [-2.5, 3, "x"],
        "repetition_penalty": [0, -1, 11, "x", NAN],
        "min_tokens": [-1, "1", 1.5],
        "logit_bias": [{5: 101}, {5: "x"}, {"5": 1}, [5], "x"],
        "allowed_token_ids": [[], [-1], "x", [1.5]],
        "bad_words": [5, [""], " "],
        "bad_word_ids": [[[]], [[-1]], [5], [[5] * 17]],
        "logprobs_mode": ["cooked", 5],
        "logits_processors": [["x"], 5, {"a:b": {"x": [1]}}],
        "n": [0, -1, 1000, "2", 1.5],
        "echo": [1, "yes"],
        "best_of": [3],
        "no such field": ["x"],
    }
    for name, bad_values in values.items():
        for value in bad_values:
            shown = str(value) if isinstance(value, (int, float, str)) and len(str(value)) < 30 else ""
            yield Bad(field=name, frames={"params": {name: value}}, shown=shown)


def bad_for_this_engine() -> Iterator[Bad]:
    """What only the core can refuse: it knows the vocabulary, the end tokens, and what it was started with."""
    for params in (
        {"stop_token_ids": [VOCABULARY]}, {"logit_bias": {VOCABULARY: 1.0}}, {"allowed_token_ids": [5, VOCABULARY]},
        {"bad_word_ids": [[5], [6, VOCABULARY]]}, {"bad_words": ["cat"]}, {"logits_processors": {"no.such:thing": {}}},
        {"bad_word_ids": [[7]], "allowed_token_ids": [7]}, {"min_tokens": 2, "stop_token_ids": [7], "allowed_token_ids": [7]},
    ):  # fmt: skip
        yield Bad(field=next(iter(params)), frames={"params": params})


def bad_fields() -> Iterator[Bad]:
    for name in ("prompt", "output"):
        key = f"{name}_token_ids"
        yield Bad(field=key, frames={name: [5, -1, 6]}, shown="-1")
        yield Bad(field=key, frames={name: [5, VOCABULARY]}, shown=str(VOCABULARY))
        yield Bad(field=key, frames={name: [(1 << 31) - 1]}, shown=str((1 << 31) - 1))
    yield Bad(field="prompt_token_ids", frames={"prompt": []})
    yield Bad(field="prompt_token_ids", frames={"prompt": [5] * 1024}, shown="1024")
    yield Bad(field="prompt_token_ids", frames={"prompt": [5] * 100_000}, shown="100000")
    yield Bad(field="prompt_token_ids", frames={"prompt_length": 7}, shown="7")
    yield Bad(field="prompt_token_ids", frames={"prompt_length": -1}, shown="-1")
    yield Bad(field="prompt_token_ids", frames={"prompt_length": "x"})
    yield Bad(field="output_token_ids", frames={"output": [5, 6], "params": {"max_tokens": 2}}, shown="2")
    yield Bad(field="priority", frames={"priority": 1 << 40}, shown=str(1 << 40))
    yield Bad(field="priority", frames={"priority": "x"})
    yield Bad(field="params", frames={"params": []})
    yield Bad(field="params", frames={"params": "x"})
    yield Bad(field="7", frames={"params": {7: 7}}, shown="7")
    yield Bad(field="request_id", frames={"request_id": ""}, request_id="")
    yield Bad(field="request_id", frames={"request_id": "x" * 129}, shown="129", request_id="")
    yield Bad(field="request_id", frames={"request_id": 7}, request_id="")
    yield Bad(field="request_id", frames={"request_id": None}, request_id="")


def broken_messages() -> dict[str, list[bytes]]:
    """Not even an AddRequest: each is answered with a RequestFailed without or with a request id."""
    version, good = bytes((PROTOCOL_VERSION,)), add_request_frames()
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    return {
        "another version": [b"\x09", *good[1:]],
        "long version": [b"\x01\x01", *good[1:]],
        "unknown tag": [version, b"\xfe", *good[2:]],
        "long tag": [version, b"\x21\x21", *good[2:]],
        "a worker's message": [bytes(f) for f in encode(Heartbeat(core_id=1, epoch=1))],
        "one frame": [version],
        "two frames": [version, b"\x21"],
        "empty frames": [b"", b"", b""],
        "not msgpack": [version, b"\x21", b"\xc1\xc1\xc1", b"", b""],
        "msgpack cut short": [version, b"\x21", good[2][:-2], *good[3:]],
        "msgpack with a tail": [version, b"\x21", good[2] + b"\x00", *good[3:]],
        "no array": [version, b"\x21", msgpack.packb({"request_id": "bad"}), b"", b""],
        "too few fields": [version, b"\x21", msgpack.packb(["bad"]), b"", b""],
        "too many fields": [version, b"\x21", msgpack.packb(["bad", 0, {}, 0, 0, 1, 2, 3]), b"", b""],
        "no buffers": good[:3],
        "one buffer more": [*good, b"more"],
        "odd buffer": [*good[:3], good[3] + b"x", good[4]],
        "deep": [version, b"\x21", msgpack.packb(deep), b"", b""],
        "an extension type": [version, b"\x21", msgpack.packb(msgpack.ExtType(5, b"x")), b"", b""],
        "claims 4 GB": [version, b"\x21", b"\xdd\xff\xff\xff\xff", b"", b""],
    }


@dataclass(slots=True, kw_only=True)
class Beside:
    """A long stream that must not notice anything; started again when it ends."""

    client: RawClient
    expected: Greedy
    streams: list[Stream] = field(default_factory=list)

    def run(self) -> None:
        if not self.streams or self.streams[-1].is_over:
            self.streams.append(self.client.submit(self.expected.prompt, **greedy_params(len(self.expected.token_ids))))
            self.client.pump_until(lambda: bool(self.streams[-1].token_ids), 20, lambda: "the long stream is silent")

    def check(self) -> list[Excused]:
        self.client.wait(self.streams, 60)
        return [found for stream in self.streams for found in check_stream(self.client, self.expected, stream)]


@pytest.fixture
def engine(engines: EnginePool, checkpoints: Checkpoints) -> Engine:
    return engines.get(checkpoints.fx_r, flags=FLAGS)


@pytest.fixture
def beside(engine: Engine, tiny_oracle: TinyOracle, excused: list[Excused]) -> Iterator[Callable[[], None]]:
    """Call it before each broken thing: a stream of known ids then runs. Its ids are checked at the end."""
    client = RawClient(engine.address)
    stream = Beside(client=client, expected=tiny_oracle.expect(50, [20], 300)[0])
    yield stream.run
    excused += stream.check()
    client.close()
    engine.settle()


def check_refusal(client: RawClient, bad: Bad) -> None:
    client.send_frames(add_request_frames(**{"request_id": "bad", **bad.frames}))
    failed = client.next_refusal(bad.request_id)
    told = f"{bad.frames!r:.100}: code {failed.code}, field {failed.field}: {failed.reason}"
    assert failed.code in ("bad_request", "bad_message"), told
    assert failed.field == bad.field, told
    assert bad.field in failed.reason, told
    assert not bad.shown or bad.shown in failed.reason, told
    assert len(failed.reason) > len(bad.field) + len(bad.shown) + 5, f"names no rule: {told}"
    assert len(failed.reason) < 400, told


def test_bad_sampling_parameters_in_raw_frames(engine: Engine, beside: Callable[[], None]) -> None:
    for bad in (*bad_params(), *bad_for_this_engine()):
        beside()
        check_refusal(engine.raw, bad)


def test_bad_fields_in_raw_frames(engine: Engine, beside: Callable[[], None]) -> None:
    for bad in bad_fields():
        beside()
        check_refusal(engine.raw, bad)
    assert not engine.raw.unclaimed


def test_broken_messages(engine: Engine, beside: Callable[[], None]) -> None:
    for name, frames in broken_messages().items():
        beside()
        engine.raw.send_frames(frames)
        engine.raw.pump_until(lambda: bool(engine.raw.unclaimed), 10, lambda: f"no answer to {name}")  # noqa: B023
        failed = engine.raw.unclaimed.pop()
        assert failed.code in ("bad_request", "bad_message") and len(failed.reason) > 10, f"{name}: {failed}"
    assert not engine.raw.unclaimed


def test_an_unknown_question_is_answered(engine: Engine) -> None:
    assert re.search("op.*'shutdown'.*stats", engine.raw.ask("shutdown").error)
    engine.raw.send(Control(control_id=(1 << 64) - 1, op=""))


def test_a_second_request_with_an_open_id_is_refused(engine: Engine, beside: Callable[[], None]) -> None:
    beside()
    client = engine.raw
    first = client.submit([5, 6, 7], request_id="twice", max_tokens=200, ignore_eos=True)
    client.send_frames(add_request_frames(request_id="twice"))
    refused = client.next_refusal("twice")
    assert refused.field == "request_id" and "twice" in refused.reason
    client.wait([first], 30)
    assert (first.finish_reason, len(first.token_ids)) == ("length", 200)


def test_peers_that_do_not_speak_the_protocol(engine: Engine, beside: Callable[[], None]) -> None:
    """Bytes that are no ZeroMQ, connections cut in the middle, frames beyond the limit."""
    host, _, port = engine.address.removeprefix("tcp://").rpartition(":")
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"):
        beside()
        with socket.create_connection((host, int(port)), timeout=5) as peer:
            peer.sendall(data)
    beside()
    large = RawClient(engine.address)
    large.send_frames([b"\x01", b"\x21", bytes(40 << 20)])
    large.pump_for(0.3)
    large.close()
    assert engine.raw.stats()["requests_running"] >= 0


def test_bad_values_through_the_client(engine: Engine, beside: Callable[[], None]) -> None:
    """The library refuses before anything is sent what breaks a rule by itself; the core refuses the rest."""
    for bad in bad_params():
        if bad.field in SamplingParams.__slots__:
            with pytest.raises(RequestError, match=re.escape(bad.field)) as caught:
                SamplingParams(**bad.frames["params"])
            assert caught.value.field == bad.field and bad.shown in str(caught.value)
    prompts: list[Any] = [[], [5, -1], [VOCABULARY], [5] * 1024, [1.5], [[5]], "", 7, None, {"a": 1}, b"abc", ["a"]]
    with engine.client() as client:
        for prompt in prompts:
            beside()
            with pytest.raises(RequestError) as refused:
                list(client.generate(prompt, SamplingParams(max_tokens=1)))
            assert refused.value.field and "prompt" in refused.value.field, f"{prompt!r:.40}: {refused.value}"
        for request_id in ("", "x" * 129, 7):
            with pytest.raises(RequestError, match="request_id"):
                list(client.generate([5], SamplingParams(max_tokens=1), request_id=request_id))  # type: ignore[arg-type]
        assert next(iter(client.generate([5], SamplingParams(max_tokens=1, temperature=0)))).token_ids


def test_k12_a_full_queue_gives_each_request_its_one_answer(
    checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    """One runs and one may wait; twelve at once from two clients, and as many over HTTP, each hear of theirs in time."""
    flags = ("--max-num-seqs", "1", "--max-queued-requests", "1", "--num-kv-blocks", "64", "--http", "127.0.0.1:0")
    engine = start(checkpoints.fx_r, pp=1, flags=flags)
    try:
        clients = [engine.wait_ready().raw, RawClient(engine.address)]
        streams = [client.submit([5, 6, i + 7], max_tokens=300, ignore_eos=True) for i in range(6) for client in clients]
        began = time.monotonic()
        for client, own in zip(clients, (streams[::2], streams[1::2]), strict=True):
            client.pump_until(lambda own=own: sum(s.is_over for s in own) >= 4, 5, lambda: "no refusal")  # type: ignore[misc]
        assert time.monotonic() - began < 5
        with ThreadPoolExecutor(12) as pool:
            body = {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True}
            posts = [pool.submit(httpx.post, f"{url_of(engine)}/v1/completions", json=body, timeout=60) for _ in range(12)]
            statuses = sorted(one.result().status_code for one in posts)
        assert set(statuses) <= {200, 429} and 429 in statuses, statuses
        for client, own in zip(clients, (streams[::2], streams[1::2]), strict=True):
            client.wait(own, 60)
        assert sum(s.finish_reason == "length" for s in streams) == 2 and all(s.num_finals == 1 for s in streams)
        assert {s.failed.code for s in streams if s.failed is not None} == {"overloaded"}
        clients[1].close()
        excused += check_against(clients[0], tiny_oracle.expect(51, [9], 8), concurrency=1)
        engine.settle()
        engine.stop()
    finally:
        engine.kill()
