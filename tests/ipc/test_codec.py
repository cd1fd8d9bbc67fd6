"""Does every message survive the wire byte for byte, and does nothing else get in?"""

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ipc import codec
from ipc import messages as m
from ipc.codec import MAX_COLUMN, PROTOCOL_VERSION, decode, encode, pack_ints, request_id_of, unpack_ints
from ipc.errors import ProtocolError, RequestError
from ipc.params import SamplingParams
from ipc.registry import MESSAGE_TYPES
from tests.wire_samples import FILE, SAMPLES, dump_all, ids, plain

EVERY = tuple(MESSAGE_TYPES.values())
NAMES = [type(sample).__name__ for sample in SAMPLES]


def wire(message: Any) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


def head_of(message: Any) -> list[Any]:
    head: list[Any] = msgpack.unpackb(wire(message)[2])
    return head


def with_head(message: Any, change: Callable[[list[Any]], Any]) -> list[bytes]:
    """Its frames, with another head."""
    frames = wire(message)
    head = msgpack.unpackb(frames[2])
    changed = change(head)
    return [*frames[:2], msgpack.packb(head if changed is None else changed), *frames[3:]]


def sample(kind: type) -> Any:
    return next(message for message in SAMPLES if type(message) is kind)


# ----------------------------------------------------------------------------------------------------- round trip


def test_there_is_a_sample_of_every_message_with_every_field_set() -> None:
    assert sorted(NAMES) == sorted(kind.__name__ for kind in EVERY)
    for message in SAMPLES:
        for f in fields(message):
            default = f.default if f.default is not MISSING else f.default_factory() if f.default_factory is not MISSING else None
            if default is not None:
                assert plain(getattr(message, f.name)) != plain(default), f"{type(message).__name__}.{f.name}"


@pytest.mark.parametrize("message", SAMPLES, ids=NAMES)
def test_every_message_comes_back_as_it_was(message: Any) -> None:
    for frames in (wire(message), encode(message), [memoryview(frame) for frame in wire(message)]):
        back = decode(frames, EVERY)
        assert type(back) is type(message)
        assert plain(back) == plain(message)


def test_golden_bytes() -> None:
    """A difference here is a change of the protocol: see tests/wire_samples.py."""
    assert dump_all() == FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("message", SAMPLES, ids=NAMES)
def test_trailing_fields_may_be_missing_if_they_have_defaults(message: Any) -> None:
    required = sum(f.default is MISSING and f.default_factory is MISSING for f in fields(message))
    frames = with_head(message, lambda head: head[:required])
    num_buffers = sum(f.type in ("IdBuffer", m.IdBuffer, m.FloatBuffer) for f in fields(message)[:required])
    if isinstance(message, m.SchedulerOutput):
        num_buffers = 1
    back = decode(frames if required == len(fields(message)) else frames[: 3 + num_buffers], EVERY)
    for f in fields(message)[required:]:
        default = f.default if f.default is not MISSING else f.default_factory()  # type: ignore[misc]
        assert plain(getattr(back, f.name)) == plain(default)
    if required:
        with pytest.raises(ProtocolError, match=f"{type(message).__name__}: has {required - 1} fields, needs"):
            decode(with_head(message, lambda head: head[: required - 1]), EVERY)


def test_buffers_are_views_that_nobody_can_write_to() -> None:
    back = decode(wire(sample(m.AddRequest)), EVERY)
    assert back.prompt_token_ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        back.prompt_token_ids[0] = 1


def test_params_travel_as_what_differs_from_the_defaults() -> None:
    message = m.AddRequest(request_id="r", prompt_token_ids=ids(1), params=SamplingParams(top_k=3))
    assert head_of(message)[2] == {"top_k": 3}
    assert decode(wire(message), EVERY).params == SamplingParams(top_k=3)


# -------------------------------------------------------------------------------------------------------- columns


@given(st.lists(st.one_of(st.integers(0, 255), st.integers(0, 65535), st.integers(-(1 << 31), (1 << 31) - 1)), max_size=50))
@example([]).via("empty")
@example([5] * 3).via("constant")
@example([255, 256]).via("edge of a byte")
@example([-1, 65536, 2**31 - 1, -(2**31)]).via("edges of four bytes")
def test_columns_come_back(values: list[int]) -> None:
    assert unpack_ints(pack_ints(values), "x") == values


