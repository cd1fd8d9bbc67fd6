"""Does a backend attend as the definition does, whatever the batch and whatever a layer asks for?"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.paged_attention import paged_attention
from kernels.panel_attention import tokens_of_panels
from tests.interpreter import use_interpreter
from tests.native import INSTRUCTION_SETS
from worker.attention import AttentionNeeds, CommonAttentionMetadata, select_backend, torch_backend
from worker.attention.torch_backend import TorchMetadata
from worker.attention.triton_backend import TritonBackend

CPU = torch.device("cpu")
G, D, H = 2, 16, 6
BLOCK_SIZES = {"torch": 4, "cpu": 16, "triton": 4}
needs_native_code = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")
BACKENDS = [
    "torch",
    pytest.param("cpu", marks=needs_native_code),
    "triton",
]
SWEPT = [*BACKENDS[:2], pytest.param("triton", marks=pytest.mark.slow)]
"""For tests of many cases: the interpreter takes a second for one batch after the other. tests/kernels has some of them."""

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the largest difference, relative to the largest value."""


def assert_close(out: Tensor, expected: Tensor) -> None:
    assert out.dtype == expected.dtype
    gap = (out.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert gap <= TOLERANCES[out.dtype], f"relative difference {gap.item()}"


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "backend" in request.fixturenames and request.getfixturevalue("backend") == "triton":
        use_interpreter(monkeypatch)


class Step:
    """A random step over a cache whose unused slots are all NaN."""

    def __init__(
        self,
        sizes: list[tuple[int, int]],
        *,
        dtype: torch.dtype,
        padding: int = 0,
        num_blocks: int = 512,
        backend: str = "torch",
        rule: dict[str, Any] | None = None,
        spread: float = 1.0,
    ) -> None:
        """
        Args:
            sizes: (tokens in the cache before, query tokens) of each sequence, decodes first.
            rule: window, soft cap and sinks, as ``attend`` takes them.
            spread: standard deviation of queries and keys.
        """
        self.sizes, self.rule = sizes, rule or {}
        K = BLOCK_SIZES[backend]
        draw = torch.Generator().manual_seed(len(sizes))
        lengths = [history + num_queries for history, num_queries in sizes]
        widest = max((-(-length // K) for length in lengths), default=0) + 1
        free = torch.randperm(num_blocks, generator=draw).tolist()
        tables = [[free.pop() for _ in range(-(-length // K))] for length in lengths]
        num_tokens = sum(num_queries for _, num_queries in sizes)
        slots = [
            table[position // K] * K + position % K
            for table, (history, num_queries) in zip(tables, sizes, strict=True)
            for position in range(history, history + num_queries)
        ]
        self.common = CommonAttentionMetadata(
            query_starts=torch.tensor([0] + [n for _, n in sizes]).cumsum(0).to(torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.tensor([t + [-1] * (widest - len(t)) for t in tables], dtype=torch.int32).view(
                len(sizes), -1
            ),
            slots=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
            num_decodes=sum(n == 1 for _, n in sizes),
            max_seq_len=max(lengths, default=0),
        )
        self.q, self.k, self.v = (
            (torch.randn(num_tokens + padding, heads, D, generator=draw) * deviation).to(dtype)
            for heads, deviation in ((H, spread), (G, spread), (G, 1.0))
        )
        needs = AttentionNeeds(device=CPU, dtype=dtype, head_size=D, block_size=K)
        self.backend = TritonBackend() if backend == "triton" else select_backend(backend, needs)
        self.builder = self.backend.make_builder(
            num_heads=H, num_kv_heads=G, head_size=D, block_size=K, dtype=dtype, device=CPU,
            window=self.rule.get("window"),
        )  # fmt: skip
        self.cache = torch.full(self.backend.cache_shape(num_blocks, K, G, D), torch.nan, dtype=dtype)
        self._write_history([history for history, _ in sizes], tables, draw, spread)

    def _write_history(
        self, lengths: list[int], tables: list[list[int]], draw: torch.Generator, spread: float
    ) -> None:
        K = self.builder.block_size
        slots = [
            table[position // K] * K + position % K
            for table, history in zip(tables, lengths, strict=True)
            for position in range(history)
        ]
        k, v = torch.randn(2, len(slots), G, D, generator=draw)
        k, v = (k * spread).to(self.q.dtype), v.to(self.q.dtype)
        write = replace(
            self.common,
            query_starts=torch.zeros_like(self.common.query_starts),
            slots=torch.tensor(slots, dtype=torch.int64),
        )
        self.backend.write(self.cache, k, v, self.builder.build(write))

    def tokens(self) -> Tensor:
        """The cache as [2, B, K, G, D]."""
        return tokens_of_panels(self.cache, D) if self.backend.name == "cpu" else self.cache

    def run(self) -> Tensor:
        metadata = self.builder.build(self.common)
        self.backend.write(self.cache, self.k, self.v, metadata)
        return self.backend.attend(self.q, self.cache, metadata, D**-0.5, **self.rule)

    def run_without_what_left_the_window(self) -> Tensor:
        """The core gave those blocks away: others write there, and the table may not even name them."""
        K, window = self.builder.block_size, self.rule["window"]
        metadata = self.builder.build(self.common)
        self.backend.write(self.cache, self.k, self.v, metadata)
        table, cache = self.common.block_table.clone(), self.cache.clone()
        for s, (history, _) in enumerate(self.sizes):
            num_left = max(0, history - window + 1) // K
            blocks = table[s, :num_left].long()
            if self.backend.name == "cpu":
                cache[blocks] = torch.nan
            else:
                cache[:, blocks] = torch.nan
            table[s, :num_left] = -1
        metadata = self.builder.build(replace(self.common, block_table=table))
        return self.backend.attend(self.q, cache, metadata, D**-0.5, **self.rule)

    def expected(self) -> Tensor:
        common = self.common
        return paged_attention(
            self.q, self.tokens(), common.query_starts, common.seq_lens, common.block_table, D**-0.5, **self.rule
        )


BATCHES = {
    "one_token": [(0, 1)],
    "one_decode": [(17, 1)],
    "decodes": [(0, 1), (3, 1), (4, 1), (130, 1), (7, 1)],
    "one_prefill": [(0, 9)],
    "chunk_with_history": [(13, 6)],
    "ragged_prefills": [(0, 4), (5, 3), (0, 17), (64, 2)],
    "mixed": [(30, 1), (2, 1), (0, 8), (16, 16), (3, 2)],
    "long_beside_short": [(700, 1), (2, 1), (1, 1), (260, 1), (400, 30)],
}


INTERPRETED = [("decodes", torch.bfloat16), ("mixed", torch.float32)]
"""What the interpreter gets of the cells that follow; the others are slow ones."""

CELLS = [
    *itertools.product(BACKENDS[:1], BATCHES, TOLERANCES),
    *(pytest.param("cpu", *cell, marks=needs_native_code) for cell in itertools.product(BATCHES, TOLERANCES)),
    *(
        pytest.param("triton", *cell, marks=[] if cell in INTERPRETED else pytest.mark.slow)
        for cell in itertools.product(BATCHES, TOLERANCES)
    ),
]


@pytest.mark.parametrize(("backend", "batch", "dtype"), CELLS)
def test_as_the_definition(backend: str, batch: str, dtype: torch.dtype) -> None:
    step = Step(BATCHES[batch], dtype=dtype, backend=backend)
    assert_close(step.run(), step.expected())


RULES: dict[str, dict[str, Any]] = {
    "window_1": {"window": 1},
    "window_4": {"window": 4},
    "window_17": {"window": 17},
    "window_beyond": {"window": 4000},
    "soft_cap": {"soft_cap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 2, H)},
    "all": {"window": 16, "soft_cap": 1.5, "sinks": torch.linspace(2, -1, H)},
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", SWEPT)
def test_windows_soft_caps_and_sinks(backend: str, rule: str, dtype: torch.dtype) -> None:
    for batch in BATCHES.values():
        step = Step(batch, dtype=dtype, backend=backend, rule=RULES[rule], padding=1)
        assert_close(step.run(), step.expected())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rule", ["soft_cap", "sinks"])
@pytest.mark.parametrize("backend", SWEPT)
def test_large_scores_are_not_rounded(backend: str, rule: str, dtype: torch.dtype) -> None:
    """Of 16 in the mean, as queries and keys four times as large as usual have; rules that plain torch has no call for."""
    chosen = {"soft_cap": {"soft_cap": 50.0}, "sinks": RULES["sinks"]}[rule]
    for batch in ("decodes", "mixed"):
        step = Step(BATCHES[batch], dtype=dtype, backend=backend, rule=chosen, spread=4.0)
        assert_close(step.run(), step.expected())


@pytest.mark.parametrize("backend", SWEPT)
def test_a_cap_that_hardly_bends_loses_nothing(backend: str) -> None:
    for cap in (300.0, 1e6):
        step = Step(BATCHES["mixed"], dtype=torch.float32, backend=backend, rule={"soft_cap": cap})
        assert_close(step.run(), step.expected())


LONG_BATCH = [(4095, 1), (2047, 1), (511, 1), (3000, 96), (0, 600), (4000, 96)]
LONG_RULES = {"none": {}, "window_1000": {"window": 1000}, **{name: RULES[name] for name in ("window_17", "soft_cap", "sinks", "all")}}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "rule", [name if name in ("none", "all") else pytest.param(name, marks=pytest.mark.slow) for name in LONG_RULES]
)
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_long_sequences(backend: str, rule: str, dtype: torch.dtype) -> None:
    step = Step(LONG_BATCH, dtype=dtype, backend=backend, rule=LONG_RULES[rule], padding=2, num_blocks=4000)
    assert_close(step.run(), step.expected())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("backend", SWEPT)
def test_what_is_broken_stays_in_its_sequence(backend: str, bad: float) -> None:
    """The first block of a decode and of a prefill, and another decode's query."""
    sizes = [(20, 1), (60, 1), (30, 1), (9, 12), (3, 17), (0, 5)]
    clean = Step(sizes, dtype=torch.float32, backend=backend).run()
    step = Step(sizes, dtype=torch.float32, backend=backend)
    metadata = step.builder.build(step.common)
    step.backend.write(step.cache, step.k, step.v, metadata)
    K = step.builder.block_size
    slots = (step.common.block_table[[2, 4], :1].long() * K + torch.arange(K)).flatten()
    poison = torch.full((2 * K, G, D), bad)
    write = replace(step.common, query_starts=torch.zeros_like(step.common.query_starts), slots=slots)
    step.backend.write(step.cache, poison, poison, step.builder.build(write))
    step.q[1] = bad
    out = step.backend.attend(step.q, step.cache, metadata, D**-0.5)
    starts = step.common.query_starts.tolist()
    for s in range(len(sizes)):
        own = slice(starts[s], starts[s + 1])
        assert torch.equal(out[own], clean[own]) == (s in (0, 3, 5))
        assert bool(out[own].isfinite().all()) == (s in (0, 3, 5))


@pytest.mark.parametrize("num_queries", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_beyond_32_bits(backend: str, num_queries: int) -> None:
    """On memory that is touched in a few blocks only, of which one lies more than 2**31 elements behind the first."""
    block_size, num_kv_heads, head_size, dtype = 16, 8, 128, torch.bfloat16
    blocks = [(1 << 17) + 2, 0, (1 << 16) + 1]
    served = TritonBackend() if backend == "triton" else select_backend(
        backend, AttentionNeeds(device=CPU, dtype=dtype, head_size=head_size, block_size=block_size)
    )  # fmt: skip
    builder = served.make_builder(
        num_heads=8, num_kv_heads=num_kv_heads, head_size=head_size, block_size=block_size, dtype=dtype, device=CPU
    )
    length = 40
    positions = torch.arange(length)

    def out_of(num_blocks: int, table: list[int]) -> Tensor:
        draw = torch.Generator().manual_seed(3)
        cache = torch.empty(served.cache_shape(num_blocks, block_size, num_kv_heads, head_size), dtype=dtype)
        common = CommonAttentionMetadata(
            query_starts=torch.tensor([0, length], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            block_table=torch.tensor([table], dtype=torch.int32),
            slots=torch.tensor(table)[positions // block_size] * block_size + positions % block_size,
            num_decodes=0,
            max_seq_len=length,
        )
        k, v = torch.randn(2, length, num_kv_heads, head_size, generator=draw).to(dtype)
        served.write(cache, k, v, builder.build(common))
        q = torch.randn(num_queries, 8, head_size, generator=draw).to(dtype)
        step = replace(
            common, query_starts=torch.tensor([0, num_queries], dtype=torch.int32),
            slots=common.slots[length - num_queries :], num_decodes=2 - num_queries,
        )  # fmt: skip
        return served.attend(q, cache, builder.build(step), 0.1)

    far = out_of(max(blocks) + 2, blocks)
    assert max(blocks) * block_size * num_kv_heads * head_size > 1 << 31
    assert torch.equal(far, out_of(3, [2, 0, 1]))


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 16, 17, 33])
@pytest.mark.parametrize("backend", SWEPT)
def test_nothing_before_the_window_is_read(backend: str, window: int) -> None:
    for batch in BATCHES.values():
        step = Step(batch, dtype=torch.float32, backend=backend, rule={"window": window})
        assert_close(step.run_without_what_left_the_window(), step.expected())


def test_memory_of_windowed_decodes_is_that_of_the_window() -> None:
    step = Step([(700, 1)] * 20, dtype=torch.float32, num_blocks=8000, rule={"window": 64})
    metadata = step.builder.build(step.common)
    assert isinstance(metadata, TorchMetadata)
    assert sum(len(decodes.slots) for decodes in metadata.decodes) == 20 * 64


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_of_another_group_is_refused(backend: str) -> None:
    step = Step(BATCHES["mixed"], dtype=torch.float32, backend=backend, rule={"window": 4})
    metadata = step.builder.build(step.common)
    with pytest.raises(AssertionError, match="KV group"):
        step.backend.attend(step.q, step.cache, metadata, D**-0.5)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("backend", SWEPT)
def test_padding_is_inert(backend: str, batch: str) -> None:
    step = Step(BATCHES[batch], dtype=torch.float32, padding=3, backend=backend)
    before = step.tokens().clone()
    out = step.run()
    num_tokens = len(out) - 3
    assert torch.equal(out[num_tokens:], torch.zeros(3, H, D))
    assert_close(out, step.expected())
    written = (step.tokens().nan_to_num(7) != before.nan_to_num(7)).flatten(3).any(3).flatten(1)
    assert written.sum() == 2 * num_tokens
    assert not step.tokens().flatten(1, 2)[:, step.common.slots[:num_tokens]].isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_result_goes_where_it_is_wanted(backend: str) -> None:
    step = Step(BATCHES["mixed"], dtype=torch.float32, padding=3, backend=backend)
    expected = step.run()
    out = torch.full(expected.shape, torch.nan)
    attended = step.backend.attend(step.q, step.cache, step.builder.build(step.common), D**-0.5, out=out)
    assert attended is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_that_are_padding(backend: str) -> None:
    """Decodes of length 0, as a batch padded for a graph has them, come out as zeros."""
    step = Step([(5, 1), (0, 1), (9, 1)], dtype=torch.float32, backend=backend)
    step.common.seq_lens[1] = 0
    step.common.block_table[1] = -1
    step.common.slots[1] = -1
    out = step.run()
    assert torch.equal(out[1], torch.zeros(H, D))
    assert not out.isnan().any()
    assert out[[0, 2]].abs().min() > 0


def test_small_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries cut into pieces, decodes cut into batches: as when they are computed at once."""
    whole = [Step(BATCHES[batch], dtype=torch.float32).run() for batch in BATCHES]
    monkeypatch.setattr(torch_backend, "_QUERIES_AT_ONCE", 5)
    monkeypatch.setattr(torch_backend, "_MAX_PADDED_TOKENS", 40)
    monkeypatch.setattr(torch_backend, "_SHORTEST_BUCKET", 4)
    for expected, batch in zip(whole, BATCHES.values(), strict=True):
        step = Step(batch, dtype=torch.float32)
        assert_close(step.run(), expected)
        for rule in RULES.values():
            step = Step(batch, dtype=torch.float32, rule=rule)
            assert_close(step.run(), step.expected())


@pytest.mark.parametrize("sizes", [[(4000, 1)] + [(50, 1)] * 100, [(3000, 1)] * 50])
def test_memory_of_decodes_is_bounded(sizes: list[tuple[int, int]]) -> None:
    """One long sequence beside many short ones, and many long ones: what is gathered stays near what there is."""
    step = Step(sizes, dtype=torch.float32, num_blocks=40_000)
    metadata = step.builder.build(step.common)
    assert isinstance(metadata, TorchMetadata)
    assert sum(len(decodes.tokens) for decodes in metadata.decodes) == len(sizes)
    assert sum(len(decodes.slots) for decodes in metadata.decodes) < 2 * sum(length + 1 for length, _ in sizes)
    assert max(len(decodes.slots) for decodes in metadata.decodes) <= 1 << 16
