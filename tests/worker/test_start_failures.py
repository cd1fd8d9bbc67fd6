"""Does a start that can't work end everything with one line that names the cause, before memory is spent on it?"""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from torch.distributed import FileStore, ProcessGroupGloo

from ipc.errors import ConfigError, PeerLost
from tests.worker.stages import load_stage as build_and_load
from worker import startup
from worker.links import opening
from worker.links.gloo import connect_group
from worker.links.opening import GlooTransport, StagedTransport, make_links
from worker.model_config import read_model_config
from worker.models import BoundaryTensor, check_weights
from worker.settings import WorkerSettings
from worker.shortage import shortage
from worker.startup import load_stage
from worker.topology import Topology
from worker.worker import MAX_FRAMES, _run


def settings_for(model: Path, **changes: Any) -> WorkerSettings:
    values: dict[str, Any] = {
        "model": str(model), "config": read_model_config(str(model)), "partition": "even", "rank": 0, "world_size": 1,
        "local_rank": 0, "local_world_size": 1, "core_address": "", "key": "", "run_dir": "", "device": "cpu",
        "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 512, "block_size": 16,
        "num_threads": torch.get_num_threads(), "parent_pid": 0, "signal_fd": -1,
    }  # fmt: skip
    return WorkerSettings(**values | changes)


class FakeWorker:
    def __init__(self, error: Exception, *, is_ready: bool) -> None:
        self.error, self.is_ready = error, is_ready

    def run(self) -> None:
        self.deep(20)

    def deep(self, depth: int) -> None:
        if depth:
            self.deep(depth - 1)
        raise self.error


class FakeControl:
    is_shutting_down = False
    shutdown_code = 0

    def __init__(self) -> None:
        self.said: list[tuple[str, bool]] = []

    def fail(self, cause: str, *, fatal: bool) -> None:
        self.said.append((cause, fatal))


def run_with(error: Exception, *, is_ready: bool, control: FakeControl) -> int:
    return _run(FakeWorker(error, is_ready=is_ready), control)  # type: ignore[arg-type]


def test_an_unexpected_failure_before_ready_is_fatal(caplog: pytest.LogCaptureFixture) -> None:
    control = FakeControl()
    with pytest.raises(ConfigError) as caught, caplog.at_level(logging.ERROR):
        run_with(IndexError("tuple index\nout of range"), is_ready=False, control=control)
    text = str(caught.value)
    assert text.startswith("start: failed unexpectedly with IndexError: tuple index out of range (line ")
    assert text.endswith(" of test_start_failures.py)")
    assert control.said == [(text, True)]
    assert 1 <= caplog.text.count("  File ") <= MAX_FRAMES
    assert "IndexError: tuple index" in caplog.text


def test_an_unexpected_failure_behind_ready_is_for_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    control = FakeControl()
    with caplog.at_level(logging.ERROR):
        assert run_with(IndexError("x"), is_ready=True, control=control) == 1
    assert control.said == [("IndexError: x", False)]
    assert 1 <= caplog.text.count("  File ") <= MAX_FRAMES


def test_a_lost_peer_before_ready_is_for_a_restart() -> None:
    control = FakeControl()
    assert run_with(PeerLost("gone"), is_ready=False, control=control) == 1
    assert control.said == [("gone", False)]


def test_a_limit_of_the_system_is_named_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    control = FakeControl()
    with pytest.raises(ConfigError, match="^start: Too many open files; .*ulimit -n"):
        run_with(OSError(24, "Too many open files", "/x"), is_ready=False, control=control)
    assert control.said[0][1]
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (zmq.ZMQError(24), "ulimit -n"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (RuntimeError("[x.cc:1] socket: Too many open files\nmore"), "ulimit -n"),
        (RuntimeError("Resource temporarily unavailable"), "ulimit -u"),
        (RuntimeError("Connection refused"), None),
        (OSError(2, "No such file"), None),
        (RuntimeError(), None),
    ],
)
def test_limits_of_the_system_are_known(error: Exception, words: str | None) -> None:
    limit = shortage(error)
    assert limit is None if words is None else words in str(limit)


