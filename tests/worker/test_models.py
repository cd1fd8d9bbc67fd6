"""Does a Llama, cut into stages, compute what transformers computes?"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ipc.errors import ConfigError
from tests.worker.stages import CPU, Pipeline
from worker.attention import AttentionNeeds, select_backend
from worker.model_config import read_model_config
from worker.models import BoundaryTensor, build_stage

TOLERANCE = 1e-4
VOCAB_SIZE = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_size": {"head_dim": 20, "num_key_value_heads": 6},
    "one_kv_head": {"num_key_value_heads": 1},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3": {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
}


class Models:
    """Random checkpoints as transformers writes them, each beside the model it came from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, tuple[Path, LlamaForCausalLM]] = {}

    def get(self, variant: str) -> tuple[Path, LlamaForCausalLM]:
        if variant not in self.made:
            torch.manual_seed(len(variant))
            model = LlamaForCausalLM(LlamaConfig(**SIZES | VARIANTS[variant], attn_implementation="eager")).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith(("norm.weight", "bias")):  # ones and zeros would hide that they are not used
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            model.save_pretrained(self.folder / variant)
            self.made[variant] = self.folder / variant, model
        return self.made[variant]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def draw_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def oracle(model: LlamaForCausalLM, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    gap = (actual - expected).abs().max().item()
    assert gap <= TOLERANCE, f"logits differ by {gap}"


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_oracles(models: Models, variant: str, num_stages: int) -> None:
    path, model = models.get(variant)
    tokens = draw_tokens(90)
    expected = oracle(model, tokens)
    pipeline = Pipeline(path, num_stages)
    assert_close(pipeline.step({0: tokens[:70]})[0], expected[:70])
    for position in range(70, 90):
        assert_close(pipeline.step({0: tokens[position : position + 1]})[0], expected[position : position + 1])


def test_c2_uneven_split_by_hand(models: Models) -> None:
    path, model = models.get("tied")
    tokens = draw_tokens(20)
    pipeline = Pipeline(path, 3, partition="1,3,1")
    assert_close(pipeline.step({0: tokens})[0], oracle(model, tokens))


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 16])
def test_c13_chunks_do_not_change_results(models: Models, chunk: int) -> None:
    path, model = models.get("untied")
    tokens = draw_tokens(35)
    pipeline = Pipeline(path, 2)
    pieces = [pipeline.step({0: tokens[i : i + chunk]})[0] for i in range(0, len(tokens), chunk)]
    assert_close(torch.cat(pieces), oracle(model, tokens))


def test_mixed_ragged_batches(models: Models) -> None:
    """Sequences come, are prefilled in chunks beside others that decode, and go."""
    path, model = models.get("llama3")
    draw = torch.Generator().manual_seed(3)
    texts = {s: draw_tokens(5 + 9 * s, seed=s) for s in range(7)}
    expected = {s: oracle(model, tokens) for s, tokens in texts.items()}
    pipeline = Pipeline(path, 2, num_blocks=128)
    while True:
        batch = {}
        for sequence, tokens in texts.items():
            done = pipeline.lengths.get(sequence, 0)
            size = int(torch.randint(0, 12, (), generator=draw))
            if tokens[done : done + size]:
                batch[sequence] = tokens[done : done + (size if size > 6 else 1)]
        if batch:
            before = dict(pipeline.lengths)
            for sequence, logits in pipeline.step(batch, padding=len(batch) % 3).items():
                start = before.get(sequence, 0)
                assert_close(logits, expected[sequence][start : start + len(logits)])
        elif all(pipeline.lengths.get(s) == len(tokens) for s, tokens in texts.items()):
            break


def test_rows_hardly_depend_on_neighbours(models: Models) -> None:
    path, _ = models.get("tied")
    tokens = draw_tokens(31)
    alone, beside = Pipeline(path), Pipeline(path, seed=5)
    for pipeline in (alone, beside):
        pipeline.step({0: tokens[:30]})
    beside.step({s: draw_tokens(11 * s, seed=s) for s in range(1, 5)})
    crowd = {s: draw_tokens(1, seed=s + 50) for s in range(1, 5)}
    difference = alone.step({0: tokens[30:]})[0] - beside.step({0: tokens[30:], **crowd})[0]
    assert difference.abs().max() < 2e-5


