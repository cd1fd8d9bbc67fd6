"""Messages to frames and back, with every field checked on the way in.

A message is a list of frames::

    version   one byte, PROTOCOL_VERSION
    tag       one byte, the message type (messages.py)
    head      msgpack array of the fields in order; trailing fields may be missing and take their defaults
    buffers   raw little-endian arrays, in the order in which their fields appear; the head holds their lengths

A nested part is an array too. SamplingParams is a map of the fields that differ from their defaults. A column of
integers (``Ints``) is a msgpack bin: empty, or one byte of kind and then the values: kind 1, 2 or 4 for uint8, uint16
or int32 values, kind 0 for an int32 value followed by a uint32 count, meaning that all values are equal.
"""

import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

import ipc.views  # noqa: F401  its messages must be known before the tables below are made
from ipc.errors import ProtocolError, RequestError
from ipc.messages import Bounds, FloatBuffer, IdBuffer, Ints, Scalars, SpanBuffer
from ipc.params import SamplingParams
from ipc.registry import MESSAGE_TYPES

PROTOCOL_VERSION = 1
MAX_COLUMN = 1 << 20
"""Most entries of one Ints column: a constant column of 9 bytes must not become gigabytes."""

MAX_HEAD_BYTES = 1 << 28
"""Enough for a ModelInfo with the largest tokenizer."""

MAX_CLIENT_HEAD_BYTES = 1 << 19
"""Enough for a request with every list and text of its parameters at its limit."""

MAX_ITEMS = 1 << 16
"""Most items of a list of parts."""

MAX_COLUMN_VALUES = 4 * MAX_COLUMN
"""Most entries of all Ints columns of one message together: many small bombs are one big one."""

Frame = bytes | memoryview


class _Incoming:
    """What is left of a message that is being decoded: its buffers, and how many column entries it may still hold."""

    def __init__(self, buffers: Sequence[Frame]) -> None:
        self.buffers = iter(buffers)
        self.num_values_left = MAX_COLUMN_VALUES


_Encode = Callable[[Any, list[Frame]], Any]
_Decode = Callable[[Any, str, _Incoming], Any]

_WIDTHS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<i4")}


def encode(message: Any) -> list[Frame]:
    """Frames of a message. Buffers are not copied: the arrays must not change until the frames are sent."""
    tag = _TAGS[type(message)]
    buffers: list[Frame] = []
    head = _STRUCTS[type(message)].encode(message, buffers)
    return [_VERSION_FRAME, bytes((tag,)), msgpack.packb(head), *buffers]


def decode(frames: Sequence[Frame], allowed: Sequence[type], *, max_head_bytes: int = MAX_HEAD_BYTES) -> Any:
    """The message in these frames, one of the ``allowed`` types.

    Buffer fields are read-only views of the frames. ``max_head_bytes`` bounds what a stranger's message can cost: each
    byte of a head may become an object of some sixty bytes.

    Raises:
        ProtocolError: with the path of the first field that is not as it should be.
        RequestError: for sampling parameters that break a rule (the frames themselves are well-formed).
    """
    kind = _kind_of(frames, allowed)
    if len(frames[2]) > max_head_bytes:
        raise ProtocolError(kind.__name__, f"has a head of {len(frames[2])} bytes, at most {max_head_bytes} are read")
    incoming = _Incoming(frames[3:])
    decoded = _STRUCTS[kind].decode(_unpack(frames[2], kind.__name__), kind.__name__, incoming)
    if next(incoming.buffers, None) is not None:
        raise ProtocolError(kind.__name__, "has more buffers than its fields name")
    return decoded


def request_id_of(frames: Sequence[Frame]) -> str:
    """The request a broken client message is about, so that its sender can be told; empty if there is none."""
    if len(frames) < 3 or len(frames[2]) > MAX_CLIENT_HEAD_BYTES:
        return ""
    try:
        head = _unpack(frames[2], "message")
    except ProtocolError:
        return ""
    first = head[0] if isinstance(head, list) and head else None
    return first if isinstance(first, str) and 1 <= len(first) <= 128 else ""


def pack_ints(values: Sequence[int]) -> bytes:
    """A column at the narrowest width that holds its values. Raises OverflowError beyond int32."""
    if not values:
        return b""
    low, high = min(values), max(values)
    if low == high and len(values) > 2:
        return b"\x00" + low.to_bytes(4, "little", signed=True) + len(values).to_bytes(4, "little")
    width = 4 if low < 0 or high > 0xFFFF else 2 if high > 0xFF else 1
    if width == 1:
        return b"\x01" + bytes(values)
    if low < -(1 << 31) or high >= 1 << 31:
        raise OverflowError(f"column holds {low} to {high}, outside int32")
    return bytes((width,)) + np.asarray(values, dtype=_WIDTHS[width]).tobytes()


