"""Does an engine with keys serve those who have them, undisturbed by those who do not?"""

import os
import subprocess
import sys
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine import Client, SamplingParams
from engine.client import Generation
from ipc.errors import PeerLost
from ipc.security import new_key_pair, read_secret_keys, write_key_pair
from scripts import cli
from tests import tiny
from tests.conftest import Checkpoints
from tests.e2e.harness import READY, ROOT, Engine, serve
from tests.e2e.test_parity import FLAGS

pytestmark = pytest.mark.e2e

LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
NUM_STREAMS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys as `brigade keygen` makes them, and a stranger's."""
    path = tmp_path_factory.mktemp("security") / "keys"
    assert CliRunner().invoke(cli.main, ["keygen", str(path)]).exit_code == 0
    write_key_pair(path / "stranger.key_secret", path / "stranger.key", new_key_pair())
    return path


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints, folder: Path) -> Iterator[Engine]:
    keys = ("--server-key", str(folder / "server.key_secret"), "--client-keys", str(folder / "clients"))
    # As an operator's shell may have it: the HTTP server's own way to the core must not care.
    env = {"BRIGADE_SERVER_KEY": str(folder / "server.key"), "BRIGADE_CLIENT_KEY": str(folder / "stranger.key_secret")}
    with serve(checkpoints.fx_r, pp=1, flags=(*FLAGS, *keys, "--http", "127.0.0.1:0"), env=env) as engine:
        yield engine


def client(engine: Engine, folder: Path) -> Client:
    return Client(engine.address, server_key=folder / "server.key", client_key=folder / "client.key_secret")


def ids(stream: Generation) -> list[int]:
    return list(deque(stream, maxlen=1)[0].token_ids)


def test_strangers_stay_out_and_streams_go_on_undisturbed(engine: Engine, folder: Path) -> None:
    prompts = [[tiny.BOS, 9, number] for number in range(3, 3 + NUM_STREAMS)]
    with client(engine, folder) as ours:
        alone = [ids(ours.generate(prompt, LONG)) for prompt in prompts]
        streams = [ours.generate(prompt, LONG) for prompt in prompts]
        for stream in streams:
            next(stream)
        for _ in range(10):
            with pytest.raises(PeerLost, match="refuses this client's public key"):
                Client(engine.address, server_key=folder / "server.key", client_key=folder / "stranger.key_secret")
        with pytest.raises(PeerLost, match="wants an encrypted connection"):
            Client(engine.address)
        together = [ids(stream) for stream in streams]
        assert together == alone and [len(answer) for answer in alone] == [LONG.max_tokens] * NUM_STREAMS
        stats = ours.stats()
    assert (stats["connections_refused_total"], stats["requests_running"]) == (10, 0)
    told = [line for line in engine.output.lines if "refused a client" in line]
    secrets = [read_secret_keys(folder / f"{name}.key_secret", "x").secret for name in ("server", "client", "stranger")]
    stranger = read_secret_keys(folder / "stranger.key_secret", "x").public
    assert 1 <= len(told) <= 3 and stranger in told[0]
    assert not any(secret in line for secret in secrets for line in engine.output.lines)


def test_commands_take_keys_from_options_and_environment(engine: Engine, folder: Path) -> None:
    words = [sys.executable, "-m", "scripts.cli", "generate", "--connect", engine.address, "--max-tokens", "3", "a"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("BRIGADE_")}
    keys = [str(folder / "server.key"), str(folder / "client.key_secret")]

    def run(*more: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*words, *more], cwd=ROOT, env=plain | env, capture_output=True, text=True, timeout=60)

    assert run("--client-key", keys[1], BRIGADE_SERVER_KEY=keys[0]).returncode == 0
    without = run()
    assert (without.returncode, "--server-key" in without.stderr) == (3, True)


def test_the_http_server_reaches_its_core_without_keys(engine: Engine) -> None:
    url = engine.output.wait_for(READY, 10, lambda: True)["http"]
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        assert "brigade_connections_refused_total" in answer.read().decode()
