"""The HTTP server as the core's child: started, watched, started again when it is lost, and drained at the end."""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine.config import CoreConfig
from engine.gateway import Gateway
from engine.openai.listener import listen, url_of
from engine.openai.start import Start
from ipc.endpoints import RunDirectory

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Before it is started again, doubled each time until it was up for as long as the longest pause."""

MAX_FAILED_STARTS = 3
"""In a row before it was up for the first time: then no further one is worth trying."""

END_TIMEOUT_S = 4.0

MakeStart = Callable[[int], Start]
"""What the child is told, for the descriptor of the listening socket."""


def http_child_of(config: CoreConfig, gateway: Gateway) -> "HttpChild":
    """The server that the settings ask for, reaching the core by a socket that nobody else is told of.

    Raises ConfigError when its address can't be used.
    """
    http = config.http
    if http is None:
        return HttpChild(None, None)
    listener = listen(http.host, http.port)
    address = RunDirectory(path=Path(config.run_dir)).address("http")
    gateway.listen_privately(address)

    def start(descriptor: int) -> Start:
        return Start(
            settings=http, connect=address, listener=descriptor, drain_timeout_s=config.drain_timeout_s,
            log_level=config.log_level, parent_pid=os.getpid(),
        )  # fmt: skip

    return HttpChild(listener, start)


class HttpChild:
    """Owns the listening socket, so that connections wait, and the port stays, while the server is started again.

    Without a socket there is no server: it counts as up, and nothing happens.
    """

    def __init__(
        self, listener: socket.socket | None, make_start: MakeStart | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.url = "-" if listener is None else url_of(listener)
        self._listener = listener
        self._make_start = make_start
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._epoll = select.epoll()
        self._pause_s = FIRST_PAUSE_S
        self._restart_at: float | None = None
        self._up_since: float | None = None
        self._num_failed_starts = 0
        self._was_up = False

    @property
    def fd(self) -> int:
        """Readable when there is something to look after."""
        return self._epoll.fileno()

    @property
    def is_up(self) -> bool:
        """Whether requests are answered."""
        return self._make_start is None or self._up_since is not None

    @property
    def has_failed(self) -> bool:
        """Whether it will never be up."""
        return not self._was_up and self._num_failed_starts >= MAX_FAILED_STARTS

    def start(self) -> None:
        """To be called from the thread that lives as long as the core: the child's life hangs on it."""
        self._restart_at = None
        if self._listener is None or self._make_start is None:
            return
        start = self._make_start(self._listener.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.openai.process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True, pass_fds=(start.listener,),
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._epoll.register(self._process.stdout.fileno(), select.EPOLLIN)
        try:
            with self._process.stdin as stdin:
                stdin.write(start.to_json())
        except BrokenPipeError:
            logger.warning("the HTTP server ended before it was told what to do")

    def look_after(self) -> None:
        """Note what the child said, or that it is gone; start it again when its time has come."""
        if self._process is not None and self._epoll.poll(0):
            self._take_news(self._process)
        due = self.deadline()
        if due is not None and self._clock() >= due:
            self.start()

    def deadline(self) -> float | None:
        """When it is to be started again."""
        return None if self._listener is None or self.has_failed else self._restart_at

    def stop(self) -> None:
        """No new connections; what is open may finish. Idempotent."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Wait for the end of what ``stop`` began, not for long."""
        self.stop()
        if self._process is not None:
            try:
                self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._let_go(self._process)
        self._epoll.close()

    def _take_news(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        if os.read(process.stdout.fileno(), 64):
            self._up_since, self._was_up = self._clock(), True
            return
        self._let_go(process)
        code = process.wait()
        if self._listener is None:
            return
        how = f"signal {-code}" if code < 0 else f"code {code}"
        self._num_failed_starts += not self._was_up
        logger.warning("the HTTP server ended with %s%s", how, "" if self.has_failed else "; it is started again")
        if self._up_since is not None and self._clock() - self._up_since > LONGEST_PAUSE_S:
            self._pause_s = FIRST_PAUSE_S
        self._up_since = None
        self._restart_at = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _let_go(self, process: "subprocess.Popen[bytes]") -> None:
        if process.stdout is not None and not process.stdout.closed:
            self._epoll.unregister(process.stdout.fileno())
            process.stdout.close()
        self._process = None
