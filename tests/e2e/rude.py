"""What rude-peer tests share: an engine whose HTTP server asks for a key, its url, its sockets, and peers by bare sockets."""

import re
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.conftest import Checkpoints
from tests.e2e.harness import Engine, EnginePool
from tests.e2e.test_http_cases import url_of

KEY = "kept-away-from-strangers-4711"
HEADERS = {"authorization": f"Bearer {KEY}"}
FLAGS = ("--http", "127.0.0.1:0", "--dtype", "float32", "--num-kv-blocks", "1024", "--max-num-seqs", "64")


def guarded(engines: EnginePool, checkpoints: Checkpoints) -> Engine:
    """The engine that these tests share; its key is in a file."""
    file = checkpoints.folder / "keys"
    file.write_text(KEY + "\n")
    return engines.get(checkpoints.fx_r, flags=(*FLAGS, "--api-key-file", str(file)))


def http_of(engine: Engine, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=url_of(engine), headers=HEADERS, **{"timeout": 60, **options})


def server_of(engine: Engine) -> psutil.Process:
    found = [p for p in engine.tree().others if "engine.openai.process" in p.cmdline()]
    assert len(found) == 1, found
    return found[0]


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.partition("://")[2].rpartition(":")
    return host, int(port)


def tcp_listeners(engine: Engine) -> dict[str, str]:
    """HOST:PORT on which the engine's processes listen, with the line of ss."""
    pids = set(engine.pids())
    found = {}
    for line in subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines():
        if pids & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}:
            found[line.split()[3]] = line
    return found


def run_directories(engine: Engine) -> list[Path]:
    """Where the engine's private sockets lie."""
    found = [path.parent for path in engine.tmp.rglob("core.lock")]
    assert found, f"no run directory under {engine.tmp}"
    return found


def reset(peer: socket.socket) -> None:
    """End a connection with RST instead of FIN."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def post_head(path: str, length: int, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {KEY}", f"content-length: {length}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
