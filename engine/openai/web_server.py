"""uvicorn as it is used here: quiet, without a timer while idle, and with errors in the form of all others."""

import asyncio
import contextlib
from collections.abc import Iterator

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.openai.errors import ApiError
from engine.openai.gate import MAX_HEADER_BYTES, App
from engine.openai.listener import BACKLOG

KEEP_ALIVE_S = 75
"""Longer than proxies and clients keep an idle connection, so that it is them who close it."""


REQUEST_S = 60.0
"""In which a request must have come whole, headers and body, so that who dribbles holds no connection for long."""


STALLED_S = 120.0
"""In which a client must have taken what is ready for it: who reads nothing holds no answer for ever."""


class Protocol(H11Protocol):
    """What is no HTTP at all, and what does not come whole in time, is answered with JSON too.

    A client that stops reading stops its answer once the kernel's buffers are full, and loses its connection after a while.
    """

    _arriving: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first request is awaited."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that writing pauses whenever something is left unsent
        self._watch_arrival()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        """All was taken."""
        super().resume_writing()
        self._stop_stall_watch()

    def data_received(self, data: bytes) -> None:
        """A piece of a request, a whole one, or more."""
        super().data_received(data)
        self._watch_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is awaited."""
        super().connection_lost(exc)
        self._stop_watch()
        self._stop_stall_watch()

    def send_400_response(self, msg: str) -> None:
        """End the connection with an error."""
        self._end_with(ApiError(400, msg, code="invalid_http"), "Bad Request")

    def _watch_arrival(self) -> None:
        """One deadline from the first piece of a request to its last."""
        if self.transport.is_closing() or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_watch()
        elif self._arriving is None:
            self._arriving = self.loop.call_later(REQUEST_S, self._end_late)

    def _stop_watch(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _stop_stall_watch(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _end_late(self) -> None:
        is_silent = self.conn.our_state is h11.IDLE and not self.conn.trailing_data[0]
        if not is_silent and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            text = f"the request did not come whole within {REQUEST_S:g} s"
            self._end_with(ApiError(408, text, code="request_timeout"), "Request Timeout")
        else:
            self.transport.close()

    def _end_with(self, error: ApiError, reason: str) -> None:
        body = error.body
        head = (
            f"HTTP/1.1 {error.status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
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


