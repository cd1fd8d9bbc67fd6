"""Server-sent events, written by hand: what is the same in every event of a choice is made once."""

import json
from collections.abc import Callable, Sequence
from typing import Any

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"connection", b"close"),
]
"""Proxies must not hold events back; the end of the connection is the end of the answer for those that wait for it."""

DONE = b"data: [DONE]\n\n"

_PART = 1 << 14
"""Numbers."""

_NEVER = "\ue000brigade\ue000"


def dumps(value: Any) -> bytes:
    """JSON in ASCII, without a line break."""
    return json.dumps(value, separators=(",", ":")).encode()


def integers(values: Sequence[int]) -> bytes:
    """What stands between the brackets of a list of these. In parts, since Python writes each in one go, and nothing else
    runs meanwhile."""
    return b",".join(dumps(values[start : start + _PART])[1:-1] for start in range(0, len(values), _PART))


def event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def around(make: Callable[[str], Any]) -> tuple[bytes, bytes]:
    """The JSON before and behind the one value that ``make`` gets, for whatever value."""
    before, after = dumps(make(_NEVER)).split(dumps(_NEVER))
    return before, after


class EventForm:
    """Events that differ in one value only."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        """``make(value)`` gives the whole event's content around the value."""
        before, after = around(make)
        self._before, self._after = b"data: " + before, after + b"\n\n"

    def fill(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + _encode_text(text) + self._after


def _encode_text(text: str) -> bytes:
    return json.dumps(text).encode()
