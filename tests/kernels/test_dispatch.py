"""When do Triton kernels compute, and is triton loaded only then?"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import gpu
from kernels.gpu import dispatch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What is remembered about devices is forgotten before and after a test."""
    serves = dispatch.serves
    serves.cache_clear()
    yield
    serves.cache_clear()


def test_a_rank_on_the_cpu_starts_without_triton() -> None:
    """It takes a second to load."""
    script = (
        "import sys, torch, worker.worker, worker.startup, worker.models.llama\n"
        "from kernels.silu_mul import silu_mul\n"
        "silu_mul(torch.ones(1, 2))\n"
        "print('triton' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize(("capability", "is_served"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)])
def test_gpus_from_ampere_on(capability: tuple[int, int], is_served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert dispatch.serves(torch.device("cuda", 0)) is is_served
    assert not dispatch.serves(torch.device("cpu"))
    assert not dispatch.serves(torch.device("meta"))


def test_without_triton_plain_torch_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "kernels.gpu.library", None)
    monkeypatch.delattr(gpu, "library", raising=False)  # where an import before has left it
    monkeypatch.setattr(dispatch, "serves", lambda device: True)
    dispatch._library.cache_clear()
    assert dispatch.triton_for(torch.ones(1)) is None
    assert "plain torch instead of Triton kernels" in caplog.text
    dispatch._library.cache_clear()
