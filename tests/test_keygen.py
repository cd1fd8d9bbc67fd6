"""Does `brigade keygen` make keys that an engine and its clients can use, and keep from spoiling what is there?"""

import re
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ipc.security import client_security, read_secret_keys, server_security
from scripts import cli


def keygen(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["keygen", *words])


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_it_makes_what_its_advice_names(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    done = keygen(str(folder))
    assert done.exit_code == 0
    modes = {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert modes == {
        "clients": 0o700, "clients/client.key": 0o600, "client.key_secret": 0o600, "server.key": 0o600,
        "server.key_secret": 0o600,
    }  # fmt: skip
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    named = re.search(r"--server-key (\S+) --client-keys (\S+)", done.output)
    exports = re.search(r"BRIGADE_SERVER_KEY=(\S+) BRIGADE_CLIENT_KEY=(\S+)", done.output)
    assert named and exports
    server = server_security(named[1], named[2])
    client = client_security("tcp://127.0.0.1:1", exports[1], exports[2])
    assert server and client
    assert server.client_keys == (client.own.public,) and server.public_key == client.server_key
    for secret in (server.secret_key, client.own.secret):
        assert secret not in done.output


def test_a_further_client_joins_the_list_and_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert keygen(str(folder)).exit_code == 0
    before = contents(folder)
    assert keygen(str(folder), "--client", "laptop").exit_code == 0
    server = server_security(str(folder / "server.key_secret"), str(folder / "clients"))
    assert server and read_secret_keys(folder / "laptop.key_secret", "x").public in (server.client_keys or ())
    after = contents(folder)
    assert before.items() < after.items() and len(after) == len(before) + 2
    for words in ([], ["--client", "laptop"]):
        again = keygen(str(folder), *words)
        assert (again.exit_code, "is there already" in again.output) == (2, True)
    assert contents(folder) == after


@pytest.mark.parametrize("name", ["", "../x", "a/b", "server", ".x", "a b"])
def test_names_that_would_lie_elsewhere(name: str, tmp_path: Path) -> None:
    done = keygen(str(tmp_path / "keys"), "--client", name)
    assert (done.exit_code, "--client: " in done.output) == (2, True)
    assert not (tmp_path / "keys").exists()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    done = keygen(str(tmp_path / "open"))
    assert (done.exit_code, "mode 0700" in done.output) == (2, True)
    assert contents(tmp_path) == {}
