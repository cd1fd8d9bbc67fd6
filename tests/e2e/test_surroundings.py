"""Does it start wherever it is started, and does it notice when a process stops without dying?"""

import os
import signal
from pathlib import Path

import pytest

from engine import SamplingParams
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
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        *_, answer = client.generate([5, 6, 7], params)
        assert answer.finish_reason == "length"
        *_, again = client.generate([5, 6, 7], params)
        assert again.token_ids == answer.token_ids
        assert client.stats()["epoch"] == 2
