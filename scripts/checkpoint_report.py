"""What is in a checkpoint, how would it be split, and what would fit on this machine?

Reads the heads of files, never weights: a checkpoint may be larger than memory.
"""

import math
import re
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import CoreConfig
from engine.kv_sizing import plan_kv_cache
from engine.kv_spec import most_blocks, spec_of
from engine.text.sources import read_text_files
from ipc.errors import ConfigError
from ipc.messages import WorkerLoaded
from scripts.tokenizer_kind import tokenizer_kind
from worker.attention import AttentionBackend, AttentionNeeds, select_backend
from worker.auto_partition import (
    Place,
    PoolLimits,
    bytes_per_block,
    engine_seconds,
    explain,
    memory_of,
    why_even,
)
from worker.device import choose_num_threads, resolve_device, resolve_dtype
from worker.kv_groups import kv_groups, num_cache_tensors
from worker.memory import free_memory
from worker.model_config import ModelConfig
from worker.models import build_stage, check_weights
from worker.partition import MIX, ModelCosts, Split, choose_split, split_layers
from worker.profile_stage import PartBytes, bytes_to_measure, measure_costs, part_bytes
from worker.weights import Checkpoint, open_checkpoint

MEASURED_BY_DEFAULT_BYTES = 1 << 30
"""What is measured unasked takes no more memory than this, and so little time."""

UNQUANTIZED = {"F64", "F32", "F16", "BF16"}

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """As given by flags; None where the user said nothing."""

    model: str
    num_stages: int
    partition: str
    device: str
    dtype: str
    block_size: int
    max_model_len: int | None
    max_num_seqs: int
    kv_cache_memory: int | None
    measure: bool | None


class _Inspection:
    """One checkpoint under one set of options."""

    def __init__(self, options: InspectOptions, config: ModelConfig) -> None:
        self.options = options
        self.config = config
        self.device = resolve_device(options.device, 0)
        self.dtype = resolve_dtype(options.dtype, config.dtype, self.device)
        self.core_config = _core_config(options, config)
        self.backend: AttentionBackend = select_backend(
            "auto",
            AttentionNeeds.of(config, device=self.device, dtype=self.dtype, block_size=options.block_size),
        )
        self.sizes: PartBytes = part_bytes(config, dtype=self.dtype, backend=self.backend)
        self.layer_block_bytes = bytes_per_block(config, options.block_size, dtype=self.dtype, backend=self.backend)
        self.places = _places(self.device, options.num_stages)

    def block_bytes(self, layers: range) -> int:
        """What a block of the pool costs a stage with these layers."""
        return num_cache_tensors(kv_groups(self.config, layers)) * self.layer_block_bytes

    def stage_bytes(self, split: Split) -> list[int]:
        """Weights of each stage."""
        found = [len(layers) * self.sizes.layer for layers in split]
        found[0] += self.sizes.first
        found[-1] += self.sizes.last
        return found


def inspect_checkpoint(options: InspectOptions, config: ModelConfig) -> dict[str, Any]:
    """Everything, as what JSON can hold; sizes in bytes, times in seconds.

    Raises:
        ConfigError: files that are missing, damaged or of another model, and options that make no sense.
    """
    inspection = _Inspection(options, config)
    checkpoint = open_checkpoint(options.model, config)
    whole = build_stage(
        config, range(config.num_layers), is_first=True, is_last=True, dtype=inspection.dtype,
        device=torch.device("meta"), backend=inspection.backend,
    )  # fmt: skip
    check_weights(whole, checkpoint)
    split, partition = _choose(inspection)
    return {
        "model": Path(options.model).resolve().name,
        **_contents(options.model, config, checkpoint),
        "tokenizer": _tokenizer(options.model),
        "compute": {
            "device": str(inspection.device),
            "dtype": str(inspection.dtype).removeprefix("torch."),
            "layer_bytes": inspection.sizes.layer,
            "embedding_bytes": inspection.sizes.first,
            "head_bytes": inspection.sizes.last,
        },
        "partition": partition,
        "stages": _stages(inspection, split),
        "kv": _kv(inspection, split),
    }


