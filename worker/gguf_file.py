"""What does a GGUF file hold, and where? Its scalars and its table of tensors, read without touching the rest.

The layout, all little-endian: magic, version, number of tensors, number of metadata entries; the entries; the tensor
table; then, aligned, the tensors' data. Arrays (a tokenizer's vocabulary, mostly) are stepped over: reading them takes
longer than all that is needed here.
"""

import mmap
import struct
from dataclasses import dataclass
from typing import Any

from ipc.errors import ConfigError

FIELD = "MODEL"
MAX_DIMS = 4
MAX_TEXT_BYTES = 1 << 24

_SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_TYPE_NAMES = {0: "F32", 1: "F16", 30: "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """One entry of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """In torch's order: the last dimension is the contiguous one."""

    type_id: int
    """Of ggml's element and block types."""

    offset: int
    """Bytes from the start of the file."""

    @property
    def type_name(self) -> str:
        """Of an unquantized type; otherwise the number."""
        return _TYPE_NAMES.get(self.type_id, f"ggml type {self.type_id}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    """The description at the front of a file."""

    path: str
    size_bytes: int
    metadata: dict[str, Any]
    """Scalars and texts; arrays are left out."""

    tensors: dict[str, GGUFTensor]

    def has(self, key: str) -> bool:
        return key in self.metadata

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A metadata value. Raises ConfigError when it is missing without a default, or of another type."""
        value = self.metadata.get(key, default)
        if value is None:
            raise ConfigError(FIELD, f"{self.path} has no metadata {key!r}, which this model needs")
        if type(value) is not kind:
            raise ConfigError(FIELD, f"{self.path}: {key}={value!r:.80} must be of type {kind.__name__}")
        return value

    def read_floats(self, name: str) -> tuple[float, ...]:
        """All values of a small float32 tensor."""
        tensor = self.tensors[name]
        count = 1
        for size in tensor.shape:
            count *= size
        if tensor.type_name != "F32" or count > 1 << 16:
            raise ConfigError(FIELD, f"{self.path}: {name} must be a small F32 tensor, is {tensor.type_name}")
        with open(self.path, "rb") as file:
            file.seek(tensor.offset)
            data = file.read(4 * count)
        if len(data) < 4 * count:
            raise ConfigError(FIELD, f"{self.path} is cut off inside tensor {name}")
        return struct.unpack(f"<{count}f", data)


def read_gguf_file(path: str) -> GGUFFile:
    """Parse the front of the file.

    Raises:
        ConfigError: when the file is not a whole, little-endian GGUF file of version 2 or 3.
        OSError: when it can't be opened.
    """
    with open(path, "rb") as file:
        try:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ConfigError(FIELD, f"{path} is empty") from None
    with view:
        try:
            return _parse(_Cursor(view), path)
        except (struct.error, _BrokenFileError) as error:
            raise ConfigError(FIELD, f"{path} is damaged or cut off ({error}); fetch it again") from None


class _BrokenFileError(Exception):
    pass


class _Cursor:
    """Reads values one behind the other, never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def skip(self, num_bytes: int) -> None:
        if num_bytes > len(self.data) - self.at:
            raise _BrokenFileError(f"{num_bytes} bytes announced at {self.at} of {len(self.data)}")
        self.at += num_bytes

    def text(self) -> str:
        size = self.take("<Q")
        start = self.at
        if size > MAX_TEXT_BYTES:
            raise _BrokenFileError(f"text of {size} bytes at {start}")
        self.skip(size)
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise _BrokenFileError(f"text at {start} is not UTF-8") from None

    def value(self) -> Any:
        """A metadata value; None for an array, which is stepped over."""
        kind = self.take("<I")
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            self.skip_array()
            return None
        return self.take(self.scalar(kind))

    def scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise _BrokenFileError(f"unknown value type {kind} at {self.at}")
        return _SCALARS[kind]

    def skip_array(self) -> None:
        kind, count = self.take("<I"), self.take("<Q")
        if kind != _STRING:
            self.skip(count * struct.calcsize(self.scalar(kind)))
            return
        if count > len(self.data) // 8:
            raise _BrokenFileError(f"array of {count} texts at {self.at}")
        read_size, data, at, last = struct.Struct("<Q").unpack_from, self.data, self.at, len(self.data) - 8
        for _ in range(count):
            if at > last:
                raise _BrokenFileError(f"array of {count} texts at {self.at} goes past the end")
            at += 8 + read_size(data, at)[0]
        self.at = 0
        self.skip(at)


def _parse(cursor: _Cursor, path: str) -> GGUFFile:
    if cursor.data[:4] != b"GGUF":
        raise ConfigError(FIELD, f"{path} is not a GGUF file: it starts with {cursor.data[:4]!r}")
    cursor.skip(4)
    version = cursor.take("<I")
    if version not in (2, 3):
        raise ConfigError(FIELD, f"{path} has GGUF version {version}; versions 2 and 3, little-endian, are read")
    num_tensors, num_entries = cursor.take("<Q"), cursor.take("<Q")
    metadata = {}
    for _ in range(num_entries):
        key = cursor.text()
        value = cursor.value()
        if value is not None:
            metadata[key] = value
    entries = [_parse_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise _BrokenFileError(f"alignment {alignment!r}")
    data_start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: GGUFTensor(name=name, shape=shape, type_id=type_id, offset=data_start + offset)
        for name, shape, type_id, offset in entries
    }
    if len(tensors) != len(entries):
        raise _BrokenFileError("two tensors have the same name")
    for tensor in tensors.values():
        if tensor.offset > len(cursor.data):
            raise _BrokenFileError(f"tensor {tensor.name!r:.80} starts past the end")
    return GGUFFile(path=path, size_bytes=len(cursor.data), metadata=metadata, tensors=tensors)


def _parse_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    num_dims = cursor.take("<I")
    if num_dims > MAX_DIMS:
        raise _BrokenFileError(f"tensor {name!r:.80} has {num_dims} dimensions")
    shape = tuple(cursor.take("<Q") for _ in range(num_dims))
    return name, shape[::-1], cursor.take("<I"), cursor.take("<Q")
