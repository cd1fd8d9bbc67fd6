"""How is loading shown? A bar on a terminal, one line otherwise."""

import logging
import sys
import time
from typing import TextIO

logger = logging.getLogger(__name__)

BAR_WIDTH = 30
REDRAW_S = 0.1
"""Often enough to look alive, seldom enough to cost nothing."""


class Progress:
    """Callable with (done, total). Only one rank of a host draws a bar: they share the terminal's line."""

    def __init__(self, what: str, *, draws: bool, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = stream or sys.stderr
        self._draws = draws and self._stream.isatty()
        self._drawn_at = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._draws and (done >= total or now - self._drawn_at >= REDRAW_S):
            self._drawn_at = now
            filled = BAR_WIDTH * done // max(1, total)
            self._stream.write(f"\r{self._what} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done}/{total}")
            self._stream.write("\n" if done >= total else "")
            self._stream.flush()
