"""What every request passes first: its id, the limits of headers, the API key, and whether there is still service."""

import asyncio
import contextlib
import hmac
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from engine.openai.errors import ApiError

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
"""Of names and values together; also of the target."""

_OPEN_PATHS = ("/health",)
_REQUEST_ID = re.compile(rb"[!-~]{1,96}")
"""What a client may call its request; anything else gets an id of ours."""


class Gate:
    """Wraps an application. ``scope["state"]["request_id"]`` has the id, which is also in the answer's X-Request-Id."""

    def __init__(self, app: App, *, api_keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._is_closed = False
        self._num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def close(self) -> None:
        """Let nobody in any more: 503, also for the question about health. Whoever is inside may finish."""
        self._is_closed = True

    async def wait_empty(self, timeout_s: float) -> None:
        """Until nobody is inside, or time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        given = next((value for name, value in headers if name == b"x-request-id"), b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        error = self._refusal(scope, headers)
        if error is not None:
            await send_error(error, send_with_id)
            return
        self._num_inside += 1
        self._is_empty.clear()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - starlette answers it, then raises it again, which would end the connection
            log.debug("request %s failed: %r", request_id.decode(), error)
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._is_empty.set()

    def _refusal(self, scope: Scope, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        size = sum(len(name) + len(value) for name, value in headers) + len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            rule = f"at most {MAX_HEADERS} with {MAX_HEADER_BYTES} bytes in all are allowed"
            return ApiError(431, f"{len(headers)} headers with {size} bytes; {rule}", code="headers_too_large")
        if self._is_closed:
            return ApiError(503, "the server is shutting down; send it to another one", code="engine_unavailable")
        if not self._keys or scope["path"] in _OPEN_PATHS:
            return None
        scheme, _, key = next((value for name, value in headers if name == b"authorization"), b"").partition(b" ")
        # Every key is looked at, so that the time tells nothing.
        fits = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if scheme.lower() == b"bearer" and any(fits):
            return None
        return ApiError(
            401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip


async def send_error(error: ApiError, send: Send) -> None:
    """The whole answer."""
    headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(error.body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body})

