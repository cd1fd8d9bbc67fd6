"""Do all ranks take the split that rank 0 measured, does it say why, and when is nothing measured?"""

import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import CoreConfig
from ipc.errors import ConfigError, EngineError, PeerLost
from ipc.messages import WorkerReady
from ipc.params import SamplingParams
from tests import tiny
from tests.families import FAMILIES, random_family
from tests.oracle import Oracle
from tests.worker.fake_core import FakeCore
from tests.worker.pipeline import Plans, settings_for, tokens_of
from worker import auto_partition
from worker.attention import AttentionNeeds, select_backend
from worker.auto_partition import (
    ENGINE_S,
    KV_MEMORY_SHARE,
    Place,
    PoolLimits,
    agree_on_split,
    engine_seconds,
    explain,
    memory_of,
)
from worker.partition import MIX, ModelCosts, Split, StepCosts, choose_split, sizes_of, split_layers
from worker.profile_stage import PartBytes, bytes_to_measure, measure_costs, part_bytes
from worker.settings import WorkerSettings

CPU = torch.device("cpu")
WAIT_S = 20.0


class DictStore:
    """What the ranks need of a store, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: set(keys) <= self.values.keys(), timeout.total_seconds()):
                raise RuntimeError("wait timeout")


class NoStore(DictStore):
    """Must not be used."""

    def set(self, key: str, value: str) -> None:
        raise AssertionError(f"{key} was set")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not tiny: its head weighs as much as ten of its five layers."""
    folder = tmp_path_factory.mktemp("auto") / "model"
    return tiny.random_llama(folder, hidden_size=256, intermediate_size=512, vocab_size=24_000, std=0.05)


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModelCosts]]:
    """Measurements that differ each time; all that were taken."""
    taken: list[ModelCosts] = []
    draw = random.Random(0)

    def measure(config: Any, **_: Any) -> ModelCosts:
        step = StepCosts(
            layers=(1e-3,) * config.num_layers, embedding=0.0, head=draw.choice((0.0, 8e-3)), sampler=1e-3 * draw.random()
        )
        taken.append(ModelCosts(decode=step, prefill=replace(step, head=0.0, sampler=0.0)))
        return taken[-1]

    monkeypatch.setattr(auto_partition, "measure_costs", measure)
    return taken


def agree(settings: WorkerSettings, store: Any) -> Split:
    backend = select_backend(
        "torch", AttentionNeeds(device=CPU, dtype=torch.float32, head_size=settings.config.head_size, block_size=16)
    )
    return agree_on_split(settings, store, device=CPU, dtype=torch.float32, backend=backend)