@pytest.mark.parametrize(("text", "kind"), [("socket: Too many open files", ConfigError), ("refused", PeerLost)])
def test_a_group_that_lacks_sockets_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception]
) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(ProcessGroupGloo, "create_device", refuse)
    with pytest.raises(kind, match=text):
        connect_group(FileStore(str(tmp_path / "store"), 2), rank=0, world_size=2, host=None, timeout_s=1)


@pytest.mark.e2e
def test_a_rank_that_can_not_start_its_thread_says_so_in_one_line(checkpoints: Any, tmp_path: Path) -> None:
    values = {
        "model": str(checkpoints.one_layer), "partition": "even", "rank": 0, "world_size": 1, "local_rank": 0,
        "local_world_size": 1, "core_address": f"ipc://{tmp_path}/core", "key": "", "run_dir": str(tmp_path),
        "device": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 16,
    }  # fmt: skip
    code = (
        "import json, sys\nfrom tests.worker.rank_main import main\nfrom worker.control import ControlThread\n"
        "def refuse(self): raise RuntimeError(\"can't start new thread\")\n"
        "ControlThread.start = refuse\nsys.exit(main(json.loads(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(values)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert done.stderr.startswith("refused: start: can't start new thread; ")
    assert done.stderr.count("\n") == 1


# -------------------------------------------------------------------------------------------------------- memory


def boundary_of_width(width: int) -> tuple[BoundaryTensor, ...]:
    return (BoundaryTensor(name="hidden", width=width, dtype=torch.float32),)


def transports() -> list[Any]:
    return [GlooTransport(None), StagedTransport(None, torch.device("cpu"))]  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", transports(), ids=["gloo", "staged"])
@pytest.mark.parametrize("max_tokens", [1 << 28, 1 << 62])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_hops_that_do_not_fit_name_the_option(checkpoints: Any, rank: int, max_tokens: int, transport: Any) -> None:
    settings, topology = settings_for(checkpoints.fx_r, max_num_batched_tokens=max_tokens), Topology(rank=rank, num_stages=3)
    with pytest.raises(ConfigError, match=f"^--max-num-batched-tokens: no memory for hops of {max_tokens} tokens") as caught:
        make_links(settings, topology, boundary_of_width(1 << 16), transport, 0)
    assert "MB are free); give fewer" in str(caught.value)


@pytest.mark.parametrize("transport", transports(), ids=["gloo", "staged"])
def test_hops_that_torch_has_no_memory_for_name_the_option(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch, transport: Any
) -> None:
    """What seemed free may be gone when it is taken."""
    monkeypatch.setattr(opening, "free_host_memory", lambda: 1 << 80)
    settings = settings_for(checkpoints.fx_r, max_num_batched_tokens=1 << 40)
    with pytest.raises(ConfigError, match="^--max-num-batched-tokens: no memory for hops"):
        make_links(settings, Topology(rank=0, num_stages=2), boundary_of_width(1 << 6), transport, 0)


def changed_config(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target)
    content = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(content))
    return target


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 9}, "lacks tensors model.layers.5.input_layernorm.weight"),
        ({"num_hidden_layers": 4}, "holds tensors model.layers.4"),
        ({"intermediate_size": 1 << 20}, "tensor model.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_a_configuration_of_another_model_is_found_before_memory_is_asked_for(
    checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    devices = []

    def build(*arguments: Any, device: torch.device, **options: Any) -> Any:
        devices.append(device.type)
        return build_stage(*arguments, device=device, **options)

    build_stage = startup.build_stage
    monkeypatch.setattr(startup, "build_stage", build)
    settings = settings_for(changed_config(checkpoints.fx_r, tmp_path / "m", **changes))
    with pytest.raises(ConfigError, match=words):
        load_stage(settings, Topology(rank=0, num_stages=1))
    assert devices == ["meta"]


def test_a_stage_without_memory_finds_the_same_tensors(checkpoints: Any) -> None:
    stage = build_and_load(checkpoints.fx_r, range(2), is_first=True, is_last=False, dtype=torch.float32)
    settings = settings_for(checkpoints.fx_r)
    sources = check_weights(stage, startup.open_checkpoint(settings.model, settings.config))
    assert set(sources) == set(stage.weight_slots())
