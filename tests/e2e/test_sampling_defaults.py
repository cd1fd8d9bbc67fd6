"""Do the defaults of a model's generation_config reach its requests, and does the start say so? (S14)"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine import Client, SamplingParams
from tests.conftest import Checkpoints
from tests.e2e.conftest import random_prompt
from tests.e2e.harness import EnginePool, serve
from tests.e2e.test_parity import FLAGS

pytestmark = pytest.mark.e2e

PROMPT = random_prompt(random.Random(14), 20)


def answer(client: Client, **params: Any) -> list[int]:
    wanted = SamplingParams(max_tokens=24, seed=7, ignore_eos=True, **params)
    return list(client.generate(PROMPT, wanted))[-1].token_ids


@pytest.fixture
def with_defaults(tmp_path: Path, checkpoints: Checkpoints) -> Path:
    model = tmp_path / "model"
    shutil.copytree(checkpoints.fx_r, model)
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.6, "top_k": 5, "top_p": 1.5}))
    return model


def test_s14_defaults_of_the_model_are_told_and_an_explicit_value_wins(
    with_defaults: Path, engines: EnginePool, checkpoints: Checkpoints
) -> None:
    with engines.get(checkpoints.fx_r, flags=FLAGS).client() as client:
        assert client.model.sampling_defaults["temperature"] == 1.0
        expected = [answer(client, temperature=0.6, top_k=5), answer(client, temperature=1.0), answer(client, top_k=2)]
        cooler = answer(client, temperature=0.6, top_k=2)
    with serve(with_defaults, flags=FLAGS) as engine:
        alive = engine.is_usable
        engine.output.wait_for("generation_config: top_p=1.5 must be above 0 and at most 1; it is not taken as a default", 1, alive)
        engine.output.wait_for("sampling defaults from generation_config: temperature=0.6 top_k=5;", 1, alive)
        with engine.client() as client:
            assert client.model.sampling_defaults == {
                "temperature": 0.6, "top_k": 5, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0
            }  # fmt: skip
            told = [answer(client), answer(client, temperature=1.0, top_k=0), answer(client, temperature=1.0, top_k=2)]
            assert told == expected and len(set(map(tuple, told))) == 3
            assert answer(client, top_k=2) == cooler, "what is unset has the model's default beside what is set"
