"""How fast is native code on the CPU beside plain torch, and how near to the memory's speed?

Both sides of a case run in turns in one process, so that a busy machine is busy for both; medians are told.
    python -m scripts.bench.kernels [--threads 2] [--rounds 15] [--json kernels.json] [names of cases]
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.cpu.huge_pages import ask_for_huge_pages
from kernels.cpu.native import native_library
from kernels.rms_norm import add_rms_norm, add_rms_norm_definition
from kernels.rope import apply_rope, apply_rope_definition
from kernels.silu_mul import silu_mul, silu_mul_definition
from worker.attention import AttentionNeeds, CommonAttentionMetadata, select_backend

H, G, D, WIDTH, MLP_WIDTH, LAYERS = 9, 3, 64, 576, 1536, 30
"""SmolLM2-135M's shape."""
BLOCK_SIZE = 16
CPU, BF16 = torch.device("cpu"), torch.bfloat16
SCALE = D**-0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two functions that compute the same, and the bytes that this must read and write at least."""

    name: str
    native: Callable[[], object]
    torch: Callable[[], object]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    name: str
    native_ms: float
    torch_ms: float
    time_share: float
    """Median of native time / torch time, each of one round."""
    gigabytes_per_s: float
    bandwidth_share: float
    """Of what summing a large tensor reads per second."""


def decode(num_seqs: int, length: int, num_layers: int) -> Case:
    """One token of each sequence over its context, cache writes included, in every layer: native, and gather + SDPA."""
    blocks_each = -(-length // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_each
    order = torch.randperm(num_blocks).view(num_seqs, blocks_each).to(torch.int32)
    common = CommonAttentionMetadata(
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32),
        seq_lens=torch.full((num_seqs,), length, dtype=torch.int32),
        block_table=order,
        slots=order[:, (length - 1) // BLOCK_SIZE].long() * BLOCK_SIZE + (length - 1) % BLOCK_SIZE,
        num_decodes=num_seqs,
        max_seq_len=length,
    )
    q, k, v = (torch.randn(num_seqs, heads, D).to(BF16) for heads in (H, G, G))
    return Case(
        name=f"decode_{num_seqs}x{length}",
        native=layers("cpu", num_blocks, num_layers, common, q, k, v),
        torch=layers("torch", num_blocks, num_layers, common, q, k, v),
        num_bytes=num_seqs * length * G * D * 2 * 2 * num_layers,
    )


def layers(
    name: str, num_blocks: int, num_layers: int, common: CommonAttentionMetadata, q: Tensor, k: Tensor, v: Tensor
) -> Callable[[], object]:
    backend = select_backend(name, AttentionNeeds(device=CPU, dtype=BF16, head_size=D, block_size=BLOCK_SIZE))
    builder = backend.make_builder(
        num_heads=H, num_kv_heads=G, head_size=D, block_size=BLOCK_SIZE, dtype=BF16, device=CPU
    )
    shape = backend.cache_shape(num_blocks, BLOCK_SIZE, G, D)
    caches = torch.empty(num_layers, *shape, dtype=BF16)
    ask_for_huge_pages(caches)  # as a worker's caches lie
    for cache in caches:
        cache.copy_(torch.randn(shape))

    def run() -> None:
        metadata = builder.build(common)
        for cache in caches:
            backend.write(cache, k, v, metadata)
            backend.attend(q, cache, metadata, SCALE)

    return run


def prefill(num_tokens: int, num_layers: int = 8) -> Case:
    """One prompt: native over the cache, and SDPA on tensors that lie ready, keys already repeated for their heads."""
    blocks = torch.randperm(-(-num_tokens // BLOCK_SIZE)).to(torch.int32)[None]
    positions = torch.arange(num_tokens)
    common = CommonAttentionMetadata(
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_table=blocks,
        slots=blocks[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        num_decodes=0,
        max_seq_len=num_tokens,
    )
    q, k, v = (torch.randn(num_tokens, heads, D).to(BF16) for heads in (H, G, G))
    queries, keys, values = (torch.randn(1, H, num_tokens, D).to(BF16) for _ in range(3))

    def sdpa() -> None:
        for _ in range(num_layers):
            scaled_dot_product_attention(queries, keys, values, is_causal=True)

    return Case(
        name=f"prefill_{num_tokens}",
        native=layers("cpu", blocks.numel(), num_layers, common, q, k, v),
        torch=sdpa,
        num_bytes=num_tokens * (2 * H + 2 * G) * D * 2 * num_layers,
    )


def rows(num_tokens: int) -> Iterator[Case]:
    x, delta = torch.randn(2, num_tokens, WIDTH).to(BF16)
    weight, gate_up = torch.randn(WIDTH), torch.randn(num_tokens, 2 * MLP_WIDTH).to(BF16)
    heads = torch.randn(num_tokens, H + 2 * G, D).to(BF16)[:, : H + G]
    cos, sin = torch.rand(2, num_tokens, D // 2)
    yield Case(
        name=f"add_rms_norm_{num_tokens}",
        native=lambda: add_rms_norm(x, delta, weight, 1e-5),
        torch=lambda: add_rms_norm_definition(x, delta, weight, 1e-5),
        num_bytes=4 * x.nbytes,
    )
    yield Case(
        name=f"rope_{num_tokens}",
        native=lambda: apply_rope(heads, cos, sin),
        torch=lambda: apply_rope_definition(heads, cos, sin),
        num_bytes=2 * heads.numel() * 2,
    )
    yield Case(
        name=f"silu_mul_{num_tokens}",
        native=lambda: silu_mul(gate_up),
        torch=lambda: silu_mul_definition(gate_up),
        num_bytes=gate_up.nbytes * 3 // 2,
    )


CASES: dict[str, Callable[[], list[Case]]] = {
    "decode": lambda: [decode(64, 192, LAYERS), decode(64, 1024, 6), decode(1, 4096, LAYERS), decode(16, 192, LAYERS)],
    "prefill": lambda: [prefill(128), prefill(512), prefill(2048, 2)],
    "rows": lambda: [*rows(1), *rows(64), *rows(512)],
}


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def read_bandwidth() -> float:
    """Bytes per second that summing 512 MiB of floats reads: the best of some."""
    numbers = torch.ones(1 << 27)
    return numbers.nbytes / min(seconds(numbers.sum) for _ in range(8))


def measure(case: Case, num_rounds: int, bandwidth: float) -> Result:
    case.native()
    case.torch()
    repeats = max(1, int(0.002 / max(seconds(case.native), 1e-7)))

    def time_of(function: Callable[[], object]) -> float:
        return seconds(lambda: [function() for _ in range(repeats)]) / repeats

    pairs = [(time_of(case.native), time_of(case.torch)) for _ in range(num_rounds)]
    native_s = statistics.median(pair[0] for pair in pairs)
    return Result(
        name=case.name,
        native_ms=native_s * 1e3,
        torch_ms=statistics.median(pair[1] for pair in pairs) * 1e3,
        time_share=statistics.median(native / plain for native, plain in pairs),
        gigabytes_per_s=case.num_bytes / native_s / 1e9,
        bandwidth_share=case.num_bytes / native_s / bandwidth,
    )


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(sorted(CASES)))
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results to this file as well.")
@torch.inference_mode()
def main(names: tuple[str, ...], threads: int, rounds: int, json_path: Path | None) -> None:
    """Time native CPU kernels against plain torch, interleaved."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    library = native_library()
    if library is None:
        raise click.ClickException("there is no native code to measure")
    bandwidth = read_bandwidth()
    print(f"{library.instruction_set}, {threads} threads, {bandwidth / 1e9:.1f} GB/s read by a sum")
    results = []
    for name in names or CASES:
        for case in CASES[name]():
            result = measure(case, rounds, bandwidth)
            results.append(result)
            print(
                f"{result.name:20} native {result.native_ms:9.3f} ms  torch {result.torch_ms:9.3f} ms  "
                f"share {result.time_share:6.3f}  {result.gigabytes_per_s:6.1f} GB/s = {result.bandwidth_share:5.1%}"
            )
    if json_path is not None:
        content = {
            "instruction_set": library.instruction_set,
            "threads": threads,
            "rounds": rounds,
            "read_bytes_per_s": bandwidth,
            "cases": [asdict(result) for result in results],
        }
        json_path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