def _contents(model: str, config: ModelConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    types: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "parameters": 0, "bytes": 0})
    layer_bytes = [0] * config.num_layers
    other_bytes = 0
    names = checkpoint.names()
    for name in names:
        stored, entry = checkpoint.stored(name), math.prod(checkpoint.describe(name))
        of_type = types[stored.type_name]
        of_type["tensors"] += 1
        of_type["parameters"] += entry
        of_type["bytes"] += stored.size_bytes
        match = _LAYER.search(name)
        if match and int(match[1]) < config.num_layers:
            layer_bytes[int(match[1])] += stored.size_bytes
        else:
            other_bytes += stored.size_bytes
    files = {checkpoint.where(name) for name in names}
    main_type = max(types, key=lambda name: types[name]["bytes"])
    return {
        "format": "gguf" if Path(model).is_file() else "safetensors",
        "num_files": len(files),
        "file_bytes": sum(Path(file).stat().st_size for file in files),
        "architecture": config.architecture,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "windows": {str(window): count for window, count in Counter(config.windows).items() if window},
        "tied_embeddings": config.tie_word_embeddings,
        "num_parameters": sum(entry["parameters"] for entry in types.values()),
        "quantization": None if main_type in UNQUANTIZED else main_type,
        "stored": {
            "types": dict(sorted(types.items(), key=lambda item: -item[1]["bytes"])),
            "least_layer_bytes": min(layer_bytes),
            "most_layer_bytes": max(layer_bytes),
            "other_bytes": other_bytes,
        },
    }


def _tokenizer(model: str) -> dict[str, Any]:
    """Its kind; with the problem where it can't be used."""
    found: dict[str, Any] = {"kind": None, "problem": None}
    try:
        found["kind"] = tokenizer_kind(model, read_text_files(model).tokenizer)
    except ConfigError as error:
        found["problem"] = error.message
    return found


def _choose(inspection: _Inspection) -> tuple[Split, dict[str, Any]]:
    """The split, and where it comes from."""
    options, config = inspection.options, inspection.config
    split = split_layers(config.num_layers, options.num_stages, options.partition)
    chosen: dict[str, Any] = {"asked": options.partition, "reason": "by hand", "costs": None, "lines": []}
    if options.partition in ("auto", "even"):
        chosen["reason"] = "evenly, as asked for"
    if options.partition == "auto":
        reason = why_even(config, options.num_stages, inspection.sizes) or _why_not_measured(inspection)
        chosen["reason"] = reason or "measured"
        if reason is None:
            engine_s = engine_seconds(inspection.places, inspection.device, torch.get_num_threads())
            costs = _measure(inspection).beside_engine(engine_s)
            memory = memory_of(
                config, inspection.sizes, inspection.places, _limits(inspection), dtype=inspection.dtype,
                backend=inspection.backend,
            )  # fmt: skip
            split = choose_split(costs, config.num_layers, options.num_stages, MIX, memory)
            chosen["lines"] = explain(costs, split, MIX, memory)
            chosen["costs"] = {"decode": _per_part(costs, split, "decode"), "prefill": _per_part(costs, split, "prefill")}
    return split, {"layers": [len(layers) for layers in split], **chosen}


def _per_part(costs: ModelCosts, split: Split, kind: str) -> dict[str, Any]:
    step = costs.decode if kind == "decode" else costs.prefill
    values = asdict(step)
    layers = values.pop("layers")
    return {"layer": sum(layers) / len(layers), **values, "waiting": list(step.waiting(split))}


def _why_not_measured(inspection: _Inspection) -> str | None:
    """None if it should be."""
    if inspection.options.measure is not None:
        return None if inspection.options.measure else "evenly, as nothing was measured (--no-measure)"
    needed = bytes_to_measure(inspection.config, inspection.options.num_stages, inspection.sizes)
    if needed > MEASURED_BY_DEFAULT_BYTES or 2 * needed > free_memory(inspection.device):
        return f"evenly, as nothing was measured (that takes {2 * needed / 1e9:.1f} GB; --measure does it)"
    return None


