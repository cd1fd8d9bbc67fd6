"""The HTTP server in a thread of the test's process, in front of any core; and events of its streams, read by hand."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx

from engine.openai.app import Server
from engine.openai.link import EngineLink
from engine.openai.listener import listen, url_of
from engine.openai.settings import RECONNECT_S, HttpSettings
from engine.openai.web_server import WebServer

DEADLINE_S = 20.0


@contextlib.contextmanager
def serving(address: str, *, reconnect_s: float = RECONNECT_S, **settings: Any) -> Iterator[str]:
    """A ready server; gives its URL."""
    listener = listen("127.0.0.1", 0)
    url = url_of(listener)
    ready = threading.Event()
    found: dict[str, Any] = {}

    async def main() -> None:
        link = EngineLink(address, reconnect_s=reconnect_s)
        server = Server(link, HttpSettings(host="127.0.0.1", port=0, **settings))
        try:
            await link.attach(DEADLINE_S)
            found["web"], found["loop"] = WebServer(server.app), asyncio.get_running_loop()
            ready.set()
            await found["web"].serve(sockets=[listener])
        finally:
            ready.set()
            listener.close()
            server.close()
            await link.aclose()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(DEADLINE_S) and "web" in found, "the server did not start"
    try:
        yield url
    finally:
        found["loop"].call_soon_threadsafe(found["web"].stop, 1.0)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def events_of(lines: Iterator[str]) -> list[Any]:
    """The content of each event in order; the end marker as it is."""
    found: list[Any] = []
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """All events of one streamed answer, up to the end of the connection."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.iter_lines())