def test_columns_take_the_narrowest_form() -> None:
    assert pack_ints([]) == b""
    assert pack_ints([7] * 500) == b"\0" + (7).to_bytes(4, "little") + (500).to_bytes(4, "little")
    assert [len(pack_ints([0, high])) for high in (255, 256, 65535, 65536)] == [3, 5, 5, 9]
    assert len(pack_ints([-1, 3])) == 9


@pytest.mark.parametrize("values", [[1 << 31, 0], [-(1 << 31) - 1, 0], [1 << 31] * 5, [-(1 << 40)] * 5])
def test_numbers_beyond_int32_do_not_get_onto_the_wire(values: list[int]) -> None:
    with pytest.raises(OverflowError):
        pack_ints(values)


@pytest.mark.parametrize(
    "data",
    [
        b"\0", b"\0" * 8, b"\0" * 10, b"\2\1", b"\4\1\2\3", b"\3\1\2\3", b"\5" * 6, b"\xff" * 9,
        "text", 5, None, [1, 2], b"\1" + bytes(MAX_COLUMN + 1), b"\2" + bytes(2 * MAX_COLUMN + 2),
        b"\0" + bytes(4) + (MAX_COLUMN + 1).to_bytes(4, "little"), b"\0" + bytes(4) + b"\xff" * 4,
    ],
)  # fmt: skip
def test_broken_columns_and_bombs_are_refused(data: Any) -> None:
    with pytest.raises(ProtocolError, match="^x: "):
        unpack_ints(data, "x")


def test_many_small_columns_can_not_add_up_to_a_bomb() -> None:
    """Nine bytes are a column of a million; a message of thousands of them must not be unpacked."""
    bomb = b"\0" + bytes(4) + MAX_COLUMN.to_bytes(4, "little")

    def fill(head: list[Any]) -> None:
        head[3] = [["full", bomb, 0]] * 5000

    with pytest.raises(ProtocolError, match=r"WorkerLoaded.groups\[\d+\].layers: .*values"):
        decode(with_head(sample(m.WorkerLoaded), fill), EVERY)


# ------------------------------------------------------------------------------------------------------- refusals


def refused(frames: list[Any], allowed: Any = EVERY) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode(frames, allowed)
    return caught.value


@pytest.mark.parametrize("tag", [0, 31, 99, 255])
def test_an_unknown_tag(tag: int) -> None:
    error = refused([wire(SAMPLES[0])[0], bytes([tag]), b"\x90"])
    assert error.path == "tag" and "is not one of WorkerHello" in error.rule


def test_a_message_that_is_not_expected_here() -> None:
    error = refused(wire(sample(m.Shutdown)), (m.Attach, m.Control))
    assert error.path == "tag" and error.rule.endswith("is not one of Attach, Control")


@pytest.mark.parametrize("frames", [[], [b"\1"], [b"\1", b"\x20"]])
def test_too_few_frames(frames: list[bytes]) -> None:
    assert refused(frames).path == "message"


@pytest.mark.parametrize("version", [b"", b"\0", b"\2", b"\1\1", b"\xff" * 1000])
def test_another_version(version: bytes) -> None:
    error = refused([version, b"\x20", b"\x90"])
    assert error.path == "version" and f"speaks {PROTOCOL_VERSION}" in error.rule and len(error.rule) < 100


@pytest.mark.parametrize("message", SAMPLES, ids=NAMES)
def test_truncated_frames(message: Any) -> None:
    frames = wire(message)
    for index, frame in enumerate(frames):
        for size in range(len(frame)):
            refused([*frames[:index], frame[:size], *frames[index + 1 :]])
    for count in range(len(frames)):
        refused(frames[:count])
    assert "more buffers" in refused([*frames, b""]).rule


