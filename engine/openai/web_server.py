"""uvicorn as it is used here: quiet, without a timer while idle, and with errors in the form of all others."""

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.openai.errors import ApiError
from engine.openai.gate import MAX_HEADER_BYTES, App
from engine.openai.listener import BACKLOG

KEEP_ALIVE_S = 75
"""Longer than proxies and clients keep an idle connection, so that it is them who close it."""


class Protocol(H11Protocol):
    """What is no HTTP at all is answered with JSON too."""

    def send_400_response(self, msg: str) -> None:
        """End the connection with an error."""
        body = ApiError(400, msg, code="invalid_http").body
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


class WebServer(uvicorn.Server):
    """Serves until ``stop`` is called; then what runs may finish for a while."""

    def __init__(self, app: App) -> None:
        super().__init__(uvicorn.Config(
            app,
            http=Protocol, ws="none", lifespan="off", loop="asyncio", log_config=None, access_log=False,
            # Warnings are about what strangers send, several lines for each.
            log_level="error", server_header=False, date_header=False, timeout_keep_alive=KEEP_ALIVE_S, backlog=BACKLOG,
            # The gate refuses headers that are too large, and says so; this is the limit of what is read at all.
            h11_max_incomplete_event_size=4 * MAX_HEADER_BYTES,
        ))  # fmt: skip
        self._stopping = asyncio.Event()

    def stop(self, drain_timeout_s: float) -> None:
        """Take no more connections, let open requests finish; the second call ends them."""
        if self._stopping.is_set():
            self.force_exit = True
        self.config.timeout_graceful_shutdown = max(1, round(drain_timeout_s))
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Without uvicorn's ten ticks a second."""
        await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business."""
        yield


