"""The socket on which an HTTP server is reached. Needs nothing that must be installed."""

import socket

from ipc.errors import ConfigError

BACKLOG = 1024
"""Connections that wait while the server is started again."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any that is free. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("--http", f"{host}:{port} is no address of this machine: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError("--http", f"{host}:{port} can't be used: {error.strerror or error}; choose another, or port 0") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
