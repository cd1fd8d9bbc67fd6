"""``brigade serve``: torchrun on this machine, with the settings, signals and exit codes that people expect of a server."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import click

from ipc.endpoints import RunDirectory, process_start
from ipc.errors import ConfigError
from ipc.logs import signal_name
from scripts.core_process import FoundCore, child_environment, read_core_file
from scripts.model_source import check_form
from scripts.options import GroupedCommand, serve_options

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_RESTARTS = 1_000_000
"""Practically without end: the core judges crash loops."""

GRACE_S = 15.0
"""Beyond the drain timeout, before what is left is killed."""

CORE_END_S = 5.0

HEAP_IN_LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PYTHONMALLOC": "malloc"}
"""Weights stream through the caches between any two steps, so that what a step touches of the heap, in ranks and core, is
looked up in page tables that are gone from them too: large pages need few entries."""

AGENT_POLL_S = 0.5
MAX_CAUSES = 5


class Launcher:
    """Starts the agent in a session of its own, so that a terminal's Ctrl-C reaches only this process."""

    def __init__(self, model: str, words: list[str], num_stages: int, drain_timeout_s: float) -> None:
        self._model = model
        self._words = words
        self._num_stages = num_stages
        self._drain_timeout_s = drain_timeout_s
        self._directory = RunDirectory.of_process(os.getpid())
        self._directory.create()
        self._error_file = self._directory.path / "errors"
        self._stops = 0
        self._deadline: float | None = None

    def run(self) -> int:
        """Serve until the engine ends or a signal asks for it; returns the exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPPING, signal.SIGCHLD))
        noun = "process" if self._num_stages == 1 else "processes"
        _say(f"starting {self._num_stages} {noun} for {self._model}")
        agent = subprocess.Popen(self._agent_words(), start_new_session=True, env=self._agent_environment())
        # Known while the agent lives, needed when it is gone.
        run_directory = RunDirectory.of_process(agent.pid)
        try:
            core = self._wait(agent, run_directory)
            return self._exit_code(agent.returncode)
        finally:
            self._clean_up(agent, core if agent.returncode is not None else None, run_directory)

    def _wait(self, agent: "subprocess.Popen[bytes]", run_directory: RunDirectory) -> FoundCore | None:
        core = None
        while agent.poll() is None:
            core = read_core_file(run_directory) or core
            timeout_s = 3600.0 if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            received = signal.sigtimedwait((*STOPPING, signal.SIGCHLD), timeout_s)
            core = read_core_file(run_directory) or core
            if received is not None and received.si_signo in STOPPING:
                self._stops += 1
                self._stop(agent, core, received.si_signo)
            elif self._deadline is not None and time.monotonic() >= self._deadline:
                self._kill(agent, core)
        return core

    def _stop(self, agent: "subprocess.Popen[bytes]", core: FoundCore | None, number: int) -> None:
        if self._stops > 1:
            _say("stopping at once")
            self._kill(agent, core)
            return
        _say(f"{signal_name(number)}: draining; once more to stop at once")
        self._deadline = time.monotonic() + self._drain_timeout_s + GRACE_S
        if core is None or not _send(core.pid, number):
            agent.send_signal(signal.SIGTERM)

    def _kill(self, agent: "subprocess.Popen[bytes]", core: FoundCore | None) -> None:
        self._deadline = time.monotonic() + GRACE_S
        os.killpg(agent.pid, signal.SIGKILL)
        if core is not None:
            _send(core.pid, signal.SIGKILL)

    def _exit_code(self, agent_code: int) -> int:
        causes = self._causes()
        for cause in causes[:MAX_CAUSES]:
            _say(cause)
        if self._stops:
            return 0
        if causes or agent_code:
            if not causes:
                how = f"signal {-agent_code}" if agent_code < 0 else f"code {agent_code}"
                _say(f"the process that starts the ranks ended with {how}")
            return 1
        return 0

    def _causes(self) -> list[str]:
        """Distinct causes in order; a cause that several ranks share is said once."""
        ranks: dict[str, list[str]] = {}
        lines = self._error_file.read_text(encoding="utf-8").splitlines() if self._error_file.exists() else []
        for line in lines:
            rank, separator, cause = line.partition(": ")
            is_rank = bool(separator) and rank.startswith("rank ")
            ranks.setdefault(cause if is_rank else line, []).extend([rank.removeprefix("rank ")] if is_rank else [])
        return [
            cause if not numbers else f"rank {', '.join(sorted(set(numbers)))}: {cause}"
            for cause, numbers in ranks.items()
        ]

    def _clean_up(self, agent: "subprocess.Popen[bytes]", core: FoundCore | None, run_directory: RunDirectory) -> None:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
        core = core or read_core_file(run_directory)
        if core is not None and not _ended_within(core.pid, CORE_END_S):
            _send(core.pid, signal.SIGKILL)
        run_directory.remove()
        # Ranks that were killed may still be on their way out, with a last file to write.
        deadline = time.monotonic() + CORE_END_S
        while self._directory.path.is_dir() and time.monotonic() < deadline:
            self._directory.remove()

    def _agent_words(self) -> list[str]:
        directory = self._directory.path
        return [
            sys.executable, "-m", "scripts.agent", str(os.getpid()), str(directory),
            f"--nproc-per-node={self._num_stages}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={directory}/rendezvous",
            "--rdzv-conf=store_type=file",
            f"--rdzv-id={directory.name}",
            f"--max-restarts={MAX_RESTARTS}",
            f"--monitor-interval={AGENT_POLL_S}",
            f"--log-dir={directory}/log",
            "-m", "scripts.serve", f"--error-file={self._error_file}", *self._words,
        ]

    def _agent_environment(self) -> dict[str, str]:
        """Nothing listens beyond loopback: no shared TCP store, gloo and NCCL on the loopback interface."""
        chosen = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        return {**loopback, **HEAP_IN_LARGE_PAGES, **child_environment(), **chosen}


def _say(text: str) -> None:
    """A line on standard error, where somebody may have stopped listening."""
    with suppress(OSError):
        click.echo(f"brigade: {text}", err=True)


def _open_standard_streams() -> None:
    """Where a stream was closed, the next file to be opened would take its number and receive its text."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _ended_within(pid: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while process_start(pid) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@click.command("serve", cls=GroupedCommand, context_settings={"max_content_width": 120})
@serve_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Serve MODEL with a pipeline of processes on this machine.

    MODEL is a folder in Hugging Face layout, a .gguf file, or a name on the hub that HF_ENDPOINT names: ORG/NAME,
    ORG/NAME@REVISION, or ORG/NAME:FILE.gguf. What is on a hub is fetched once per host; a path that exists never touches the
    network.

    The last line of start-up on standard error is `brigade ready: …`. SIGTERM or Ctrl-C drains and ends with exit code 0;
    a second one stops at once. A start that can't work ends with its cause and exit code 1, wrong usage with 2.
    """
    _open_standard_streams()
    try:
        check_form(options["model"])
        launcher = Launcher(
            options["model"], ctx.meta["brigade.words"], options["pipeline_parallel_size"] or 1, options["drain_timeout"]
        )
        ctx.exit(launcher.run())
    except ConfigError as error:
        _say(str(error))
        ctx.exit(1)
