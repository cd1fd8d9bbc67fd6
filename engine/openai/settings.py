"""What a server is told when it starts, and what it needs to be installed."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ipc.errors import ConfigError

MAX_BODY_BYTES = 8 << 20
"""By default. A prompt of 131,072 tokens has about half a megabyte as text, and under one as ids."""

RECONNECT_S = 60.0
"""How long requests that are open wait for a lost engine to be back, by default: a small model takes ten seconds, and few
clients wait longer than a minute.
"""

REQUIRED = ("fastapi", "uvicorn")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings of one HTTP server. Keys are secrets: never logged, never on a command line of ours."""

    host: str
    port: int
    """0 for any that is free."""
    api_keys: tuple[str, ...] = ()
    """Any of them lets a client in; none: everybody is."""
    cors_origins: tuple[str, ...] = ()
    """Pages of these origins may call the server from a browser; "*" stands for all."""
    served_model_names: tuple[str, ...] = ()
    """Names under which requests may ask for the model beside its own; the first is what answers say."""
    max_body_bytes: int = MAX_BODY_BYTES

    def __post_init__(self) -> None:
        for name in ("api_keys", "cors_origins", "served_model_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("--api-key", "a key must be visible ASCII characters without spaces")
        for origin in self.cors_origins:
            scheme, separator, rest = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not separator or not rest or "/" in rest):
                raise ConfigError("--cors-origin", f"{origin!r:.80} must be * or an origin such as https://example.com")


def parse_address(text: str, *, insecure: bool, has_key: bool) -> tuple[str, int]:
    """Host and port of HOST:PORT; brackets around IPv6 numbers.

    Raises:
        ConfigError: it is no address, or other machines could use the engine without a key.
    """
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("http://").strip("[]")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError("--http", f"{text!r:.80} must be HOST:PORT, such as 127.0.0.1:8000")
    is_local = host in ("localhost", "::1") or host.startswith("127.")
    if not is_local and not insecure and not has_key:
        raise ConfigError(
            "--http",
            f"{text} can be reached from other machines, and nothing here checks who connects; give --api-key, listen on "
            "127.0.0.1, or accept that with --insecure",
        )
    return host, int(port)


def read_keys(keys: Iterable[str], files: Iterable[str]) -> tuple[str, ...]:
    """Keys as given, and one of each line of the files that is not empty. Raises ConfigError."""
    found = list(keys)
    for name in files:
        try:
            lines = Path(name).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--api-key-file", f"{name} can't be read: {error}") from None
        found += [line.strip() for line in lines if line.strip()]
    return tuple(found)


def check_installed() -> None:
    """Raises ConfigError that says what to install."""
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        raise ConfigError("--http", f"the HTTP server needs {' and '.join(missing)}: pip install -e '.[http]' in the clone")