def unpack_ints(data: Any, path: str) -> list[int]:
    """The column again. Raises ProtocolError."""
    if type(data) is not bytes:
        raise ProtocolError(path, f"must be a packed column (bin), got {type(data).__name__}")
    if not data:
        return []
    kind = data[0]
    if kind == 0 and len(data) == 9:
        count = int.from_bytes(data[5:], "little")
        if count > MAX_COLUMN:
            raise ProtocolError(path, f"holds {count} values, more than {MAX_COLUMN}")
        return [int.from_bytes(data[1:5], "little", signed=True)] * count
    dtype = _WIDTHS.get(kind)
    if dtype is None or (len(data) - 1) % kind or len(data) - 1 > MAX_COLUMN * kind:
        raise ProtocolError(path, f"is not a packed column (kind {kind}, {len(data)} bytes)")
    return cast(list[int], np.frombuffer(data, dtype, offset=1).tolist())


def _unpack(frame: Frame, path: str) -> Any:
    try:
        return msgpack.unpackb(frame, raw=False, strict_map_key=False, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(path, f"head is not msgpack ({type(error).__name__})") from None


def _kind_of(frames: Sequence[Frame], allowed: Sequence[type]) -> type:
    if len(frames) < 3:
        raise ProtocolError("message", f"has {len(frames)} frames, needs at least 3")
    if bytes(frames[0]) != _VERSION_FRAME:
        raise ProtocolError("version", f"is {bytes(frames[0])[:8]!r}, this side speaks {PROTOCOL_VERSION}")
    kind = MESSAGE_TYPES.get(frames[1][0]) if len(frames[1]) == 1 else None
    if kind is None or kind not in allowed:
        names = ", ".join(a.__name__ for a in allowed)
        raise ProtocolError("tag", f"{bytes(frames[1])[:8]!r} is not one of {names}")
    return kind


class _Struct:
    """Compiled encoder and decoder of one dataclass."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        hints = get_type_hints(cls, include_extras=True)
        self.names = [f.name for f in fields(cls)]
        self.codecs = [_codec_of(hints[name]) for name in self.names]
        self.num_required = sum(f.default is MISSING and f.default_factory is MISSING for f in fields(cls))

    def encode(self, value: Any, buffers: list[Frame]) -> list[Any]:
        return [
            encode_field(getattr(value, name), buffers)
            for name, (encode_field, _) in zip(self.names, self.codecs, strict=True)
        ]

    def decode(self, data: Any, path: str, incoming: _Incoming) -> Any:
        if type(data) is not list:
            raise ProtocolError(path, f"must be an array of fields, got {type(data).__name__}")
        if not self.num_required <= len(data) <= len(self.names):
            raise ProtocolError(path, f"has {len(data)} fields, needs {self.num_required} to {len(self.names)}")
        return self.cls(**{
            name: codec[1](item, f"{path}.{name}", incoming)
            for name, codec, item in zip(self.names, self.codecs, data, strict=False)
        })


def _codec_of(hint: Any) -> tuple[_Encode, _Decode]:
    plain = _PLAIN.get(_key(hint))
    if plain is not None:
        return plain
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _bounded(args[0], args[1])
    if origin in (types.UnionType, Union):
        return _optional(next(a for a in args if a is not type(None)))
    if origin is tuple:
        return _many(args[0])
    if is_dataclass(hint):
        struct = _struct_of(cast(type, hint))
        return struct.encode, struct.decode
    raise TypeError(f"no codec for {hint}")


def _key(hint: Any) -> Any:
    """Type aliases that are not hashable by identity are told apart by their text."""
    return hint if isinstance(hint, type) and not get_args(hint) else str(hint)


def _same(value: Any, buffers: list[Frame]) -> Any:
    return value


def _exactly(kind: type, name: str) -> tuple[_Encode, _Decode]:
    def decode_value(data: Any, path: str, incoming: _Incoming) -> Any:
        if type(data) is not kind:
            raise ProtocolError(path, f"must be {name}, got {type(data).__name__}")
        return data

    return _same, decode_value


def _decode_float(data: Any, path: str, incoming: _Incoming) -> float:
    if type(data) not in (int, float):
        raise ProtocolError(path, f"must be a number, got {type(data).__name__}")
    return float(data)


def _bounded(kind: type, bounds: Bounds) -> tuple[_Encode, _Decode]:
    encode_plain, decode_plain = _codec_of(kind)
    is_number = kind is int

    def decode_value(data: Any, path: str, incoming: _Incoming) -> Any:
        value = decode_plain(data, path, incoming)
        measure = value if is_number else len(value)
        if not bounds.low <= measure <= bounds.high:
            what = "must be" if is_number else "must have a length"
            raise ProtocolError(path, f"{what} between {bounds.low} and {bounds.high}, got {measure}")
        return value

    return encode_plain, decode_value


def _optional(inner: Any) -> tuple[_Encode, _Decode]:
    encode_inner, decode_inner = _codec_of(inner)
    return (
        lambda value, buffers: None if value is None else encode_inner(value, buffers),
        lambda data, path, incoming: None if data is None else decode_inner(data, path, incoming),
    )


def _many(inner: Any) -> tuple[_Encode, _Decode]:
    encode_inner, decode_inner = _codec_of(inner)

    def decode_value(data: Any, path: str, incoming: _Incoming) -> Any:
        if type(data) is not list or len(data) > MAX_ITEMS:
            raise ProtocolError(path, f"must be an array of at most {MAX_ITEMS} items")
        return tuple(decode_inner(item, f"{path}[{i}]", incoming) for i, item in enumerate(data))

    return lambda value, buffers: [encode_inner(item, buffers) for item in value], decode_value


def _buffer(dtype: np.dtype[Any]) -> tuple[_Encode, _Decode]:
    def encode_value(value: Any, buffers: list[Frame]) -> int:
        array = np.ascontiguousarray(value, dtype=dtype)
        buffers.append(array.data.cast("B") if array.size else b"")
        return int(array.size)

    def decode_value(data: Any, path: str, incoming: _Incoming) -> Any:
        frame = next(incoming.buffers, None)
        if frame is None or type(data) is not int or len(frame) != data * dtype.itemsize:
            got = "no buffer" if frame is None else f"a buffer of {len(frame)} bytes"
            raise ProtocolError(path, f"has {got} for {data!r:.40} values of {dtype.itemsize} bytes")
        return np.frombuffer(frame, dtype)

    return encode_value, decode_value


def _decode_ints(data: Any, path: str, incoming: _Incoming) -> list[int]:
    values = unpack_ints(data, path)
    incoming.num_values_left -= len(values)
    if incoming.num_values_left < 0:
        raise ProtocolError(path, f"brings the message's columns to more than {MAX_COLUMN_VALUES} values")
    return values


def _decode_params(data: Any, path: str, incoming: _Incoming) -> SamplingParams:
    if type(data) is not dict:
        raise RequestError(f"params must be a map, got {type(data).__name__}", field="params")
    return SamplingParams.from_wire(data)


def _decode_scalars(data: Any, path: str, incoming: _Incoming) -> Any:
    if type(data) is not dict or len(data) > MAX_ITEMS:
        raise ProtocolError(path, "must be a map")
    for key, value in data.items():
        if type(key) is not str or type(value) not in (int, float, str, bool):
            raise ProtocolError(path, f"entry {key!r:.80} must map a text to a number, a text or a boolean")
    return data


_PLAIN: dict[Any, tuple[_Encode, _Decode]] = {
    _key(int): _exactly(int, "an integer"),
    _key(str): _exactly(str, "text"),
    _key(bytes): _exactly(bytes, "bytes"),
    _key(bool): _exactly(bool, "a boolean"),
    _key(float): (_same, _decode_float),
    _key(Ints): (lambda value, buffers: pack_ints(value), _decode_ints),
    _key(IdBuffer): _buffer(np.dtype("<i4")),
    _key(FloatBuffer): _buffer(np.dtype("<f4")),
    _key(SpanBuffer): _buffer(np.dtype("<i8")),
    _key(Scalars): (_same, _decode_scalars),
    _key(SamplingParams): (lambda value, buffers: value.to_wire(), _decode_params),
}

_STRUCTS: dict[type, _Struct] = {}


def _struct_of(cls: type) -> _Struct:
    if cls not in _STRUCTS:
        _STRUCTS[cls] = _Struct(cls)
    return _STRUCTS[cls]


for _cls in MESSAGE_TYPES.values():
    _struct_of(_cls)

_TAGS = {cls: tag for tag, cls in MESSAGE_TYPES.items()}
_VERSION_FRAME = bytes((PROTOCOL_VERSION,))
