"""Engines that idle, that live side by side, and that are killed and started again (P7 P8 P10)."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests import tiny
from tests.conftest import Checkpoints
from tests.e2e.compare import check_against
from tests.e2e.conftest import TinyOracle
from tests.e2e.harness import Engine, fail_to_start, serve, start, wait_for_end
from tests.e2e.rude import host_and_port
from tests.e2e.test_http_cases import url_of
from tests.oracle import Excused

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
HTTP = ("--http", "127.0.0.1:0")


# ---------------------------------------------------------------------------------------------- P7


@pytest.mark.parametrize("link_timeout_s, idle_s, gap_s", [(1, 3, 2), pytest.param(15, 60, 40, marks=SLOW)])
def test_p7_idle_is_free_and_so_is_a_reader_that_pauses(
    link_timeout_s: int, idle_s: int, gap_s: int, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    """Longer than the stages' own deadline: nothing is pending meanwhile."""
    flags = ["--link-timeout", str(link_timeout_s), "--health-timeout", str(max(1, link_timeout_s)), *HTTP, "--num-kv-blocks", "256"]
    with serve(checkpoints.fx_r, flags=flags) as engine:
        expected = tiny_oracle.expect(7, [6, 9, 14, 20, 31], 8) * 4
        excused += check_against(engine.raw, expected[:1], concurrency=1)
        assert not wait_for_end(engine.pids(), idle_s), "a process ended"
        excused += check_against(engine.raw, expected, concurrency=5)
        # In all more than the kernel's buffers hold, so that the server feels a pause that is long enough.
        body = {"prompt": [5, 6, 7], "max_tokens": 400, "n": 4, "ignore_eos": True, "stream": True, "logprobs": 20}
        transport = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)])
        with (
            httpx.Client(transport=transport, base_url=url_of(engine), timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            first = next(lines)
            assert not wait_for_end(engine.pids(), gap_s), "a process ended"
            events = [line for line in (first, *lines) if line]
        assert events[-1] == "data: [DONE]"
        choices = [choice for e in events[:-1] for choice in json.loads(e.removeprefix("data: "))["choices"]]
        assert sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"]) == 4 * 400
        assert engine.raw.stats()["epoch"] == 1


# ---------------------------------------------------------------------------------------------- P8


@pytest.mark.parametrize("count, rounds", [(2, 1), pytest.param(4, 5, marks=SLOW)])
def test_p8_engines_started_together_serve_their_own_model(
    count: int, rounds: int, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    """Without any port, and with a MASTER_PORT that is taken, as left over from something else."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        for _ in range(rounds):
            models = [(checkpoints.fx_r, checkpoints.chain)[i % 2] for i in range(count)]
            with ExitStack() as stack:
                engines = []
                for model in models:
                    engines.append(start(model, listen=None, env=env, flags=[*HTTP, "--num-kv-blocks", "64"]))
                    stack.callback(engines[-1].kill)
                for engine in engines:
                    engine.wait_ready()
                places = [place for engine in engines for place in (engine.address, url_of(engine))]
                assert len(set(places)) == 2 * count
                for model, engine in zip(models, engines, strict=True):
                    if model == checkpoints.fx_r:
                        excused += check_against(engine.raw, tiny_oracle.expect(8, [9, 20], 8), concurrency=2)
                    else:
                        made = httpx.post(f"{url_of(engine)}/v1/completions", json={"prompt": [0], "temperature": 0, "max_tokens": 40}, timeout=60).json()
                        assert made["choices"][0]["text"].startswith(tiny.SCRIPT_TEXT)
                    assert httpx.get(f"{url_of(engine)}/v1/models", timeout=60).json()["data"][0]["id"] == engine.raw.info.name
                for engine in engines:
                    engine.stop()


@pytest.mark.slow
def test_p8_a_master_port_in_use_ends_plain_torchrun(checkpoints: Checkpoints) -> None:
    """torchrun's own affair, and its own words; nothing hangs and nothing is left."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = Engine(
            [[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
              "--master-port", str(taken.getsockname()[1]), "-m", "scripts.serve", str(checkpoints.fx_r)]], env={},
        )  # fmt: skip
        try:
            assert engine.exit_codes(60) != [0]
            engine.wait_gone()
            assert "EADDRINUSE" in engine.output.tail() or "in use" in engine.output.tail()
        finally:
            engine.kill()


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--http", "--listen"])
def test_p8_a_port_in_use_is_one_clear_line(flag: str, checkpoints: Checkpoints) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        value = address if flag == "--http" else f"tcp://{address}"
        failure = fail_to_start(checkpoints.fx_r, listen=None, flags=[flag, value], within_s=10)
    assert failure.exit_codes == [1] and "Traceback" not in failure.text
    assert [line for line in failure.lines if address in line and flag in line], failure.text


# ---------------------------------------------------------------------------------------------- P10


def kill_tree(engine: Engine) -> None:
    """SIGKILL to all, the core last, so that none can clean up for another."""
    tree = engine.tree()
    for process in [*tree.launchers, *tree.agents, *tree.ranks.values(), *tree.others, *([tree.core] if tree.core else [])]:
        process.kill()
    engine.wait_gone()


def our_files(tmp: Path) -> list[str]:
    """All that engines made in their temporary directory; that none of it lies elsewhere is the harness's affair."""
    return sorted(str(path) for path in tmp.rglob("*"))


@contextmanager
def short_folder() -> Iterator[Path]:
    """Of a path short enough for sockets."""
    folder = Path(f"/tmp/bt-lives-{os.getpid()}")
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("rounds", [2, pytest.param(5, marks=SLOW)])
def test_p10_p14_killed_trees_leave_room_for_the_next(
    rounds: int, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    """SIGKILL to every process, and at once again on the same ports: each start works, and what is left does not add up."""
    with short_folder() as tmp:
        flags, listen, counts = ["--num-kv-blocks", "64", *HTTP], "tcp://127.0.0.1:*", []
        for _ in range(rounds):
            engine = start(checkpoints.fx_r, pp=1, tmp=tmp, flags=flags, listen=listen)
            try:
                engine.wait_ready()
                excused += check_against(engine.raw, tiny_oracle.expect(10, [9], 8), concurrency=1)
                counts.append(our_files(tmp))
                engine.raw.submit([5, 6, 7], max_tokens=900, ignore_eos=True)
                listen = engine.address
                flags[-1] = "{}:{}".format(*host_and_port(url_of(engine)))
                kill_tree(engine)
            finally:
                engine.kill()
        with serve(checkpoints.fx_r, pp=1, tmp=tmp, flags=flags, listen=listen) as engine:
            counts.append(our_files(tmp))
            excused += check_against(engine.raw, tiny_oracle.expect(10, [9], 8), concurrency=1)
        # While the second runs, what the first left may still be there; from then on nothing is added.
        assert len(counts[-1]) <= len(counts[1]), (counts[1], counts[-1])
        left = [name for name in our_files(tmp) if Path(name).is_socket()]
        assert not left, left


START_AGAIN = "import subprocess, sys, torch, scripts.cli; subprocess.run([sys.executable, '-c', ''], check=True)"


@pytest.mark.slow
def test_p10_another_user_at_the_same_time(checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]) -> None:
    """Both in the same temporary directory."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, and setpriv")
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    with short_folder() as tmp:
        tmp.chmod(0o1777)
        model = Path(shutil.copytree(checkpoints.fx_r, tmp / "model"))
        readable = subprocess.run([*other, sys.executable, "-c", START_AGAIN], cwd=tmp, env={**os.environ, "HOME": str(tmp)}, check=False)
        if readable.returncode:
            pytest.skip("another user can't read this installation")
        env = {"HOME": str(tmp)}
        with serve(model, pp=1, tmp=tmp, env=env) as ours, serve(model, pp=1, tmp=tmp, env=env, prefix=other) as theirs:
            for engine in (ours, theirs):
                excused += check_against(engine.raw, tiny_oracle.expect(10, [9], 8), concurrency=1)
            folders = {path.owner(): oct(path.stat().st_mode & 0o777) for path in tmp.glob("brigade-*") if path.name.startswith(("brigade-0", "brigade-65534"))}
            assert set(folders.values()) == {"0o700"} and len(folders) == 2, folders
