"""Where processes find each other: torchrun's environment, the run directory, and addresses.

The only file that reads environment variables.
"""

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import zmq

from ipc.errors import ConfigError

DEFAULT_LISTEN = "tcp://127.0.0.1:5757"
MAX_IPC_PATH = zmq.IPC_PATH_MAX_LEN
WAIT_POLICY_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Any of them says how OpenMP's threads wait."""

SPIN_COUNT = "30000"
"""About 0.5 ms. Two stages in turn, 15 layers of SmolLM2 each, one row, two threads on two Zen 4 cores, milliseconds: 26 with
none, 16 with this one, 16 with the default on idle cores (a tenth of the steps above 210 and 950 on busy ones); one thread 20."""

LONGEST_FILE_NAME = 24
"""Longest name of a socket inside a run directory."""


# ---------------------------------------------------------------------------------------------- torchrun


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunEnvironment:
    """What torchrun tells each rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    num_agents: int
    master_addr: str
    master_port: int
    uses_agent_store: bool
    """True: an agent serves a TCPStore at master_addr:master_port; False: nobody does yet."""


def read_torchrun(environment: Mapping[str, str] = os.environ) -> TorchrunEnvironment:
    """Raises ConfigError when this process was not started by torchrun."""
    try:
        return TorchrunEnvironment(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            local_world_size=int(environment["LOCAL_WORLD_SIZE"]),
            num_agents=int(environment.get("GROUP_WORLD_SIZE", "1")),
            master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(environment.get("MASTER_PORT", "0")),
            uses_agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True",
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "RANK",
            f"this process was not started by torchrun ({error}); use `brigade serve MODEL --pp N` or "
            "`torchrun --nproc-per-node N -m scripts.serve MODEL`",
        ) from None


def threads_set_by_user(agent_pid: int) -> int | None:
    """OMP_NUM_THREADS as the user set it, or None.

    torchrun sets the variable to 1 where it is missing, so only the agent's own first environment tells the two apart.
    """
    try:
        raw = Path(f"/proc/{agent_pid}/environ").read_bytes()
    except OSError:
        return None
    for entry in raw.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == b"OMP_NUM_THREADS" and value.isdigit() and int(value) > 0:
            return int(value)
    return None


def let_waiting_threads_sleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Tell OpenMP, before torch loads it, that a thread without work spins briefly, then sleeps; a user's choice stays.

    Not at once: in a step a product follows the last one within 0.1 ms, and waking a thread took as long, so that two
    threads were slower than one. Not for the 10 times longer that is the default either: the core that is spun on may
    be what the awaited thread needs.
    """
    if not any(name in environment for name in WAIT_POLICY_VARIABLES):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT


# ---------------------------------------------------------------------------------------------- clients


def client_key_defaults(environment: Mapping[str, str] = os.environ) -> tuple[str | None, str | None]:
    """The engine's public key and the client's secret key file where a client is not told them; empty counts as unset."""
    return environment.get("BRIGADE_SERVER_KEY") or None, environment.get("BRIGADE_CLIENT_KEY") or None


# ---------------------------------------------------------------------------------------------- processes


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is no such process.

    With the pid it names one process for ever: pids are used again, the pair is not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *numbers = text[text.rindex(")") + 2 :].split()
    return None if state == "Z" else int(numbers[18])


