"""How near do the Triton kernels come to what this GPU gives: decode to its memory's speed, prefill to its matrix rate?

    python -m scripts.bench.gpu_kernels [--rounds 30] [--sweep] [--json FILE]

Decode attention of 64 sequences of 4,096 tokens and prefill of 8 x 4,096, both with Llama 3 8B's heads in bfloat16 and
shuffled blocks, in turns with a copy of 2 GiB and a product of 8192 x 8192 matrices. Medians of times on the device.

Exit code 0 when decode reaches 80 % of the copy's bandwidth and prefill 60 % of the product's rate, and both agree with plain
torch; 1 otherwise; 2 without a GPU that serves.
"""

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.gpu import dispatch
from kernels.paged_attention import paged_attention

H, G, D, BLOCK_SIZE, CONTEXT = 32, 8, 128, 16, 4096
"""Llama 3 8B's heads."""
DECODES, PREFILLS = 64, 8
SCALE = D**-0.5
WANTED_DECODE, WANTED_PREFILL = 0.8, 0.6
MAX_GAP = 1e-2
"""Largest difference from plain torch, relative to the largest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    name: str
    milliseconds: float
    rate: float
    unit: str
    share: float | None = None
    """Of what was measured beside it."""

    wanted: float | None = None
    gap: float | None = None


class Attention:
    """Sequences of one length whose last ``num_queries`` tokens are computed."""

    def __init__(self, num_seqs: int, num_queries: int, device: torch.device) -> None:
        blocks_each = CONTEXT // BLOCK_SIZE
        order = torch.randperm(num_seqs * blocks_each, device=device)
        self.num_seqs, self.num_queries = num_seqs, num_queries
        self.table = order.view(num_seqs, blocks_each).to(torch.int32)
        self.cache = torch.randn(2, len(order), BLOCK_SIZE, G, D, dtype=torch.bfloat16, device=device)
        self.q = torch.randn(num_seqs * num_queries, H, D, dtype=torch.bfloat16, device=device)
        self.starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_queries
        self.lengths = torch.full((num_seqs,), CONTEXT, dtype=torch.int32, device=device)

    @property
    def num_decodes(self) -> int:
        return self.num_seqs if self.num_queries == 1 else 0

    @property
    def num_bytes(self) -> int:
        """Keys and values, once."""
        return self.cache.nbytes

    @property
    def num_operations(self) -> int:
        """Multiplications and additions of both products, where a query sees a key."""
        seen = sum(range(CONTEXT - self.num_queries + 1, CONTEXT + 1))
        return 4 * H * D * seen * self.num_seqs

    def run(self) -> Tensor:
        return paged_attention(
            self.q, self.cache, self.starts, self.lengths, self.table, SCALE,
            num_decodes=self.num_decodes, max_seq_len=CONTEXT, has_padding=False,
        )  # fmt: skip

    def contiguous(self, seq: int) -> Tensor:
        """One sequence by torch, from keys and values gathered before."""
        k, v = self.cache[:, self.table[seq].long()].flatten(1, 2).transpose(1, 2)[:, None]
        start = seq * self.num_queries
        q = self.q[start : start + self.num_queries].transpose(0, 1)[None]
        is_causal = self.num_queries > 1
        out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=SCALE, enable_gqa=True)
        return out[0].transpose(0, 1)

    def gap(self) -> float:
        """Between the kernel's result and torch's, over a few sequences."""
        out = self.run().view(self.num_seqs, self.num_queries, H, D)
        gaps = [_gap(out[seq], self.contiguous(seq)) for seq in (0, self.num_seqs // 2, self.num_seqs - 1)]
        return max(gaps)


def _gap(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()


def medians(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds on the device of each, run in turns; the first rounds, which compile, do not count."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 3):
        for name, function in functions.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            end.synchronize()
            if number >= 3:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(rounds: int, device: torch.device) -> list[Result]:
    decode, prefill = Attention(DECODES, 1, device), Attention(PREFILLS, CONTEXT, device)
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device=device)
    took = medians(
        {"copy": lambda: target.copy_(source), "decode": decode.run, "product": lambda: a @ b, "prefill": prefill.run}, rounds
    )
    copy_rate = 2 * source.nbytes / took["copy"] / 1e6
    product_rate = 2 * 8192**3 / took["product"] / 1e9
    decode_rate = decode.num_bytes / took["decode"] / 1e6
    prefill_rate = prefill.num_operations / took["prefill"] / 1e9
    return [
        Result(name="copy of 2 GiB", milliseconds=took["copy"], rate=copy_rate, unit="GB/s"),
        Result(
            name="decode", milliseconds=took["decode"], rate=decode_rate, unit="GB/s", share=decode_rate / copy_rate,
            wanted=WANTED_DECODE, gap=decode.gap(),
        ),
        Result(name="product of 8192 x 8192", milliseconds=took["product"], rate=product_rate, unit="TFLOP/s"),
        Result(
            name="prefill", milliseconds=took["prefill"], rate=prefill_rate, unit="TFLOP/s",
            share=prefill_rate / product_rate, wanted=WANTED_PREFILL, gap=prefill.gap(),
        ),
    ]  # fmt: skip


def sweep(rounds: int, device: torch.device) -> Iterator[str]:
    """Other tilings than the kernels choose, the fastest first: for whoever tunes them for a new GPU."""
    library = dispatch.triton_for(torch.empty(0, device=device))
    decode, prefill = Attention(DECODES, 1, device), Attention(PREFILLS, CONTEXT, device)
    rule = library.Rule(scale=SCALE)
    attend, merge = library.decode_launches(
        torch.empty_like(decode.q), decode.q, decode.cache, decode.lengths, decode.table, rule, max_seq_len=CONTEXT
    )
    ragged = library.ragged_launch(
        torch.empty_like(prefill.q), prefill.q, prefill.cache, prefill.starts, prefill.lengths, prefill.table, rule, first_seq=0
    )
    yield f"merging the parts of a decode: {medians({'merge': merge.run}, rounds)['merge']:.3f} ms"
    for name, launch in (("decode", attend), ("prefill", ragged)):
        variants = {}
        for keys, warps, stages in itertools.product((32, 64, 128), (4, 8), (2, 3, 4, 5)):
            variant = replace(launch, arguments={**launch.arguments, "KEYS": keys}, num_warps=warps, num_stages=stages)
            try:
                variant.run()
            except Exception as error:  # noqa: BLE001 - what the device can't hold is left out
                yield f"{name}: {keys} keys, {warps} warps, {stages} stages: {str(error).splitlines()[0]:.100}"
            else:
                variants[f"{keys} keys, {warps} warps, {stages} stages"] = variant.run
        for what, took in sorted(medians(variants, rounds).items(), key=lambda item: item[1]):
            yield f"{name}: {what}: {took:.3f} ms"


def line(result: Result) -> str:
    text = f"{result.name:<24} {result.milliseconds:9.3f} ms {result.rate:9.1f} {result.unit}"
    if result.share is None:
        return text
    return f"{text}   {result.share:6.1%} of it (wanted {result.wanted:.0%}), differs from torch by {result.gap:.1e}"


def passes(result: Result) -> bool:
    is_fast = result.share is None or result.wanted is None or result.share >= result.wanted
    return is_fast and (result.gap is None or result.gap <= MAX_GAP)


@click.command()
@click.option("--rounds", type=click.IntRange(3), default=30, show_default=True, help="Times each is run.")
@click.option("--sweep", "sweeps", is_flag=True, help="Also time other tilings.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the results there too.")
def main(rounds: int, sweeps: bool, json_file: Path | None) -> None:
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or not dispatch.is_installed() or not dispatch.serves(device):
        click.echo("gpu_kernels: no GPU here that the Triton kernels serve; nothing was measured", err=True)
        sys.exit(2)
    click.echo(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    with torch.inference_mode():
        results = measure(rounds, device)
        for result in results:
            click.echo(line(result))
        for text in sweep(rounds, device) if sweeps else ():
            click.echo(text)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    sys.exit(0 if all(map(passes, results)) else 1)


if __name__ == "__main__":
    main()
