"""Do wrong starts end with rank, cause and remedy, and do odd surroundings work? (C3 U1 U3 U6 P9)"""

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests import tiny
from tests.conftest import Checkpoints
from tests.e2e.compare import check_against
from tests.e2e.conftest import TinyOracle
from tests.e2e.harness import Engine, EnginePool, Failure, fail_to_start, serve, start
from tests.e2e.test_parity import FLAGS
from tests.oracle import Excused

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

WITHIN_S = 30.0
MOST_LINES = 40
LAST_LINES = 5


def check_failure(failure: Failure, patterns: Sequence[str], *, names_rank: bool = True) -> None:
    assert all(code != 0 for code in failure.exit_codes), failure.text
    assert failure.elapsed_s < WITHIN_S
    assert len(failure.lines) < MOST_LINES, failure.text
    assert "Traceback" not in failure.text
    last = "\n".join(failure.lines[-LAST_LINES:])
    for pattern in [*patterns, *([r"\brank \d"] if names_rank else [])]:
        assert re.search(pattern, last), f"nothing like {pattern!r} in the last lines of:\n{failure.text}"


# ---------------------------------------------------------------------------------------------- C3


@pytest.mark.parametrize(
    "partition", ["5,1", *(pytest.param(split, marks=pytest.mark.slow) for split in ("a,b", "5", "-1,6"))]
)
def test_c3_impossible_split(partition: str, checkpoints: Checkpoints) -> None:
    """One line names the layer count, the rank count and the split."""
    failure = fail_to_start(checkpoints.fx_r, flags=[f"--pipeline-partition={partition}"])
    numbers = r"--pipeline-partition.*\b5\b.*\b2\b|--pipeline-partition.*\b2\b.*\b5\b"
    check_failure(failure, [numbers, re.escape(partition)])


def test_c3_more_ranks_than_layers(checkpoints: Checkpoints) -> None:
    check_failure(fail_to_start(checkpoints.one_layer), [r"\b1 layer.*\b2\b|\b2\b.*\b1 layer"])


@pytest.mark.parametrize("num_nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_c3_under_plain_torchrun(num_nodes: int, checkpoints: Checkpoints) -> None:
    """torchrun adds words of its own; the cause is among them, and no rank hangs."""
    failure = fail_to_start(
        checkpoints.fx_r, flags=["--pipeline-partition=5,1"], launcher="torchrun", num_nodes=num_nodes
    )
    assert all(code != 0 for code in failure.exit_codes), failure.text
    assert re.search(r"--pipeline-partition.*5,1", failure.text), failure.text


# ---------------------------------------------------------------------------------------------- U1 and wrong starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A start that can't work: what to start, and what must be said."""

    make: Callable[[Checkpoints, Path], Path]
    flags: tuple[str, ...] = ()
    patterns: tuple[str, ...]
    names_rank: bool = True


def original(checkpoints: Checkpoints, tmp: Path) -> Path:
    return checkpoints.fx_r


def nowhere(checkpoints: Checkpoints, tmp: Path) -> Path:
    return tmp / "nowhere"


def changed(change: Callable[[Path], None]) -> Callable[[Checkpoints, Path], Path]:
    """A copy of fx_r that ``change`` has been at."""

    def make(checkpoints: Checkpoints, tmp: Path) -> Path:
        folder = Path(shutil.copytree(checkpoints.fx_r, tmp / "model"))
        change(folder)
        return folder

    return make


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:10_000])