def _measure(inspection: _Inspection) -> ModelCosts:
    torch.set_num_threads(choose_num_threads(None, inspection.options.num_stages))
    try:
        return measure_costs(
            inspection.config, num_stages=inspection.options.num_stages, mix=MIX, device=inspection.device,
            dtype=inspection.dtype, backend=inspection.backend, block_size=inspection.options.block_size,
        )  # fmt: skip
    except MemoryError as error:
        raise ConfigError("--measure", f"{error}; leave it out") from None


def _limits(inspection: _Inspection) -> PoolLimits:
    options = inspection.options
    return PoolLimits(
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len or inspection.config.max_position_embeddings,
        kv_cache_memory=options.kv_cache_memory,
    )


def _places(device: torch.device, num_stages: int) -> list[Place]:
    """Where stages would be if all of them ran on this machine."""
    if device.type != "cuda":
        return [Place(name=str(device), free_bytes=free_memory(device))] * num_stages
    gpus = [torch.device("cuda", stage % torch.cuda.device_count()) for stage in range(num_stages)]
    return [Place(name=str(gpu), free_bytes=free_memory(gpu)) for gpu in gpus]


def _stages(inspection: _Inspection, split: Split) -> list[dict[str, Any]]:
    return [
        {
            "stage": stage,
            "first_layer": layers[0],
            "last_layer": layers[-1],
            "num_layers": len(layers),
            "weight_bytes": weight_bytes,
            "kv_bytes_per_token": len(layers) * inspection.layer_block_bytes // inspection.options.block_size,
            "kv_bytes_per_block": inspection.block_bytes(layers),
        }
        for stage, (layers, weight_bytes) in enumerate(zip(split, inspection.stage_bytes(split), strict=True))
    ]


def _core_config(options: InspectOptions, config: ModelConfig) -> CoreConfig:
    return CoreConfig(
        run_dir="", agent_pid=0, agent_start=0, key="", num_stages=options.num_stages, model_name="",
        vocab_size=config.vocab_size, model_max_len=config.max_position_embeddings, max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs, block_size=options.block_size, kv_cache_memory=options.kv_cache_memory,
    )  # fmt: skip


def _kv(inspection: _Inspection, split: Split) -> dict[str, Any]:
    """The pool as the core would size it once all stages are loaded on this machine."""
    weights = inspection.stage_bytes(split)
    free: dict[str, int] = {}
    left: dict[str, int] = {}
    for place, own in zip(inspection.places, weights, strict=True):
        free[place.name] = place.free_bytes
        left[place.name] = left.get(place.name, place.free_bytes) - own
    pool: dict[str, Any] = {
        "block_size": inspection.options.block_size,
        "bytes_per_token": inspection.config.num_layers * inspection.layer_block_bytes // inspection.options.block_size,
        "bytes_per_block": sum(map(inspection.block_bytes, split)),
        "free_bytes": sum(free.values()),
        "weight_bytes": sum(weights),
        "num_blocks": 0,
        "max_model_len": 0,
        "max_sequences": 0,
        "problem": None,
    }
    short = -min(left.values())
    if short > 0:
        return pool | {"problem": f"the weights of all stages don't fit on this machine: {short / 1e9:.1f} GB are lacking"}
    stages = [
        WorkerLoaded(
            core_id=0, epoch=0, rank=rank, groups=kv_groups(inspection.config, layers),
            bytes_per_block=inspection.block_bytes(layers), free_bytes=left[place.name], device=place.name,
            weight_bytes=weights[rank], load_s=0.0, num_threads=1,
        )
        for rank, (layers, place) in enumerate(zip(split, inspection.places, strict=True))
    ]  # fmt: skip
    try:
        plan = plan_kv_cache(inspection.core_config, stages, dict.fromkeys(range(len(stages)), "here"))
    except ConfigError as error:
        return pool | {"problem": str(error)}
    of_one = most_blocks(
        map(spec_of, plan.groups), plan.max_model_len, inspection.options.block_size,
        inspection.core_config.max_num_batched_tokens,
    )  # fmt: skip
    return pool | {
        "num_blocks": plan.num_blocks,
        "max_model_len": plan.max_model_len,
        "max_sequences": min(plan.num_blocks // of_one, inspection.options.max_num_seqs),
    }