def test_bfloat16_is_as_good_as_the_oracles(models: Models) -> None:
    path, model = models.get("tied")
    texts = [draw_tokens(60, seed=seed) for seed in range(6)]
    exact = torch.cat([oracle(model, tokens) for tokens in texts])
    theirs = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    pipeline = Pipeline(path, 2, dtype=torch.bfloat16, num_blocks=128)
    ours = torch.cat([pipeline.step({seed: tokens})[seed] for seed, tokens in enumerate(texts)])
    their_error = (torch.cat([oracle(theirs, tokens) for tokens in texts]) - exact).square().mean().sqrt().item()
    our_error = (ours - exact).square().mean().sqrt().item()
    assert ours.dtype == torch.float32
    assert 0 < our_error <= 1.05 * their_error


def test_float16_runs(models: Models) -> None:
    path, model = models.get("biases")
    tokens = draw_tokens(12)
    logits = Pipeline(path, dtype=torch.float16).step({0: tokens})[0]
    assert (logits - oracle(model, tokens)).abs().max() < 0.5


def test_stages_hold_only_their_own(models: Models) -> None:
    """F5 on a small scale: the head is on the last stage, an untied embedding on the first only."""
    path, model = models.get("untied")
    names = [set(stage.weight_slots()) for stage in Pipeline(path, 2).stages]
    assert names[0] | names[1] == set(model.state_dict())
    assert not names[0] & names[1]
    assert "lm_head.weight" in names[1]
    assert "model.embed_tokens.weight" in names[0]
    table = VOCAB_SIZE * SIZES["hidden_size"] * 4
    sizes = [stage.weight_bytes() for stage in Pipeline(path, 2).stages]
    assert sum(sizes) == sum(4 * parameter.numel() for parameter in model.parameters())
    assert all(size > table for size in sizes)


def test_c1_tied_head_is_loaded_on_the_last_stage(models: Models) -> None:
    path, model = models.get("tied")
    names = [set(stage.weight_slots()) for stage in Pipeline(path, 3).stages]
    assert "model.embed_tokens.weight" in names[0] & names[2] - names[1]
    one = Pipeline(path, 1).stages[0]
    assert one.weight_bytes() == sum(4 * parameter.numel() for parameter in model.parameters())


def test_boundary_and_inputs_stay(models: Models) -> None:
    path, _ = models.get("tied")
    config = read_model_config(str(path))
    backend = select_backend("auto", AttentionNeeds(device=CPU, dtype=torch.bfloat16, head_size=8, block_size=4))
    stage = build_stage(
        config, range(0, 1), is_first=True, is_last=False, dtype=torch.bfloat16, device=CPU, backend=backend
    )
    assert stage.boundary() == (BoundaryTensor(name="hidden", width=48, dtype=torch.bfloat16),)
    pipeline = Pipeline(path)
    hidden = torch.randn(3, 48)
    before = hidden.clone()
    pipeline.step({0: [1, 2, 3]})
    metadata = pipeline.builder.build(pipeline._common({0: [1, 2, 3]}, [0, 1, 2]))
    pipeline.stages[0](hidden, torch.arange(3), pipeline.caches[0], [metadata] * len(pipeline.caches[0]))
    pipeline.stages[0].logits(hidden)
    assert torch.equal(hidden, before)


def test_a_model_beyond_all_memory(models: Models) -> None:
    config = replace(read_model_config(str(models.get("tied")[0])), hidden_size=1 << 20, vocab_size=1 << 24)
    backend = select_backend("auto", AttentionNeeds(device=CPU, dtype=torch.float32, head_size=8, block_size=4))
    with pytest.raises(ConfigError, match="no memory for the weights of layers 0 to 1 in torch.float32 on cpu"):
        build_stage(config, range(0, 2), is_first=True, is_last=False, dtype=torch.float32, device=CPU, backend=backend)


def test_unknown_family(models: Models) -> None:
    config = replace(read_model_config(str(models.get("tied")[0])), architecture="mamba")
    backend = select_backend("auto", AttentionNeeds(device=CPU, dtype=torch.float32, head_size=8, block_size=4))
    with pytest.raises(ConfigError, match="no model class for 'mamba'; known are llama"):
        build_stage(config, range(0, 2), is_first=True, is_last=False, dtype=torch.float32, device=CPU, backend=backend)


def test_old_spelling_of_rope_scaling(models: Models, tmp_path: Path) -> None:
    """Configurations before transformers 5 have rope_theta beside rope_scaling."""
    path, _ = models.get("llama3")
    content = json.loads((path / "config.json").read_text())
    parameters = content.pop("rope_parameters")
    content["rope_theta"] = parameters.pop("rope_theta")
    content["rope_scaling"] = parameters
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_model_config(str(tmp_path)).rope == read_model_config(str(path)).rope
