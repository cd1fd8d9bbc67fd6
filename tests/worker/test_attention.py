"""Does a backend attend as the definition does, whatever the batch, and is the right one selected?"""

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ipc.errors import ConfigError
from kernels.paged_attention import paged_attention
from kernels.panel_attention import tokens_of_panels
from tests.native import INSTRUCTION_SETS, use_instruction_set
from worker.attention import CommonAttentionMetadata, backend_names, select_backend, torch_backend
from worker.attention.torch_backend import TorchMetadata

CPU = torch.device("cpu")
G, D, H = 2, 16, 6
BLOCK_SIZES = {"torch": 4, "cpu": 16}
BACKENDS = [
    "torch",
    pytest.param("cpu", marks=pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")),
]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


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
    ) -> None:
        """``sizes``: (tokens in the cache before, query tokens) of each sequence, decodes first."""
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
            torch.randn(num_tokens + padding, heads, D, generator=draw).to(dtype) for heads in (H, G, G)
        )
        self.backend = select_backend(backend, device=CPU, dtype=dtype, head_size=D, block_size=K)
        self.builder = self.backend.make_builder(
            num_heads=H, num_kv_heads=G, head_size=D, block_size=K, dtype=dtype, device=CPU
        )
        self.cache = torch.full(self.backend.cache_shape(num_blocks, K, G, D), torch.nan, dtype=dtype)
        self._write_history([history for history, _ in sizes], tables, draw)

    def _write_history(self, lengths: list[int], tables: list[list[int]], draw: torch.Generator) -> None:
        K = self.builder.block_size
        slots = [
            table[position // K] * K + position % K
            for table, history in zip(tables, lengths, strict=True)
            for position in range(history)
        ]
        k, v = torch.randn(2, len(slots), G, D, generator=draw).to(self.q.dtype)
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
        return self.backend.attend(self.q, self.cache, metadata, D**-0.5)

    def expected(self) -> Tensor:
        common = self.common
        return paged_attention(self.q, self.tokens(), common.query_starts, common.seq_lens, common.block_table, D**-0.5)


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


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_as_the_definition(backend: str, batch: str, dtype: torch.dtype) -> None:
    step = Step(BATCHES[batch], dtype=dtype, backend=backend)
    out = step.run()
    assert out.dtype == dtype
    assert (out.float() - step.expected().float()).abs().max() <= TOLERANCES[dtype]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_inert(backend: str, batch: str) -> None:
    step = Step(BATCHES[batch], dtype=torch.float32, padding=3, backend=backend)
    before = step.tokens().clone()
    out = step.run()
    num_tokens = len(out) - 3
    assert torch.equal(out[num_tokens:], torch.zeros(3, H, D))
    assert (out - step.expected()).abs().max() <= TOLERANCES[torch.float32]
    written = (step.tokens().nan_to_num(7) != before.nan_to_num(7)).flatten(3).any(3).flatten(1)
    assert written.sum() == 2 * num_tokens
    assert not step.tokens().flatten(1, 2)[:, step.common.slots[:num_tokens]].isnan().any()


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
        assert (step.run() - expected).abs().max() <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("sizes", [[(4000, 1)] + [(50, 1)] * 100, [(3000, 1)] * 50])
def test_memory_of_decodes_is_bounded(sizes: list[tuple[int, int]]) -> None:
    """One long sequence beside many short ones, and many long ones: what is gathered stays near what there is."""
    step = Step(sizes, dtype=torch.float32, num_blocks=40_000)
    metadata = step.builder.build(step.common)
    assert isinstance(metadata, TorchMetadata)
    assert sum(len(decodes.tokens) for decodes in metadata.decodes) == len(sizes)
    assert sum(len(decodes.slots) for decodes in metadata.decodes) < 2 * sum(length + 1 for length, _ in sizes)
    assert max(len(decodes.slots) for decodes in metadata.decodes) <= 1 << 16


@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata_outlives_the_batchs_buffers(backend: str) -> None:
    step = Step(BATCHES["mixed"], dtype=torch.float32, backend=backend)
    expected = Step(BATCHES["mixed"], dtype=torch.float32, backend=backend).run()
    metadata = step.builder.build(step.common)
    for tensor in (step.common.query_starts, step.common.seq_lens, step.common.block_table, step.common.slots):
        tensor.fill_(0)
    step.backend.write(step.cache, step.k, step.v, metadata)
    assert torch.equal(step.backend.attend(step.q, step.cache, metadata, D**-0.5), expected)


def select(
    name: str = "auto",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    head_size: int = 64,
    block_size: int = 16,
) -> str:
    return select_backend(
        name, device=torch.device(device), dtype=dtype, head_size=head_size, block_size=block_size
    ).name


def test_selection(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"cpu", "torch"} <= set(backend_names())
    with caplog.at_level(logging.INFO):
        assert select("torch", dtype=torch.bfloat16) == "torch"
        use_instruction_set("torch", monkeypatch)
        assert select() == "torch"
    assert [record.message for record in caplog.records] == [
        "attention backend torch (asked for)",
        "attention backend torch (first that fits; cpu lacks native code (no compiler when Brigade was installed?))",
    ]
    with pytest.raises(ConfigError, match="cpu cannot be used: cpu lacks native code"):
        select("cpu")


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")
def test_native_code_is_preferred_where_it_serves() -> None:
    assert select() == "cpu"
    assert select(head_size=24) == "torch"
    assert select(block_size=8) == "torch"
    with pytest.raises(ConfigError, match="cpu does not serve head size 24"):
        select("cpu", head_size=24)


def test_selection_says_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="--attention-backend: 'flash' is unknown; give auto or one of .*torch"):
        select("flash")
    with pytest.raises(ConfigError, match="torch does not serve dtype float64"):
        select(dtype=torch.float64)
    with pytest.raises(ConfigError, match="torch does not serve device meta"):
        select("torch", device="meta")
