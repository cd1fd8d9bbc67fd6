"""How does a benchmark start an engine of its own, find its processes, and end it?"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from ipc.errors import PeerLost
from scripts.core_process import child_environment

READY = re.compile(r"^brigade ready: .*\blisten=(?P<listen>[^\s,]+)")
LAYERS = re.compile(r"stage (?P<stage>\d+) of \d+: layers (?P<first>\d+) to (?P<last>\d+) on")
"""How a rank says in the log what it holds."""

READY_S = 300.0
"""To the ready line: a large model is read from disk first."""

PROCESS_MODULES = {b"scripts.agent": "agent", b"engine.core_main": "core", b"engine.openai.process": "http"}
"""What processes that are no ranks run, and what they are called."""

STOP_S = 60.0
MAX_LINES = 500
TAIL_LINES = 12

THREAD_SETTINGS = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_")
"""Beginnings of variables that would tell ranks how many threads to use, or how to wait: serve shall choose itself."""


class Engine:
    """``brigade serve`` with these words, in a session of its own; a context manager that waits for ready, and ends it.

    Its client address is a free port on loopback unless the words say otherwise; what it writes is kept, not shown.

    Raises:
        PeerLost: on entry or from ``wait_ready``: it ended, or was not ready in time; the message has its last lines.
    """

    def __init__(self, words: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        """``environment``: variables on top of this process's own, of which those about threads are left out."""
        _let_sigterm_unwind()
        self.words = list(words)
        self.address = ""
        listen = [] if any(word.startswith("--listen") for word in words) else ["--listen", "tcp://127.0.0.1:0"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.cli", "serve", *words, *listen],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
            env={**clean_environment(), **(environment or {})},
        )  # fmt: skip
        assert self._process.stderr is not None
        self._output = _Output(self._process.stderr)

    def wait_ready(self, timeout_s: float = READY_S) -> "Engine":
        """Until the ready line, which gives the address."""
        match = self._output.wait_for(READY, timeout_s)
        if match is None:
            self.stop()
            said = "\n  ".join(self._output.tail())
            raise PeerLost(f"`brigade serve {' '.join(self.words)}` did not become ready; its last lines:\n  {said}")
        self.address = match["listen"]
        return self

    def first_match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Of the lines that it wrote."""
        return next(iter(self._output.all_matches(pattern)), None)

    def partition(self) -> str:
        """Layers per stage, as the ranks said, such as "16,14". Raises PeerLost when they did not."""
        sizes = {int(m["stage"]): int(m["last"]) - int(m["first"]) + 1 for m in self._output.all_matches(LAYERS)}
        if sorted(sizes) != list(range(len(sizes))) or not sizes:
            raise PeerLost(f"the log of `brigade serve {' '.join(self.words)}` does not tell each stage's layers")
        return ",".join(str(sizes[stage]) for stage in range(len(sizes)))

    def ranks(self) -> dict[int, int]:
        """Process ids of the living ranks, by rank."""
        found = {}
        for pid in _descendants(self._process.pid):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                variables = dict(
                    entry.split(b"=", 1) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in entry
                )
                if b"scripts.serve" in words and b"RANK" in variables and b"scripts.agent" not in words:
                    found[int(variables[b"RANK"])] = pid
        return dict(sorted(found.items()))

    def processes(self) -> dict[str, int]:
        """Process ids of all that live, by what they are: launcher, agent, core, http, and the ranks."""
        found = {"launcher": self._process.pid, **{f"rank {rank}": pid for rank, pid in self.ranks().items()}}
        for pid in _descendants(self._process.pid):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                found |= {name: pid for word, name in PROCESS_MODULES.items() if word in words}
        return found

    def pin(self, cores: Sequence[Sequence[int]]) -> None:
        """Let rank i, with all of its threads, run on ``cores[i]`` only."""
        for rank, pid in self.ranks().items():
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(task.name), cores[rank])

    def stop(self) -> None:
        """SIGTERM, and at a deadline SIGKILL to all of its processes. Idempotent."""
        if self._process.poll() is None:
            pids = [self._process.pid, *_descendants(self._process.pid)]
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self._process.wait()
        self._output.close()

    def __enter__(self) -> "Engine":
        try:
            return self if self.address else self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _let_sigterm_unwind() -> None:
    """A benchmark that is told to end must end its engines, which live in sessions of their own."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def clean_environment() -> dict[str, str]:
    """This process's variables without those that steer thread pools."""
    return {name: value for name, value in child_environment().items() if not name.startswith(THREAD_SETTINGS)}


def cpu_seconds(pid: int) -> float:
    """Time on a core of a process's living threads, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # Behind the name, which may hold anything: state, parent, …
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found: list[int] = []
    unseen = [root]
    while unseen:
        below = children.get(unseen.pop(), [])
        found += below
        unseen += below
    return found


class _Output:
    """The last lines of a process's standard error, read by a thread, so that it never blocks on a full pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._news = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._read, name="engine output", daemon=True)
        self._thread.start()

    def wait_for(self, pattern: re.Pattern[str], timeout_s: float) -> re.Match[str] | None:
        """The newest match; None when the process closed its standard error or time is up without one."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while not (found := self._matches(pattern)):
                left = deadline - time.monotonic()
                if self._is_over or left <= 0:
                    return None
                self._news.wait(left)
        return found[-1]

    def all_matches(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        with self._news:
            return self._matches(pattern)

    def tail(self) -> list[str]:
        with self._news:
            return list(self._lines)[-TAIL_LINES:]

    def close(self) -> None:
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            self._pipe.close()

    def _matches(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        return [match for line in self._lines if (match := pattern.search(line)) is not None]

    def _read(self) -> None:
        for line in self._pipe:
            with self._news:
                self._lines.append(line.decode("utf-8", "replace").rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()
