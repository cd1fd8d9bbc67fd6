"""Do contexts of thousands of tokens give transformers' tokens: full, windowed and soft-capped, in chunks, on every backend?"""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.families import random_family
from tests.oracle import LOGPROB_TOLERANCE, Oracle, check_greedy
from tests.tiny import random_llama
from tests.worker.scheduled import BACKENDS, Engine, prompt_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MOST = 8192
WINDOW = 1024
NUM_TOKENS = 12
MODELS = ("llama", "mistral", "gemma2", "gemma3")


def checkpoint(folder: Path, family: str) -> Path:
    """Three layers; with windows one of each kind at least, but for Mistral, which has them everywhere."""
    if family == "llama":
        return random_llama(folder, num_layers=3, max_position_embeddings=MOST)
    window = {"sliding_window": WINDOW}
    return random_family(folder, family, num_layers=3, max_position_embeddings=MOST, config=window)


class Reference:
    """One family's checkpoint, and what transformers says of it; computed once for all backends."""

    def __init__(self, folder: Path, family: str) -> None:
        self.path = checkpoint(folder / family, family)
        oracle = Oracle.of(self.path)
        self.prompts = [prompt_of(length) for length in (MOST - NUM_TOKENS, 4097, WINDOW - 2)]
        self.greedy = [oracle.greedy(prompt, NUM_TOKENS) for prompt in self.prompts]
        told = oracle.logprobs(self.prompts[0])[:-1]
        self.prompt_logprobs = told.gather(1, torch.tensor(self.prompts[0][1:])[:, None])[:, 0]


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("long"), request.param)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_and_logprobs_are_the_oracles(reference: Reference, backend: str, num_stages: int) -> None:
    """Up to the last token that the model's positions allow; three sequences in chunks beside each other's decodes."""
    engine = Engine(
        reference.path, num_stages, num_blocks=1400, max_model_len=MOST, budget=500, attention_backend=backend
    )
    results = engine.run(reference.prompts, NUM_TOKENS)
    for expected, (token_ids, logprobs) in zip(reference.greedy, results, strict=True):
        excused = check_greedy(expected, lambda ids, count: engine.run([ids], count)[0][0], token_ids)
        end = excused[0].position if excused else NUM_TOKENS
        assert np.abs(np.array(logprobs[:end]) - expected.logprobs[:end]).max() <= LOGPROB_TOLERANCE
    found = engine.prompt_logprobs(reference.prompts[0])
    assert (found - reference.prompt_logprobs).abs().max() <= LOGPROB_TOLERANCE
