"""The server's attachment to its engine: one client for all requests, which finds a lost engine again."""

import asyncio
import logging

from engine.aclient import AsyncClient
from engine.openai.errors import ApiError
from engine.openai.settings import RECONNECT_S
from ipc.conversation import ATTACH_TIMEOUT_S
from ipc.errors import EngineError, PeerLost
from ipc.security import KeySource

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""How long a new request waits for an engine that is being attached to."""


class EngineLink:
    """Used from one event loop."""

    def __init__(
        self, address: str, server_key: KeySource | None = None, client_key: KeySource | None = None, *,
        reconnect_s: float = RECONNECT_S,
    ) -> None:  # fmt: skip
        """``reconnect_s``: how long requests that are open wait for a lost engine to be back. Keys as AsyncClient's."""
        self.address = address
        self._reconnect_s = reconnect_s
        self._server_key = server_key
        self._client_key = client_key
        self._client: AsyncClient | None = None
        self._attaching: asyncio.Task[AsyncClient] | None = None

    async def attach(self, timeout_s: float | None) -> AsyncClient:
        """The first time. None waits for ever, for an engine that starts just now.

        Raises:
            PeerLost: no engine answered in time.
            ConfigError: its tokenizer, or a key, can't be read.
            RequestError: the address is none.
        """
        while True:
            try:
                self._client = await self._new_client(timeout_s or ATTACH_TIMEOUT_S).attach()
                return self._client
            except PeerLost:
                if timeout_s is not None:
                    raise

    async def client(self) -> AsyncClient:
        """An attached client. Raises ApiError 503 when there is no engine, after having looked for one."""
        client = self._client
        if client is None:
            raise ApiError(503, "the engine can't be reached", code="engine_unavailable")
        if not client.is_lost:
            return client
        if self._attaching is None or self._attaching.done():
            log.warning("the engine at %s is gone; looking for one", self.address)
            self._attaching = asyncio.create_task(self._attach_again(client))
            self._attaching.add_done_callback(_note_end)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await asyncio.shield(self._attaching)
        except (TimeoutError, EngineError):
            raise ApiError(503, "the engine can't be reached", code="engine_unavailable") from None

    async def aclose(self) -> None:
        """Leave; open requests end."""
        if self._attaching is not None:
            self._attaching.cancel()
        if self._client is not None:
            await self._client.aclose()

    def _new_client(self, timeout_s: float) -> AsyncClient:
        return AsyncClient(
            self.address, timeout_s=timeout_s, reconnect_s=self._reconnect_s,
            server_key=self._server_key, client_key=self._client_key,
        )  # fmt: skip

    async def _attach_again(self, client: AsyncClient) -> AsyncClient:
        await client.attach()
        log.warning("attached to the engine at %s", self.address)
        return client


def _note_end(attaching: asyncio.Task[AsyncClient]) -> None:
    """Nobody may be waiting for it any more."""
    error = None if attaching.cancelled() else attaching.exception()
    if isinstance(error, PeerLost):
        log.debug("%s", error)
    elif error is not None:
        log.error("the engine that was found can't be used: %s", error)
