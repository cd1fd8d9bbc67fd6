"""Does it start wherever it is started, and does it notice when a process stops without dying?"""

import os
import signal
from pathlib import Path

import pytest

from engine import SamplingParams
from ipc.errors import EngineError
from tests.conftest import Checkpoints
from tests.e2e.harness import serve

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


def test_modules_in_the_current_directory_are_never_ours(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("open('was-run', 'w')\nraise SystemExit(0)\n")
    with serve(checkpoints.fx_r, tmp=tmp_path, pp=1, flags=["--num-kv-blocks", "64"]) as engine:
        engine.settle()
    assert not (tmp_path / "was-run").exists()


def test_a_frozen_rank_is_replaced_within_the_health_timeout(checkpoints: Checkpoints) -> None:
    flags = ["--health-timeout", "2", "--num-kv-blocks", "64"]
    with serve(checkpoints.fx_r, flags=flags) as engine, engine.client() as client:
        frozen = engine.tree().ranks[1]
        os.kill(frozen.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="no sign of life"):
            for _ in client.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=500)):
                pass
        answers = list(client.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=4)))
        assert answers[-1].finish_reason is not None
        assert client.stats()["epoch"] == 2
