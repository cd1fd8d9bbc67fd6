"""Does every family, cut into stages, on every backend, generate what transformers generates?

The core's own scheduler drives the stages, so prompts come in chunks beside decodes, blocks that left a window are used
again, and so are rows and prefixes.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kv_spec import most_blocks, spec_of
from tests.families import FAMILIES, WINDOW, random_family
from tests.native import INSTRUCTION_SETS
from tests.oracle import LOGPROB_TOLERANCE, Greedy, Oracle, check_greedy
from tests.worker.fake_graphs import FakePool
from tests.worker.scheduled import BACKENDS, Engine, prompt_of
from worker.kv_groups import kv_groups
from worker.model_config import read_model_config

NEW = [family for family in FAMILIES if family != "llama"]
MAX_TOKENS = 24


class Models:
    """Checkpoints beside their oracles, made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, tuple[Path, Oracle]] = {}
        self.known: dict[tuple[str, tuple[int, ...], int], Greedy] = {}

    def get(self, family: str, **config: object) -> tuple[Path, Oracle]:
        name = f"{family}-{abs(hash(str(sorted(config.items()))))}"
        if name not in self.made:
            path = random_family(self.folder / name, family, config=config)
            self.made[name] = path, Oracle.of(path)
        return self.made[name]

    def greedy(self, path: Path, prompt: Sequence[int], num_tokens: int) -> Greedy:
        key = (path.name, tuple(prompt), num_tokens)
        if key not in self.known:
            self.known[key] = self.made[path.name][1].greedy(prompt, num_tokens)
        return self.known[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


def check(models: Models, path: Path, engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> None:
    for prompt, (token_ids, logprobs) in zip(prompts, engine.run(prompts, num_tokens), strict=True):
        expected = models.greedy(path, prompt, num_tokens)
        excused = check_greedy(expected, lambda ids, count: engine.run([ids], count)[0][0], token_ids)
        end = excused[0].position if excused else num_tokens
        assert np.abs(np.array(logprobs[:end]) - expected.logprobs[:end]).max() <= LOGPROB_TOLERANCE


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", NEW)
def test_ids_and_logprobs_are_the_oracles(models: Models, family: str, backend: str, num_stages: int) -> None:
    """C7: prompts on both sides of the window's edge, and one that decodes across it from two tokens before."""
    path, _ = models.get(family)
    engine = Engine(path, num_stages, attention_backend=backend)
    prompts = [prompt_of(length) for length in (12, WINDOW - 2, WINDOW, WINDOW + 1, 48, 97)]
    check(models, path, engine, prompts, MAX_TOKENS)


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")
@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize("family", NEW)
def test_graphs_of_every_family(models: Models, family: str, mode: str) -> None:
    """Windows, groups of layers and two kinds of turns; log probabilities of tokens beside ids."""
    path, _ = models.get(family)
    pool = FakePool()
    engine = Engine(path, 2, cudagraph_mode=mode, cudagraph_capture_sizes=(4, 6, 40), pool=pool)
    check(models, path, engine, [prompt_of(length) for length in (12, WINDOW + 1, 48)], MAX_TOKENS)
    assert pool.replayed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", NEW)
def test_prefixes_are_shared(models: Models, family: str, backend: str) -> None:
    """C9: cold, warm, and with endings of their own; beginnings shorter and longer than the window."""
    path, _ = models.get(family)
    engine = Engine(path, 2, attention_backend=backend)
    base = prompt_of(80, 5)
    prompts = [base, base[:33] + prompt_of(20, 6), base[:64] + prompt_of(9, 7)]
    for _ in range(2):
        for prompt in prompts:
            check(models, path, engine, [prompt], 8)
    assert engine.scheduler.stats().prefix_hit_tokens >= 64 + 48 + 32 + 64


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_small_pool_preempts_and_reuses(models: Models, family: str) -> None:
    path, _ = models.get(family)
    config = read_model_config(str(path))
    specs = map(spec_of, kv_groups(config, range(config.num_layers)))
    engine = Engine(path, 2, num_blocks=2 + most_blocks(specs, 96, 16, 32), max_model_len=96)
    check(models, path, engine, [prompt_of(9 + i, i) for i in range(5)], 44)
    assert engine.scheduler.stats().preemptions > 0


@pytest.mark.parametrize("partition", ["3,2", "2,3", "1,1,1,1,1"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen2"])
def test_c4_layers_are_told_apart_by_their_global_number(models: Models, family: str, partition: str) -> None:
    path, _ = models.get(family)
    engine = Engine(path, partition.count(",") + 1, partition=partition)
    check(models, path, engine, [prompt_of(12), prompt_of(60)], 12)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2"])
def test_c4_layer_types_in_any_pattern(models: Models, family: str) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    path, _ = models.get(family, layer_types=kinds, sliding_window=WINDOW, use_sliding_window=True)
    assert read_model_config(str(path)).windows == (None, WINDOW, WINDOW, None, WINDOW)
    check(models, path, Engine(path, 2), [prompt_of(60)], 12)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_c8_a_window_that_no_layer_type_names_is_none(models: Models, family: str) -> None:
    extra = {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": ["full_attention"] * 5}
    path, _ = models.get(family, **extra)
    assert read_model_config(str(path)).windows == (None,) * 5
    check(models, path, Engine(path, 2), [prompt_of(60)], 12)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_a_window_that_is_switched_off(models: Models, family: str) -> None:
    path, _ = models.get(family, sliding_window=None, use_sliding_window=False)
    check(models, path, Engine(path), [prompt_of(60)], 12)


def test_a_window_off_by_one_would_show(models: Models) -> None:
    """C7's measure: at one token beyond the window log probabilities differ by far more than the tolerance."""
    path, oracle = models.get("mistral")
    wider, other = models.get("mistral", sliding_window=WINDOW + 1)
    for length, is_same in ((WINDOW, True), (WINDOW + 1, False)):
        differences = oracle.logprobs(prompt_of(length)) - other.logprobs(prompt_of(length))
        assert (differences[-1].abs().max().item() < 10 * LOGPROB_TOLERANCE) == is_same
    with pytest.raises(AssertionError):
        check(models, path, Engine(wider), [prompt_of(WINDOW + 1)], 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", NEW)
def test_log_probabilities_of_a_prompt(models: Models, family: str, backend: str) -> None:
    """Closer than ids need: the two formulas of gelu differ by ten times as much."""
    path, oracle = models.get(family)
    tokens = prompt_of(60)
    expected = oracle.logprobs(tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    found = Engine(path, 2, attention_backend=backend).prompt_logprobs(tokens)
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("family", NEW)
def test_bfloat16_stays_near(models: Models, family: str) -> None:
    """As near to float32 as transformers in bfloat16, over the log probabilities of a sequence."""
    path, oracle = models.get(family)
    tokens = prompt_of(60)
    exact = oracle.logprobs(tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    theirs = Oracle.of(path, torch.bfloat16).logprobs(tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    ours = Engine(path, 2, dtype="bfloat16").prompt_logprobs(tokens)
    their_error, our_error = ((values - exact).square().mean().sqrt().item() for values in (theirs, ours))
    assert 0 < our_error <= 1.3 * their_error
