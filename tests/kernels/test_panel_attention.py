"""Does native attention give the definition's numbers, whatever the batch, the instruction set and the threads?"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.cpu.native import NativeError
from kernels.panel_attention import (
    append_panels,
    panel_attention,
    panel_attention_definition,
    panel_cache_shape,
    tokens_of_panels,
)
from tests.native import INSTRUCTION_SETS, use_instruction_set

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Relative to the largest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """(history, query tokens) of each sequence, and the model's shape."""

    sizes: tuple[tuple[int, int], ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    padding: int = 0


BATCHES = {
    "one_token": Batch(sizes=((0, 1),)),
    "decodes": Batch(sizes=((0, 1), (14, 1), (15, 1), (16, 1), (200, 1)), num_heads=9, num_kv_heads=3, head_size=64),
    "prefill": Batch(sizes=((0, 70),), num_heads=9, num_kv_heads=3, head_size=64),
    "chunk_with_history": Batch(sizes=((37, 30), (16, 16), (15, 2))),
    "mixed": Batch(sizes=((130, 1), (2, 1), (0, 9), (33, 40)), padding=3),
    "every_query_its_key_head": Batch(sizes=((90, 1), (0, 50)), num_heads=3, num_kv_heads=3, head_size=80),
    "one_key_head_for_many": Batch(sizes=((90, 1), (5, 3)), num_heads=50, num_kv_heads=1, head_size=16),
    "groups_of_seven": Batch(sizes=((90, 1), (5, 30)), num_heads=14, num_kv_heads=2, head_size=128, block_size=64),
    "widest_heads": Batch(sizes=((40, 1), (0, 20)), num_heads=4, num_kv_heads=2, head_size=256, block_size=32),
    "long": Batch(sizes=((1500, 1), (511, 1), (512, 1), (600, 80)), num_heads=4, num_kv_heads=1, head_size=64),
    "window": Batch(sizes=((16, 1), (17, 1), (100, 1), (0, 60), (30, 20)), window=17),
    "window_of_one": Batch(sizes=((20, 1), (3, 20)), window=1),
    "long_window": Batch(sizes=((1300, 1), (700, 9)), window=530),
    "soft_cap": Batch(sizes=((40, 1), (0, 20)), soft_cap=0.7),
    "soft_cap_that_hardly_bends": Batch(sizes=((40, 1), (0, 20)), soft_cap=10_000.0),
    "sinks": Batch(sizes=((40, 1), (700, 1), (0, 20)), has_sinks=True),
    "all_of_it": Batch(sizes=((40, 1), (700, 1), (9, 40)), window=100, soft_cap=2.0, has_sinks=True),
}


class Step:
    """A batch over a cache with shuffled blocks, whose unused slots are all NaN."""

    def __init__(self, batch: Batch, dtype: torch.dtype) -> None:
        self.batch, self.scale = batch, batch.head_size**-0.5
        draw = torch.Generator().manual_seed(7)
        lengths = [history + queries for history, queries in batch.sizes]
        blocks = [-(-length // batch.block_size) for length in lengths]
        free = torch.randperm(sum(blocks) + 5, generator=draw).tolist()
        self.block_table = torch.full((len(lengths), max(blocks) + 2), 2**30, dtype=torch.int32)
        self.cache = torch.full(
            panel_cache_shape(len(free), batch.block_size, batch.num_kv_heads, batch.head_size), torch.nan, dtype=dtype
        )
        for s, length in enumerate(lengths):
            self.block_table[s, : blocks[s]] = torch.tensor([free.pop() for _ in range(blocks[s])])
            k, v = torch.randn(2, length, batch.num_kv_heads, batch.head_size, generator=draw).to(dtype)
            append_panels(self.cache, k, v, self.slots(s, torch.arange(length)))
        num_queries = [queries for _, queries in batch.sizes]
        self.query_starts = torch.tensor([0, *num_queries]).cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.q = torch.randn(
            sum(num_queries) + batch.padding, batch.num_heads, batch.head_size, generator=draw
        ).to(dtype)  # fmt: skip
        self.sinks = torch.randn(batch.num_heads, generator=draw) if batch.has_sinks else None

    def slots(self, s: int, positions: Tensor) -> Tensor:
        size = self.batch.block_size
        return self.block_table[s, positions // size].long() * size + positions % size

    def run(self) -> Tensor:
        return panel_attention(
            self.q, self.cache, self.query_starts, self.seq_lens, self.block_table, self.scale,
            window=self.batch.window, soft_cap=self.batch.soft_cap, sinks=self.sinks,
        )  # fmt: skip

    def expected(self) -> Tensor:
        return panel_attention_definition(
            self.q, self.cache, self.query_starts, self.seq_lens, self.block_table, self.scale,
            window=self.batch.window, soft_cap=self.batch.soft_cap, sinks=self.sinks,
        )  # fmt: skip


@pytest.mark.parametrize("window", [1 << 31, 1 << 32, (1 << 64) + 1])
def test_a_window_may_be_longer_than_any_sequence(window: int) -> None:
    whole = Step(BATCHES["mixed"], torch.float32)
    windowed = Step(replace(BATCHES["mixed"], window=window), torch.float32)
    assert torch.equal(windowed.run(), whole.run())


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_as_the_definition(
    instruction_set: str, batch: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_instruction_set(instruction_set, monkeypatch)
    step = Step(BATCHES[batch], dtype)
    out, expected = step.run(), step.expected()
    assert out.dtype == dtype
    gap = (out.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert gap <= TOLERANCES[dtype], f"relative difference {gap.item()}"
    num_tokens = len(out) - BATCHES[batch].padding
    assert not out[num_tokens:].any()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_neither_threads_nor_the_rest_of_the_batch_change_a_bit(dtype: torch.dtype) -> None:
    step = Step(BATCHES["long"], dtype)
    with threads(1):
        one = step.run()
    with threads(2):
        assert torch.equal(step.run(), one)
    alone = panel_attention(
        step.q[1:2], step.cache, torch.tensor([0, 1], dtype=torch.int32), step.seq_lens[1:2],
        step.block_table[1:2].contiguous(), step.scale,
    )  # fmt: skip
    assert torch.equal(alone, one[1:2])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_poison_stays_in_its_sequence(instruction_set: str, poison: float, monkeypatch: pytest.MonkeyPatch) -> None:
    use_instruction_set(instruction_set, monkeypatch)
    for dtype in TOLERANCES:
        step = Step(BATCHES["mixed"], dtype)
        before = step.run()
        bad = torch.full((1, 2, 32), poison, dtype=dtype)
        append_panels(step.cache, bad, bad, step.slots(0, torch.tensor([60])))
        after = step.run()
        assert after[0].isnan().all()
        assert torch.equal(after[1:], before[1:])


def test_a_query_of_poison_spoils_its_row_alone() -> None:
    step = Step(BATCHES["mixed"], torch.bfloat16)
    before = step.run()
    step.q[5] = torch.nan
    after = step.run()
    assert after[5].isnan().all()
    assert torch.equal(after[torch.arange(len(after)) != 5], before[torch.arange(len(before)) != 5])


def test_sequences_of_length_0_are_padding() -> None:
    step = Step(BATCHES["decodes"], torch.float32)
    expected = step.expected()
    step.seq_lens[2] = 0
    step.block_table[2] = -1
    out = step.run()
    assert not out[2].any()
    assert torch.allclose(out[[0, 1, 3, 4]], expected[[0, 1, 3, 4]], atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_append(instruction_set: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens lie where the layout's definition finds them; padding and all other slots stay."""
    use_instruction_set(instruction_set, monkeypatch)
    cache = torch.full(panel_cache_shape(3, 32, 2, 48), 7.0, dtype=dtype)
    heads = torch.randn(5, 9, 48).to(dtype)
    k, v = heads[:, 4:6], heads[:, 6:8]
    slots = torch.tensor([95, -1, 0, 33, 50])
    append_panels(cache, k, v, slots)
    tokens = tokens_of_panels(cache, 48).flatten(1, 2)
    written = slots[[0, 2, 3, 4]]
    assert torch.equal(tokens[0, written], k[[0, 2, 3, 4]])
    assert torch.equal(tokens[1, written], v[[0, 2, 3, 4]])
    tokens[:, written] = 7.0
    assert torch.equal(tokens, torch.full_like(tokens, 7.0))


def test_queries_may_be_part_of_a_wider_tensor() -> None:
    step = Step(BATCHES["mixed"], torch.float32)
    expected = step.run()
    wide = torch.randn(len(step.q), 10, 32)
    wide[:, 2:8] = step.q
    step.q = wide[:, 2:8]
    assert torch.equal(step.run(), expected)


def test_what_does_not_fit_is_refused() -> None:
    step = Step(BATCHES["one_token"], torch.float32)
    arguments = (step.query_starts, step.seq_lens, step.block_table, 1.0)
    with pytest.raises(TypeError, match="bfloat16"):
        panel_attention(step.q.bfloat16(), step.cache, *arguments)
    with pytest.raises(ValueError, match="5 heads over 2"):
        panel_attention(step.q[:, :5].contiguous(), step.cache, *arguments)
    with pytest.raises(ValueError, match="heads of 24"):
        panel_attention(torch.randn(1, 6, 24), step.cache, *arguments)
    with pytest.raises(ValueError, match="a window of 0 tokens"):
        panel_attention(step.q, step.cache, *arguments, window=0)
    with pytest.raises(TypeError, match="int64"):
        panel_attention(step.q, step.cache, step.query_starts.long(), *arguments[1:])
    with pytest.raises(ValueError, match="heads must lie together"):
        panel_attention(torch.randn(1, 32, 6).transpose(1, 2), step.cache, *arguments)
    with pytest.raises(ValueError, match="slots"):
        append_panels(step.cache, torch.ones(2, 2, 32), torch.ones(2, 2, 32), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("block_table", (3, 2), 1 << 30),
        ("block_table", (3, 2), -1),
        ("query_starts", (4,), 1000),
        ("query_starts", (1,), -1),
        ("query_starts", (2,), 0),
        ("seq_lens", (1,), -5),
        ("seq_lens", (1,), 100_000),
        ("seq_lens", (3,), 10),
    ],
)
def test_nothing_outside_is_touched(name: str, index: tuple[int, ...], value: int) -> None:
    step = Step(BATCHES["mixed"], torch.float32)
    getattr(step, name)[index] = value
    with pytest.raises(IndexError, match="outside"):
        step.run()
    before = step.cache.clone()
    k = torch.ones(2, 2, 32)
    with pytest.raises(IndexError, match="slot"):
        append_panels(step.cache, k, k, torch.tensor([0, len(step.cache) * 16]))
    assert torch.equal(step.cache.nan_to_num(7), before.nan_to_num(7))


def test_without_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(BATCHES["one_token"], torch.float32)
    use_instruction_set("torch", monkeypatch)
    with pytest.raises(NativeError):
        step.run()
