"""Does every layer go to exactly one stage, for every split that is possible, and does each other one say why?"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ipc.errors import ConfigError
from worker.partition import Memory, Mix, ModelCosts, StepCosts, choose_split, split_layers


@pytest.mark.parametrize("partition", ["even", "auto"])
def test_c2_every_layer_exactly_once_in_order(partition: str) -> None:
    for num_layers in range(1, 40):
        for num_stages in range(1, num_layers + 1):
            stages = split_layers(num_layers, num_stages, partition)
            assert [layer for stage in stages for layer in stage] == list(range(num_layers))
            sizes = [len(stage) for stage in stages]
            assert len(sizes) == num_stages
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True), "the last stage has the head besides"


def test_by_hand() -> None:
    assert split_layers(5, 2, "3,2") == (range(0, 3), range(3, 5))
    assert split_layers(5, 3, " 1, 3 ,1") == (range(0, 1), range(1, 4), range(4, 5))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "partition", "why"),
    [
        (5, 2, "5,1", "adds up to 6"),
        (5, 2, "5", "names 1 ranks"),
        (5, 2, "2,2,1", "names 3 ranks"),
        (5, 2, "5,0", "at least one layer"),
        (5, 2, "6,-1", "separated by commas"),
        (5, 2, "", "separated by commas"),
        (5, 2, "3,2,", "separated by commas"),
        (5, 2, "half", "separated by commas"),
        (5, 2, "²,3", "separated by commas"),
        (5, 2, "9999999999,1", "separated by commas"),
        (2, 3, "even", "at least one layer"),
        (2, 3, "1,1,0", "at least one layer"),
        (5, 0, "even", "separated by commas"),
    ],
)
def test_c3_impossible_splits_name_everything(num_layers: int, num_stages: int, partition: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_layers(num_layers, num_stages, partition)
    assert caught.value.field == "--pipeline-partition"
    text = str(caught.value)
    assert f"{num_layers} layers over {num_stages} ranks as {partition!r}" in text
    assert why in text
    assert "\n" not in text


# ------------------------------------------------------------------------------------------------ by cost


MIX = Mix(num_running=4, prompt_tokens=8, output_tokens=8, prefill_tokens=8, drawn_share=0.0)


def step(layers: Sequence[float], *, embedding: float = 0.0, head: float = 0.0, sampler: float = 0.0) -> StepCosts:
    return StepCosts(layers=tuple(layers), embedding=embedding, head=head, sampler=sampler)


def costs(layers: Sequence[float], prefill: StepCosts | None = None, **ends: float) -> ModelCosts:
    """A model whose prefill costs nothing, unless it is given."""
    return ModelCosts(decode=step(layers, **ends), prefill=prefill or step([0.0] * len(layers)))


def memory_for(num_layers: int, budgets: Sequence[int], **changes: Any) -> Memory:
    """Layers of 10 bytes, blocks of 1 byte a layer, every stage in a place of its own."""
    values: dict[str, Any] = {
        "layer_bytes": (10,) * num_layers, "first_bytes": 0, "last_bytes": 0, "block_bytes": (1,) * num_layers,
        "budgets": tuple(budgets), "place_of_stage": tuple(range(len(budgets))), "most_blocks": 1 << 40,
    }  # fmt: skip
    return Memory(**values | changes)


def sizes(split: Sequence[range]) -> list[int]:
    return [len(stage) for stage in split]


def every_split(num_layers: int, num_stages: int) -> Iterator[tuple[range, ...]]:
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        bounds = [0, *inner, num_layers]
        yield tuple(range(start, end) for start, end in itertools.pairwise(bounds))


@pytest.mark.parametrize(
    ("head", "expected"), [(0.0, [5, 5]), (2.0, [6, 4]), (4.0, [7, 3]), (8.0, [9, 1]), (100.0, [9, 1])]
)
def test_the_head_counts_as_layers(head: float, expected: list[int]) -> None:
    assert sizes(choose_split(costs([1.0] * 10, head=head), 10, 2, MIX)) == expected
    assert sizes(choose_split(costs([1.0] * 10, head=head / 2, sampler=head / 2), 10, 2, MIX)) == expected
    assert sizes(choose_split(costs([1.0] * 10, embedding=head), 10, 2, MIX)) == expected[::-1]


def test_equal_layers_are_split_evenly_whatever_the_count() -> None:
    for num_layers in range(1, 25):
        for num_stages in range(1, num_layers + 1):
            split = choose_split(costs([0.1] * num_layers), num_layers, num_stages, MIX)
            assert split == split_layers(num_layers, num_stages, "even")


def test_the_slowest_stage_is_the_fastest_possible_one() -> None:
    draw = random.Random(0)
    for _ in range(60):
        num_layers = draw.randint(1, 9)
        num_stages = draw.randint(1, num_layers)
        model = costs(
            [draw.choice((0.1, 0.5, 1.0, 3.0)) for _ in range(num_layers)],
            embedding=draw.random(), head=3 * draw.random(), sampler=draw.random(),
        )  # fmt: skip
        price = model.of_request(MIX, num_stages)
        found = max(price.of_stages(choose_split(model, num_layers, num_stages, MIX)))
        assert found == pytest.approx(min(max(price.of_stages(s)) for s in every_split(num_layers, num_stages)), rel=1e-6)


def test_a_dearer_head_never_gives_the_last_stage_more_layers() -> None:
    last = [sizes(choose_split(costs([1.0] * 30, head=h / 4), 30, 3, MIX))[-1] for h in range(100)]
    assert last == sorted(last, reverse=True)
    assert (last[0], last[-1]) == (10, 1)


def test_the_mix_weighs_decode_and_prefill_by_the_steps_of_a_request() -> None:
    decode, prefill = step([1.0] * 10, head=4.0), step([5.0] * 10, embedding=20.0)
    model = ModelCosts(decode=decode, prefill=prefill)
    mostly_decode = Mix(num_running=2, prompt_tokens=8, output_tokens=800, prefill_tokens=8, drawn_share=0.0)
    mostly_prefill = Mix(num_running=2, prompt_tokens=8, output_tokens=1, prefill_tokens=8, drawn_share=0.0)
    assert sizes(choose_split(model, 10, 2, mostly_decode)) == [7, 3]
    assert sizes(choose_split(model, 10, 2, mostly_prefill)) == [4, 6]
    request = model.of_request(mostly_decode, 2)  # 800 decode steps of one row each, one prefill step
    assert (request.layers[0], request.head, request.embedding) == pytest.approx((805.0, 3200.0, 20.0))
    assert MIX.decode_rows(2) == 2
    assert MIX.decode_rows(40) == 1


def test_a_large_model_over_many_stages_is_split_at_once() -> None:
    draw = random.Random(1)
    model = costs([1 + draw.random() for _ in range(100)], head=7.0, embedding=0.5)
    started = time.monotonic()
    for memory in (None, memory_for(100, [1000 + draw.randint(0, 100) for _ in range(40)], last_bytes=100)):
        split = choose_split(model, 100, 40, MIX, memory)
        assert [layer for stage in split for layer in stage] == list(range(100))
    assert time.monotonic() - started < 30


def test_waiting_is_what_a_stage_has_less_to_do_than_the_slowest() -> None:
    decode = step([1.0] * 10, head=2.0)
    assert decode.waiting(split_layers(10, 2, "6,4")) == pytest.approx((0.0, 0.0))
    assert decode.waiting(split_layers(10, 2, "5,5")) == pytest.approx((2 / 7, 0.0))
    assert step([0.0] * 2).waiting(split_layers(2, 2, "1,1")) == (0.0, 0.0)
    with pytest.raises(ValueError, match="at least 0"):
        step([1.0], head=-1.0)


# ------------------------------------------------------------------------------------------------ by memory


def test_the_pool_is_the_minimum_over_places_and_ends_count() -> None:
    memory = memory_for(10, [200, 300], first_bytes=30, last_bytes=50)
    # (200 - 30 - 60) / 6 and (300 - 50 - 40) / 4
    assert memory.num_blocks(split_layers(10, 2, "6,4")) == 110 // 6
    assert replace(memory, most_blocks=7).num_blocks(split_layers(10, 2, "6,4")) == 7
    shared = memory_for(10, [500], place_of_stage=(0, 0), first_bytes=30, last_bytes=50)
    assert shared.num_blocks(split_layers(10, 2, "9,1")) == (500 - 80 - 100) // 10


def test_a_small_gain_does_not_cost_much_of_the_pool() -> None:
    """10 layers: 5,5 has a pool of 200, 6,4 one of 166, 7,3 of 142."""
    memory = memory_for(10, [1000, 1000], layer_bytes=(0,) * 10)
    assert [memory.num_blocks(split_layers(10, 2, text)) for text in ("5,5", "6,4", "7,3")] == [200, 166, 142]
    small, large = costs([1.0] * 10, head=1.2), costs([1.0] * 10, head=4.0)
    # 6,4 is 3 % faster than 5,5 and its pool 8 % smaller than what counts (180).
    assert sizes(choose_split(small, 10, 2, MIX, memory)) == [5, 5]
    assert sizes(choose_split(small, 10, 2, MIX)) == [6, 4]
    # 6,4 is 12.5 % faster here. 7,3 is another 14.3 % faster, its pool 14.5 % smaller.
    assert sizes(choose_split(large, 10, 2, MIX, memory)) == [6, 4]
    assert sizes(choose_split(large, 10, 2, MIX)) == [7, 3]
    # A pool that is more than anybody uses counts no more than what is used.
    assert sizes(choose_split(small, 10, 2, MIX, replace(memory, most_blocks=150))) == [6, 4]
    # What a tenth less costs is given for nothing.
    wide = memory_for(40, [1000, 1000], layer_bytes=(0,) * 40)
    assert sizes(choose_split(costs([1.0] * 40, head=2.0), 40, 2, MIX, wide)) == [21, 19]


def test_the_rule_holds_for_every_split_of_random_models() -> None:
    draw = random.Random(2)
    for _ in range(150):
        num_layers = draw.randint(2, 8)
        num_stages = draw.randint(2, num_layers)
        model = costs([draw.uniform(0.5, 2.0) for _ in range(num_layers)], head=draw.uniform(0, 4))
        places = list(itertools.accumulate(draw.randint(0, 1) * (stage > 0) for stage in range(num_stages)))
        memory = memory_for(
            num_layers, [draw.randint(60, 400) for _ in range(places[-1] + 1)], place_of_stage=tuple(places),
            layer_bytes=tuple(draw.randint(1, 20) for _ in range(num_layers)), last_bytes=draw.randint(0, 60),
        )  # fmt: skip
        price = model.of_request(MIX, num_stages)
        pools = {split: memory.num_blocks(split) for split in every_split(num_layers, num_stages)}
        if max(pools.values()) < 1:
            continue
        useful = max(1, int(0.9 * max(pools.values())))
        scores = {split: min(pool, useful) / max(price.of_stages(split)) for split, pool in pools.items() if pool > 0}
        chosen = choose_split(model, num_layers, num_stages, MIX, memory)
        assert scores[chosen] == pytest.approx(max(scores.values()), rel=1e-6)


def test_stages_that_share_a_memory_leave_it_out_of_account() -> None:
    shared = memory_for(10, [1000], place_of_stage=(0, 0))
    assert sizes(choose_split(costs([1.0] * 10, head=4.0), 10, 2, MIX, shared)) == [7, 3]
    # Two hosts with two stages each: what one of them holds is bounded, not what one stage holds.
    hosts = memory_for(12, [400, 160], place_of_stage=(0, 0, 1, 1), layer_bytes=(20,) * 12)
    split = choose_split(costs([1.0] * 12), 12, 4, MIX, hosts)
    assert (sizes(split)[:2], sum(sizes(split)[2:])) == ([4, 4], 4)


def test_weights_that_fit_one_way_only_are_split_that_way() -> None:
    memory = memory_for(4, [15, 45], layer_bytes=(10,) * 4)
    assert sizes(choose_split(costs([1.0] * 4, head=3.0), 4, 2, MIX, memory)) == [1, 3]
    nowhere = memory_for(4, [5, 5])
    assert sizes(choose_split(costs([1.0] * 4, head=2.0), 4, 2, MIX, nowhere)) == [3, 1]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        choose_split(costs([1.0] * 3), 3, 4, MIX)
