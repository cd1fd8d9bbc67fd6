"""Do the examples in docs/http.md do what they say?"""

import json
import os
import re
import shutil
import subprocess

import pytest

from tests.conftest import Checkpoints
from tests.e2e.harness import ROOT, EnginePool
from tests.e2e.test_http_cases import FLAGS, url_of

pytestmark = pytest.mark.e2e

PAGE = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```bash\n(curl .*?)```", PAGE, re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_run(engines: EnginePool, checkpoints: Checkpoints, example: str) -> None:
    url = url_of(engines.get(checkpoints.fx_r, flags=FLAGS))
    done = subprocess.run(["bash", "-c", example], env={**os.environ, "URL": url}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if "/metrics" in example:
        assert "brigade_requests_running" in done.stdout
    elif '"stream": true' in example:
        assert done.stdout.endswith("data: [DONE]\n\n") and '"usage":{' in done.stdout
    else:
        answer = json.loads(done.stdout)
        assert "error" not in answer
        if "color" in example and "json_schema" in example:
            assert json.loads(answer["choices"][0]["message"]["content"])["color"] in ("red", "green")
        if '"choice"' in example:
            assert answer["choices"][0]["text"] in ("yes", "no")


def test_every_field_is_on_the_page() -> None:
    from engine.openai.fields import SamplingFields

    ours = set(SamplingFields.model_fields) - {
        "model", "temperature", "top_p", "n", "seed", "stop", "frequency_penalty", "presence_penalty", "logit_bias", "stream", "user",
    }  # fmt: skip
    assert len(EXAMPLES) >= 11
    assert [name for name in ours if f"`{name}" not in PAGE and f".{name}" not in PAGE and f'"{name}"' not in PAGE] == []
