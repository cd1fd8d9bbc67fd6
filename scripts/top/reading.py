"""Who asks the engine, how often, and what happens while it is away?"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ipc.client import TokenClient
from ipc.conversation import Scalar
from ipc.errors import PeerLost, RequestError
from ipc.messages import ModelInfo
from ipc.views import RequestsReply

ANSWER_S = 5.0
"""How long an engine may take to answer."""

NAME = "brigade-top"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What an engine said at one moment, or why it said nothing."""

    at: float
    """On this process's monotonic clock."""
    error: str | None = None
    is_final: bool = False
    """No later reading will be without this error."""
    model: ModelInfo | None = None
    stats: dict[str, Scalar]
    health: dict[str, Scalar]
    requests: RequestsReply | None = None
    """None from an engine that can't tell."""


class Source:
    """One engine's address, asked by one thread; attaches again whenever the engine was lost."""

    def __init__(
        self,
        address: str,
        *,
        attach_s: float,
        clock: Callable[[], float] = time.monotonic,
        server_key: str | None = None,
        client_key: str | None = None,
    ) -> None:
        self._server_key = server_key
        self._client_key = client_key
        self.address = address
        self._attach_s = attach_s
        self._clock = clock
        self._client: TokenClient | None = None

    def read(self) -> Reading:
        """Ask once. Raises PeerLost, and RequestError for what is no address."""
        if self._client is None:
            self._client = TokenClient(
                self.address, timeout_s=self._attach_s, name=NAME, server_key=self._server_key, client_key=self._client_key
            )
        client = self._client
        try:
            stats, health = client.stats(ANSWER_S), client.health(ANSWER_S)
            requests = None
            with suppress(RequestError):
                requests = client.requests(ANSWER_S)
        except PeerLost:
            self.close()
            raise
        return Reading(at=self._clock(), model=client.model, stats=stats, health=health, requests=requests)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


class Watcher:
    """Reads again and again in a thread, so that whoever draws never waits for an engine."""

    def __init__(self, source: Source, interval_s: float, on_reading: Callable[[Reading], None]) -> None:
        """``on_reading`` is called from the thread."""
        self._source = source
        self._interval_s = interval_s
        self._on_reading = on_reading
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="brigade-top", daemon=True)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join(ANSWER_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._on_reading(self._source.read())
            except (PeerLost, RequestError) as error:
                is_final = isinstance(error, RequestError) and error.field == "addr"
                self._on_reading(Reading(at=time.monotonic(), error=str(error), is_final=is_final, stats={}, health={}))
            self._stopping.wait(self._interval_s)
        self._source.close()
