"""Starts real engines for tests, sees all of their processes, and makes sure that nothing of them is left.

Every process of an engine is found by a marker in its environment, which detached and orphaned ones inherit too. There
are no sleeps for synchronisation: output is awaited under a condition, ends of processes through pidfds.
"""

import contextlib
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

from engine import Client
from tests.e2e.raw import RawClient

ROOT = Path(__file__).resolve().parents[2]
MARKER = "BRIGADE_TEST_RUN"
READY = re.compile(r"^brigade ready: model=.* stages=(?P<stages>\d+) listen=(?P<listen>\S+) http=(?P<http>\S+)$")

READY_S = 150.0
"""To the ready line on a busy machine; how fast a start must be is a test of its own."""

STOP_S = 40.0
GONE_S = 10.0
"""From the end of the launcher, or of any process that the others must not outlive, to the end of all."""

_KEPT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


class Output:
    """Lines of a process's standard error, as they come."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._is_over = False
        self._pipe = pipe
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str | re.Pattern[str], timeout_s: float, is_alive: Callable[[], bool]) -> re.Match[str]:
        """The first line that matches. Fails at the deadline, or when the process is gone without it."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        while True:
            with self._news:
                for line in self.lines[seen:]:
                    if (match := re.search(pattern, line)) is not None:
                        return match
                seen = len(self.lines)
                left = deadline - time.monotonic()
                assert left > 0, f"no line like {pattern!r} within {timeout_s:g} s; output:\n{self.tail()}"
                is_over = self._is_over or not is_alive()
                if len(self.lines) > seen:
                    continue
                assert not is_over, f"ended without a line like {pattern!r}; output:\n{self.tail()}"
                self._news.wait(min(left, 0.2))

    @property
    def is_closed(self) -> bool:
        return self._pipe.closed

    def tail(self, num_lines: int = 60) -> str:
        return "\n".join(self.lines[-num_lines:])

    def close(self) -> None:
        """Read to the end; only for when every process that could write is gone."""
        self._reader.join(GONE_S)
        assert not self._reader.is_alive(), "a process still holds the engine's standard error open"
        self._pipe.close()

    def _read(self) -> None:
        for line in self._pipe:
            with self._news:
                self.lines.append(line.decode("utf-8", "replace").rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The living processes of one engine, by what they are."""

    launchers: list[psutil.Process]
    agents: list[psutil.Process]
    ranks: dict[int, psutil.Process]
    core: psutil.Process | None
    others: list[psutil.Process]

    @property
    def all(self) -> list[psutil.Process]:
        core = [] if self.core is None else [self.core]
        return [*self.launchers, *self.agents, *self.ranks.values(), *core, *self.others]


class Engine:
    """One started engine. ``stop`` ends it and checks what it leaves behind; as a context manager it stops at the end.

    Left through an exception it is killed instead, so that the first failure is the one that is reported.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        env: Mapping[str, str],
        tmp: Path | None = None,
        exit_code: int | None = 0,
    ) -> None:
        self.marker = uuid.uuid4().hex
        self.exit_code = exit_code
        """Of the launcher after SIGTERM; None for any."""
        self._owned = None if tmp else tempfile.TemporaryDirectory(prefix="bt-", dir="/tmp")
        self.tmp = Path(self._owned.name) if self._owned else Path(tmp or "")
        self.environment = {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TMPDIR": str(self.tmp), MARKER: self.marker, **env,
        }  # fmt: skip
        self.started = time.monotonic()
        read_end, write_end = os.pipe()
        self.launchers = [
            subprocess.Popen(
                command, cwd=self.tmp, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=write_end, start_new_session=True,
            )
            for command in commands
        ]  # fmt: skip
        os.close(write_end)
        self.output = Output(os.fdopen(read_end, "rb"))
        self.start_s = 0.0
        self.address = ""
        self._agent_pids: set[int] = set()
        self._raw: RawClient | None = None

    # ------------------------------------------------------------------------------------------ using it

    def wait_ready(self, timeout_s: float = READY_S) -> "Engine":
        """Until the ready line; it gives the address."""
        match = self.output.wait_for(READY, timeout_s, lambda: all(p.poll() is None for p in self.launchers))
        self.start_s = time.monotonic() - self.started
        self.address = match["listen"].split(",")[0]
        self._agent_pids = {p.pid for p in self.tree().agents}
        return self

    def client(self) -> Client:
        """A new text client; close it, or use it as a context manager."""
        return Client(self.address)

    @property
    def raw(self) -> RawClient:
        """A client on bare frames, shared by all users of this engine."""
        if self._raw is None:
            self._raw = RawClient(self.address)
        return self._raw

    def is_usable(self) -> bool:
        return bool(self.address) and all(p.poll() is None for p in self.launchers)

    def settle(self, timeout_s: float = 10.0) -> dict[str, int | float | str | bool]:
        """Wait until nothing runs or waits; every block must then be free. Returns the stats."""
        stats = self.raw.wait_for_stats(
            lambda s: s["requests_running"] == 0 and s["requests_waiting"] == 0
            and s["kv_blocks_free"] == s["kv_blocks_total"],
            timeout_s,
        )  # fmt: skip
        assert stats["kv_blocks_total"] > 0
        return stats

    # ------------------------------------------------------------------------------------------ its processes

    def tree(self) -> Tree:
        launchers, ranks, others, core = [], {}, [], None
        own = {p.pid for p in self.launchers}
        for process in _marked(self.marker):
            with contextlib.suppress(psutil.NoSuchProcess):
                words, env = process.cmdline(), process.environ()
                if process.pid in own:
                    launchers.append(process)
                elif "engine.core_main" in words:
                    core = process
                elif "scripts.serve" in words and "RANK" in env:
                    ranks[int(env["RANK"])] = process
                else:
                    others.append(process)
        parents = {p.ppid() for p in ranks.values()}
        agents = [p for p in others if p.pid in parents]
        others = [p for p in others if p.pid not in parents]
        if not agents:
            agents = [p for p in launchers if p.pid in parents]
            launchers = [p for p in launchers if p.pid not in parents]
        return Tree(launchers=launchers, agents=agents, ranks=ranks, core=core, others=others)

    def pids(self) -> list[int]:
        """All living processes: launchers, agents, ranks, core."""
        return [p.pid for p in _marked(self.marker)]

    def wait_gone(self, timeout_s: float = GONE_S) -> None:
        """Until no process of this engine lives, those included that appear meanwhile."""
        deadline = time.monotonic() + timeout_s
        while living := _marked(self.marker):
            left = deadline - time.monotonic()
            if left <= 0:
                raise AssertionError(f"still alive after {timeout_s:g} s: {_described(living)}\n{self.output.tail()}")
            wait_for_end([p.pid for p in living], left)

    # ------------------------------------------------------------------------------------------ ending it

    def signal_and_wait(self, number: int, timeout_s: float = STOP_S) -> list[int]:
        """Signal every launcher; its exit codes."""
        for process in self.launchers:
            process.send_signal(number)
        return self.exit_codes(timeout_s)

    def exit_codes(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        try:
            return [p.wait(max(0.0, deadline - time.monotonic())) for p in self.launchers]
        except subprocess.TimeoutExpired as expired:
            raise AssertionError(f"the launcher did not end in {timeout_s:g} s\n{self.output.tail()}") from expired

    def stop(self) -> None:
        """SIGTERM; the launcher ends with the expected exit code, and nothing is left. Idempotent."""
        if self.output.is_closed:
            return
        try:
            self._close_raw()
            codes = self.signal_and_wait(signal.SIGTERM)
            expected = [self.exit_code] * len(codes)
            assert self.exit_code is None or codes == expected, f"exit codes {codes}\n{self.output.tail()}"
            self.wait_gone(STOP_S)
            self.check_nothing_left()
        finally:
            self.kill()

    def check_nothing_left(self, *, sockets_only: bool = False) -> None:
        """No socket of ours, and nothing else, in the temporary directory or where run directories are.

        An agent of torchrun that was killed can't remove its directory: ``sockets_only`` leaves such aside.
        """
        left = [
            path for path in self.tmp.rglob("*")
            if (path.exists() and stat.S_ISSOCK(path.lstat().st_mode))
            or (not sockets_only and "brigade" in path.name and not _is_empty_run_base(path))
        ]  # fmt: skip
        bases = [Path(base) / f"brigade-{os.geteuid()}" for base in ("/tmp", "/dev/shm")]
        left += [run for base in bases for pid in self._agent_pids for run in base.glob(f"{pid}-*")]
        assert not left, f"left behind: {left}"

    def kill(self) -> None:
        """End everything at once and let go of it, whatever state it is in. Idempotent."""
        if self.output.is_closed:
            return
        self._close_raw()
        deadline = time.monotonic() + GONE_S
        while (living := _marked(self.marker)) and time.monotonic() < deadline:
            for process in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            wait_for_end([p.pid for p in living], 2.0)
        for launcher in self.launchers:
            launcher.wait(GONE_S)
        self.output.close()
        if self._owned is not None:
            self._owned.cleanup()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
        else:
            self.kill()

    def _close_raw(self) -> None:
        if self._raw is not None:
            self._raw.close()
            self._raw = None


def brigade_command(model: Path | str, pp: int, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "scripts.cli", "serve", str(model), "--pp", str(pp), *flags]


def torchrun_commands(model: Path | str, pp: int, flags: Sequence[str], num_nodes: int) -> list[list[str]]:
    """Plain torchrun; several nodes are several agents on this host, with one rank or more each."""
    if num_nodes == 1:
        where = [[]]
    else:
        port = free_port()
        where = [
            ["--nnodes", str(num_nodes), "--node-rank", str(i), "--master-addr", "127.0.0.1", "--master-port", str(port)]
            for i in range(num_nodes)
        ]
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(pp // num_nodes)]
    return [[*run, *place, "-m", "scripts.serve", str(model), *flags] for place in where]


def start(
    model: Path | str,
    *,
    pp: int = 2,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    launcher: str = "brigade",
    num_nodes: int = 1,
    listen: str | None = "tcp://127.0.0.1:*",
    tmp: Path | None = None,
    prefix: Sequence[str] = (),
) -> Engine:
    """Start an engine without waiting for it.

    Args:
        launcher: "brigade" for ``brigade serve``, "torchrun" for plain torchrun.
        listen: client address; a ``*`` is a free port, None leaves the flag out.
        tmp: its working and temporary directory, kept; None makes one that goes away with the engine.
        prefix: words before each command, such as those of ``unshare``.
    """
    listening = [] if listen is None else ["--listen", listen.replace("*", "0")]
    words = [*listening, *flags]
    commands = (
        [brigade_command(model, pp, words)] if launcher == "brigade" else torchrun_commands(model, pp, words, num_nodes)
    )
    return Engine(
        [[*prefix, *command] for command in commands], env=env or {}, tmp=tmp,
        exit_code=0 if launcher == "brigade" else None,
    )


@contextlib.contextmanager
def serve(model: Path | str, **options: object) -> Iterator[Engine]:
    """A ready engine, see ``start``; stopped and checked at the end."""
    engine = start(model, **options)  # type: ignore[arg-type]
    try:
        engine.wait_ready()
    except BaseException:
        engine.kill()
        raise
    with engine:
        yield engine


class EnginePool:
    """Engines that tests share, by what they were started with; the one unused for longest makes room."""

    def __init__(self, max_alive: int = 2) -> None:
        self._max_alive = max_alive
        self._engines: dict[tuple[object, ...], Engine] = {}

    def get(self, model: Path | str, *, pp: int = 2, flags: Sequence[str] = ()) -> Engine:
        """A ready engine, idle and with all of its blocks free."""
        key = (str(model), pp, tuple(flags))
        engine = self._engines.pop(key, None)
        if engine is not None and not engine.is_usable():
            tail = engine.output.tail()
            engine.kill()
            raise AssertionError(f"an engine that tests share has died:\n{tail}")
        if engine is None:
            while len(self._engines) >= self._max_alive:
                self._stop_oldest()
            engine = start(model, pp=pp, flags=flags)
            try:
                engine.wait_ready()
            except BaseException:
                engine.kill()
                raise
        self._engines[key] = engine
        engine.settle()
        return engine

    def close(self) -> None:
        """Stop all; the first failure is raised after all were ended."""
        failures = []
        while self._engines:
            try:
                self._stop_oldest()
            except AssertionError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def _stop_oldest(self) -> None:
        self._engines.pop(next(iter(self._engines))).stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a start that could not work ended."""

    exit_codes: list[int]
    lines: list[str]
    elapsed_s: float

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def fail_to_start(model: Path | str, *, within_s: float = 30.0, **options: object) -> Failure:
    """Start what can't work; it must end by itself with nothing left."""
    engine = start(model, **options)  # type: ignore[arg-type]
    try:
        codes = engine.exit_codes(within_s)
        elapsed_s = time.monotonic() - engine.started
        engine.wait_gone()
        engine.check_nothing_left()
    finally:
        engine.kill()
    return Failure(exit_codes=codes, lines=engine.output.lines, elapsed_s=elapsed_s)


def wait_for_end(pids: Sequence[int], timeout_s: float) -> bool:
    """True when all of these processes, related or not, have ended in time."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        finally:
            os.close(descriptor)
    return True


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Time on a core so far, all threads, in nanosecond steps."""
    total = 0
    for process in processes:
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def free_port() -> int:
    """A port that was free a moment ago; only for what can't take port 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _marked(marker: str) -> list[psutil.Process]:
    """Living processes of ours; zombies have no environment left."""
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for pid in psutil.pids():
        try:
            if pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(psutil.Process(pid))
        except (OSError, psutil.NoSuchProcess):
            continue
    return found


def _described(processes: Sequence[psutil.Process]) -> list[str]:
    described = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            described.append(f"{process.pid} (parent {process.ppid()}): {' '.join(process.cmdline())[:120]}")
    return described


def _is_empty_run_base(path: Path) -> bool:
    """The parent of run directories stays: removing it would race with another engine's start."""
    return path.name == f"brigade-{os.geteuid()}" and path.is_dir() and not any(path.iterdir())
