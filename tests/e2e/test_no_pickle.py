"""Is anything pickled on its way between processes? In the source, and in a running engine (number 8)."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Checkpoints
from tests.e2e.harness import ROOT, serve

FOLDERS = ("ipc", "kernels", "engine", "worker", "scripts")
WATCH = Path(__file__).parent / "pickle_watch"

MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
"""``multiprocessing`` pickles what goes through its queues and pipes."""

NAMES = {
    # pyzmq
    "send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized",
    # torch.distributed
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "_object_to_tensor", "_tensor_to_object", "rpc",
    # torch
    "load_state_dict_from_url", "hub",
}  # fmt: skip
TORCH_ONLY = {"load", "save"}
"""Forbidden as ``torch.load`` and ``torch.save``: other objects have methods of that name."""


def violations(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (n.name for n in names if is_forbidden(n.name))
            case ast.ImportFrom(module=module, names=names):
                full = [f"{module}.{n.name}" for n in names]
                yield from (name for name in full if is_forbidden(name) or name.rpartition(".")[2] in NAMES)
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr) if attr in TORCH_ONLY:
                yield f"torch.{attr}"
            case ast.Attribute(attr=attr) if attr in NAMES:
                yield attr
            case ast.Name(id=name) if name in NAMES:
                yield name


def is_forbidden(module: str) -> bool:
    return module.split(".")[0] in MODULES or module.startswith("torch.multiprocessing")


def test_number_8_the_source_never_pickles() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 20
    found = [f"{path.relative_to(ROOT)}: {what}" for path in files for what in violations(path.read_text("utf-8"))]
    assert not found


@pytest.mark.parametrize("source", [
    "import pickle", "from pickle import loads", "import multiprocessing.queues", "socket.send_pyobj(1)",
    "torch.distributed.broadcast_object_list(x)", "from torch.distributed import gather_object", "torch.load(f)",
])  # fmt: skip
def test_number_8_the_source_check_sees(source: str) -> None:
    assert list(violations(source))


@pytest.mark.e2e
@pytest.mark.parametrize("num_nodes", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.alone])])
def test_number_8_a_running_engine_never_pickles(num_nodes: int, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Ranks and core, of one agent and of two, from start to end, with requests of every kind between.

    torchrun's own rendezvous lives in the agents, which are left aside.
    """
    log = tmp_path / "log"
    env = {"PYTHONPATH": f"{WATCH}:{ROOT}", "BRIGADE_PICKLE_LOG": str(log)}
    launcher = "brigade" if num_nodes == 1 else "torchrun"
    with serve(checkpoints.fx_r, env=env, launcher=launcher, num_nodes=num_nodes) as engine:
        probe = "import pickle; pickle.loads(pickle.dumps(1))"
        assert _run_here(probe, engine.environment) == 0
        client = engine.raw
        streams = [
            client.submit([5] * 40, max_tokens=8, temperature=0, logprobs=2, prompt_logprobs=2),
            client.submit([6] * 3, max_tokens=8, seed=1),
            client.submit([7] * 3, max_tokens=500, ignore_eos=True),
        ]
        client.pump_until(lambda: bool(streams[-1].token_ids), 20, lambda: "no token")
        client.abort(streams[-1].request_id)
        client.wait(streams, 30)
    uses = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(probe in use["words"] for use in uses), "the watch saw nothing at all"
    ours = [u for u in uses if {"scripts.serve", "engine.core_main"} & set(u["words"]) and not is_agent(u["words"])]
    assert not ours, ours[:3]


def is_agent(words: list[str]) -> bool:
    return "torch.distributed.run" in words or "scripts.agent" in words


def _run_here(source: str, env: dict[str, str]) -> int:
    return subprocess.run([sys.executable, "-c", source], env=env, check=False).returncode
