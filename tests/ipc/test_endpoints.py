"""Run directories, torchrun's environment and addresses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipc import endpoints
from ipc.endpoints import (
    MAX_IPC_PATH,
    RunDirectory,
    check_listen_address,
    let_waiting_threads_sleep,
    make_private,
    process_start,
    read_torchrun,
)
from ipc.errors import ConfigError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_torchrun_environment_is_read_and_its_absence_is_explained() -> None:
    place = read_torchrun({**TORCHRUN, "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (place.rank, place.world_size, place.num_agents, place.uses_agent_store) == (1, 2, 2, True)
    with pytest.raises(ConfigError, match="not started by torchrun.*brigade serve"):
        read_torchrun({})


@pytest.mark.parametrize(
    "chosen", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "1000"}, {"KMP_BLOCKTIME": "5"}]
)
def test_how_threads_wait_is_the_users_choice(chosen: dict[str, str]) -> None:
    environment = {"OMP_NUM_THREADS": "3", **chosen}
    let_waiting_threads_sleep(environment)
    assert environment == {"OMP_NUM_THREADS": "3", **chosen}


def test_threads_that_wait_sleep_soon() -> None:
    """A rank's modules leave torch, and with it OpenMP, for later; then OpenMP hears of it."""
    script = (
        "import sys, scripts.rank\n"
        "assert 'torch' not in sys.modules\n"
        "scripts.rank.let_waiting_threads_sleep()\n"
        "import torch\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in endpoints.WAIT_POLICY_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this torch's OpenMP does not display its settings")
    assert f"GOMP_SPINCOUNT = '{endpoints.SPIN_COUNT}'" in done.stderr


@pytest.mark.parametrize("length", [10, 150])
def test_p9_a_long_or_odd_tmpdir_still_gives_a_short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    base = tmp_path / ("ü " + "x" * length)
    base.mkdir()
    monkeypatch.setenv("TMPDIR", str(base))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(endpoints.tempfile, "gettempdir", lambda: str(base))
    run = RunDirectory.of_process(os.getpid())
    assert len(run.address("tokens").removeprefix("ipc://")) <= MAX_IPC_PATH


def test_the_directory_is_private_and_foreign_ones_are_refused(tmp_path: Path) -> None:
    run = RunDirectory(path=tmp_path / "b" / "1-2")
    run.create()
    assert run.path.stat().st_mode & 0o777 == 0o700
    run.create()
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(run.path)
    for name in ("open", "link"):
        with pytest.raises(ConfigError, match="run directory.*0700"):
            make_private(tmp_path / name)


def test_one_process_holds_the_lock_and_its_death_frees_it(tmp_path: Path) -> None:
    run = RunDirectory(path=tmp_path / "b" / "1-2")
    run.create()
    code = (
        "import sys; from pathlib import Path; from ipc.endpoints import RunDirectory\n"
        f"lock = RunDirectory(path=Path({str(run.path)!r})).try_lock(); print(lock is not None, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"True\n"
        assert run.try_lock() is None
        holder.kill()
        holder.wait(10)
        lock = run.try_lock()
        assert lock is not None
        os.close(lock)


def test_p10_directories_of_dead_agents_are_removed_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as dead:
        pass
    own = RunDirectory(path=tmp_path / "b" / "own")
    start = process_start(os.getpid())
    living = RunDirectory(path=tmp_path / "b" / f"{os.getpid()}-{start:x}")
    reused = RunDirectory(path=tmp_path / "b" / f"{os.getpid()}-{start + 1:x}")
    stale = RunDirectory(path=tmp_path / "b" / f"{dead.pid}-1")
    held = RunDirectory(path=tmp_path / "b" / f"{dead.pid}-2")
    for run in (own, living, reused, stale, held):
        run.create()
    lock = held.try_lock()
    own.remove_stale_siblings()
    assert [run.path.exists() for run in (own, living, reused, stale, held)] == [True, True, False, False, True]
    os.close(lock)


@pytest.mark.parametrize("address, words", [
    ("tcp://0.0.0.0:5757", "--insecure"),
    ("tcp://192.168.1.7:5757", "--insecure"),
    ("127.0.0.1:5757", "must be tcp://HOST:PORT"),
    ("tcp://127.0.0.1", "must be tcp://HOST:PORT"),
    ("tcp://127.0.0.1:70000", "must be tcp://HOST:PORT"),
    ("ipc://" + "x" * 108, "at most 107"),
    ("udp://127.0.0.1:1", "must be tcp://HOST:PORT"),
])
def test_addresses_that_cannot_be_served_are_refused(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_listen_address(address, insecure=False)


def test_loopback_is_always_fine_and_more_only_on_demand() -> None:
    for address in ("tcp://127.0.0.1:0", "tcp://localhost:5757", "tcp://[::1]:5757", "ipc:///tmp/x"):
        assert check_listen_address(address, insecure=False) == address
    assert check_listen_address("tcp://0.0.0.0:5757", insecure=True)
    assert check_listen_address("tcp://0.0.0.0:5757", insecure=False, asks_for_keys=True)
