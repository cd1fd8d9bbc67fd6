"""The commands and the client's batches on a real engine."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine import Client, SamplingParams
from ipc.views import RequestState
from tests import tiny
from tests.conftest import Checkpoints
from tests.e2e.harness import Engine, EnginePool, start
from tests.e2e.test_parity import FLAGS
from tests.terminal import CTRL_C, CTRL_D, ROOT, Terminal

pytestmark = pytest.mark.e2e

ENDLESS = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)


@pytest.fixture
def engine(engines: EnginePool, checkpoints: Checkpoints) -> Engine:
    return engines.get(checkpoints.fx_r, flags=FLAGS)


def brigade(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.cli", *words]
    return subprocess.run(command, cwd=ROOT, env=None, input=stdin, capture_output=True, text=True, timeout=120)


def test_top_sees_requests_of_others_and_what_stages_do(engine: Engine) -> None:
    with engine.client() as client:
        streams = [client.generate([tiny.BOS, 9, i], ENDLESS, f"own-{i}") for i in range(3, 6)]
        for stream in streams:
            next(stream)
        reply = client.requests()
        assert set(reply.request_ids) == {"own-3", "own-4", "own-5"} and reply.num_open == 3
        assert set(reply.states) <= {RequestState.PROMPT, RequestState.ANSWER} and reply.num_prompt_tokens == [3, 3, 3]
        assert len(reply.clients) == 1 and reply.clients[0].startswith("brigade-python ")
        seen = json.loads(brigade("top", engine.address, "--json", "--interval", "0.5").stdout)
        for stream in streams:
            stream.close()
    assert seen["num_stages"] == 2 and seen["is_ready"] and seen["kv_blocks_total"] > 0
    assert seen["num_open"] is not None
    engine.settle()


def test_a_chat_on_a_terminal(engine: Engine) -> None:
    with Terminal("chat", "--connect", engine.address, "--max-tokens", "5", "--seed", "3", "--ignore-eos") as terminal:
        terminal.expect("/help lists what there is")
        terminal.expect("> ")
        terminal.type("hi\n")
        terminal.expect("cut at max_tokens=5")
        terminal.type("/params max_tokens=900\n")
        terminal.expect("max_tokens=900")
        terminal.expect("> ")
        terminal.type("more\n")
        engine.raw.wait_for_stats(lambda s: s["requests_running"] == 1, 30)
        terminal.type(CTRL_C)
        terminal.expect("stopped")
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.end()[0] == 0
    engine.settle()


def test_a_file_of_json_lines(engine: Engine, tmp_path: Path) -> None:
    lines = [
        {"prompt": [tiny.BOS, 9, 8], "id": "ids"}, {"messages": [{"role": "user", "content": "hi"}], "id": "chat"},
        {"prompt": "hi", "params": {"max_tokens": 2, "logprobs": 1}},
    ]  # fmt: skip
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    words = ("--jsonl", "--file", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--max-tokens", "4", "--temperature", "0")
    done = brigade("generate", "--connect", engine.address, *words, "--ignore-eos")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    records = list(map(json.loads, (tmp_path / "out").read_text().splitlines()))
    assert [record.get("id") for record in records] == ["ids", "chat", None]
    assert [len(record["token_ids"]) for record in records] == [4, 4, 2] and len(records[2]["logprobs"]) == 2


def test_d10_a_batch_keeps_its_order_on_a_real_engine(engine: Engine) -> None:
    prompts = [[tiny.BOS, 9, *range(3, 4 + i * 7 % 40)] for i in range(24)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i * 5 % 17, ignore_eos=True) for i in range(24)]
    with Client(engine.address) as client:
        alone = [list(client.generate(prompt, rule))[-1].token_ids for prompt, rule in zip(prompts, params, strict=True)]
        for max_open in (None, 3):
            results = client.generate_batch(prompts, params, max_open=max_open)
            assert [result.output.token_ids for result in results] == alone


def test_serve_names_ctrl_c_where_that_was_pressed(checkpoints: Checkpoints) -> None:
    engine = start(checkpoints.fx_r, flags=FLAGS)
    with engine:
        engine.wait_ready()
        assert engine.signal_and_wait(signal.SIGINT) == [0]
        said = engine.output.tail()
    assert "brigade: Ctrl-C: draining" in said and "core: Ctrl-C: draining" in said and "SIGTERM" not in said
