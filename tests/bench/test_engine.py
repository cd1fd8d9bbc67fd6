"""Does a benchmark start its engine as a person would, from the folder that it is in?"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ipc.errors import PeerLost
from scripts.bench.engine import Engine


@pytest.mark.e2e
def test_a_models_path_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.txt").write_text("not a model")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PeerLost, match=r"model\.txt is not a folder"), Engine(["model.txt"]):
        pass


BENCHMARK = """
import signal
from scripts.bench.engine import Engine
engine = Engine(["no-such-model"])
try:
    print("begun", flush=True)
    signal.pause()
finally:
    engine.stop()
    print("engine ended", flush=True)
"""


def test_a_benchmark_that_is_told_to_end_ends_its_engine_first() -> None:
    process = subprocess.Popen([sys.executable, "-c", BENCHMARK], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert (said, process.returncode) == ("engine ended\n", 128 + signal.SIGTERM)
