"""Who may talk to whom, encrypted: CURVE keys (ZeroMQ's) in files, on a listening socket and on a connecting one.

Key files have ZeroMQ's certificate format, as ``zmq.auth`` writes and reads it. Keys are 40 characters of Z85.
"""

import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from ipc.endpoints import client_key_defaults
from ipc.errors import ConfigError

KEY_CHARS = 40
MAX_KEY_FILE_BYTES = 1 << 16
MAX_CLIENT_KEYS = 10_000
PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"

ZAP_DOMAIN = b"brigade"
"""Of sockets whose clients are asked about at the allow-list: ZeroMQ asks for no others."""

HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_LINE = re.compile(r'^\s*(public|secret)-key\s*=\s*"([^"\n]*)"\s*$', re.MULTILINE)


# ---------------------------------------------------------------------------------------------- key files


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A public key, and the secret one that belongs to it. Only the former is ever shown."""

    public: str
    secret: str = field(repr=False)


def new_key_pair() -> KeyPair:
    """A random one."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public.decode(), secret=secret.decode())


def write_key_pair(secret_file: Path, public_file: Path, keys: KeyPair) -> None:
    """Write both files with mode 0600. Raises ConfigError for one that is there already, or that can't be written."""
    public_line = f'    public-key = "{keys.public}"\n'
    _write_new(secret_file, f'# A secret: keep it.\ncurve\n{public_line}    secret-key = "{keys.secret}"\n')
    _write_new(public_file, f"# No secret: give it to whom it concerns.\ncurve\n{public_line}")


def _write_new(path: Path, text: str) -> None:
    try:
        # The mode holds from the first moment, and nothing that is there, be it a link, is written to.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(str(path), "is there already, and keys are not overwritten") from None
    except OSError as error:
        raise ConfigError(str(path), f"can't be written: {error.strerror}") from None
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def read_secret_keys(path: str | os.PathLike[str], name: str) -> KeyPair:
    """The pair in a secret key file; ``name`` is the setting that errors speak of.

    Raises:
        ConfigError: the file is missing, not ours, open to others, no key file, or holds only a public key.
    """
    text, status = _read(path, name)
    found = _keys_in(text, path, name)
    if "secret" not in found:
        raise ConfigError(name, f"{path} holds no secret key; give the file that ends in {SECRET_SUFFIX}")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(name, f"{path} belongs to another user (uid {status.st_uid}), who can read the secret in it")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(name, f"{path} has mode {mode:04o}, but must be open to its owner alone: chmod 600 {path}")
    keys = KeyPair(public=zmq.curve_public(found["secret"].encode()).decode(), secret=found["secret"])
    if found.get("public", keys.public) != keys.public:
        raise ConfigError(name, f"{path}: its public and its secret key don't belong together")
    return keys


def read_public_key(value: str | os.PathLike[str], name: str) -> str:
    """A public key from its file, or the 40 characters themselves. Raises ConfigError."""
    if type(value) is not str and not isinstance(value, os.PathLike):
        raise ConfigError(name, f"must be a key file or a key of {KEY_CHARS} characters, not a {type(value).__name__}")
    if isinstance(value, str) and _is_key(value) and not os.path.exists(value):
        return value
    text, _ = _read(value, name)
    found = _keys_in(text, value, name)
    if "public" not in found:
        raise ConfigError(name, f"{value} holds no public key; give the file that ends in {PUBLIC_SUFFIX}")
    return found["public"]


def read_allow_list(path: str | os.PathLike[str], name: str) -> tuple[str, ...]:
    """Public keys of the clients that may come in: a key file, or a directory of files that end in .key.

    Raises:
        ConfigError: it is missing, a file is none of those, or there is no key at all.
    """
    folder = Path(path)
    if not folder.is_dir():
        return (read_public_key(folder, name),)
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == PUBLIC_SUFFIX)
    except OSError as error:
        raise ConfigError(name, f"{path} can't be read: {error.strerror}") from None
    if not files:
        raise ConfigError(name, f"{path} has no file that ends in {PUBLIC_SUFFIX}: nobody could connect")
    if len(files) > MAX_CLIENT_KEYS:
        raise ConfigError(name, f"{path} has {len(files)} keys, more than {MAX_CLIENT_KEYS}")
    return tuple(dict.fromkeys(read_public_key(file, name) for file in files))


def _read(path: str | os.PathLike[str], name: str) -> tuple[str, os.stat_result]:
    """Text of a regular file, and what it was when it was read."""
    try:
        # A pipe without a writer must not hold the start up.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MAX_KEY_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(name, f"{str(path)!r:.200} can't be read: {reason}; `brigade keygen` makes key files") from None
    if data is None or len(data) > MAX_KEY_FILE_BYTES:
        raise ConfigError(name, f"{path} is not a key file; `brigade keygen` makes them")
    return data.decode("ascii", "replace"), status


