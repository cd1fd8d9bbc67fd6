"""What docs/ gives people to copy, run against an engine: the client of the protocol page, and the probe of the manifest."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import Checkpoints
from tests.e2e.harness import EnginePool
from tests.e2e.test_parity import FLAGS

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "docs" / "plain_client.py"


def run_client(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a folder of its own and without our path: nothing of ours can be imported."""
    program = folder / "client.py"
    program.write_text(CLIENT.read_text())
    return subprocess.run(
        [sys.executable, "-I", str(program), *words], cwd=folder, env={"PATH": ""}, capture_output=True, text=True, timeout=90
    )


def test_the_plain_client_gets_the_tokens(engines: EnginePool, checkpoints: Checkpoints, tmp_path: Path) -> None:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    prompt = [5, 6, 7, 300]
    [expected] = engine.raw.run([(prompt, {"max_tokens": 16, "temperature": 0.0})], concurrency=1, timeout_s=60)
    done = run_client(tmp_path, engine.address, *map(str, prompt))
    assert (done.returncode, [int(line) for line in done.stdout.split()]) == (0, expected.token_ids), done.stderr
    assert f"{engine.raw.info.name}: 2 stages, 512 tokens" in done.stderr
    assert f"ended by {expected.finish_reason}" in done.stderr


def test_the_plain_client_says_why_it_was_refused(engines: EnginePool, checkpoints: Checkpoints, tmp_path: Path) -> None:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    done = run_client(tmp_path, engine.address, "5", "512")
    assert (done.returncode, done.stdout) == (1, "")
    assert "bad_request: prompt_token_ids holds 512; ids must be between 0 and 511" in done.stderr


def test_the_plain_client_is_short_and_imports_nothing_of_ours() -> None:
    lines = CLIENT.read_text().splitlines()
    assert len(lines) <= 60
    imported = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert imported == {"struct", "sys", "msgpack", "zmq"}


def test_the_readiness_probe_of_the_manifest(engines: EnginePool, checkpoints: Checkpoints) -> None:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    deployment = next(yaml.safe_load_all((ROOT / "docs" / "deploy" / "one-node.yaml").read_text()))
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    python, flag, program = container["readinessProbe"]["exec"]["command"]
    assert (python, flag) == ("python", "-c") and "tcp://127.0.0.1:5757" in program
    for address, is_ready in ((engine.address, True), ("tcp://127.0.0.1:9", False)):
        words = [sys.executable, "-c", program.replace("tcp://127.0.0.1:5757", address)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode == 0) is is_ready, done.stderr
