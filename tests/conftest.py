"""What all tests share: tiny checkpoints, the demo model and its oracle's results, and a check that nothing leaks."""

import contextlib
import gc
import json
import os
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

# Before anything imports triton: its kernels then run on CPU tensors.
os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Before anything imports torch: tests that run side by side have a core each, and so do the processes they start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import pytest

from scripts.demo_model import CACHE_FOLDER, FILE_NAME
from tests import tiny

GOLDEN = Path(__file__).parent / "golden"
LEAK_GRACE_S = 10.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", choices=("side-by-side", "alone"),
        help="only the tests that others may run beside, or only those marked alone; scripts/test.sh runs both",
    )  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = config.getoption("share")
    if share is None:
        return
    by_share: dict[str, list[pytest.Item]] = {"side-by-side": [], "alone": []}
    for item in items:
        by_share["alone" if item.get_closest_marker("alone") else "side-by-side"].append(item)
    items[:] = by_share.pop(share)
    [others] = by_share.values()
    config.hook.pytest_deselected(items=others)


class Checkpoints:
    """Tiny models, each built on first use and kept for the session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def fx_r(self) -> Path:
        """Random Llama of 5 layers, tied, no head on disk."""
        return tiny.random_llama(self.folder / "fx-r")

    @cached_property
    def garbage_head(self) -> Path:
        """``fx_r`` with a redundant head on disk whose values are wrong."""
        return tiny.random_llama(self.folder / "garbage-head", garbage_head=True)

    @cached_property
    def sharded(self) -> Path:
        """``fx_r`` in three files with an index."""
        return tiny.random_llama(self.folder / "sharded", num_files=3)

    @cached_property
    def fx_r_gguf(self) -> Path:
        """``fx_r`` as a GGUF file."""
        return tiny.as_gguf(self.fx_r, self.folder / "fx-r.gguf")

    @cached_property
    def one_layer(self) -> Path:
        return tiny.random_llama(self.folder / "one-layer", num_layers=1)

    @cached_property
    def large_vocabulary(self) -> Path:
        """Untied, 50,000 tokens: embedding and head are almost all of it, 102 MB each."""
        return tiny.random_llama(
            self.folder / "large-vocabulary", num_layers=2, hidden_size=512, intermediate_size=64, vocab_size=50_000,
            tied=False, std=0.05,
        )  # fmt: skip

    @cached_property
    def chain(self) -> Path:
        """Says tiny.SCRIPT after any prompt that ends in token 0."""
        return tiny.chain(self.folder / "chain")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    path = Path(os.environ.get("BRIGADE_DEMO_MODEL") or CACHE_FOLDER / FILE_NAME)
    if not path.is_file():
        pytest.skip("the demo model is not here; scripts/test.sh or `python -m scripts.demo_model` fetches it")
    return path


@pytest.fixture(scope="session")
def golden() -> "Golden":
    return Golden()


class Golden:
    """The stored results of tests/golden, see its README."""

    @cached_property
    def prompts(self) -> list[dict[str, Any]]:
        return list(_read("smollm2_greedy")["prompts"])

    @cached_property
    def text(self) -> dict[str, Any]:
        return _read("smollm2_text")

    @cached_property
    def quickstart(self) -> list[dict[str, Any]]:
        return list(_read("smollm2_quickstart")["answers"])


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes and sockets that a test opened are gone after it, unless a fixture of a wider scope owns them."""
    if _uses_shared_engines(request):
        yield
        return
    processes, sockets = _child_pids(), _open_sockets()
    yield
    deadline = time.monotonic() + LEAK_GRACE_S
    while True:
        left = _child_pids() - processes
        more = len(_open_sockets() - sockets)
        if not left and more <= 0:
            return
        if time.monotonic() > deadline:
            break
        gc.collect()
        for child in [psutil.Process(pid) for pid in left if psutil.pid_exists(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                child.wait(0.1)
        if not left:
            time.sleep(0.02)  # ZeroMQ closes its sockets in a thread of its own and tells nobody
    pytest.fail(f"left behind: processes {sorted(left)}, {more} sockets")


def _uses_shared_engines(request: pytest.FixtureRequest) -> bool:
    return "engines" in request.fixturenames


def _child_pids() -> set[int]:
    """Living descendants of this process; what multiprocessing keeps for itself does not count."""
    pids = set()
    for child in _descendants():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline()):
                pids.add(child.pid)
    return pids


def _descendants() -> list[psutil.Process]:
    """Most tests have none, and the kernel says so at once; to ask psutil is to read every process of the machine."""
    with contextlib.suppress(OSError):  # a thread that ended meanwhile
        told = [path.read_bytes() for path in Path("/proc/self/task").glob("*/children")]
        if told and not any(told):
            return []
    return psutil.Process().children(recursive=True)


def _open_sockets() -> set[str]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found
