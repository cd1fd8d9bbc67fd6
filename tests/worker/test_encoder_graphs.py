"""Are encoder items packed, padded, replayed and handed back whole, whatever their sizes?"""

import logging
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ipc.errors import ConfigError, RequestError
from tests.worker.fake_graphs import FakePool
from worker.encoder_graphs import EncoderCudaGraphManager
from worker.encoders import ITEM_IDS, Item, PackedEncoder, PackedInput
from worker.encoders.packing import pack_items, token_budgets

WIDTH = 3


class SumEncoder(PackedEncoder):
    """Each token becomes the sum over its item, plus its own weight; records what it was given."""

    output_width, dtype, device = WIDTH, torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[tuple[dict[str, Tensor], Tensor]] = []

    def inputs(self) -> tuple[PackedInput, ...]:
        return (
            PackedInput(name="values", shape=(WIDTH,), dtype=torch.float32, padding=0.0),
            PackedInput(name="weights", shape=(), dtype=torch.float64, padding=7.0),
        )

    def forward(self, inputs: Mapping[str, Tensor], item_ids: Tensor) -> Tensor:
        self.passes.append(({name: tensor.clone() for name, tensor in inputs.items()}, item_ids.clone()))
        sees = item_ids[:, None] == item_ids
        return sees.float() @ inputs["values"] + inputs["weights"][:, None].float()


def make_item(num_tokens: int, seed: int = 0) -> Item:
    """Of whole numbers, whose sums are exact in any order."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "values": torch.randint(-9, 9, (num_tokens, WIDTH), generator=draw).float(),
        "weights": torch.randint(-9, 9, (num_tokens,), generator=draw).double(),
    }


def expected_output(item: Item) -> Tensor:
    return item["values"].sum(0) + item["weights"][:, None].float()


def make_manager(
    smallest: int = 4, largest: int = 16, pool: FakePool | None = None
) -> tuple[EncoderCudaGraphManager, SumEncoder]:
    encoder = SumEncoder()
    manager = EncoderCudaGraphManager(encoder, smallest=smallest, largest=largest, pool=pool or FakePool())
    manager.capture(lambda done, total: None)
    return manager, encoder


# ---------------------------------------------------------------------------------------------- packing


counts_of_items = st.integers(1, 8) | st.integers(1, 64) | st.integers(1, 300)
counts_of_batches = st.lists(counts_of_items, max_size=3) | st.lists(counts_of_items, max_size=40)
limits = st.tuples(st.integers(1, 64), st.integers(64, 256))


@given(counts_of_batches, limits)
def test_no_item_is_lost_or_split_and_padding_is_bounded(counts: list[int], limits: tuple[int, int]) -> None:
    budgets = token_budgets(*limits)
    packs = pack_items(counts, budgets)
    assert sorted(index for pack in packs for index in pack.items) == list(range(len(counts)))
    for pack in packs:
        assert pack.num_tokens == sum(counts[index] for index in pack.items)
        assert pack.budget is None or pack.budget in budgets
        assert pack.budget is None or pack.num_tokens <= pack.budget
    computed = sum(pack.budget or pack.num_tokens for pack in packs)
    assert sum(counts) <= computed <= 2 * sum(counts)


@given(counts_of_batches, limits)
def test_what_fits_a_budget_well_runs_on_a_graph(counts: list[int], limits: tuple[int, int]) -> None:
    """Eager is only what is larger than all budgets, or would fill less than half of the smallest."""
    budgets = token_budgets(*limits)
    for pack in pack_items(counts, budgets):
        if pack.budget is None:
            assert 2 * pack.num_tokens < budgets[0] or (pack.num_tokens > budgets[-1] and len(pack.items) == 1)


@given(counts_of_batches, limits)
def test_few_passes(counts: list[int], limits: tuple[int, int]) -> None:
    """Two packs of which each had room for the other's items would be one pack."""
    most = token_budgets(*limits)[-1]
    totals = sorted(pack.num_tokens for pack in pack_items(counts, token_budgets(*limits)) if pack.num_tokens <= most)
    assert len(totals) < 2 or totals[0] + totals[1] > most


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 8), st.integers(8, 32))
def test_order_is_restored_and_items_do_not_mix(counts: list[int], smallest: int, largest: int) -> None:
    items = [make_item(count, seed) for seed, count in enumerate(counts)]
    manager, _ = make_manager(smallest, largest)
    outputs = manager.encode(items)
    assert len(outputs) == len(items)
    for item, output in zip(items, outputs, strict=True):
        assert torch.equal(output, expected_output(item))


