"""How does somebody who waits for many answers see how far they are? A line on a terminal, and nothing elsewhere."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

REDRAW_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """How far a batch of requests is."""

    num_total: int
    num_done: int = 0
    """Requests that are over, failed ones included."""
    num_failed: int = 0
    num_tokens: int = 0
    """Generated so far, by all of them."""


ProgressHook = Callable[[BatchProgress], None]
"""Is called for every output and every end, from the thread that waits for the batch."""


class ProgressBar:
    """A ProgressHook that draws on standard error while that is a terminal: with rich if it is installed, else as text.

    Use as a context manager: it leaves the last state on the screen.
    """

    def __init__(self, num_total: int, stream: TextIO | None = None, *, hidden: bool = False) -> None:
        """``hidden`` draws nothing anywhere, for when something else is shown on the terminal."""
        stream = sys.stderr if stream is None else stream
        self._drawing: _Rich | _Plain | None = None
        if not hidden and stream.isatty():
            self._drawing = _rich(num_total, stream) or _Plain(stream)
        self._drawn_at = float("-inf")
        self._last = BatchProgress(num_total=num_total)

    def __call__(self, progress: BatchProgress) -> None:
        self._last = progress
        now = time.monotonic()
        if self._drawing is not None and now - self._drawn_at >= REDRAW_S:
            self._drawn_at = now
            self._drawing.draw(progress)

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._drawing is not None:
            self._drawing.draw(self._last)
            self._drawing.close()


class _Plain:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = time.monotonic()

    def draw(self, progress: BatchProgress) -> None:
        rate = progress.num_tokens / max(time.monotonic() - self._started, 1e-3)
        self._stream.write(f"\r{progress.num_done}/{progress.num_total} answers{_failed(progress)}, {rate:.0f} tokens/s   ")
        self._stream.flush()

    def close(self) -> None:
        self._stream.write("\n")
        self._stream.flush()


class _Rich:
    def __init__(self, bar: Any, num_total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("answers", total=num_total, tokens="", failed="")
        self._started = time.monotonic()
        bar.start()

    def draw(self, progress: BatchProgress) -> None:
        rate = progress.num_tokens / max(time.monotonic() - self._started, 1e-3)
        self._bar.update(
            self._task, completed=progress.num_done, tokens=f"{rate:.0f} tokens/s", failed=_failed(progress)
        )

    def close(self) -> None:
        self._bar.stop()


def _rich(num_total: int, stream: TextIO) -> _Rich | None:
    """None when rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = (
        MofNCompleteColumn(), TextColumn("{task.description}{task.fields[failed]}"), BarColumn(),
        TextColumn("{task.fields[tokens]}"), TimeRemainingColumn(),
    )  # fmt: skip
    return _Rich(Progress(*columns, console=Console(file=stream)), num_total)


def _failed(progress: BatchProgress) -> str:
    return f", {progress.num_failed} failed" if progress.num_failed else ""