@pytest.mark.parametrize("head", [b"", b"\xc1", b"\x92\x01", b"\x80", b"\xa1x", b"\x05", b"\x91\xa1\xff", b"\x90\x90", b"\xd4\x01\x01", b"\x81\x90\x01"])
def test_a_head_that_is_no_msgpack_array_of_fields(head: bytes) -> None:
    refused([b"\1", bytes([33]), head, b"", b""])


@pytest.mark.parametrize("head", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 100_000, b"\x81\x01" * 100_000])
def test_a_head_that_claims_or_nests_too_much(head: bytes) -> None:
    refused([b"\1", bytes([33]), head])


WRONG: list[tuple[type, int, Any, str]] = [
    (m.WorkerHello, 0, "1", "WorkerHello.rank: must be an integer, got str"),
    (m.WorkerHello, 0, True, "WorkerHello.rank: must be an integer, got bool"),
    (m.WorkerHello, 0, 1.0, "WorkerHello.rank: must be an integer, got float"),
    (m.WorkerHello, 0, -1, "WorkerHello.rank: must be between 0 and 4294967295, got -1"),
    (m.WorkerHello, 0, 1 << 32, "WorkerHello.rank: must be between 0 and 4294967295, got 4294967296"),
    (m.WorkerHello, 5, b"h", "WorkerHello.host: must be text, got bytes"),
    (m.WorkerHello, 5, "h" * 257, "WorkerHello.host: must have a length between 0 and 256, got 257"),
    (m.WorkerHello, 7, None, "WorkerHello.token_address: must be text, got NoneType"),
    (m.WorkerLoaded, 3, {}, "WorkerLoaded.groups: must be an array of at most"),
    (m.WorkerLoaded, 3, [1], r"WorkerLoaded.groups[0]: must be an array of fields, got int"),
    (m.WorkerLoaded, 3, [["full", b"", 0], ["full", [1], 0]], r"WorkerLoaded.groups[1].layers: must be a packed column"),
    (m.WorkerLoaded, 3, [["full", b"", 0, 0]], r"WorkerLoaded.groups[0]: has 4 fields, needs 2 to 3"),
    (m.WorkerLoaded, 8, "x", "WorkerLoaded.load_s: must be a number, got str"),
    (m.WorkerFailed, 4, 1, "WorkerFailed.fatal: must be a boolean, got int"),
    (m.SchedulerOutput, 4, [[6, "", 2, 2, 0, [], {}]], r"SchedulerOutput.new_requests[0].request_id: must have a length between 1 and 128"),
    (m.SchedulerOutput, 4, [[6, "r", 3, 2, 0, [], {}]], r"SchedulerOutput.new_requests[0].token_ids: has a buffer of 8 bytes for 3 values"),
    (m.SchedulerOutput, 4, [[6, "r", 2, 2, 0, [b"\7"], {}]], r"SchedulerOutput.new_requests[0].block_ids[0]: is not a packed column"),
    (m.SchedulerOutput, 5, [b"", [b"\7"]], r"SchedulerOutput.cached_requests.num_new_blocks[0]: is not a packed column"),
    (m.AddRequest, 0, "", "AddRequest.request_id: must have a length between 1 and 128, got 0"),
    (m.AddRequest, 0, "r" * 129, "AddRequest.request_id: must have a length between 1 and 128, got 129"),
    (m.AddRequest, 1, -3, "AddRequest.prompt_token_ids: has a buffer of 12 bytes for -3 values of 4 bytes"),
    (m.AddRequest, 1, "3", "AddRequest.prompt_token_ids: has a buffer of 12 bytes for '3' values"),
    (m.AddRequest, 4, 1 << 31, "AddRequest.priority: must be between -2147483648 and 2147483647"),
    (m.RequestOutput, 4, -1, "RequestOutput.stop_reason: must be between 0"),
    (m.RequestOutput, 9, [0, 1], "RequestOutput.prompt_logprobs: has 2 fields, needs 5 to 5"),
    (m.ModelInfo, 8, "{}", "ModelInfo.tokenizer: must be bytes, got str"),
    (m.ModelInfo, 10, 5, "ModelInfo.chat_template: must be text, got int"),
    (m.ControlReply, 3, [], "ControlReply.values: must be a map"),
    (m.ControlReply, 3, {"a": None}, "ControlReply.values: entry 'a' must map a text to"),
    (m.ControlReply, 3, {1: 1}, "ControlReply.values: entry 1 must map a text to"),
]


