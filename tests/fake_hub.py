"""A hub on loopback: as much of its protocol as huggingface_hub needs to fetch files, with a count of what was asked for."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"one commit").hexdigest()


class FakeHub:
    """Serves repositories, each a map of file names to contents, at the one commit that they have.

    ``allowed_bytes`` (None: all) is what may go out before every answer's body stalls until ``release``.
    """

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]], *, gated: frozenset[str] = frozenset()) -> None:
        self.repos = repos
        self.gated = gated
        self.requests: Counter[tuple[str, str]] = Counter()
        """By method and path; for files the path is REPO/FILE."""

        self.ranges: list[str] = []
        """Range headers of requests for files."""

        self.allowed_bytes: int | None = None
        self.stalled = threading.Event()
        self._gate = threading.Event()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def num_requests(self) -> int:
        return sum(self.requests.values())

    def count(self, method: str, path: str) -> int:
        return self.requests[(method, path)]

    def release(self) -> None:
        """What stalls goes on, and nothing stalls any more."""
        self.allowed_bytes = None
        self._gate.set()

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, size: int) -> None:
        """Called before ``size`` bytes of a body go out."""
        with self._lock:
            if self.allowed_bytes is not None:
                self.allowed_bytes -= size
            waits = self.allowed_bytes is not None and self.allowed_bytes < 0
        if waits:
            self.stalled.set()
            self._gate.wait(60)

    def _handler(hub: "FakeHub") -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                """Quiet."""

            def do_HEAD(self) -> None:
                self._answer(has_body=False)

            def do_GET(self) -> None:
                self._answer(has_body=True)

            def _answer(self, *, has_body: bool) -> None:
                path = unquote(urlsplit(self.path).path).strip("/")
                if path.startswith("api/models/"):
                    self._count(path)
                    self._describe(path.removeprefix("api/models/"))
                    return
                repo, _, rest = path.partition("/resolve/")
                revision, _, file = rest.partition("/")
                self._count(f"{repo}/{file}")
                content = hub.repos.get(repo, {}).get(file)
                if repo in hub.gated:
                    self._refuse(403, "GatedRepo", "Access to this model is restricted.")
                elif content is None or revision not in ("main", COMMIT):
                    self._refuse(404, "EntryNotFound", "no such file")
                else:
                    self._send_file(content, has_body=has_body)

            def _count(self, path: str) -> None:
                with hub._lock:
                    hub.requests[(self.command, path)] += 1

            def _describe(self, path: str) -> None:
                repo, _, revision = path.partition("/revision/")
                if repo in hub.gated:
                    self._refuse(403, "GatedRepo", "Access to this model is restricted.")
                elif repo not in hub.repos:
                    self._refuse(401, "RepoNotFound", "Repository not found")
                elif revision not in ("", "main", COMMIT):
                    self._refuse(404, "RevisionNotFound", "no such revision")
                else:
                    files = [{"rfilename": name, "size": len(content)} for name, content in hub.repos[repo].items()]
                    body = json.dumps({"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "siblings": files}).encode()
                    self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
                    self.wfile.write(body)

            def _send_file(self, content: bytes, *, has_body: bool) -> None:
                start, headers = 0, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
                asked = self.headers.get("Range")
                if asked is not None and has_body:
                    hub.ranges.append(asked)
                    start = int(asked.removeprefix("bytes=").partition("-")[0])
                    headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                headers["Content-Length"] = str(len(content) - start)
                self._head(206 if start else 200, headers)
                for position in range(start, len(content) if has_body else start, 1024):
                    piece = content[position : position + 1024]
                    hub.take(len(piece))
                    try:
                        self.wfile.write(piece)
                    except OSError:
                        self.close_connection = True
                        return

            def _refuse(self, status: int, code: str, message: str) -> None:
                self._head(status, {"X-Error-Code": code, "X-Error-Message": message, "Content-Length": "0"})

            def _head(self, status: int, headers: Mapping[str, str]) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

        return Handler