def host_id() -> str:
    """Same on processes that share memory: host name and boot id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()[:128]}/{boot}"


# ---------------------------------------------------------------------------------------------- run directory


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """A private directory (0700) of one process of this host: a torchrun agent's has its engine's sockets, stores and lock, a
    launcher's has what it gives its agent.
    """

    path: Path

    @classmethod
    def of_process(cls, pid: int) -> "RunDirectory":
        """The directory of a living process; nothing is created. Raises ConfigError when it is gone."""
        start = process_start(pid)
        if start is None:
            raise ConfigError("agent", f"process {pid} that should be torchrun's agent is gone")
        return cls(path=_base_directory() / f"{pid}-{start:x}")

    @property
    def lock_path(self) -> Path:
        """Whoever holds an flock on this file is the core."""
        return self.path / "core.lock"

    @property
    def core_file(self) -> Path:
        """JSON by which ranks and the launcher find the core."""
        return self.path / "core.json"

    def address(self, name: str) -> str:
        """An ipc address inside the directory."""
        return f"ipc://{self.path / name}"

    def create(self) -> None:
        """Make the directory if it is missing. Raises ConfigError when it is not ours or open to others."""
        make_private(self.path.parent)
        make_private(self.path)

    def try_lock(self) -> int | None:
        """A file descriptor that holds the core's lock, or None while another process holds it."""
        return _try_lock(self.lock_path)

    def remove(self) -> None:
        """Delete the directory and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_stale_siblings(self) -> None:
        """Delete the directories of processes that are gone and whose lock is free."""
        for sibling in self.path.parent.iterdir():
            pid_text, _, start_text = sibling.name.partition("-")
            if sibling == self.path or not pid_text.isdigit() or not sibling.is_dir():
                continue
            start = process_start(int(pid_text))
            if start is not None and f"{start:x}" == start_text:
                continue
            lock = _try_lock(sibling / "core.lock")
            if lock is not None:
                shutil.rmtree(sibling, ignore_errors=True)
                os.close(lock)


def make_private(
    path: Path, name: str = "run directory", remedy: str = "set XDG_RUNTIME_DIR or TMPDIR to another place"
) -> None:
    """Make a directory with mode 0700, or check that it is one of ours. Raises ConfigError, of the setting ``name``."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(name, f"{path} is not a directory of ours with mode 0700; remove it, or {remedy}") from None
    except OSError as error:
        raise ConfigError(name, f"{path} can't be made ({error.strerror}); {remedy}") from None


def _try_lock(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _base_directory() -> Path:
    """XDG_RUNTIME_DIR, TMPDIR or /tmp: the first that exists, is writable and leaves room in a socket's path."""
    uid = os.geteuid()
    longest_run = len(f"/brigade-{uid}/4194304-{1 << 40:x}/") + LONGEST_FILE_NAME
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp", "/dev/shm"):
        if candidate and os.path.isdir(candidate) and os.access(candidate, os.W_OK | os.X_OK):
            full = os.path.abspath(candidate)
            if full.isascii() and len(full) + longest_run <= MAX_IPC_PATH:
                return Path(full) / f"brigade-{uid}"
    raise ConfigError("TMPDIR", "no writable directory with a path short enough for a socket; set TMPDIR to one")


# ---------------------------------------------------------------------------------------------- addresses


def check_listen_address(address: str, *, insecure: bool, asks_for_keys: bool = False) -> str:
    """The address if clients may be served there; ``asks_for_keys``: only listed keys come in. Raises ConfigError."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        if len(rest) > MAX_IPC_PATH:
            raise ConfigError("--listen", f"{address}: the path has {len(rest)} bytes, at most {MAX_IPC_PATH} work")
        return address
    _, _, port = rest.rpartition(":")
    if scheme != "tcp" or not _host_of(address) or not port.isdigit() or int(port) > 65535:
        raise ConfigError("--listen", f"{address!r} must be tcp://HOST:PORT or ipc://PATH")
    if is_wide(address) and not insecure and not asks_for_keys:
        raise ConfigError(
            "--listen",
            f"{address} can be reached from other machines, and nothing here checks who connects; give --server-key and "
            "--client-keys (`brigade keygen` makes them), listen on 127.0.0.1, or accept that with --insecure",
        )
    return address


def is_wide(address: str) -> bool:
    """Whether other machines may reach it."""
    return address.startswith("tcp://") and not is_loopback(_host_of(address))


def _host_of(address: str) -> str:
    return address.partition("://")[2].rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """True for names and numbers of this machine's loopback interface."""
    return host in ("localhost", "::1") or host.startswith("127.")


def local_address_towards(host: str, port: int) -> str:
    """The address of this machine that packets to ``host`` leave from. Raises ConfigError."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError("MASTER_ADDR", f"{host}:{port} can't be reached ({error})") from None
