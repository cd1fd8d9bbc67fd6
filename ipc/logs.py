"""How log lines look: one line per event, with the process that says it."""

import logging
import signal
import sys
import time
from collections.abc import Callable

LEVELS = ("debug", "info", "warning", "error")

MOST_ALIKE = 20
"""Lines of one kind in a second: a stranger who sends garbage must not fill a disk with what is said of it."""


class FloodLimit(logging.Filter):
    """Lets so many lines of one kind pass in a second; the next that passes says how many did not. Kinds are the format texts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._second = 0
        self._counts: dict[str, int] = {}
        """Of this second, by kind; and below those of earlier ones that did not pass and were not told of yet."""
        self._untold: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Called under the handler's lock."""
        if (second := int(self._clock())) != self._second:
            self._second, self._counts = second, {}
        kind = str(record.msg)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count > MOST_ALIKE and record.levelno < logging.ERROR:
            self._untold[kind] = self._untold.get(kind, 0) + 1
            return False
        if untold := self._untold.pop(kind, 0):
            record.msg = f"{kind} (and {untold} more like this)"
        return True


def set_up_logging(who: str, level: str) -> None:
    """Log to standard error; ``who`` ("core", "rank 1") stands in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s brigade {who}: %(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(FloodLimit())
    # Whoever read standard error may be gone; that is no reason to fail, nor to say so there.
    logging.raiseExceptions = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def signal_name(number: int) -> str:
    """A signal as the person who sent it would call it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
