"""Do the Triton kernels attend as the definition does: ragged batches, windows, blocks anywhere, NaN beside them?

In triton's interpreter, or compiled on a GPU when TRITON_INTERPRET=0.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.paged_attention import paged_attention, paged_attention_definition
from tests.interpreter import DEVICE, use_interpreter

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the largest difference, relative to the largest value."""


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    use_interpreter(monkeypatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16


class Batch:
    """Sequences in shuffled blocks of a cache that is NaN wherever no token of theirs lies."""

    def __init__(
        self, sizes: list[tuple[int, int]], *, dtype: torch.dtype = torch.float32, shape: Shape = Shape(), padding: int = 0
    ) -> None:
        """``sizes``: tokens in the cache before, and query tokens, of each sequence; those with one first."""
        K = shape.block_size
        draw = torch.Generator().manual_seed(7)
        lengths = [history + num_queries for history, num_queries in sizes]
        needed = [-(-length // K) for length in lengths]
        free = torch.randperm(sum(needed) + 3, generator=draw).tolist()
        cache = torch.full((2, len(free), K, shape.num_kv_heads, shape.head_size), torch.nan)
        table = torch.full((len(sizes), max(needed) + 1), -1, dtype=torch.int32)
        for s, length in enumerate(lengths):
            for i in range(needed[s]):
                block, num_tokens = free.pop(), min(K, length - i * K)
                table[s, i] = block
                cache[:, block, :num_tokens] = torch.randn(2, num_tokens, *cache.shape[3:], generator=draw)
        num_tokens = sum(num_queries for _, num_queries in sizes) + padding
        self.num_decodes = len(list(takewhile(lambda size: size[1] == 1, sizes)))
        self.max_seq_len = max(lengths)
        self.padding = padding
        self.scale = shape.head_size**-0.5
        self.cache = cache.to(dtype).to(DEVICE)
        self.table = table.to(DEVICE)
        self.q = torch.randn(num_tokens, shape.num_heads, shape.head_size, generator=draw).to(dtype).to(DEVICE)
        self.starts = torch.tensor([0, *(n for _, n in sizes)]).cumsum(0).to(torch.int32).to(DEVICE)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def run(self, *, num_decodes: int | None = None, **rule: Any) -> Tensor:
        return paged_attention(
            self.q, self.cache, self.starts, self.lengths, self.table, self.scale,
            num_decodes=self.num_decodes if num_decodes is None else num_decodes, max_seq_len=self.max_seq_len,
            has_padding=self.padding > 0, **rule,
        )  # fmt: skip

    def expected(self, **rule: Any) -> Tensor:
        return paged_attention_definition(
            self.q, self.cache, self.starts, self.lengths, self.table, self.scale, **rule
        )


def assert_close(out: Tensor, expected: Tensor) -> None:
    assert out.dtype == expected.dtype
    gap = (out.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert gap <= TOLERANCES[out.dtype], f"relative difference {gap.item()}"


BATCHES = {
    "one_token": [(0, 1)],
    "decodes": [(0, 1), (14, 1), (15, 1), (16, 1), (63, 1), (64, 1), (200, 1)],
    "prefills": [(0, 15), (0, 16), (0, 17), (0, 65)],
    "chunks": [(13, 6), (16, 48), (129, 2)],
    "mixed": [(30, 1), (127, 1), (0, 30), (40, 45), (255, 1)],
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 17},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 2, 6, device=DEVICE)},
    "all": {"window": 33, "soft_cap": 1000.0, "sinks": torch.linspace(2, -1, 6, device=DEVICE)},
}


def swept(values: Iterable[Any], *by_default: Any) -> list[Any]:
    """The others are slow ones: the interpreter takes seconds for each."""
    return [value if value in by_default else pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("batch", BATCHES)
def test_ragged_batches(batch: str) -> None:
    for dtype in TOLERANCES:
        whole = Batch(BATCHES[batch], dtype=dtype, padding=2)
        assert_close(whole.run(), whole.expected())


@pytest.mark.parametrize("rule", swept(RULES, "soft_cap", "all"))
def test_rules(rule: str) -> None:
    """All in one batch; once with the kernel for decodes, once with that for any queries alone."""
    batch = Batch(BATCHES["mixed"])
    expected = batch.expected(**RULES[rule])
    assert_close(batch.run(**RULES[rule]), expected)
    assert_close(batch.run(num_decodes=0, **RULES[rule]), expected)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_heads=2, num_kv_heads=2, head_size=64),
        Shape(num_heads=14, num_kv_heads=2, head_size=80, block_size=32),
        Shape(num_heads=5, num_kv_heads=1, head_size=96, block_size=1),
        Shape(num_heads=20, num_kv_heads=1, head_size=128, block_size=8),
        Shape(num_heads=8, num_kv_heads=4, head_size=256, block_size=64),
        Shape(num_heads=2, num_kv_heads=1, head_size=24, block_size=128),
    ],
    ids=str,
)
def test_shapes(shape: Shape, dtype: torch.dtype) -> None:
    batch = Batch([(33, 1), (5, 1), (20, 13), (0, 18)], dtype=dtype, shape=shape)
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize("window", swept([None, 1, 300, 512, 700], None, 512))
def test_decodes_cut_along_their_keys(window: int | None) -> None:
    """Lengths about the parts' borders; where there is a window the first part is not at the beginning."""
    batch = Batch([(510, 1), (511, 1), (512, 1), (1030, 1), (3, 1)])
    for sinks in (None, torch.linspace(-1, 2, 6, device=DEVICE)):
        expected = batch.expected(window=window, sinks=sinks)
        assert_close(batch.run(window=window, sinks=sinks), expected)


