"""Do keys, and only the right ones, let a client in; and does everybody else learn what is wrong in time?"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from zmq.auth import load_certificate

from engine.allow_list import NUM_FRAMES, AllowList
from engine.gateway import Gateway
from engine.openai.link import EngineLink
from ipc.aclient import AsyncTokenClient
from ipc.channel import open_socket
from ipc.client import TokenClient
from ipc.codec import encode
from ipc.errors import ConfigError, PeerLost
from ipc.messages import Attach
from ipc.security import (
    KeyPair,
    ServerSecurity,
    client_security,
    new_key_pair,
    read_allow_list,
    read_public_key,
    read_secret_keys,
    server_security,
    write_key_pair,
)
from tests.fake_core import CORE_ID, DEADLINE_S, FakeCore, model_info

TIMEOUT_S = 1.0
"""To attach where nobody lets us in for reasons that ZeroMQ does not tell."""


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRIGADE_SERVER_KEY", raising=False)
    monkeypatch.delenv("BRIGADE_CLIENT_KEY", raising=False)


class Keys:
    """An engine's and two clients' key files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pairs = {name: new_key_pair() for name in ("server", "listed", "stranger")}
        for name, pair in self.pairs.items():
            write_key_pair(self.secret(name), self.public(name), pair)

    def secret(self, name: str) -> Path:
        return self.folder / f"{name}.key_secret"

    def public(self, name: str) -> Path:
        return self.folder / f"{name}.key"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


class Listener:
    """A core's gateway in a thread of its own, that answers Attach and nothing else."""

    def __init__(self, security: ServerSecurity | None, address: str = "tcp://127.0.0.1:0") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.gateway = Gateway(self._context, core_id=CORE_ID, max_prompt_tokens=64, security=security)
        self.gateway.listen([address])
        self.address = self.gateway.addresses[0]
        self._stop_in, self._stop_out = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Listener":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._stop_out)
        self._thread.join(DEADLINE_S)
        os.close(self._stop_in)

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (*self.gateway.sources, self._stop_in):
            poller.register(source, zmq.POLLIN)
        while self._stop_in not in (ready := {source for source, _ in poller.poll()}):
            for received in self.gateway.receive(ready):
                if isinstance(received.message, Attach):
                    self.gateway.send_frames(received.client, encode(model_info()))
        self.gateway.close(0)
        self._context.term()


@pytest.fixture
def guarded(keys: Keys) -> Iterator[Listener]:
    with Listener(server_security(str(keys.secret("server")), str(keys.public("listed")))) as listener:
        yield listener


def blocking(address: str, timeout_s: float, server_key: object, client_key: object) -> str:
    with TokenClient(address, timeout_s=timeout_s, server_key=server_key, client_key=client_key) as client:  # type: ignore[arg-type]
        return client.model.name


def asynchronous(address: str, timeout_s: float, server_key: object, client_key: object) -> str:
    async def go() -> str:
        async with AsyncTokenClient(address, timeout_s=timeout_s, server_key=server_key, client_key=client_key) as client:  # type: ignore[arg-type]
            return client.model.name

    return asyncio.run(go())


Attaching = Callable[[str, float, object, object], str]
BOTH = pytest.mark.parametrize("attach", [blocking, asynchronous])


def refusal(attach: Attaching, address: str, server_key: object, client_key: object, timeout_s: float = DEADLINE_S) -> str:
    """How attaching fails; with the default it must not have waited for the time to be over."""
    started = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        attach(address, timeout_s, server_key, client_key)
    assert time.monotonic() - started < DEADLINE_S
    return str(caught.value)


# --------------------------------------------------------------------------------------------------- who comes in


@BOTH
def test_a_listed_client_with_the_right_server_key_comes_in(attach: Attaching, guarded: Listener, keys: Keys) -> None:
    assert attach(guarded.address, DEADLINE_S, keys.public("server"), keys.secret("listed")) == "fake"
    assert attach(guarded.address, DEADLINE_S, keys.pairs["server"].public, str(keys.secret("listed"))) == "fake"
    assert guarded.gateway.num_strangers == 0


