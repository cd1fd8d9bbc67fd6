"""Do the Triton kernels compile for GPUs that are not here, and what do they take there?

    python -m scripts.compile_kernels [--only NAME] [--capability 80,90,100] [--json | --update docs/kernels.md]

Each launch is described for tensors without memory, as the kernels' own code describes it, and compiled as it would be on
its first run. Triton's ptxas-blackwell then tells registers, shared memory and spills.

Exit code 0 when all compile and nothing spills, 1 otherwise, 2 without what it takes.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.gpu import gate_mul, kv_cache, logits, noise, paged_attention, rms_norm, rope, sampling, step_inputs
from kernels.gpu.launch import Launch

CAPABILITIES = (80, 90, 100)
BEGIN, END = "<!-- compiled: begin -->", "<!-- compiled: end -->"

_POINTERS = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
_DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """A launch as some model makes it."""

    case: str
    launch: Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a kernel takes on one kind of GPU."""

    kernel: str
    case: str
    capability: int
    num_threads: int
    registers: int
    """Per thread."""

    shared_bytes: int
    spill_bytes: int
    """Stores and loads that registers too few cost each thread."""


# ------------------------------------------------------------------------------------------ what is compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """A model's attention."""

    case: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


MODELS = (
    Heads(case="Llama 3 8B, bf16", dtype=torch.bfloat16, num_heads=32, num_kv_heads=8, head_size=128),
    Heads(case="Llama 3 8B, fp16", dtype=torch.float16, num_heads=32, num_kv_heads=8, head_size=128),
    Heads(case="Llama 3 8B, fp32", dtype=torch.float32, num_heads=32, num_kv_heads=8, head_size=128),
    Heads(case="SmolLM2 135M, bf16", dtype=torch.bfloat16, num_heads=9, num_kv_heads=3, head_size=64),
    Heads(case="SmolLM2 135M, fp32", dtype=torch.float32, num_heads=9, num_kv_heads=3, head_size=64),
    Heads(case="Mistral 7B, bf16", dtype=torch.bfloat16, num_heads=32, num_kv_heads=8, head_size=128, window=4096),
    Heads(case="Gemma 2 9B, bf16", dtype=torch.bfloat16, num_heads=16, num_kv_heads=8, head_size=256, window=4096, soft_cap=50.0),
    Heads(case="Gemma 2 9B, fp32", dtype=torch.float32, num_heads=16, num_kv_heads=8, head_size=256, window=4096, soft_cap=50.0),
    Heads(case="sinks, 64 of 8, bf16", dtype=torch.bfloat16, num_heads=64, num_kv_heads=8, head_size=64, has_sinks=True),
    Heads(case="one key head, 71 x 64, bf16", dtype=torch.bfloat16, num_heads=71, num_kv_heads=1, head_size=64),
    Heads(case="heads of 80, bf16", dtype=torch.bfloat16, num_heads=32, num_kv_heads=32, head_size=80),
)  # fmt: skip


def specimens() -> Iterator[Specimen]:
    for heads in MODELS:
        yield from _attention(heads)
    for dtype in (torch.bfloat16, torch.float32):
        yield from _rows(dtype)
    yield from _choices()


def _attention(heads: Heads, num_seqs: int = 64, longest: int = 4096) -> Iterator[Specimen]:
    cache = _empty(2, 1000, 16, heads.num_kv_heads, heads.head_size, dtype=heads.dtype)
    q = _empty(num_seqs, heads.num_heads, heads.head_size, dtype=heads.dtype)
    starts, lengths, tables = (_empty(*shape, dtype=torch.int32) for shape in ((num_seqs + 1,), (num_seqs,), (num_seqs, 256)))
    sinks = _empty(heads.num_heads, dtype=torch.float32) if heads.has_sinks else None
    rule = paged_attention.Rule(scale=0.1, window=heads.window, soft_cap=heads.soft_cap, sinks=sinks)
    for max_seq_len in (paged_attention.PART, longest):
        for launch in paged_attention.decode_launches(q, q, cache, lengths, tables, rule, max_seq_len=max_seq_len):
            parts = "in parts" if max_seq_len == longest else "whole"
            yield Specimen(case=f"{heads.case}, {parts}", launch=launch)
    yield Specimen(
        case=heads.case, launch=paged_attention.ragged_launch(q, q, cache, starts, lengths, tables, rule, first_seq=0)
    )


def _rows(dtype: torch.dtype) -> Iterator[Specimen]:
    """The small kernels, with the widths of Llama 3 8B; norms also of heads."""
    case = str(dtype).removeprefix("torch.")
    x, weight = _empty(256, 4096, dtype=dtype), _empty(4096, dtype=torch.float32)
    yield Specimen(case=case, launch=rms_norm.rms_norm_launch(x, None, x, None, weight, 1e-5))
    yield Specimen(case=f"{case}, adds", launch=rms_norm.rms_norm_launch(x, x, x, x, weight, 1e-5))
    qkv, angles = _empty(256, 48, 128, dtype=dtype), _empty(256, 64, dtype=torch.float32)
    yield Specimen(case=f"{case}, heads", launch=rms_norm.rms_norm_launch(qkv, None, qkv[:, :32], None, weight[:128], 1e-5))
    yield Specimen(case=case, launch=rope.rope_launch(qkv[:, :40], angles, angles))
    cache, slots = _empty(2, 1000, 16, 8, 128, dtype=dtype), _empty(256, dtype=torch.int64)
    yield Specimen(case=case, launch=kv_cache.append_kv_launch(cache, qkv[:, 32:40], qkv[:, 40:], slots))
    gate_up, gated = _empty(256, 2 * 14336, dtype=dtype), _empty(256, 14336, dtype=dtype)
    for activation in ("silu", "gelu", "gelu_tanh"):
        yield Specimen(case=f"{case}, {activation}", launch=gate_mul.gate_mul_launch(gated, gate_up, activation))