def _keys_in(text: str, path: str | os.PathLike[str], name: str) -> dict[str, str]:
    """Keys by kind. What is wrong is not shown: it may be most of a secret."""
    lines = _LINE.findall(text)
    found = dict(lines)
    if not found or len(lines) != len(found):
        raise ConfigError(name, f"{path} is not a key file; `brigade keygen` makes them")
    for kind, key in lines:
        if not _is_key(key):
            raise ConfigError(name, f"{path}: its {kind} key is not one: a key has {KEY_CHARS} characters of Z85")
    return found


def _is_key(text: str) -> bool:
    if len(text) != KEY_CHARS or not text.isascii():
        return False
    try:
        z85.decode(text)
    except (KeyError, struct.error):  # not of the alphabet; five characters beyond four bytes
        return False
    return True


# ---------------------------------------------------------------------------------------------- a listening socket


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSecurity:
    """What a listening tcp socket asks of who connects. Has a secret: never logged."""

    secret_key: str = field(repr=False)
    client_keys: tuple[str, ...] | None = None
    """Public keys that may come in; None lets in everybody who has the server's public key."""

    def __post_init__(self) -> None:
        if self.client_keys is not None:
            object.__setattr__(self, "client_keys", tuple(self.client_keys))

    @property
    def public_key(self) -> str:
        """What clients need."""
        return zmq.curve_public(self.secret_key.encode()).decode()

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Before ``bind``: speak CURVE and nothing else, and ask at the allow-list if there is one."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key.encode())
        if self.client_keys is not None:
            socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            # Without an answer nobody comes in.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def server_security(server_key: str | None, client_keys: str | None) -> ServerSecurity | None:
    """From ``--server-key`` and ``--client-keys``; None when neither is given. Raises ConfigError."""
    if server_key is None:
        if client_keys is not None:
            raise ConfigError("--client-keys", "needs --server-key FILE: without it no client shows a key")
        return None
    keys = read_secret_keys(server_key, "--server-key")
    allowed = None if client_keys is None else read_allow_list(client_keys, "--client-keys")
    return ServerSecurity(secret_key=keys.secret, client_keys=allowed)


# ---------------------------------------------------------------------------------------------- a connecting socket


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecurity:
    """The keys of one connection."""

    server_key: str
    """Only who has the secret that belongs to it can answer."""
    own: KeyPair
    is_listed: bool
    """Whether the own keys were given; else they are of this connection alone."""

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Before ``connect``."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret.encode())


KeySource = str | os.PathLike[str]


def client_security(
    address: str, server_key: KeySource | None = None, client_key: KeySource | None = None
) -> ClientSecurity | None:
    """From what a caller gave, else from the environment; None for a plain connection.

    An ipc address is protected by its file's permissions and has no keys: the environment's are left aside there.

    Raises:
        ConfigError: a file can't be used, the server's key is missing, or keys were given for an ipc address.
    """
    server_name, client_name = "server_key", "client_key"
    is_given = server_key is not None or client_key is not None
    if isinstance(address, str) and address.startswith("ipc://"):
        if is_given:
            raise ConfigError(server_name, f"{address} speaks no CURVE: an ipc address is protected by its file's permissions")
        return None
    if server_key is None and (default := client_key_defaults()[0]) is not None:
        server_key, server_name = default, "BRIGADE_SERVER_KEY"
    if client_key is None and (default := client_key_defaults()[1]) is not None:
        client_key, client_name = default, "BRIGADE_CLIENT_KEY"
    if server_key is None:
        if client_key is not None:
            raise ConfigError(client_name, "needs server_key, the public key of the engine (BRIGADE_SERVER_KEY), too")
        return None
    return ClientSecurity(
        server_key=read_public_key(server_key, server_name),
        own=new_key_pair() if client_key is None else read_secret_keys(client_key, client_name),
        is_listed=client_key is not None,
    )


def handshake_failure(event: Mapping[str, Any], security: ClientSecurity | None) -> str:
    """What a failed handshake on a connecting socket means, for people."""
    kind, detail = event["event"], event["value"]
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH and security is not None:
        key = f"this client's public key {security.own.public}"
        return f"the engine refuses {key}: it is not among its --client-keys" if security.is_listed else (
            "the engine lets in listed clients only: give client_key (--client-key, BRIGADE_CLIENT_KEY)"
        )
    if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and detail == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return (
            "the engine wants an encrypted connection: give server_key (--server-key, BRIGADE_SERVER_KEY)"
            if security is None
            else "the engine there speaks without encryption: it was started without --server-key, or is another one"
        )
    if security is None:
        return "what answers there ended the handshake: it is no engine, or wants an encrypted connection (--server-key)"
    return (
        f"what answers there ended the encrypted handshake: it is no engine, or its public key is not {security.server_key} "
        "(server_key, --server-key, BRIGADE_SERVER_KEY)"
    )
