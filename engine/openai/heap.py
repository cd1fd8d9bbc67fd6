"""Memory of large bodies goes back to the system: glibc keeps free what lies between pieces that are in use."""

import asyncio
import ctypes
import gc

TRIM_AFTER_S = 1.0
"""Behind the first large body; those that come meanwhile are done with at once."""


class HeapTrim:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        """Only glibc has it."""
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        if self._timer is None and self._trim is not None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._now)

    def _now(self) -> None:
        self._timer = None
        gc.collect()  # an error that was raised holds its frames, and they hold it
        if self._trim is not None:
            self._trim(0)