def _choices(vocab_size: int = 128256, num_seqs: int = 64) -> Iterator[Specimen]:
    """From logits to tokens, and the inputs of a step."""
    scores = _empty(num_seqs, vocab_size, dtype=torch.float32)
    ints, wide, floats = (_empty(num_seqs, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.float32))
    shares = _empty(num_seqs, dtype=torch.float64)
    counts, words = _empty(256, vocab_size, dtype=torch.int32), _empty(256, -(-vocab_size // 32), dtype=torch.int32)
    ids = _empty(1, vocab_size, dtype=torch.int64)
    case = f"{vocab_size} tokens"
    yield Specimen(case=case, launch=sampling.argmax_launch(wide, scores))
    yield Specimen(case=case, launch=sampling.draw_launch(wide, scores, floats, wide, shares, shares, wide, wide))
    yield Specimen(case=case, launch=noise.noise_launch(scores, wide, wide, ids))
    yield Specimen(case=case, launch=logits.penalties_launch(scores, wide, words, counts, floats, floats, floats))
    yield Specimen(case=case, launch=logits.token_mask_launch(scores, words[:num_seqs], wide))
    tables = _empty(256, 512, dtype=torch.int32)
    launch = step_inputs.step_inputs_launch((wide, wide, wide, ints), wide, ints, ints, counts, tables, 16)
    yield Specimen(case="blocks of 16", launch=launch)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# ------------------------------------------------------------------------------------------ how


def compile_specimen(specimen: Specimen, capability: int) -> Compiled:
    """Raises whatever the compiler does."""
    launch = specimen.launch
    built = triton.compile(
        _source(launch),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    told = _assemble(built.asm["ptx"])
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told)
    registers = re.search(r"Used (\d+) registers", told)
    if spills is None or registers is None:
        raise RuntimeError(f"ptxas-blackwell says neither registers nor spills: {told:.500}")
    return Compiled(
        kernel=launch.kernel.__name__,
        case=specimen.case,
        capability=capability,
        num_threads=32 * launch.num_warps,
        registers=int(registers[1]),
        shared_bytes=built.metadata.shared,
        spill_bytes=int(spills[1]) + int(spills[2]),
    )


def _source(launch: Launch) -> Any:
    """Types, and what the first run would specialise on: constants, ones, addresses and numbers divisible by 16."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        is_special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_special and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = _DIVISIBLE
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if abs(value) < 1 << 31 else "i64"
            if is_special and value % 16 == 0:
                attributes[(i,)] = _DIVISIBLE
        else:
            signature[parameter.name] = "fp32"
    return ASTSource(launch.kernel, signature, constants, attributes)


def _assemble(ptx: str) -> str:
    """What ptxas-blackwell says of it; it knows all targets, the plain one does not."""
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [assembler(), "-v", f"--gpu-name={target[1]}", source, "-o", f"{folder}/kernel.cubin"],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"ptxas-blackwell refuses it: {done.stderr:.2000}")
    return done.stderr


def assembler() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"


# ------------------------------------------------------------------------------------------ the command


def table(found: list[Compiled]) -> str:
    """Markdown: a line for each kernel and case, registers / shared KiB (/ spilled bytes) for each capability."""
    capabilities = sorted({one.capability for one in found})
    lines = [
        "| kernel | case | threads | " + " | ".join(f"sm_{capability}" for capability in capabilities) + " |",
        "|---|---|---|" + "---|" * len(capabilities),
    ]
    by_case: dict[tuple[str, str], list[Compiled]] = {}
    for one in found:
        by_case.setdefault((one.kernel, one.case), []).append(one)
    for (kernel, case), ones in sorted(by_case.items()):
        cells = [
            f"{one.registers} / {one.shared_bytes / 1024:.1f}" + (f" / **{one.spill_bytes}**" if one.spill_bytes else "")
            for one in sorted(ones, key=lambda one: one.capability)
        ]
        lines.append(f"| {kernel.removesuffix('_kernel')} | {case} | {ones[0].num_threads} | {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command()
@click.option("--only", default="", help="Kernels whose name contains this.")
@click.option("--case", default="", help="Cases whose name contains this.")
@click.option("--capability", default=",".join(map(str, CAPABILITIES)), show_default=True, help="Of GPUs, separated by commas.")
@click.option("--json", "as_json", is_flag=True, help="One JSON list instead of a table.")
@click.option("--update", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Put the table into this file.")
def main(only: str, case: str, capability: str, as_json: bool, update: Path | None) -> None:
    if triton.knobs.runtime.interpret or not assembler().is_file():
        click.echo("compile_kernels: needs ptxas-blackwell beside triton, and TRITON_INTERPRET=0", err=True)
        sys.exit(2)
    found, failures = [], 0
    for specimen in specimens():
        if only not in specimen.launch.kernel.__name__ or case not in specimen.case:
            continue
        for number in map(int, capability.split(",")):
            try:
                found.append(compile_specimen(specimen, number))
            except Exception as error:  # noqa: BLE001 - a compiler's; the others are compiled all the same
                failures += 1
                click.echo(f"{specimen.launch.kernel.__name__} ({specimen.case}) for sm_{number}: {error}", err=True)
    text = json.dumps([asdict(one) for one in found]) if as_json else table(found)
    if update is None:
        click.echo(text)
    else:
        page = update.read_text()
        before, after = page.index(BEGIN) + len(BEGIN), page.index(END)
        update.write_text(f"{page[:before]}\n{text}\n{page[after:]}")
    sys.exit(int(failures > 0 or any(one.spill_bytes for one in found)))


if __name__ == "__main__":
    main()
