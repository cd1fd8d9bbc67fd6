"""The HTTP server's life beside the core: who starts it, what ends with it, and what it does when others end."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import Checkpoints
from tests.e2e.harness import ROOT, Engine, EnginePool, Output, fail_to_start, serve, start, wait_for_end
from tests.e2e.test_http_cases import url_of

pytestmark = pytest.mark.e2e

LONG = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def server_of(engine: Engine) -> psutil.Process:
    found = [p for p in engine.tree().others if "engine.openai.process" in p.cmdline()]
    assert len(found) == 1, found
    return found[0]


def wait_for_health(url: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            # Connections wait in the core's socket while there is no server.
            if httpx.get(f"{url}/health", timeout=timeout_s).status_code == 200:
                return
        except httpx.TransportError:
            continue
    raise AssertionError(f"not healthy within {timeout_s:g} s")


def test_p2_a_lost_server_is_started_again_and_leaves_nothing_running(checkpoints: Checkpoints) -> None:
    with serve(checkpoints.fx_r, pp=1, flags=("--http", "127.0.0.1:0")) as engine:
        url = url_of(engine)
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(httpx.post, f"{url}/v1/completions", json=LONG, timeout=60)
            engine.raw.wait_for_stats(lambda s: s["requests_running"] == 1, 20)
            first = server_of(engine)
            first.kill()
            with pytest.raises(httpx.TransportError):
                lost.result()
        wait_for_health(url, 60)
        engine.settle()
        assert server_of(engine).pid != first.pid
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=60).status_code == 200
        assert any("the HTTP server ended with signal 9; it is started again" in line for line in engine.output.lines)


@pytest.mark.parametrize("victim", ["launcher", "core"])
def test_p2_the_server_ends_with_its_parents_however_they_die(checkpoints: Checkpoints, victim: str) -> None:
    engine = start(checkpoints.fx_r, pp=1, flags=("--http", "127.0.0.1:0"))
    try:
        engine.wait_ready()
        url, server = url_of(engine), server_of(engine)
        core = engine.tree().core
        assert core is not None
        if victim == "launcher":
            engine.launchers[0].kill()
            engine.launchers[0].wait()
            engine.wait_gone()
            with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
                return  # the port is free at once
        core.kill()
        assert wait_for_end([server.pid], 10)
    finally:
        engine.kill()


def test_p5_sigterm_lets_open_requests_finish_and_refuses_more(checkpoints: Checkpoints) -> None:
    """Four streams go on to their end; whoever comes meanwhile is told so, through both front doors."""
    flags = ("--http", "127.0.0.1:0", "--drain-timeout", "100", "--num-kv-blocks", "512")
    engine = start(checkpoints.fx_r, pp=1, flags=flags)
    body = {**LONG, "max_tokens": 600}
    try:
        engine.wait_ready()
        url = url_of(engine)
        with ThreadPoolExecutor(4) as pool:
            bodies = [body, *[{**body, "stream": True, "stream_options": {"include_usage": True}}] * 3]
            posts = [pool.submit(httpx.post, f"{url}/v1/completions", json=one, timeout=60) for one in bodies]
            engine.raw.wait_for_stats(lambda s: s["requests_running"] == 4, 20)
            engine.launchers[0].send_signal(signal.SIGTERM)
            while (late := engine.raw.submit([5, 6], max_tokens=1)) and not engine.raw.wait([late], 20) and late.failed is None:
                continue
            assert late.failed is not None and late.failed.code == "unavailable"
            while (refused := httpx.get(f"{url}/health", timeout=20)).status_code == 200:
                continue
            assert refused.status_code == 503 and refused.headers["retry-after"]
            refused = httpx.post(f"{url}/v1/completions", json=LONG, timeout=20)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_unavailable"
            assert not any(post.done() for post in posts), "the streams were too short to be drained"
            whole, *streamed = [post.result() for post in posts]
        assert whole.json()["usage"]["completion_tokens"] == 600
        for one in streamed:
            assert '"completion_tokens":600' in one.text and one.text.endswith("data: [DONE]\n\n")
        engine.stop()
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")
    finally:
        engine.kill()


@pytest.mark.parametrize("drain_s", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_p5_a_drain_that_takes_too_long_ends_requests_with_503(drain_s: int, checkpoints: Checkpoints) -> None:
    """Also in the middle of a stream: its last event is the error. Meanwhile new ones keep coming, and hold nothing up."""
    flags = ("--http", "127.0.0.1:0", "--drain-timeout", str(drain_s), "--num-kv-blocks", "512")
    engine = start(checkpoints.fx_r, pp=1, flags=flags)
    endless = {**LONG, "prompt": ["x"] * 16, "n": 4}
    try:
        engine.wait_ready()
        url = url_of(engine)
        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(httpx.post, f"{url}/v1/completions", json=endless, timeout=60)
            streamed = pool.submit(httpx.post, f"{url}/v1/completions", json={**endless, "stream": True}, timeout=60)
            engine.raw.wait_for_stats(lambda s: s["requests_running"] >= 100 and s["generation_tokens_total"] > 200, 20)
            engine.launchers[0].send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert whole.result().status_code == 503 and whole.result().json()["error"]["code"] == "engine_unavailable"
            *_, last, done, _ = streamed.result().text.split("\n\n")
            assert '"engine_unavailable"' in last and done == "data: [DONE]"
            assert drain_s - 0.5 < time.monotonic() - began < drain_s + 2
        engine.stop()
    finally:
        engine.kill()


def test_an_address_that_can_not_be_used_ends_the_start(checkpoints: Checkpoints) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        failure = fail_to_start(checkpoints.fx_r, pp=1, flags=("--http", address), within_s=60)
    assert failure.exit_codes == [1] and f"--http: {address} can't be used" in failure.text and "Traceback" not in failure.text
    failure = fail_to_start(checkpoints.fx_r, pp=1, flags=("--http", "0.0.0.0:0"), within_s=60)
    assert failure.exit_codes == [1] and "give --api-key" in failure.text


def test_two_servers_of_their_own_before_one_engine(engines: EnginePool, checkpoints: Checkpoints, tmp_path: Path) -> None:
    engine = engines.get(checkpoints.fx_r, pp=1)
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    servers = []
    try:
        for words in ([], ["--api-key-file", str(keys), "--served-model-name", "other"]):
            command = [sys.executable, "-m", "scripts.cli", "http", "--connect", engine.address, "--http", "127.0.0.1:0", *words]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
            assert process.stderr is not None
            output = Output(process.stderr)
            servers.append((process, output))
        urls = [
            output.wait_for(r"brigade http ready: connect=\S+ http=(\S+)$", 90, lambda p=process: p.poll() is None)[1]  # type: ignore[misc]
            for process, output in servers
        ]
        body = {"prompt": "x", "temperature": 0, "max_tokens": 4}
        texts = [
            httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": "Bearer two"}, timeout=60).json()["choices"][0]["text"]
            for url in urls
        ]
        assert texts[0] == texts[1]
        assert httpx.get(f"{urls[1]}/v1/models").status_code == 401
        for process, _ in servers:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(20) for process, _ in servers] == [0, 0]
    finally:
        for process, output in servers:
            process.kill()
            process.wait()
            output.close()


def test_a_server_without_an_engine_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.cli", "http", "--connect", f"ipc://{tmp_path}/none", "--http", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 3 and "no engine answered" in done.stderr and "Traceback" not in done.stderr


def test_p11_leaving_frees_the_engine(engines: EnginePool, checkpoints: Checkpoints) -> None:
    from tests.e2e.test_http_cases import FLAGS

    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    url = url_of(engine)
    bodies = [LONG, LONG, {**LONG, "prompt": ["a", "b", "c", "d", "e"]}, {**LONG, "n": 3}, {**LONG, "stream": True}]
    gone = threading.Barrier(len(bodies) + 1)

    def leave(body: dict[str, object]) -> None:
        with (
            httpx.Client(base_url=url) as http,
            pytest.raises(httpx.TimeoutException),
            http.stream("POST", "/v1/completions", json=body, timeout=2.0) as response,
        ):
            # A stream has no such limit for the whole: it is cut after its first event.
            next(response.iter_lines())
            raise httpx.ReadTimeout("left")
        gone.wait(60)

    with ThreadPoolExecutor(len(bodies)) as pool:
        for body in bodies:
            pool.submit(leave, body)
        engine.raw.wait_for_stats(lambda s: s["requests_running"] + s["requests_waiting"] >= 5, 20)
        gone.wait(60)
        left = time.monotonic()
        engine.settle(10)
        assert time.monotonic() - left < 4.0
    before = engine.raw.wait_for_stats(lambda s: True, 5)["generation_tokens_total"]
    assert httpx.get(f"{url}/health").status_code == 200
    assert engine.raw.wait_for_stats(lambda s: True, 5)["generation_tokens_total"] == before