def test_packs_by_hand() -> None:
    assert [(p.items, p.budget) for p in pack_items([5, 9, 8, 3], (4, 8, 16))] == [((1, 0), 16), ((2, 3), 16)]
    assert [(p.items, p.budget) for p in pack_items([8, 9, 2], (4, 8, 16))] == [((1, 2), 16), ((0,), 8)]


@pytest.mark.parametrize(
    ("smallest", "largest", "expected"),
    [(1, 1, (1,)), (4, 16, (4, 8, 16)), (3, 17, (4, 8, 16)), (5, 8, (8,)), (1, 3, (1, 2))],
)
def test_budgets_are_powers_of_two(smallest: int, largest: int, expected: tuple[int, ...]) -> None:
    assert token_budgets(smallest, largest) == expected


@pytest.mark.parametrize(
    ("smallest", "largest", "text"),
    [
        (0, 8, "smallest: 0 must be at least 1 token"),
        (-4, 8, "smallest: -4 must be"),
        (5, 7, "largest: no power of two lies between 5 and 7 tokens"),
        (8, 4, "largest: no power of two lies between 8 and 4 tokens"),
        (4, -1, "largest: no power of two lies between 4 and -1 tokens"),
    ],
)
def test_budgets_that_do_not_work_are_refused(smallest: int, largest: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        token_budgets(smallest, largest)


# ---------------------------------------------------------------------------------------------- graphs


def test_largest_is_captured_first_and_nearest_is_replayed() -> None:
    pool = FakePool()
    manager, encoder = make_manager(pool=pool)
    assert [len(item_ids) for _, item_ids in encoder.passes] == [16, 16, 8, 8, 4, 4]  # each warmed up, then captured
    for num_tokens in (2, 4, 5, 8, 9, 16):
        manager.encode([make_item(num_tokens)])
    assert pool.replayed == [2, 2, 1, 1, 0, 0]


def test_one_graph_serves_any_number_of_items() -> None:
    pool = FakePool()
    manager, _ = make_manager(pool=pool)
    for counts in ([16], [8, 8], [3, 7, 6], [1] * 16, [2, 7]):
        items = [make_item(count, seed) for seed, count in enumerate(counts)]
        for item, output in zip(items, manager.encode(items), strict=True):
            assert torch.equal(output, expected_output(item))
    assert pool.replayed == [0] * 5


def test_padding_follows_each_buffers_rule_whatever_was_there() -> None:
    manager, encoder = make_manager()
    manager.encode([make_item(16)])
    manager.encode([make_item(3), make_item(6)])
    inputs, item_ids = encoder.passes[-1]
    assert torch.equal(inputs["values"][9:], torch.zeros(7, WIDTH))
    assert torch.equal(inputs["weights"][9:], torch.full((7,), 7.0, dtype=torch.float64))
    assert item_ids.tolist() == [0] * 6 + [1] * 3 + [ITEM_IDS.padding] * 7


def test_capture_sees_padding_only() -> None:
    _, encoder = make_manager()
    for inputs, item_ids in encoder.passes:
        assert torch.equal(inputs["weights"], torch.full_like(inputs["weights"], 7.0))
        assert set(item_ids.tolist()) == {ITEM_IDS.padding}


def test_outputs_outlive_the_next_replay() -> None:
    manager, _ = make_manager()
    first, second = make_item(10, 1), make_item(10, 2)
    kept = manager.encode([first])[0]
    manager.encode([second])
    assert torch.equal(kept, expected_output(first))


def test_oversized_items_run_eagerly_among_others() -> None:
    pool = FakePool()
    manager, encoder = make_manager(pool=pool)
    encoder.passes.clear()
    items = [make_item(4, 1), make_item(17, 2), make_item(5, 3)]
    for item, output in zip(items, manager.encode(items), strict=True):
        assert torch.equal(output, expected_output(item))
    assert pool.replayed == [0]
    assert sorted(len(item_ids) for _, item_ids in encoder.passes) == [16, 17]
    assert manager.statistics.num_items_eager == 1


def test_without_capture_everything_runs_eagerly() -> None:
    encoder = SumEncoder()
    manager = EncoderCudaGraphManager(encoder, smallest=4, largest=16)
    items = [make_item(count, count) for count in (4, 9, 1)]
    for item, output in zip(items, manager.encode(items), strict=True):
        assert torch.equal(output, expected_output(item))
    assert manager.budgets == ()
    assert manager.statistics.hit_share == 0.0


def test_an_empty_batch() -> None:
    manager, encoder = make_manager()
    encoder.passes.clear()
    assert manager.encode([]) == []
    assert encoder.passes == []
    assert manager.statistics.hit_share == 0.0


def test_statistics() -> None:
    manager, _ = make_manager()
    manager.encode([make_item(9), make_item(4)])
    manager.encode([make_item(16)])
    manager.encode([make_item(40), make_item(1)])
    statistics = manager.statistics
    assert (statistics.num_items_replayed, statistics.num_items_eager) == (3, 2)
    assert statistics.num_replays == {16: 2}
    assert (statistics.num_tokens_replayed, statistics.num_tokens_padded) == (29, 3)
    assert statistics.hit_share == 3 / 5


def test_buffers_are_shared_by_all_budgets() -> None:
    """One set as large as the largest budget, however many graphs there are."""
    row = WIDTH * 4 + 8 + 4
    assert make_manager(16, 16)[0].buffer_bytes == make_manager(1, 16)[0].buffer_bytes == 16 * row


def test_progress() -> None:
    seen: list[tuple[int, int]] = []
    manager = EncoderCudaGraphManager(SumEncoder(), smallest=4, largest=16)
    manager.capture(lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_graph_without_memory_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    pool = FakePool(has_memory=lambda number: number not in (0, 2))
    with caplog.at_level(logging.WARNING):
        manager, _ = make_manager(largest=32, pool=pool)
    assert caplog.messages == [
        f"no memory for the encoder's graph of {budget} tokens, which is left out" for budget in (32, 8)
    ]
    assert manager.budgets == (4, 16)
    items = [make_item(count, count) for count in (20, 16, 5)]
    for item, output in zip(items, manager.encode(items), strict=True):
        assert torch.equal(output, expected_output(item))
    assert pool.replayed == [1]  # 5 tokens are too few for it, 20 too many
    assert manager.statistics.num_items_eager == 2


def test_another_error_while_capturing_is_not_hidden() -> None:
    manager = EncoderCudaGraphManager(BrokenEncoder(), smallest=4, largest=8)
    with pytest.raises(RuntimeError, match="broken"):
        manager.capture(lambda done, total: None)


class BrokenEncoder(SumEncoder):
    def forward(self, inputs: Mapping[str, Tensor], item_ids: Tensor) -> Tensor:
        raise RuntimeError("broken")


# ---------------------------------------------------------------------------------------------- bad items


def changed(**inputs: Tensor | None) -> Item:
    item = {**make_item(3), **inputs}
    return {name: tensor for name, tensor in item.items() if tensor is not None}


@pytest.mark.parametrize(
    ("item", "field", "text"),
    [
        (make_item(0), "items[1]", "items[1] has no tokens, must have at least 1"),
        (changed(weights=None), "items[1]", "items[1] has ['values'], must have ['values', 'weights']"),
        (changed(pixels=torch.zeros(3)), "items[1]", "items[1] has ['pixels', 'values', 'weights'], must have"),
        (
            changed(values=torch.zeros(3, WIDTH, dtype=torch.float16)), "items[1].values",
            "items[1].values is of type torch.float16, must be torch.float32",
        ),
        (changed(values=torch.zeros(3, 5)), "items[1].values", "items[1].values has shape [3, 5], must be [3, 3]"),
        (changed(values=torch.zeros(3)), "items[1].values", "items[1].values has shape [3], must be [3, 3]"),
        (changed(values=torch.tensor(1.0)), "items[1].values", "items[1].values has shape [], must be"),
        (
            changed(weights=torch.zeros(2, dtype=torch.float64)), "items[1].weights",
            "items[1].weights has shape [2], must be [3]",
        ),
    ],
)  # fmt: skip
def test_a_bad_item_is_named_before_anything_is_computed(item: Item, field: str, text: str) -> None:
    manager, encoder = make_manager()
    encoder.passes.clear()
    with pytest.raises(RequestError) as caught:
        manager.encode([make_item(2), item])
    assert (caught.value.field, caught.value.code) == (field, "bad_request")
    assert text in caught.value.reason
    assert encoder.passes == []
    good = make_item(5)
    assert torch.equal(manager.encode([good])[0], expected_output(good))
