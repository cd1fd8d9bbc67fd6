"""How is a field of a model's description read, and what is said of one that can't be used? Without torch."""

import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ipc.errors import ConfigError

FIELD = "MODEL"

NO_TOKEN = (-1, (1 << 32) - 1)
"""Ids that stand for no token, the second as GGUF has it."""


def refused(name: str, value: Any, rule: str) -> ConfigError:
    return ConfigError(FIELD, f"{name}={shown(value)} {rule}")


def shown(value: Any) -> str:
    """Whatever a file may hold, on one line, of bounded length and depth."""
    shortened = reprlib.Repr()
    shortened.maxstring = 80
    return shortened.repr(value)[:100]


@contextmanager
def errors_name(file: str) -> Iterator[None]:
    """Rules that are checked where the file is no longer known."""
    try:
        yield
    except ConfigError as error:
        if file in error.message:
            raise
        raise ConfigError(FIELD, f"{file}: {error.message}") from None


def check_regular(file: Path) -> None:
    """Raise ConfigError for what is there and is not a file: reading from a pipe or a device may never end."""
    if file.exists() and not file.is_file():
        raise ConfigError(FIELD, f"{file} is not a regular file; give a model folder or a .gguf file")


class Fields:
    """Typed reads of one JSON object; an error names the file and the field."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """The value; null is the same as absent. Without a default the field is required."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise ConfigError(FIELD, f"{self.where} has no field {name!r}, which this model needs")
            return default
        if kind is float and type(value) is int and abs(value) < 1 << 1000:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(FIELD, f"{self.where}: {name}={shown(value)} must be of type {kind.__name__}")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """An id or a list of ids; none when absent. An id of -1 means "no such token" and is left out."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token_id) is not int for token_id in ids):
            raise ConfigError(FIELD, f"{self.where}: {name}={shown(value)} must be a token id or a list of them")
        return known_tokens(ids, name, self.where, vocab_size)

    def nullable(self, name: str, kind: type, absent: Any) -> Any:
        """The value, where null says "none" and an absent field means ``absent``."""
        if name not in self.values:
            return absent
        return None if self.values[name] is None else self.get(name, kind)

    def must_be(self, name: str, supported: Any) -> None:
        """Refuse a field that is set to something that would change results and isn't supported."""
        value = self.values.get(name, supported)
        if value is not None and value != supported:
            raise ConfigError(FIELD, f"{self.where}: {name}={shown(value)} is not supported, only {supported!r}")


def known_tokens(ids: list[int], name: str, where: str, vocab_size: int) -> tuple[int, ...]:
    known = tuple(token_id for token_id in ids if token_id not in NO_TOKEN)
    for token_id in known:
        if not 0 <= token_id < vocab_size:
            raise ConfigError(
                FIELD, f"{where}: {name}={shown(token_id)} must be at least 0 and below vocab_size={vocab_size}"
            )
    return known


def read_json(path: Path) -> Fields:
    check_regular(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(FIELD, f"{path} is not readable JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(FIELD, f"{path} must hold a JSON object, found {type(values).__name__}")
    return Fields(values, str(path))
