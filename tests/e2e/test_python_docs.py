"""Does docs/python.md tell everything there is, and do its examples run?"""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from engine import BatchProgress, Output, Result, TokenLogprob, Usage
from engine.client import Client
from ipc import errors
from tests.conftest import Checkpoints
from tests.e2e.harness import EnginePool
from tests.e2e.test_parity import FLAGS
from tests.terminal import ROOT

pytestmark = pytest.mark.e2e

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ADDRESS = "tcp://127.0.0.1:5757"


def test_every_field_and_every_call_is_told() -> None:
    names = {f.name for kind in (Output, Usage, TokenLogprob, Result, BatchProgress) for f in fields(kind)}
    names |= {name for name in vars(Client) if not name.startswith("_")} - {"close"}
    names |= {"RequestError", "PromptTooLong", "PeerLost", "ConfigError"}
    untold = {name for name in names if not re.search(rf"\b{name}\b", PAGE)}
    assert untold == set() and all(hasattr(errors, name) for name in names if name.endswith("Error"))


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int, engines: EnginePool, checkpoints: Checkpoints, tmp_path: Path) -> None:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    assert "5757" not in EXAMPLES[number].replace(ADDRESS, "")
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number].replace(ADDRESS, engine.address), encoding="utf-8")
    done = subprocess.run([sys.executable, "-W", "error", str(script)], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONUTF8": "1"})  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    engine.settle()
