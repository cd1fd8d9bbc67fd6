"""The core's process over its real sockets, with a fake worker group and raw clients."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq

from engine.config import CoreConfig, ModelFiles, pack_start
from engine.scheduler import SchedulerConfig
from ipc.channel import open_socket, receive_within
from ipc.codec import decode, encode
from ipc.endpoints import RunDirectory, process_start
from ipc.errors import ConfigError, PeerLost
from ipc.messages import (
    AbortRequest,
    AddRequest,
    Attach,
    Control,
    ControlReply,
    ModelInfo,
    ModelRunnerOutput,
    RequestFailed,
    RequestOutput,
    TokenUpdates,
    WorkerFailed,
)
from ipc.params import SamplingParams
from ipc.routes import ToldOutputs
from scripts.core_process import FoundCore, ensure_core
from tests.fake_group import FakeGroup
from tests.fakes import VOCAB_SIZE, expected_output

DEADLINE_S = 60.0
STAGES = 2


class RawClient:
    """Speaks messages, not text."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.socket = open_socket(context, zmq.DEALER)
        self.socket.connect(address)

    def ask(self, message: object) -> None:
        self.socket.send_multipart(encode(message))

    def hear(self) -> ModelInfo | RequestOutput | RequestFailed | ControlReply:
        return decode(receive_within(self.socket, DEADLINE_S, "the core"),
                      (ModelInfo, RequestOutput, RequestFailed, ControlReply))

    def attach(self) -> ModelInfo:
        self.ask(Attach())
        info = self.hear()
        assert isinstance(info, ModelInfo)
        return info

    def stats(self) -> dict[str, int | float | str | bool]:
        self.ask(Control(control_id=7, op="stats"))
        while not isinstance(reply := self.hear(), ControlReply):
            pass
        return reply.values

    def collect(self, request_id: str) -> tuple[list[int], str | None]:
        tokens: list[int] = []
        while True:
            output = self.hear()
            if isinstance(output, RequestFailed):
                return tokens, f"{output.code}: {output.reason}"
            if isinstance(output, RequestOutput) and output.request_id == request_id:
                tokens += output.new_token_ids
                if output.finish_reason:
                    assert output.num_output_tokens == len(tokens)
                    return tokens, output.finish_reason


