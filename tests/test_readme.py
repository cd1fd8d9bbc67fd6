"""Do the README's commands and its client work as they stand there?"""

import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
ANSWER = " the primary colors of the RGB color model: red, blue, and green."
URL_IN_README = "http://127.0.0.1:8000"
MODEL_IN_README = ".cache/demo-model/SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def command(pattern: str) -> list[str]:
    """The one command of the README that matches, as arguments, with the demo model's path and no prompt sign."""
    lines = [line.removeprefix("$ ") for block in blocks("bash") + blocks("console") for line in block.splitlines()]
    found = [line for line in lines if re.match(pattern, line)]
    assert len(found) == 1, f"{len(found)} commands match {pattern}"
    model = os.environ.get("BRIGADE_DEMO_MODEL", MODEL_IN_README)
    return [model if word == MODEL_IN_README else word for word in shlex.split(found[0])]


def environment() -> dict[str, str]:
    """As in an activated environment: the commands of this Python's folder come first."""
    return {**os.environ, "VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


class Server(NamedTuple):
    address: str
    url: str
    process: subprocess.Popen[str]


@contextmanager
def running_server(arguments: list[str]) -> Iterator[Server]:
    """Start a server, and end it with its whole session. Its ports are any that are free."""
    arguments = [word.replace(URL_IN_README.removeprefix("http://"), "127.0.0.1:0") for word in arguments]
    server = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stderr is not None
    try:
        output = []
        for line in server.stderr:
            output.append(line)
            if ready := re.match(r"brigade ready: .*listen=(tcp://[^ ,]+) http=(\S+)", line):
                yield Server(ready[1], ready[2], server)
                return
        pytest.fail(f"{arguments[0]} ended before it was ready:\n{''.join(output)}")
    finally:
        end(server)


def end(server: subprocess.Popen[str]) -> int:
    """SIGTERM, and a minute to drain; then the hard way, so that a failing test leaves nothing behind."""
    server.send_signal(signal.SIGTERM)
    try:
        server.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        raise
    return server.returncode


def run(arguments: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=ROOT, env=environment(), input=text, capture_output=True, text=True, timeout=240)


needs_installation = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="brigade")),
    reason="the package is not installed here; ./scripts/test.sh installs it",
)


@needs_installation
def test_quickstart_answers_and_ends_clean(tmp_path: Path) -> None:
    script = command(r"\./scripts/quickstart\.sh")
    done = subprocess.run(
        [str(ROOT / script[0])],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (ROOT / "scripts/quickstart_answer.txt").read_text() in done.stdout
    assert done.stderr == ""


@needs_installation
def test_brigade_serve_and_generate(tmp_path: Path) -> None:
    with running_server(command("brigade serve")) as (address, url, server):
        done = run([*command("brigade generate"), "--connect", address])
        assert (done.stdout, done.stderr, done.returncode) == (f"{ANSWER}\n", "", 0)
        done = run([word.replace(URL_IN_README, url) for word in command("curl")])
        assert json.loads(done.stdout)["usage"]["completion_tokens"] == 16, done.stdout + done.stderr
        done = run([*command("brigade chat"), "--connect", address, "--max-tokens", "8"], "Hello!\n")
        assert done.stdout.strip() and done.returncode == 0, done.stdout + done.stderr
        done = run([*command("brigade top"), "--connect", address])
        assert "SmolLM2" in done.stdout and done.returncode == 0, done.stdout + done.stderr
        done = run([*command("brigade bench"), "--connect", address])
        assert done.returncode == 0 and "8 requests completed, 0 failed" in done.stdout, done.stdout + done.stderr
        words = command("brigade timeline")
        done = run([*words[:-1], str(tmp_path / words[-1]), "--connect", address])
        assert done.returncode == 0 and "core's own work per step" in done.stdout, done.stdout + done.stderr
        assert json.loads((tmp_path / words[-1]).read_text())["traceEvents"]
        assert end(server) == 0


@needs_installation
def test_brigade_inspect() -> None:
    done = run(command("brigade inspect"))
    assert done.returncode == 0 and "SmolLM2" in done.stdout, done.stdout + done.stderr


def test_torchrun_and_the_client() -> None:
    [client] = blocks("python")
    with running_server(command("torchrun")) as (address, _, _):
        done = run([sys.executable, "-c", client.replace("tcp://127.0.0.1:5757", address)])
        assert (done.stdout, done.stderr, done.returncode) == (f"{ANSWER}\nlength: 16 tokens\n", "", 0)


def test_the_files_to_read_are_there() -> None:
    named = re.findall(r"^\| `([^`]+)` \|", README, re.MULTILINE)
    assert named and [file for file in named if not (ROOT / file).is_file()] == []