def agree_all(model: Path, world_size: int, **changes: Any) -> list[Split | EngineError]:
    """What each rank comes to, all at once."""
    store, results = DictStore(), dict[int, Split | EngineError]()

    def run(rank: int) -> None:
        values = {"partition": "auto", "link_timeout_s": WAIT_S} | changes
        settings = settings_for(model, rank=rank, world_size=world_size, **values)
        try:
            results[rank] = agree(settings, store)
        except EngineError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in reversed(range(world_size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return [results[rank] for rank in range(world_size)]


def test_all_ranks_take_the_split_that_rank_0_measured(model: Path, noisy: list[ModelCosts]) -> None:
    seen = set()
    for turn in range(6):
        splits = agree_all(model, 2)
        assert len(noisy) == turn + 1, "only one rank measures"
        assert splits == splits[:1] * 2
        assert isinstance(splits[0], tuple)
        assert [layer for stage in splits[0] for layer in stage] == list(range(5))
        seen.add(splits[0])
    assert len(seen) > 1, "the noise should make a difference from start to start"


def test_the_log_gives_the_split_its_costs_and_the_waiting(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decode = StepCosts(layers=(1e-3,) * 5, embedding=1e-5, head=3e-3, sampler=1e-3)
    prefill = StepCosts(layers=(2e-3,) * 5, embedding=1e-5, head=0.0, sampler=0.0)
    monkeypatch.setattr(auto_partition, "measure_costs", lambda *_, **__: ModelCosts(decode=decode, prefill=prefill))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    with caplog.at_level(logging.INFO):
        splits = agree_all(model, 2, num_kv_blocks=10)
    assert sizes_of(splits[0]) == "4,1"  # type: ignore[arg-type]
    text = "\n".join(caplog.messages)
    assert "decode step of 16 rows, context 192: layer 1.000 ms, head 3.000 ms, sampler 1.000 ms" in text
    assert "prefill step of 256 tokens: layer 2.000 ms" in text
    assert "stages 4,1 wait 20% / 0% of a decode step, 0% / 75% of a prefill step" in text
    assert "faster than 3,2; KV pool 10 blocks either way" in text
    assert "pipeline partition 4,1 (auto, measured in" in text


def test_the_engine_takes_of_the_last_stage_where_no_core_is_left_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = Place(name="a/cpu", free_bytes=1), Place(name="b/cpu", free_bytes=1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5, 6})
    assert engine_seconds([here, here], CPU, 2) == ENGINE_S > 0
    assert engine_seconds([here, here], CPU, 1) == 0
    assert engine_seconds([here, here, there], CPU, 2) == 0
    assert engine_seconds([here, there, here], CPU, 2) == ENGINE_S
    assert engine_seconds([here, here], torch.device("cuda", 0), 2) == 0


def test_the_engines_work_moves_a_layer_forward() -> None:
    step = StepCosts(layers=(1e-3,) * 6, embedding=0.0, head=2e-3, sampler=0.0)
    costs = ModelCosts(decode=step, prefill=step)
    assert sizes_of(choose_split(costs, 6, 2, MIX)) == "4,2"
    assert sizes_of(choose_split(costs.beside_engine(1.5e-3), 6, 2, MIX)) == "5,1"
    assert costs.beside_engine(1.5e-3).decode.of_stages(split_layers(6, 2, "5,1")) == pytest.approx((5e-3, 4.5e-3))


@pytest.mark.parametrize("partition", ["even", "3,2"])
def test_a_split_by_hand_asks_nobody(model: Path, noisy: list[ModelCosts], partition: str) -> None:
    settings = settings_for(model, world_size=2, partition=partition)
    assert agree(settings, NoStore()) == split_layers(5, 2, partition)
    assert not noisy


@pytest.mark.parametrize("num_stages", [1, 5])
def test_nothing_is_measured_where_there_is_nothing_to_choose(
    model: Path, noisy: list[ModelCosts], num_stages: int
) -> None:
    settings = settings_for(model, world_size=num_stages, partition="auto")
    assert agree(settings, NoStore()) == split_layers(5, num_stages, "even")
    assert agree(replace(settings, world_size=2), None) == split_layers(5, 2, "even")
    assert not noisy


def test_a_tiny_model_is_split_evenly(checkpoints: Any, noisy: list[ModelCosts]) -> None:
    assert agree(settings_for(checkpoints.fx_r, world_size=2, partition="auto"), NoStore()) == (range(3), range(3, 5))
    assert not noisy


def test_no_memory_to_measure_in_is_an_even_split_on_all_ranks(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def measure(*_: Any, **__: Any) -> ModelCosts:
        raise MemoryError("measuring takes 9 MB, 8 MB are free")

    monkeypatch.setattr(auto_partition, "measure_costs", measure)
    assert agree_all(model, 2) == [split_layers(5, 2, "even")] * 2
    assert "split evenly, as nothing can be measured (measuring takes 9 MB, 8 MB are free)" in caplog.text


@pytest.mark.parametrize(("rank", "missing"), [(1, 0), (0, 1)])
def test_a_rank_that_says_nothing_is_named_in_time(
    model: Path, noisy: list[ModelCosts], rank: int, missing: int
) -> None:
    started = time.monotonic()
    with pytest.raises(PeerLost, match=f"rank {rank}: rank {missing} said nothing about the pipeline partition within"):
        agree(settings_for(model, rank=rank, world_size=2, partition="auto", link_timeout_s=0.05), DictStore())
    assert time.monotonic() - started < WAIT_S


@pytest.mark.parametrize("text", ["", "5", "3,3", "noise"])
def test_a_split_that_is_none_is_refused(model: Path, text: str) -> None:
    store = DictStore()
    store.set("partition/split", text)
    with pytest.raises(ConfigError, match="cannot split 5 layers over 2 ranks"):
        agree(settings_for(model, rank=1, world_size=2, partition="auto"), store)


# ------------------------------------------------------------------------------------------------ memory


def limits(**changes: Any) -> PoolLimits:
    return PoolLimits(**{"block_size": 16, "max_num_seqs": 8, "max_model_len": 100} | changes)


def test_the_pool_follows_flags_and_places(model: Path) -> None:
    settings = settings_for(model)
    backend = select_backend("torch", AttentionNeeds(device=CPU, dtype=torch.float32, head_size=settings.config.head_size, block_size=16))
    sizes = PartBytes(layer=1000, first=300, last=500)
    block = 2 * 16 * 2 * 64 * 4  # keys and values, tokens, heads, head size, bytes
    places = [Place(name="a", free_bytes=10 << 20), Place(name="a", free_bytes=9 << 20), Place(name="b", free_bytes=1 << 20)]

    def memory(**changes: Any) -> Any:
        return memory_of(settings.config, sizes, places, limits(**changes), dtype=torch.float32, backend=backend)

    measured = memory()
    assert measured.place_of_stage == (0, 0, 1)
    assert measured.budgets == (9 << 20, 1 << 20)
    assert measured.most_blocks == 8 * 7
    assert measured.block_bytes == (4 * block,) * 5
    one_layer = split_layers(5, 3, "2,2,1")
    assert measured.num_blocks(one_layer) == ((1 << 20) - 1500) // (4 * block)
    by_flag = memory(kv_cache_memory=20 * block)
    assert [by_flag.num_blocks(split_layers(5, 3, text)) for text in ("2,2,1", "3,1,1")] == [10, 6]
    assert memory(num_kv_blocks=3).most_blocks == 3


def test_the_share_of_memory_is_the_one_that_the_core_takes() -> None:
    assert next(f.default for f in fields(CoreConfig) if f.name == "kv_memory_share") == KV_MEMORY_SHARE


# ------------------------------------------------------------------------------------------------ measuring


@pytest.mark.parametrize("num_stages", [2, 4])
def test_costs_are_measured_for_every_part(model: Path, num_stages: int) -> None:
    config = settings_for(model).config
    backend = select_backend("auto", AttentionNeeds(device=CPU, dtype=torch.float32, head_size=config.head_size, block_size=16))
    costs = measure_costs(
        config, num_stages=num_stages, mix=MIX, device=CPU, dtype=torch.float32, backend=backend, block_size=16
    )
    for step in (costs.decode, costs.prefill):
        assert len(step.layers) == 5
        assert min(*step.layers, step.embedding, step.head, step.sampler) > 0
    # The head multiplies ten times as many weights as a layer, and in prefill 64 times fewer rows.
    assert costs.decode.head > costs.decode.layers[0]
    assert costs.prefill.layers[0] / costs.prefill.head > costs.decode.layers[0] / costs.decode.head
    assert explain(costs, split_layers(5, num_stages, "even"), MIX)


@pytest.mark.parametrize("family", FAMILIES)
def test_costs_of_every_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr("worker.profile_stage.BUDGET_S", 0.0)
    config = settings_for(random_family(tmp_path / family, family)).config
    needs = AttentionNeeds.of(config, device=CPU, dtype=torch.float32, block_size=16)
    costs = measure_costs(
        config, num_stages=2, mix=MIX, device=CPU, dtype=torch.float32, backend=select_backend("auto", needs), block_size=16
    )
    assert min(costs.decode.layers + costs.prefill.layers) > 0
    assert costs.decode.embedding > 0 and costs.decode.head > 0


def test_sizes_are_those_of_the_parts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings_for(model).config
    backend = select_backend("auto", AttentionNeeds(device=CPU, dtype=torch.float32, head_size=config.head_size, block_size=16))
    sizes = part_bytes(config, dtype=torch.float32, backend=backend)
    assert sizes.layer == 4 * (256 * (2 * 256 + 2 * 128 + 3 * 512) + 2 * 256)
    assert sizes.first == 4 * 24_000 * 256
    assert sizes.last == sizes.first + 4 * 256
    assert bytes_to_measure(config, 2, sizes) == 4 * sizes.layer + sizes.first + sizes.last
    monkeypatch.setattr("worker.profile_stage.free_memory", lambda device: 2 * bytes_to_measure(config, 2, sizes) - 1)
    with pytest.raises(MemoryError, match="measuring takes"):
        measure_costs(config, num_stages=2, mix=MIX, device=CPU, dtype=torch.float32, backend=backend, block_size=16)


@pytest.mark.e2e
def test_real_ranks_agree_over_the_store_of_their_epoch(model: Path) -> None:
    prompt = list(range(10, 47))
    core = FakeCore(model, 2, partition="auto")
    try:
        core.begin()
        loaded = core.configure()
        for rank in range(2):
            core.expect(WorkerReady, rank)
        layers = [list(loaded[rank].groups[0].layers) for rank in range(2)]
        assert sum(layers, []) == list(range(5))
        plans = Plans()
        plans.add(0, prompt, SamplingParams(temperature=0.0, seed=0))
        got = tokens_of(core.run(plans.step({0: len(prompt)})))[0]
        assert [got] == Oracle.of(model).greedy(prompt, 1).token_ids
        core.shut_down()
        texts = [core.wait(rank)[1] for rank in range(2)]
        assert f"pipeline partition {len(layers[0])},{len(layers[1])} (auto, measured in" in texts[0]
        assert "pipeline partition" not in texts[1]
    finally:
        core.close()
