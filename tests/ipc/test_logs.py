"""Does a flood of lines of one kind stay small, and is nothing of other kinds lost in it?"""

import logging

from ipc.logs import MOST_ALIKE, FloodLimit


def test_a_flood_is_cut_and_counted_and_others_pass() -> None:
    now = [5.0]
    limit = FloodLimit(lambda: now[0])

    def passes(text: str, *args: object, level: int = logging.WARNING) -> str | None:
        record = logging.LogRecord("x", level, "", 0, text, args, None)
        return record.getMessage() if limit.filter(record) else None

    shown = [passes("dropped %d", i) for i in range(MOST_ALIKE + 30)]
    assert shown == [f"dropped {i}" for i in range(MOST_ALIKE)] + [None] * 30
    assert passes("something else") == "something else"
    assert passes("dropped %d", 1, level=logging.ERROR) == "dropped 1 (and 30 more like this)"
    assert passes("dropped %d", 2) is None
    now[0] = 6.0
    assert passes("dropped %d", 3) == "dropped 3 (and 1 more like this)"
    assert passes("dropped %d", 4) == "dropped 4"
