"""What does the head of a GGUF file say under given keys?

The file is read with bounds on every length. (The gguf package would do as well, but takes two seconds to wrap a
vocabulary of 50,000 texts in array views; start-up waits for this.)
"""

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ipc.errors import ConfigError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


def read_metadata(path: Path, *prefixes: str) -> dict[str, Any]:
    """Values of all keys that start with one of the prefixes; arrays as lists.

    Raises:
        ConfigError: the file can't be read, is no GGUF file, or is cut.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, path).read_metadata(prefixes)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("MODEL", f"{path} can't be read as a GGUF file: {error}") from None


class _Cursor:
    """Reads forward through the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.offset = 0

    def read_metadata(self, prefixes: tuple[str, ...]) -> dict[str, Any]:
        if self._take(4) != b"GGUF":
            raise ConfigError("MODEL", f"{self.path} is not a GGUF file (it does not begin with 'GGUF')")
        version = self._scalar("I")
        if version not in _VERSIONS:
            known = " or ".join(map(str, _VERSIONS))
            raise ConfigError("MODEL", f"{self.path} is GGUF version {version}, little-endian {known} is supported")
        self._scalar("Q")  # number of tensors
        found = {}
        for _ in range(self._scalar("Q")):
            key = self._text().decode("utf-8", "replace")
            value = self._value(self._scalar("I"), is_wanted=key.startswith(prefixes))
            if key.startswith(prefixes):
                found[key] = value
        return found

    def _take(self, size: int) -> bytes:
        if size > len(self.data) - self.offset:
            raise ConfigError("MODEL", f"{self.path} ends in the middle of its metadata (byte {self.offset})")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _text(self) -> bytes:
        return self._take(self._scalar("Q"))

    def _value(self, kind: int, is_wanted: bool) -> Any:
        if kind == _STRING:
            return self._text().decode("utf-8", "replace")
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"), is_wanted)
        if kind not in _SCALARS:
            raise ConfigError("MODEL", f"{self.path} holds a metadata value of unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int, is_wanted: bool) -> list[Any]:
        if kind in _SCALARS:
            code = np.dtype("<" + _SCALARS[kind])
            raw = self._take(count * code.itemsize)
            return list(np.frombuffer(raw, code).tolist()) if is_wanted else []
        if count > len(self.data) - self.offset:
            raise ConfigError("MODEL", f"{self.path} ends in the middle of an array of {count} values")
        if kind == _STRING and is_wanted:
            return [self._text().decode("utf-8", "replace") for _ in range(count)]
        for _ in range(count):
            self._value(kind, is_wanted=False)
        return []
