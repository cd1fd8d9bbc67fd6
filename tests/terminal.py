"""A command of ours on a pseudo-terminal, as a person has it: what it writes is awaited under a deadline."""

import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from fcntl import ioctl
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 60.0
CTRL_C, CTRL_D = "\x03", "\x04"

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()=>].?|\x07")

_TAKE_TERMINAL = (
    "import fcntl, os, signal, sys, termios; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""So that Ctrl-C becomes a signal, and is not ignored as in what a shell starts in the background. In the child, since a
test's process has threads and must not fork by itself."""


class Terminal:
    """Use as a context manager; what still runs at its end is killed."""

    def __init__(self, *words: str, env: Mapping[str, str] | None = None, rows: int = 40, columns: int = 120) -> None:
        self._master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, "-m", "scripts.cli", *words], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, env={**inherited, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **(env or {})},
        )  # fmt: skip
        os.close(slave)
        self.raw = ""
        """All that was written so far."""
        self._seen = 0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str) -> str:
        """Wait until it was written, behind what was awaited before; what stands in between, without escape sequences."""
        deadline = time.monotonic() + DEADLINE_S
        while (at := (plain := self._plain()).find(text, self._seen)) < 0:
            assert self._read(deadline), f"{text!r} was not written; but: {plain[self._seen :]!r}"
        between, self._seen = plain[self._seen : at], at + len(text)
        return between

    def end(self) -> tuple[int, str]:
        """Exit code, and what was written at last."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read(deadline):
            continue
        return self._process.wait(max(0.1, deadline - time.monotonic())), self._plain()[self._seen :]

    def _plain(self) -> str:
        return _ESCAPES.sub("", self.raw)

    def _read(self, deadline: float) -> bool:
        """False when the terminal is closed on the other side, or at the deadline."""
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:
            return False
        self.raw += data.decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(data)