def test_a_sequence_gets_the_same_bits_in_any_batch() -> None:
    """Alone, beside a longer one that is cut into parts, and with its prompt in two chunks."""
    together = Batch([(40, 1), (1000, 1)]).run()
    alone = Batch([(40, 1)])
    # The first sequence's blocks are drawn from another pool, so its numbers are taken along.
    other = Batch([(40, 1), (1000, 1)])
    alone.q, alone.cache, alone.table = other.q[:1], other.cache, other.table[:1]
    assert torch.equal(alone.run(), together[:1])
    whole = Batch([(0, 90)])
    expected = whole.run()
    whole.q, whole.starts = whole.q[50:], torch.tensor([0, 40], dtype=torch.int32, device=DEVICE)
    assert torch.equal(whole.run(), expected[50:])


@pytest.mark.parametrize("num_decodes", [0, 3])
def test_nothing_before_the_window_is_read(num_decodes: int) -> None:
    batch, window = Batch([(70, 1), (33, 1), (48, 1), (80, 20)]), 16
    batch.num_decodes = num_decodes
    expected = batch.expected(window=window)
    for s, length in enumerate(batch.lengths.tolist()):
        num_queries = int(batch.starts[s + 1] - batch.starts[s])
        num_left = max(0, length - num_queries - window + 1) // 16
        batch.cache[:, batch.table[s, :num_left].long()] = torch.nan
        batch.table[s, :num_left] = -1
    assert_close(batch.run(window=window), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("bad", swept([torch.nan, torch.inf, -torch.inf], torch.nan, torch.inf))
def test_what_is_broken_stays_in_its_sequence(bad: float) -> None:
    """One sequence's keys and values, another one's query."""
    batch = Batch([(20, 1), (600, 1), (30, 1), (9, 12), (3, 17), (0, 5)])
    clean = batch.run()
    batch.cache[:, batch.table[2, 0].long(), 3] = bad
    batch.cache[:, batch.table[4, 0].long(), 2] = bad
    batch.q[1] = bad
    out = batch.run()
    starts = batch.starts.tolist()
    for s in (0, 3, 5):
        assert torch.equal(out[starts[s] : starts[s + 1]], clean[starts[s] : starts[s + 1]])
    for s in (1, 2, 4):
        assert not out[starts[s] : starts[s + 1]].isfinite().all()


def test_padding_is_zeros() -> None:
    """Tokens of no sequence, and sequences of no tokens, as a batch that was padded has them."""
    batch = Batch([(20, 1), (0, 1), (600, 1), (3, 7)], padding=3)
    expected = batch.expected()
    batch.lengths[1] = 0
    batch.table[1] = -1
    for num_decodes in (0, 3):
        out = batch.run(num_decodes=num_decodes)
        assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))
        assert torch.equal(out[1], torch.zeros_like(out[1]))
        assert_close(out[[0, 2, 3, 9]], expected[[0, 2, 3, 9]])


def test_queries_may_be_part_of_a_wider_tensor() -> None:
    batch = Batch(BATCHES["mixed"])
    expected = batch.expected()
    wider = torch.randn(batch.q.shape[0], 10, 64, device=DEVICE)
    wider[:, :6] = batch.q
    batch.q = wider[:, :6]
    assert_close(batch.run(), expected)


@pytest.mark.parametrize("num_queries", [1, 2])
def test_offsets_beyond_32_bits(num_queries: int) -> None:
    """On memory that is touched in a few blocks only, of which one lies more than 2**31 elements behind the first."""
    cache = torch.empty(2, (1 << 17) + 4, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    table = torch.tensor([[(1 << 17) + 2, 0, (1 << 16) + 1]], dtype=torch.int32, device=DEVICE)
    assert int(table.max()) * cache.stride(1) > 1 << 31
    cache[:, table[0].long()] = torch.randn(2, 3, 16, 8, 128, device=DEVICE).bfloat16()
    q = torch.randn(num_queries, 8, 128, device=DEVICE).bfloat16()
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, num_queries], [40]))
    out = paged_attention(q, cache, starts, lengths, table, 0.1, num_decodes=2 - num_queries)
    small = table.clone()
    small[0] = torch.arange(3)
    assert_close(out, paged_attention_definition(q, cache[:, table[0].long()].clone(), starts, lengths, small, 0.1))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rule", RULES)
def test_long_sequences(rule: str, dtype: torch.dtype) -> None:
    batch = Batch([(4095, 1), (2047, 1), (511, 1), (3000, 96), (0, 600), (4000, 96)], dtype=dtype)
    assert_close(batch.run(**RULES[rule]), batch.expected(**RULES[rule]))
