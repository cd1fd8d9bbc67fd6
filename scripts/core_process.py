"""How the first rank makes sure that an EngineCore runs beside it."""

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import zmq

from engine.config import CoreConfig, ModelFiles, pack_start
from ipc.channel import open_socket, receive_within, send_within
from ipc.codec import decode, encode
from ipc.endpoints import RunDirectory
from ipc.errors import ConfigError, EngineError, PeerLost
from ipc.messages import Control, ControlReply

START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCore:
    """Where the core is."""

    pid: int
    worker_address: str
    key: str


def child_environment() -> dict[str, str]:
    """For ``python -m`` of our modules: they come from where this one did, never from the current directory."""
    ours = str(Path(__file__).resolve().parent.parent)
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": f"{ours}{os.pathsep}{others}" if others else ours}


def read_core_file(directory: RunDirectory) -> FoundCore | None:
    """The core that announced itself last, or None; it may be dead."""
    try:
        return FoundCore(**json.loads(directory.core_file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def ensure_core(directory: RunDirectory, config: CoreConfig, files: ModelFiles) -> FoundCore:
    """The living core of this run, started if there is none; a core that does not answer is replaced.

    Raises:
        ConfigError: what the core said when it could not start.
    """
    directory.create()
    directory.remove_stale_siblings()
    lock = directory.try_lock()
    if lock is None:
        found = read_core_file(directory)
        if found is not None and _answers(found, config.health_timeout_s):
            return found
        if found is not None:
            _kill(found.pid)
        lock = directory.try_lock()
        if lock is None:
            raise EngineError(f"{directory.lock_path} is held by a process that is not a core of ours")
    try:
        return _start(directory, config, files, lock)
    finally:
        os.close(lock)


def _start(directory: RunDirectory, config: CoreConfig, files: ModelFiles, lock: int) -> FoundCore:
    environment = child_environment()
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.core_main", str(directory.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        pass_fds=(lock,),
        env=environment,
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin as stdin:
        stdin.write(pack_start(config, files))
    with process.stdout as stdout:
        if not select.select([stdout], [], [], START_TIMEOUT_S)[0]:
            process.kill()
            raise PeerLost(f"the core did not start within {START_TIMEOUT_S:g} s")
        line = stdout.readline()
    answer = json.loads(line or b'{"field": "core", "error": "ended while starting; its traceback is above"}')
    if "error" in answer:
        process.wait(END_TIMEOUT_S)
        raise ConfigError(answer["field"], answer["error"])
    # Not our child to wait for: it outlives this rank, and init or the agent reaps it.
    process.returncode = 0
    return FoundCore(**answer)


def _answers(found: FoundCore, timeout_s: float) -> bool:
    with zmq.Context() as context, open_socket(context, zmq.DEALER) as socket:
        socket.connect(found.worker_address)
        try:
            send_within(socket, encode(Control(control_id=1, op="health")), timeout_s, "the core")
            decode(receive_within(socket, timeout_s, "the core"), (ControlReply,))
        except PeerLost:
            return False
    return True


def _kill(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], END_TIMEOUT_S)
    finally:
        os.close(descriptor)