@BOTH
def test_an_unlisted_client_is_told_so_at_once(
    attach: Attaching, guarded: Listener, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    text = refusal(attach, guarded.address, keys.public("server"), keys.secret("stranger"))
    public = keys.pairs["stranger"].public
    assert f"refuses this client's public key {public}: it is not among its --client-keys" in text
    assert guarded.gateway.num_strangers == 1
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "127.0.0.1" in line and public in line
    assert keys.pairs["stranger"].secret not in line + text


@BOTH
def test_a_client_without_a_key_of_its_own_is_not_listed(attach: Attaching, guarded: Listener, keys: Keys) -> None:
    assert "lets in listed clients only: give client_key" in refusal(attach, guarded.address, keys.public("server"), None)


@BOTH
def test_a_plain_client_of_an_encrypted_engine(attach: Attaching, guarded: Listener) -> None:
    text = refusal(attach, guarded.address, None, None, TIMEOUT_S)
    assert "wants an encrypted connection" in text and "--server-key" in text


@BOTH
def test_the_wrong_server_key(attach: Attaching, guarded: Listener, keys: Keys) -> None:
    text = refusal(attach, guarded.address, keys.public("stranger"), keys.secret("listed"), TIMEOUT_S)
    assert f"its public key is not {keys.pairs['stranger'].public}" in text


@BOTH
def test_a_client_with_keys_tells_a_plain_engine_from_its_own(attach: Attaching, keys: Keys) -> None:
    with FakeCore() as core:
        text = refusal(attach, core.address, keys.public("server"), keys.secret("listed"), TIMEOUT_S)
    assert "speaks without encryption" in text


def test_without_an_allow_list_the_server_key_is_enough(keys: Keys) -> None:
    with Listener(server_security(str(keys.secret("server")), None)) as listener:
        assert blocking(listener.address, DEADLINE_S, keys.public("server"), None) == "fake"
        assert "encrypted" in refusal(blocking, listener.address, None, None, TIMEOUT_S)


def test_keys_come_from_the_environment_where_none_are_given(
    guarded: Listener, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIGADE_SERVER_KEY", keys.pairs["server"].public)
    monkeypatch.setenv("BRIGADE_CLIENT_KEY", str(keys.secret("listed")))
    assert blocking(guarded.address, DEADLINE_S, None, None) == "fake"
    assert "refuses" in refusal(blocking, guarded.address, None, keys.secret("stranger"))
    monkeypatch.setenv("BRIGADE_CLIENT_KEY", "/nowhere")
    with pytest.raises(ConfigError, match="^BRIGADE_CLIENT_KEY: '/nowhere' can't be read"):
        blocking(guarded.address, DEADLINE_S, None, None)


def test_ipc_addresses_stay_plain_and_leave_the_environment_aside(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = server_security(str(keys.secret("server")), str(keys.public("listed")))
    with Listener(security, f"ipc://{tmp_path}/core") as listener:
        monkeypatch.setenv("BRIGADE_SERVER_KEY", "not a key")
        assert blocking(listener.address, DEADLINE_S, None, None) == "fake"
        with pytest.raises(ConfigError, match="speaks no CURVE"):
            blocking(listener.address, DEADLINE_S, keys.public("server"), None)


def test_the_http_servers_link_takes_keys(guarded: Listener, keys: Keys) -> None:
    async def go() -> str:
        link = EngineLink(guarded.address, keys.public("server"), keys.secret("listed"))
        name = (await link.attach(DEADLINE_S)).model.name
        await link.aclose()
        return name

    assert asyncio.run(go()) == "fake"


# ------------------------------------------------------------------------------------------------- the allow-list


class FakeAsker:
    """ZeroMQ's side of the allow-list's socket."""

    def __init__(self, allow_list: AllowList, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._allow_list = allow_list
        self.socket = open_socket(context, zmq.DEALER)
        self.socket.connect("inproc://zeromq.zap.01")

    def ask(self, key: bytes, mechanism: bytes = b"CURVE", version: bytes = b"1.0") -> bytes | None:
        frames = [b"", version, b"1", b"brigade", b"10.0.0.9", b"", mechanism, key]
        assert len(frames) == NUM_FRAMES - 1
        self.socket.send_multipart(frames)
        assert self._allow_list.socket.poll(int(DEADLINE_S * 1000))
        self._allow_list.answer()
        return self.socket.recv_multipart()[3] if self.socket.poll(0) else None


def test_refusals_are_counted_and_told_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now, listed, stranger = [100.0], new_key_pair(), new_key_pair()
    with zmq.Context() as context:
        allow_list = AllowList(context, [listed.public], clock=lambda: now[0])
        asker = FakeAsker(allow_list, context)
        raw = {pair.public: zmq.utils.z85.decode(pair.public) for pair in (listed, stranger)}
        assert asker.ask(raw[listed.public]) == b"200"
        assert [asker.ask(raw[stranger.public]) for _ in range(50)] == [b"400"] * 50
        assert asker.ask(raw[listed.public], mechanism=b"PLAIN") == b"400"
        assert asker.ask(b"") == asker.ask(b"x" * 31) == b"400"
        assert asker.ask(raw[listed.public], version=b"2.0") is None
        assert (allow_list.num_refused, len(caplog.records)) == (53, 1)
        now[0] += 11
        assert asker.ask(raw[stranger.public]) == b"400"
        assert "52 more since" in caplog.records[1].getMessage() and len(caplog.records) == 2
        asker.socket.close()
        allow_list.socket.close()


# ------------------------------------------------------------------------------------------------------ key files


def test_key_files_are_private_and_those_of_zeromq(keys: Keys) -> None:
    pair = keys.pairs["server"]
    assert load_certificate(keys.secret("server")) == (pair.public.encode(), pair.secret.encode())
    assert load_certificate(keys.public("server")) == (pair.public.encode(), None)
    assert {file.stat().st_mode & 0o777 for file in keys.folder.iterdir()} == {0o600}
    assert read_secret_keys(keys.secret("server"), "x") == pair
    assert read_public_key(keys.secret("server"), "x") == pair.public
    with pytest.raises(ConfigError, match="is there already"):
        write_key_pair(keys.secret("server"), keys.public("server"), new_key_pair())
    assert read_secret_keys(keys.secret("server"), "x") == pair


def test_no_secret_is_shown(keys: Keys) -> None:
    security = ServerSecurity(secret_key=keys.pairs["server"].secret)
    client = client_security("tcp://127.0.0.1:1", keys.public("server"), keys.secret("listed"))
    shown = repr([keys.pairs, security, client])
    assert keys.pairs["listed"].public in shown
    assert all(pair.secret not in shown for pair in keys.pairs.values())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_secret_that_others_can_read_is_refused(keys: Keys, mode: int) -> None:
    keys.secret("server").chmod(mode)
    for read in (lambda path: server_security(path, None), lambda path: client_security("tcp://a:1", "k" * 40, path)):
        with pytest.raises(ConfigError, match=rf"server.key_secret has mode {mode:04o}, .* chmod 600"):
            read(str(keys.secret("server")))


def damaged(pair: KeyPair) -> dict[str, str]:
    whole = f'curve\n    public-key = "{pair.public}"\n    secret-key = "{pair.secret}"\n'
    return {
        "empty": "",
        "prose": "there is no key in here",
        "binary": "\x00\x01" * 100,
        "short": whole.replace(pair.secret, pair.secret[:-1]),
        "alphabet": whole.replace(pair.secret, "~" + pair.secret[1:]),
        "too big": whole.replace(pair.secret, "#" * 40),
        "twice": whole + whole,
        "of two pairs": whole.replace(pair.public, new_key_pair().public),
        "long": whole + "#" * (1 << 17),
    }


def test_files_that_are_no_keys_are_refused_without_being_shown(keys: Keys, tmp_path: Path) -> None:
    pair = keys.pairs["server"]
    for what, text in damaged(pair).items():
        path = keys.secret("server")
        path.write_text(text)
        with pytest.raises(ConfigError, match="^--server-key: .*server.key_secret") as caught:
            server_security(str(path), None)
        assert pair.secret[5:30] not in str(caught.value), what
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, words in (
        (tmp_path / "missing", "No such file.*brigade keygen"), (tmp_path, "irectory"), (tmp_path / "pipe", "not a key file"),
        (keys.public("server"), "holds no secret key; give the file that ends in .key_secret"), ("\0", "can't be read"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            server_security(str(path), None)


@pytest.mark.parametrize("value", [5, b"x" * 40, True, ["a"]])
def test_what_is_no_key_at_all(value: object) -> None:
    with pytest.raises(ConfigError, match="^server_key: must be a key file or a key of 40 characters"):
        client_security("tcp://127.0.0.1:1", value)  # type: ignore[arg-type]


def test_half_of_the_keys_is_refused(keys: Keys) -> None:
    with pytest.raises(ConfigError, match="^--client-keys: needs --server-key"):
        server_security(None, str(keys.folder))
    with pytest.raises(ConfigError, match="^client_key: needs server_key"):
        client_security("tcp://127.0.0.1:1", None, keys.secret("listed"))
    assert server_security(None, None) is None
    assert client_security("tcp://127.0.0.1:1") is None


def test_an_allow_list_is_a_file_or_a_folder(keys: Keys, tmp_path: Path) -> None:
    assert read_allow_list(keys.public("listed"), "x") == (keys.pairs["listed"].public,)
    assert set(read_allow_list(keys.folder, "x")) == {pair.public for pair in keys.pairs.values()}
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"none has no file that ends in .key: nobody could connect"):
        read_allow_list(tmp_path / "none", "x")
    (keys.folder / "broken.key").write_text("?")
    with pytest.raises(ConfigError, match=r"broken.key is not a key file"):
        read_allow_list(keys.folder, "x")
