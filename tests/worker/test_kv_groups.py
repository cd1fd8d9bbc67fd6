"""Do ranks agree on the groups of a model, and does every layer find its table and its tensor?"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.config import CoreConfig
from engine.kv_sizing import plan_kv_cache
from ipc.errors import ConfigError, ProtocolError
from ipc.messages import KVCacheGroup, WorkerLoaded
from tests.families import WINDOW, random_family
from tests.tiny import random_llama
from tests.worker.pipeline import Pipeline, Plans
from worker.block_table import BlockTable
from worker.input_batch import StepTokens, attention_inputs
from worker.kv_groups import MOST_OF_A_KIND, kv_groups, num_cache_tensors, place_layers
from worker.model_config import ModelConfig, read_model_config
from worker.partition import split_layers
from worker.request_states import Span

F, W = None, WINDOW


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_model_config(str(random_llama(tmp_path_factory.mktemp("groups") / "model", num_layers=1)))


def of(llama: ModelConfig, *windows: int | None) -> ModelConfig:
    return replace(llama, num_layers=len(windows), layer_windows=windows)


def layers_of(config: ModelConfig, layers: range | None = None) -> list[list[int]]:
    return [group.layers for group in kv_groups(config, layers or range(config.num_layers))]


def test_groups_are_about_equally_large(llama: ModelConfig) -> None:
    assert layers_of(of(llama, F, F, F)) == [[0, 1, 2]]
    assert layers_of(of(llama, W, W)) == [[0, 1]]
    assert layers_of(of(llama, W, F, W, F)) == [[1, 3], [0, 2]]
    assert layers_of(of(llama, *[W, W, W, F] * 2)) == [[3, 7], [0, 4], [1, 5], [2, 6]]
    assert layers_of(of(llama, F, F, F, F, W, W)) == [[0, 2], [1, 3], [4, 5]]
    assert [group.kind for group in kv_groups(of(llama, W, 8, F), range(3))] == ["full", "window", "window"]
    assert [group.window for group in kv_groups(of(llama, W, 8, F), range(3))] == [0, 8, W]
    many = of(llama, *[W] * 40, F)
    assert len(kv_groups(many, range(41))) == 1 + MOST_OF_A_KIND
    assert num_cache_tensors(kv_groups(many, range(41))) == 40 // MOST_OF_A_KIND


@pytest.mark.parametrize("partition", ["even", "1,11", "11,1", "6,6"])
def test_the_core_puts_together_what_the_ranks_report(llama: ModelConfig, partition: str) -> None:
    """Also from a stage that has no layer of some group."""
    config = of(llama, *[W, W, W, W, W, F] * 2)
    split = split_layers(12, 2, partition)
    stages = [
        WorkerLoaded(
            core_id=1, epoch=1, rank=rank, groups=kv_groups(config, layers), bytes_per_block=100, free_bytes=10**9,
            device="cpu", weight_bytes=0, load_s=0.0, num_threads=1,
        )
        for rank, layers in enumerate(split)
    ]  # fmt: skip
    core = CoreConfig(
        run_dir="", agent_pid=0, agent_start=0, key="", num_stages=2, model_name="", vocab_size=512, model_max_len=512
    )
    plan = plan_kv_cache(core, stages, {0: "here", 1: "here"})
    assert [(group.kind, group.window) for group in plan.groups] == [("full", 0), *[("window", W)] * 5]
    assert sorted(layer for group in plan.groups for layer in group.layers) == list(range(12))
    for layers in split:
        group_of_layer, tensor_of_layer = place_layers(plan.groups, config, layers)
        assert [plan.groups[group].window or None for group in group_of_layer] == [config.windows[i] for i in layers]
        assert len({*zip(group_of_layer, tensor_of_layer, strict=True)}) == len(layers), "two layers in one place"
        assert max(tensor_of_layer) + 1 == num_cache_tensors(kv_groups(config, layers))


def test_groups_of_another_model_are_refused(llama: ModelConfig) -> None:
    config = of(llama, W, F)
    for groups in (
        (KVCacheGroup(kind="full", layers=[0, 1]),),
        (KVCacheGroup(kind="full", layers=[1]), KVCacheGroup(kind="window", layers=[0], window=W + 1)),
        (KVCacheGroup(kind="window", layers=[0], window=W), KVCacheGroup(kind="full", layers=[1])),
        (KVCacheGroup(kind="full", layers=[1]), KVCacheGroup(kind="window", layers=[], window=W)),
    ):
        with pytest.raises(ConfigError, match="layers 0 to 1 must be in 2 groups, as they were reported"):
            place_layers(groups, config, range(2))


def test_layers_of_different_groups_share_tensors(tmp_path: Path) -> None:
    path = random_family(tmp_path / "gemma", "gemma2", num_layers=4)
    runner = Pipeline(path).runners[0]
    first, second, third, fourth = runner._caches.tensors
    assert first is second and third is fourth and first is not third
    assert runner.num_groups == 2


def test_plans_with_the_blocks_of_another_number_of_groups_are_refused(tmp_path: Path) -> None:
    pipeline, plans = Pipeline(random_family(tmp_path / "gemma", "gemma2", num_layers=2)), Plans()
    plans.add(0, [5, 6, 7])
    with pytest.raises(ProtocolError, match="block_ids.*has 1 KV groups, this model has 2"):
        pipeline.run(plans.step({0: 3}))


def test_a_token_without_a_block_is_refused() -> None:
    table = BlockTable(4, 64, 16)
    table.set_row(2, [-1, 5])

    def step(start: int, count: int) -> StepTokens:
        ends = np.array([start + count], np.int32)
        span = Span(starts=np.array([start], np.int32), ends=ends, samples=np.array([True]))
        return StepTokens.of(np.array([2]), np.array([count]), span)

    assert attention_inputs(table, step(16, 2)).slots.tolist() == [80, 81]
    with pytest.raises(ProtocolError, match="row 2 computes a token that has no block"):
        attention_inputs(table, step(15, 2))