class Engine:
    """A core with everything that a test needs to disturb it."""

    def __init__(self, run: RunDirectory, found: FoundCore, agent: "subprocess.Popen[bytes]", address: str,
                 start: Callable[[], FoundCore], context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.run = run
        self.found = found
        self.agent = agent
        self.address = address
        self.start = start
        self.context = context
        self.clients: list[RawClient] = []

    def group(self, **kwargs: object) -> FakeGroup:
        return FakeGroup(self.found.worker_address, scheduler_config(), **kwargs)

    def client(self) -> RawClient:
        client = RawClient(self.context, self.address)
        self.clients.append(client)
        return client

    def wait_for_end(self) -> None:
        psutil.wait_procs([psutil.Process(self.found.pid)] if psutil.pid_exists(self.found.pid) else [], DEADLINE_S)
        assert process_start(self.found.pid) is None


def scheduler_config() -> SchedulerConfig:
    return SchedulerConfig(num_stages=STAGES, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, block_size=4,
                           num_blocks=64, eos_token_ids=frozenset())


@contextmanager
def running_core(
    tmp_path: Path, *, tokenizer: bytes = b"{}", generation_config_file: bytes = b"{}", **changes: object
) -> Iterator[Engine]:
    agent = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    run = RunDirectory(path=tmp_path / "r" / f"{agent.pid}-x")
    address = f"ipc://{tmp_path}/listen"
    config = CoreConfig(**{
        "run_dir": str(run.path), "agent_pid": agent.pid, "agent_start": 0, "key": "", "num_stages": STAGES,
        "listen": (address,), "model_name": "fake", "vocab_size": VOCAB_SIZE, "model_max_len": 64, "max_num_seqs": 4,
        "max_num_batched_tokens": 16, "block_size": 4, "num_kv_blocks": 64, "drain_timeout_s": 5.0, **changes})

    def start() -> FoundCore:
        return ensure_core(run, config, ModelFiles(tokenizer=tokenizer, generation_config=generation_config_file))

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine = None
    try:
        engine = Engine(run, start(), agent, address, start, context)
        yield engine
    finally:
        agent.stdin.close()
        agent.wait(DEADLINE_S)
        for client in engine.clients if engine else ():
            client.socket.close(0)
        context.destroy(0)
        if (core := process_of(run)) is not None:
            core.wait(DEADLINE_S)
        assert not run.path.exists()


def process_of(run: RunDirectory) -> psutil.Process | None:
    for process in psutil.process_iter():
        try:
            if process.cmdline()[-2:] == ["engine.core_main", str(run.path)]:
                return process
        except psutil.Error:
            continue
    return None


def add(request_id: str, prompt: list[int], **params: object) -> AddRequest:
    return AddRequest(request_id=request_id, prompt_token_ids=np.array(prompt, np.int32),
                      params=SamplingParams(**{"max_tokens": 8, "seed": 3, **params}))


def answer_to(prompt: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, seed=3)
    return expected_output(prompt, params, eos_token_ids=frozenset(), max_model_len=64)[0]


def test_a_request_gets_its_tokens_and_one_ending(tmp_path: Path) -> None:
    with running_core(tmp_path) as engine:
        group, client = engine.group(), engine.client()
        info = client.attach()
        assert (info.vocab_size, info.max_model_len, info.num_stages, info.tokenizer) == (VOCAB_SIZE, 64, STAGES, b"{}")
        for request_id in ("a", "b"):
            client.ask(add(request_id, [1, 2, 3]))
        answers: dict[str, list[int]] = {"a": [], "b": []}
        reasons = {}
        while len(reasons) < 2:
            output = client.hear()
            answers[output.request_id] += output.new_token_ids
            if output.finish_reason:
                assert output.request_id not in reasons
                reasons[output.request_id] = output.finish_reason
        assert answers["a"] == answers["b"] == answer_to([1, 2, 3], 8)
        assert set(reasons.values()) == {"length"}
        stats = client.stats()
        assert stats["requests_running"] == 0 and stats["kv_blocks_free"] == stats["kv_blocks_total"] == 64
        assert stats["generation_tokens_total"] == 16 and stats["stage_0_resident_bytes"] == 1234
        group.stop()


def test_clients_that_take_updates_get_one_message_a_step(tmp_path: Path) -> None:
    with running_core(tmp_path) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        names = ("a", "b", "c")
        for name in names:
            client.ask(replace(add(name, [1, 2, 3]), takes_updates=True))
        told, answers, open_names, num_updates = ToldOutputs(), {name: [] for name in names}, set(names), 0
        while open_names:
            message = decode(receive_within(client.socket, DEADLINE_S, "the core"), (RequestOutput, TokenUpdates))
            num_updates += isinstance(message, TokenUpdates)
            for output in told.expand(message):
                answers[output.request_id] += output.new_token_ids
                assert output.num_output_tokens == len(answers[output.request_id]) and output.seed == 3
                if output.finish_reason:
                    open_names.remove(output.request_id)
        assert all(answer == answer_to([1, 2, 3], 8) for answer in answers.values())
        assert 6 <= num_updates <= 18  # between the first and the last token of each, by how many rode together
        group.stop()


def test_the_core_stays_small_and_never_loads_torch(tmp_path: Path) -> None:
    with running_core(tmp_path) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        process = psutil.Process(engine.found.pid)
        assert process.memory_info().rss < 80e6
        assert not [m for m in process.memory_maps() if "torch" in m.path]
        group.stop()


@pytest.mark.parametrize("bad, field", [
    (add("x", []), "prompt_token_ids"),
    (add("x", [VOCAB_SIZE]), "prompt_token_ids"),
    (add("x", [-1]), "prompt_token_ids"),
    (add("x", [1] * 64), "prompt_token_ids"),
    (add("x", [1], stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
])
def test_a_bad_request_fails_alone_and_names_the_field(tmp_path: Path, bad: AddRequest, field: str) -> None:
    with running_core(tmp_path) as engine:
        group, client, other = engine.group(), engine.client(), engine.client()
        client.attach()
        other.ask(add("long", [5], max_tokens=40))
        client.ask(bad)
        answer = client.hear()
        assert isinstance(answer, RequestFailed) and answer.code == "bad_request" and answer.field == field
        assert other.collect("long") == (answer_to([5], 40), "length")
        group.stop()


def test_a_second_request_with_an_open_id_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    hold = threading.Event()
    with running_core(tmp_path) as engine:
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        client.ask(add("same", [1]))
        client.ask(add("same", [2]))
        answer = client.hear()
        assert isinstance(answer, RequestFailed) and answer.code == "duplicate"
        hold.set()
        assert client.collect("same") == (answer_to([1], 8), "length")
        group.stop()


def test_k6_abort_is_idempotent_in_every_state(tmp_path: Path) -> None:
    hold = threading.Event()
    with running_core(tmp_path, max_num_seqs=1) as engine:
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        client.ask(AbortRequest(request_id="unknown"))
        client.ask(add("runs", [1], max_tokens=50))
        client.ask(add("waits", [1]))
        for _ in range(2):
            client.ask(AbortRequest(request_id="waits"))
        assert client.collect("waits") == ([], "abort")
        client.ask(AbortRequest(request_id="runs"))
        tokens, reason = client.collect("runs")
        assert reason == "abort"
        hold.set()
        client.ask(AbortRequest(request_id="runs"))
        client.ask(add("next", [9]))
        assert client.collect("next")[1] == "length"
        assert client.stats()["kv_blocks_free"] == 64
        group.stop()


def test_requests_of_a_lost_group_go_on_in_the_next_one(tmp_path: Path) -> None:
    hold = threading.Event()
    with running_core(tmp_path) as engine:
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        client.ask(add("lost", [1]))
        while client.stats()["requests_running"] == 0:
            pass
        second = engine.group()
        assert client.collect("lost") == (answer_to([1], 8), "length")
        client.ask(add("after", [1]))
        assert client.collect("after")[1] == "length"
        assert client.stats()["epoch"] == 2
        assert second.epoch_start.store != group.epoch_start.store
        hold.set()
        group.stop()
        second.stop()


def test_requests_wait_while_no_epoch_is_ready(tmp_path: Path) -> None:
    with running_core(tmp_path) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        group.fail("made to", fatal=False)
        while client.stats()["kv_blocks_total"] != 0:
            pass
        group.stop()
        client.ask(add("early", [1]))
        client.ask(add("gone", [1]))
        client.ask(AbortRequest(request_id="gone"))
        assert client.collect("gone") == ([], "abort")
        second = engine.group()
        assert client.collect("early")[1] == "length"
        second.stop()


def test_a_fatal_fault_ends_the_agent_and_says_why(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with running_core(tmp_path, error_file=str(errors)) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        group.fail("the disk is gone", fatal=True)
        assert engine.agent.wait(DEADLINE_S) == -signal.SIGTERM
        assert "rank 0: the disk is gone" in errors.read_text()
        assert group.shut_down.wait(DEADLINE_S) and group.exit_code == 1
        engine.wait_for_end()
        group.stop()


def test_a_hello_with_a_foreign_key_is_not_answered(tmp_path: Path) -> None:
    with running_core(tmp_path, key="right") as engine:
        stranger = engine.group(key="wrong")
        group = engine.group(key="right")
        engine.client().attach()
        assert stranger.epoch_start is None and group.epoch_start is not None
        stranger.stop()
        group.stop()


def test_sigterm_drains_then_shuts_the_workers_down(tmp_path: Path) -> None:
    hold = threading.Event()
    with running_core(tmp_path) as engine:
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        client.ask(add("drains", [1]))
        while client.stats()["requests_running"] == 0:
            pass
        os.kill(engine.found.pid, signal.SIGTERM)
        while True:
            client.ask(add("late", [1]))
            answer = client.hear()
            if isinstance(answer, RequestFailed):
                break
            client.ask(AbortRequest(request_id="late"))
        assert answer.code in ("unavailable", "duplicate")
        hold.set()
        assert client.collect("drains")[1] in ("length", "unavailable: the engine is shutting down")
        assert group.shut_down.wait(DEADLINE_S) and group.exit_code == 0
        engine.agent.stdin.close()
        engine.wait_for_end()
        group.stop()


def test_the_core_ends_with_its_agent_and_tells_its_clients(tmp_path: Path) -> None:
    hold = threading.Event()
    with running_core(tmp_path) as engine:
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        client.ask(add("open", [1]))
        while client.stats()["requests_running"] == 0:
            pass
        engine.agent.kill()
        assert client.collect("open") == ([], "unavailable: the engine was stopped")
        engine.wait_for_end()
        hold.set()
        group.stop()


def test_a_living_core_is_found_again_and_a_frozen_one_is_replaced(tmp_path: Path) -> None:
    with running_core(tmp_path, health_timeout_s=3.0) as engine:
        assert engine.start().pid == engine.found.pid
        os.kill(engine.found.pid, signal.SIGSTOP)
        second = engine.start()
        assert second.pid != engine.found.pid and process_start(engine.found.pid) is None
        engine.found = second
        group = engine.group()
        engine.client().attach()
        group.stop()


def test_an_address_in_use_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with (
        running_core(tmp_path) as engine,
        pytest.raises(ConfigError, match="--listen.*in use"),
        running_core(tmp_path / "b", listen=(engine.address,)),
    ):
        pass


def test_garbage_on_either_socket_harms_nobody(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with running_core(tmp_path) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        rude = [open_socket(engine.context, zmq.DEALER) for _ in range(2)]
        for socket, address in zip(rude, (engine.address, engine.found.worker_address), strict=True):
            socket.connect(address)
            for size in range(60):
                socket.send_multipart([random.bytes(int(n)) for n in random.integers(0, 40, size % 5 + 1)])
            socket.close(1000)
        client.ask(add("x", [1]))
        assert client.collect("x")[1] == "length"
        group.stop()


def test_a_client_that_vanished_loses_its_requests(tmp_path: Path) -> None:
    with running_core(tmp_path) as engine:
        group, client, other = engine.group(), engine.client(), engine.client()
        other.attach()
        client.ask(add("x", [1], max_tokens=60))
        client.hear()
        client.socket.close(0)
        while other.stats()["requests_running"]:
            pass
        assert other.stats()["kv_blocks_free"] == 64
        group.stop()


def test_silence_has_a_deadline(tmp_path: Path) -> None:
    with running_core(tmp_path) as engine, pytest.raises(PeerLost):
        engine.client().ask(Attach())
        receive_within(engine.client().socket, 0.2, "the core")


def test_a_silent_rank_ends_the_epoch_within_the_health_timeout(tmp_path: Path) -> None:
    hold = threading.Event()
    with running_core(tmp_path, health_timeout_s=1.0) as engine:
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        client.ask(add("stuck", [1]))
        while client.stats()["ready"]:
            pass
        client.ask(Control(control_id=1, op="health"))
        assert client.hear().values == {"ready": False, "state": "recovering", "epoch": 1}
        hold.set()
        group.stop()
        second = engine.group()
        assert client.collect("stuck") == (answer_to([1], 8), "length")
        second.stop()


def test_a_flood_of_one_client_only_delays_another(tmp_path: Path) -> None:
    with running_core(tmp_path) as engine:
        group, client, rude = engine.group(), engine.client(), engine.client()
        client.attach()
        over = threading.Event()

        def flood() -> None:
            frames = encode(AbortRequest(request_id="nope"))
            while not over.is_set():
                rude.socket.send_multipart(frames)

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            client.ask(add("x", [1], max_tokens=20))
            assert client.collect("x")[1] == "length"
        finally:
            over.set()
            thread.join(DEADLINE_S)
        group.stop()


def test_a_huge_head_is_refused_unread(tmp_path: Path) -> None:
    with running_core(tmp_path) as engine:
        group, client, rude = engine.group(), engine.client(), engine.client()
        client.attach()
        process = psutil.Process(engine.found.pid)
        before = process.memory_info().rss
        head = b"\xdd\x00\x0f\x00\x00" + b"\x90" * 0xF0000
        rude.socket.send_multipart([b"\x01", bytes((33,)), head])
        answer = rude.hear()
        assert isinstance(answer, RequestFailed) and "a head of" in answer.reason
        assert process.memory_info().rss - before < 20e6
        assert client.stats()["requests_running"] == 0
        group.stop()


def test_many_attaches_of_a_client_that_reads_nothing_share_one_answer(tmp_path: Path) -> None:
    with running_core(tmp_path, tokenizer=b"t" * 2_000_000) as engine:
        group, client, rude = engine.group(), engine.client(), engine.client()
        client.attach()
        process = psutil.Process(engine.found.pid)
        before = process.memory_info().rss
        for _ in range(500):
            rude.ask(Attach())
        rude.ask(add("last", [1], max_tokens=1))
        while not any(client.stats()[f"requests_finished_total_{reason}"] for reason in ("length", "disconnect")):
            pass  # it runs, or is ended because too much waits for its client
        assert process.memory_info().rss - before < 60e6
        group.stop()


def test_only_the_last_rank_itself_can_return_a_step(tmp_path: Path) -> None:
    with running_core(tmp_path) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        start = group.epoch_start
        with open_socket(engine.context, zmq.DEALER, linger_ms=1000) as stranger:
            stranger.connect(engine.found.worker_address)
            stranger.send_multipart(encode(ModelRunnerOutput(
                core_id=start.core_id, epoch=start.epoch, step_id=10**9, rows=[], token_ids=[], counts=[])))
            stranger.send_multipart(encode(WorkerFailed(
                core_id=start.core_id, epoch=start.epoch, rank=0, cause="not me", fatal=True)))
            stranger.send_multipart(encode(Control(control_id=5, op="health")))
            decode(receive_within(stranger, DEADLINE_S, "the core"), (ControlReply,))
        client.ask(add("x", [1]))
        assert client.collect("x")[1] == "length"
        group.stop()


def test_listening_never_replaces_a_file(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("data")
    with pytest.raises(ConfigError, match="not a socket"), running_core(tmp_path, listen=(f"ipc://{precious}",)):
        pass
    assert precious.read_text() == "data"


def test_a_core_whose_rank_is_gone_says_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as agent:
        run = RunDirectory(path=tmp_path / "r" / "1-x")
        run.create()
        config = CoreConfig(run_dir=str(run.path), agent_pid=agent.pid, agent_start=0, key="", num_stages=1,
                            listen=(f"ipc://{tmp_path}/listen",), model_name="fake", vocab_size=9, model_max_len=64)
        read_end, write_end = os.pipe()
        os.close(read_end)
        with subprocess.Popen([sys.executable, "-m", "engine.core_main", str(run.path)], stdin=subprocess.PIPE,
                              stdout=write_end, stderr=subprocess.PIPE) as core:
            os.close(write_end)
            core.stdin.write(pack_start(config, ModelFiles()))
            core.stdin.close()
            agent.stdin.close()
            assert core.wait(DEADLINE_S) == 0 and b"Traceback" not in core.stderr.read()
