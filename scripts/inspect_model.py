"""How does ``brigade inspect`` tell people and programs about a checkpoint?"""

import json
from collections.abc import Iterator
from typing import Any

import click

from ipc.errors import ConfigError
from scripts.model_source import find_model
from scripts.options import DEFAULT_MAX_NUM_SEQS, MAX_COUNT, Bytes
from worker.model_config import read_model_config
from worker.partition import split_layers


@click.command("inspect", context_settings={"max_content_width": 120})
@click.argument("model")
@click.option("--pipeline-parallel-size", "--pp", "num_stages", type=click.IntRange(1, 1024), default=1, show_default=True,
              help="Stages to split it into.")
@click.option("--pipeline-partition", "partition", default="auto", show_default=True, metavar="auto|even|N,N,…",
              help="Layers per stage.")
@click.option("--measure/--no-measure", default=None,
              help="Time layers, embedding and head on this machine for an auto split, with made-up weights.  "
              "[default: if it takes little memory]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
              help="Where stages would compute.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True,
              help="Type of weights and KV cache in memory; auto takes the checkpoint's.")
@click.option("--block-size", type=click.IntRange(1, 1 << 16), default=16, show_default=True,
              help="Tokens per KV block, a power of two.")
@click.option("--max-model-len", type=click.IntRange(2, MAX_COUNT), default=None,
              help="Most tokens of a prompt and its answer together.  [default: the model's]")
@click.option("--max-num-seqs", type=click.IntRange(1, 1 << 16), default=DEFAULT_MAX_NUM_SEQS, show_default=True,
              help="Most requests that run at once.")
@click.option("--kv-cache-memory", type=Bytes(), default=None,
              help="KV cache bytes per stage, such as 2GiB.  [default: by free memory]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: sizes in bytes, times in seconds.")
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """Show what is in MODEL, how it would split, and what would fit on this machine.

    MODEL is a folder, a .gguf file, or a name on a hub, as for `brigade serve`; what is on a hub is fetched first. Only the
    heads of files are read, so MODEL may be larger than memory.

    \b
    Exit codes:
      0  shown
      1  MODEL can't be served, or an option does not suit it
      2  wrong usage
    """
    try:
        source = find_model(options["model"])
        options["model"] = source.path
        config = read_model_config(source.path)
        split_layers(config.num_layers, options["num_stages"], options["partition"])
        # What follows needs torch, which takes seconds to load.
        from scripts.checkpoint_report import InspectOptions, inspect_checkpoint

        report = inspect_checkpoint(InspectOptions(**options), config)
        report["model"] = source.name
    except ConfigError as error:
        click.echo(f"brigade: {error}", err=True)
        ctx.exit(1)
    if as_json:
        click.echo(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        click.echo("\n".join(_lines(report)))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield from _content_lines(report)
    yield ""
    yield from _stage_lines(report)
    yield ""
    yield from _pool_lines(report["kv"])


def _content_lines(report: dict[str, Any]) -> Iterator[str]:
    stored, compute, tokenizer = report["stored"], report["compute"], report["tokenizer"]
    files = _counted(report["num_files"], "file")
    yield f"{report['model']}: {report['format']}, {_size(report['file_bytes'])} in {files}"
    quantized = f", quantized {report['quantization']}" if report["quantization"] else ""
    yield _row(
        "architecture",
        f"{report['architecture']}, {report['num_layers']} layers, {_count(report['num_parameters'])} parameters{quantized}",
    )
    yield _row(
        "sizes",
        f"width {report['hidden_size']}, MLP {report['intermediate_size']}, {report['num_heads']} heads of "
        f"{report['head_size']} ({report['num_kv_heads']} for keys and values), vocabulary {report['vocab_size']}"
        f"{', head tied to the embedding' if report['tied_embeddings'] else ''}",
    )
    windows = "".join(f", {_counted(count, 'layer')} with a window of {size}" for size, count in report["windows"].items())
    yield _row("context", f"{report['context_length']} tokens{windows}")
    unusable = f"not usable: {tokenizer['problem']}"
    yield _row("tokenizer", unusable if tokenizer["problem"] else tokenizer["kind"] or "none, token ids only")
    types = [
        f"{name} {_size(entry['bytes'])} ({_counted(entry['tensors'], 'tensor')})" for name, entry in stored["types"].items()
    ]
    yield _row("on disk", ", ".join(types))
    layers = {_size(stored["least_layer_bytes"]), _size(stored["most_layer_bytes"])}
    yield _row("", f"{' to '.join(sorted(layers))} a layer, {_size(stored['other_bytes'])} outside layers")
    yield _row(
        "in memory",
        f"{compute['dtype']} on {compute['device']}: {_size(compute['layer_bytes'])} a layer, embedding "
        f"{_size(compute['embedding_bytes'])}, head {_size(compute['head_bytes'])}",
    )


def _stage_lines(report: dict[str, Any]) -> Iterator[str]:
    partition, stages = report["partition"], report["stages"]
    split = ",".join(map(str, partition["layers"]))
    yield f"{_counted(len(stages), 'stage')}: {split} ({partition['reason']})"
    for stage in stages:
        layers = f"layers {stage['first_layer']} to {stage['last_layer']}"
        yield _row(
            f"stage {stage['stage']}",
            f"{layers}, weights {_size(stage['weight_bytes'])}, KV {stage['kv_bytes_per_token']} bytes per token, "
            f"{stage['kv_bytes_per_block']} per block",
        )
    for line in partition["lines"]:
        yield _row("", line)


def _pool_lines(kv: dict[str, Any]) -> Iterator[str]:
    yield f"KV cache: {kv['bytes_per_token']} bytes per token, {kv['bytes_per_block']} per block of {kv['block_size']} tokens"
    yield _row("this machine", f"{_size(kv['free_bytes'])} free, the weights take {_size(kv['weight_bytes'])}")
    if kv["problem"]:
        yield _row("", kv["problem"])
        return
    yield _row("", f"{kv['num_blocks']} blocks, contexts of up to {kv['max_model_len']} tokens, "
               f"{_counted(kv['max_sequences'], 'such sequence')} at once")


def _row(name: str, text: str) -> str:
    return f"  {name:<13} {text}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _size(num_bytes: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def _count(number: int) -> str:
    for unit, size in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