@pytest.mark.parametrize(("kind", "index", "value", "words"), WRONG, ids=[f"{w[0].__name__}-{w[1]}-{i}" for i, w in enumerate(WRONG)])
def test_wrong_types_and_sizes_are_named_with_their_path(kind: type, index: int, value: Any, words: str) -> None:
    def change(head: list[Any]) -> None:
        head[index] = value

    error = refused(with_head(sample(kind), change))
    assert str(error).startswith(words)


@pytest.mark.parametrize(
    ("params", "field"),
    [([], "params"), (None, "params"), ({"top_p": 7}, "top_p"), ({"nope": 1}, "nope"), ({5: 1}, "5"), ({b"top_k": 1}, None), ({"stop": [1]}, "stop")],
)
def test_bad_sampling_parameters_are_the_requests_fault(params: Any, field: str | None) -> None:
    def change(head: list[Any]) -> None:
        head[2] = params

    with pytest.raises(RequestError) as caught:
        decode(with_head(sample(m.AddRequest), change), EVERY)
    assert field is None or caught.value.field == field


def test_the_request_that_a_broken_message_names() -> None:
    assert request_id_of(with_head(sample(m.AddRequest), lambda head: head[:2])) == "r"
    for frames in ([], [b"", b"", b"\xff"], [b"", b"", b"\x90"], [b"", b"", msgpack.packb([5])], [b"", b"", msgpack.packb(["x" * 129])]):
        assert request_id_of(frames) == ""


# ----------------------------------------------------------------------------------------------------------- fuzz

VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.text(max_size=8), st.binary(max_size=12),
        st.sampled_from([pack_ints([1, 2]), pack_ints([9] * 9), b"\0" + b"\xff" * 8, 1 << 31, "stop", {}]),
    ),
    lambda inner: st.lists(inner, max_size=5)
    | st.dictionaries(st.sampled_from(["top_p", "stop", "seed", "max_tokens", "temperature", "logprobs"]) | st.integers(-5, 1 << 40), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


def survives(frames: list[bytes]) -> None:
    """Decoding gives a message, a ProtocolError or a RequestError, and nothing else."""
    try:
        message = decode(frames, EVERY)
    except (ProtocolError, RequestError) as error:
        assert len(str(error)) < 600
        return
    assert plain(decode(wire(message), EVERY)) == plain(message) or "nan" in repr(plain(message))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_fuzz_arbitrary_frames(frames: list[bytes]) -> None:
    survives(frames)
    request_id_of(frames)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(MESSAGE_TYPES)), VALUES, st.lists(st.binary(max_size=16), max_size=4))
def test_fuzz_arbitrary_heads(tag: int, head: Any, buffers: list[bytes]) -> None:
    survives([b"\1", bytes([tag]), msgpack.packb(head), *buffers])


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(SAMPLES), st.data())
def test_fuzz_one_value_of_a_good_message_replaced(message: Any, data: st.DataObject) -> None:
    def change(head: list[Any]) -> None:
        where: Any = head
        index = data.draw(st.integers(0, len(head) - 1))
        while isinstance(where[index], list) and where[index] and data.draw(st.booleans()):
            where, index = where[index], data.draw(st.integers(0, len(where[index]) - 1))
        where[index] = data.draw(VALUES)

    survives(with_head(message, change))


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(SAMPLES), st.data())
def test_fuzz_bytes_of_a_good_message_changed(message: Any, data: st.DataObject) -> None:
    frames = wire(message)
    for _ in range(data.draw(st.integers(1, 4))):
        index = data.draw(st.integers(0, len(frames) - 1))
        frame = bytearray(frames[index])
        at = data.draw(st.integers(0, max(0, len(frame) - 1)))
        frame[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        frames[index] = bytes(frame)
    survives(frames)


def test_every_field_type_has_a_codec_and_unknown_ones_are_found_at_import() -> None:
    with pytest.raises(TypeError, match="no codec for"):
        codec._codec_of(complex)
