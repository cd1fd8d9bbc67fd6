"""A process that is an HTTP server: by itself (``brigade http``), or as the core's child (``python -m engine.openai.process``).

A child reads its start from standard input, takes over the core's listening socket, says "up" on standard output, and ends
when the core does.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

from engine.openai.app import Server
from engine.openai.link import EngineLink
from engine.openai.settings import HttpSettings
from engine.openai.start import Start
from engine.openai.web_server import WebServer
from ipc.logs import set_up_logging
from ipc.parent import die_with_parent
from ipc.promptness import ask_for_promptness

log = logging.getLogger(__name__)

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAST_ANSWERS_S = 3.0
"""Beyond the time to drain, for what the engine's end has to say."""

OBJECTS_PER_COLLECTION = 50_000
"""A body may hold a million lists. With Python's 700, looking through them again and again took most of a second, in which nobody
else was answered."""

ORPHAN_S = 2.0
"""Without its core there is nothing to wait for but the errors on their way."""


async def serve(
    settings: HttpSettings,
    link: EngineLink,
    listener: socket.socket,
    *,
    drain_timeout_s: float,
    attach_timeout_s: float | None,
    on_up: Callable[[], None],
    is_orphan: Callable[[], bool] = lambda: False,
) -> None:
    """Until a signal; open requests may then finish, new ones get 503 meanwhile. ``on_up`` is called once requests are answered.

    Raises:
        PeerLost, ConfigError, RequestError: the engine can't be attached to.
    """
    loop = asyncio.get_running_loop()
    gc.freeze()
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    server = Server(link, settings)
    web = WebServer(server.app)
    attaching = asyncio.create_task(link.attach(attach_timeout_s))

    stopping: list[asyncio.Task[None]] = []

    async def drain(patience_s: float) -> None:
        """New requests are still answered, with 503, as long as others go on: a refused connection may be anything."""
        await server.gate.wait_empty(patience_s)
        await link.aclose()
        web.stop(LAST_ANSWERS_S)

    def stop() -> None:
        attaching.cancel()
        server.gate.close()
        if stopping:
            stopping[0].cancel()
            web.stop(0)
            web.stop(0)
        else:
            stopping.append(loop.create_task(drain(0.0 if is_orphan() else drain_timeout_s)))
        if is_orphan():
            loop.call_later(ORPHAN_S, os._exit, 1)

    for number in STOPPING:
        loop.add_signal_handler(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    try:
        await attaching
        loop.call_soon(on_up)
        await web.serve(sockets=[listener])
    except asyncio.CancelledError:
        log.debug("stopped before the engine was there")
    finally:
        listener.close()
        server.close()
        await link.aclose()


def main() -> int:
    """Be the core's child; returns the exit code."""
    start = Start.from_json(sys.stdin.buffer.read())
    set_up_logging("http", start.log_level)
    if not die_with_parent(start.parent_pid, signal.SIGTERM):
        return 1
    ask_for_promptness()
    listener = socket.socket(fileno=start.listener)
    asyncio.run(serve(
        start.settings, EngineLink(start.connect), listener, drain_timeout_s=start.drain_timeout_s, attach_timeout_s=None,
        on_up=lambda: _say(b"up\n"), is_orphan=lambda: os.getppid() != start.parent_pid,
    ))  # fmt: skip
    return 0


def _say(word: bytes) -> None:
    os.write(sys.stdout.fileno(), word)


if __name__ == "__main__":
    sys.exit(main())
