"""The live screen: it is drawn when a reading comes or a key is pressed, and does nothing between."""

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from rich.live import Live

from scripts.top.drawing import Choices, console_of, frame, rows_for_requests
from scripts.top.model import History, View
from scripts.top.reading import Reading, Source, Watcher


class Screen:
    """One engine on this terminal."""

    def __init__(self, source: Source, interval_s: float, choices: Choices) -> None:
        self._source = source
        self._interval_s = interval_s
        self._choices = choices
        self._history = History(source.address)
        self._view: View | None = None
        self._problem: str | None = None
        self._readings: list[Reading] = []
        self._news_out, self._news_in = os.pipe()

    def run(self) -> str | None:
        """Until somebody leaves, which gives None; or until a fault that no waiting cures, which it returns."""
        console = console_of(sys.stdout, is_plain=False)
        try:
            with (
                _keys_at_once(sys.stdin.fileno()), Watcher(self._source, self._interval_s, self._take),
                Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
            ):  # fmt: skip
                while True:
                    num_rows = rows_for_requests(console.height, self._view, self._choices)
                    shown = frame(
                        self._view, self._problem, self._choices, width=console.width, num_rows=num_rows, keys=True
                    )
                    live.update(shown, refresh=True)
                    ready, _, _ = select.select([sys.stdin.fileno(), self._news_out], [], [])
                    if sys.stdin.fileno() in ready and not self._press(os.read(sys.stdin.fileno(), 64)):
                        return None
                    if self._news_out in ready and (fault := self._read_news()) is not None:
                        return fault
        except KeyboardInterrupt:
            return None

    def _take(self, reading: Reading) -> None:
        """From the watcher's thread."""
        self._readings.append(reading)
        os.write(self._news_in, b"\0")

    def _read_news(self) -> str | None:
        for _ in os.read(self._news_out, 64):
            reading = self._readings.pop(0)
            if reading.is_final:
                return reading.error
            self._problem = reading.error
            if reading.error is None:
                self._view = self._history.view(reading)
        return None

    def _press(self, keys: bytes) -> bool:
        """False to leave; so does a terminal that is gone."""
        for key in keys.decode("ascii", "replace").lower():
            if key == "q" or key == "\x04":
                return False
            if key == "r":
                self._choices.requests = not self._choices.requests
            if key == "p":
                self._choices.pipeline = not self._choices.pipeline
        return bool(keys)


@contextmanager
def _keys_at_once(descriptor: int) -> Iterator[None]:
    """Keys arrive without Enter and are not echoed; SIGTERM unwinds, so that the terminal is given back as it was."""
    before = termios.tcgetattr(descriptor)
    old = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, old)