def garbled(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(np.random.default_rng(0).bytes(20_000))


LAST_TENSOR = "model.layers.4.mlp.up_proj.weight"


def tensor_missing(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[LAST_TENSOR]
    save_file(tensors, folder / "model.safetensors")


def tensor_of_wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[LAST_TENSOR] = np.ascontiguousarray(tensors[LAST_TENSOR][:-1])
    save_file(tensors, folder / "model.safetensors")


def with_config(**entries: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | entries))

    return change


def unreadable(folder: Path) -> None:
    (folder / "model.safetensors").chmod(0)


def odd_tokenizer(checkpoints: Checkpoints, tmp: Path) -> Path:
    return tiny.as_gguf(checkpoints.fx_r, tmp / "model.gguf", tokenizer_kind="weird")


def odd_gguf(checkpoints: Checkpoints, tmp: Path) -> Path:
    return tiny.as_gguf(checkpoints.fx_r, tmp / "model.gguf", architecture="weird")


def text_as_gguf(checkpoints: Checkpoints, tmp: Path) -> Path:
    (tmp / "model.gguf").write_text("this is not a GGUF file\n" * 100)
    return tmp / "model.gguf"


MAMBA = with_config(architectures=["MambaForCausalLM"], model_type="mamba")

FAULTS = {
    "missing file": Fault(make=nowhere, patterns=("nowhere",), names_rank=False),
    "unknown architecture": Fault(make=changed(MAMBA), patterns=("(?i)mamba",)),
    "unknown tokenizer kind": Fault(make=odd_tokenizer, patterns=("weird", "(?i)tokenizer")),
    "missing tensor": Fault(make=changed(tensor_missing), patterns=(re.escape(LAST_TENSOR),)),
    "device absent": Fault(make=original, flags=("--device", "cuda"), patterns=("--device.*cuda",)),
}

SLOW_FAULTS = {
    "no config": Fault(make=changed(without_config), patterns=(r"config\.json",)),
    "truncated weights": Fault(make=changed(truncated), patterns=(r"model\.safetensors",)),
    "corrupt weights": Fault(make=changed(garbled), patterns=(r"model\.safetensors",)),
    "wrong shape": Fault(make=changed(tensor_of_wrong_shape), patterns=(re.escape(LAST_TENSOR), "159", "160")),
    "unknown architecture in GGUF": Fault(make=odd_gguf, patterns=("weird",)),
    "not a GGUF file": Fault(make=text_as_gguf, patterns=(r"model\.gguf",)),
    "rope of an unknown kind": Fault(
        make=changed(with_config(rope_scaling={"rope_type": "odd", "factor": 2.0})), patterns=("odd", "(?i)rope")
    ),
    "pool too small": Fault(
        make=original, flags=("--num-kv-blocks", "2", "--max-model-len", "100"), patterns=("--max-model-len", r"\b2\b"),
        names_rank=False,
    ),
    "no such dtype": Fault(make=original, flags=("--dtype", "int3"), patterns=("dtype", "int3"), names_rank=False),
    "no size to capture": Fault(
        make=original, flags=("--cudagraph-capture-sizes", "-4,8"), patterns=("--cudagraph-capture-sizes: -4 must be at least 1",)
    ),
    "tensor parallelism": Fault(make=original, flags=("--tp", "2"), patterns=("tensor-parallel-size",)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [*FAULTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAULTS)]
)
def test_u1_wrong_start(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    if name == "device absent" and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    fault = (FAULTS | SLOW_FAULTS)[name]
    failure = fail_to_start(fault.make(checkpoints, tmp_path), flags=fault.flags)
    check_failure(failure, fault.patterns, names_rank=fault.names_rank)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_u1_no_right_to_read(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model = changed(unreadable)(checkpoints, tmp_path)
    check_failure(fail_to_start(model), [r"model\.safetensors", "(?i)permission"])


@pytest.mark.slow
def test_u1_too_little_address_space(checkpoints: Checkpoints) -> None:
    """Whoever meets the limit first, it ends in time, in few lines and with a code."""
    if shutil.which("prlimit") is None:
        pytest.skip("needs prlimit")
    failure = fail_to_start(checkpoints.large_vocabulary, prefix=["prlimit", f"--as={1200 << 20}"])
    assert all(code != 0 for code in failure.exit_codes)
    assert len(failure.lines) < MOST_LINES, failure.text
    assert re.search("(?i)memory|alloc|map", failure.text), failure.text


def test_u1_address_in_use(checkpoints: Checkpoints) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        failure = fail_to_start(checkpoints.fx_r, listen=address)
    check_failure(failure, [re.escape(address), "in use", "choose|another"])


def test_the_default_address_in_use_is_no_fault(
    checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    """Two engines without --listen, started together: one takes a free port, and both say where they are."""
    both = [start(checkpoints.fx_r, pp=1, listen=None) for _ in range(2)]
    try:
        for engine in both:
            engine.wait_ready()
        assert both[0].address != both[1].address
        for engine in both:
            excused += check_against(engine.raw, tiny_oracle.expect(8, [9], 8), concurrency=1)
            engine.stop()
    finally:
        for engine in both:
            engine.kill()


# ---------------------------------------------------------------------------------------------- odd surroundings


@pytest.mark.parametrize("offline", ["unset", pytest.param("1", marks=pytest.mark.slow)])
def test_u3_a_local_path_needs_no_network(
    offline: str, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    """In a network namespace of its own with nothing but loopback; the client comes in over an ipc path."""
    prefix = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces are not allowed here")
    env = {} if offline == "unset" else {"HF_HUB_OFFLINE": offline}
    with (
        tempfile.TemporaryDirectory(prefix="bt-", dir="/tmp") as short,
        serve(checkpoints.fx_r, listen=f"ipc://{short}/clients", prefix=prefix, env=env) as engine,
    ):
        assert engine.start_s < WITHIN_S
        excused += check_against(engine.raw, tiny_oracle.expect(3, [9, 40], 8), concurrency=2)


@pytest.fixture(scope="module")
def with_two_threads(checkpoints: Checkpoints) -> Iterator[Engine]:
    """A fresh engine whose user wants two threads a rank."""
    with serve(checkpoints.fx_r, env={"OMP_NUM_THREADS": "2"}) as engine:
        yield engine


def threads_told(engine: Engine) -> list[int]:
    return [int(m[1]) for line in engine.output.lines if (m := re.search(r"stage \d.*\b(\d+) thread", line))]


def test_u6_ranks_share_the_cores(engines: EnginePool, checkpoints: Checkpoints) -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_told(engines.get(checkpoints.fx_r, flags=FLAGS)) == [max(1, cores // 2)] * 2


def test_u6_the_users_threads_win(with_two_threads: Engine) -> None:
    assert threads_told(with_two_threads) == [2, 2]


def test_ready_line_is_the_last_of_the_start(with_two_threads: Engine, checkpoints: Checkpoints) -> None:
    lines = with_two_threads.output.lines
    assert [i for i, line in enumerate(lines) if line.startswith("brigade ready:")] == [len(lines) - 1]
    assert f"model={checkpoints.fx_r.name} stages=2 " in lines[-1]


def test_p9_long_and_odd_paths(
    checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused], tmp_path: Path
) -> None:
    tmp = tmp_path / ("scratch of a – long – näme " + "x" * 150)
    tmp.mkdir()
    assert len(os.fsencode(tmp)) > 150
    model = tmp_path / ("m" * 100) / ("n" * 100)
    model.parent.mkdir()
    shutil.copytree(checkpoints.fx_r, model)
    with serve(model, tmp=tmp) as engine:
        excused += check_against(engine.raw, tiny_oracle.expect(9, [9, 40], 8), concurrency=2)


@pytest.mark.slow
def test_p9_a_listen_path_that_is_too_long(checkpoints: Checkpoints, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/{'x' * 120}"
    check_failure(fail_to_start(checkpoints.fx_r, listen=address), ["--listen", r"\b107\b"], names_rank=False)
