"""What a rank does first: it checks the settings, rank 0 makes sure that an EngineCore runs beside it, and every rank
becomes a Worker.
"""

import json
import logging
import os
import secrets
from typing import Any

import click

from engine.config import CoreConfig, ModelFiles
from engine.text.sources import read_text_files
from ipc.endpoints import (
    RunDirectory,
    TorchrunEnvironment,
    check_listen_address,
    is_wide,
    let_waiting_threads_sleep,
    local_address_towards,
    process_start,
    read_torchrun,
    threads_set_by_user,
)
from ipc.errors import ConfigError, EngineError
from ipc.logs import set_up_logging
from ipc.security import server_security
from scripts.core_process import ensure_core
from scripts.ending import SignalWatch, end_everything
from scripts.model_source import find_model
from scripts.options import DEFAULT_MAX_NUM_SEQS, GroupedCommand, http_settings, serve_options
from worker.graphs.modes import SIZES_FLAG, put_right
from worker.model_config import ModelConfig, read_model_config
from worker.partition import split_layers
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)


@click.command(cls=GroupedCommand, context_settings={"max_content_width": 120})
@serve_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Be one rank of the pipeline (started by torchrun)."""
    signals: SignalWatch = ctx.obj
    parent_pid = os.getppid()
    try:
        place = read_torchrun()
    except ConfigError as error:
        click.echo(f"brigade: {error}", err=True)
        ctx.exit(2)
    set_up_logging(f"rank {place.rank}", options["log_level"])
    try:
        ctx.exit(_run(place, parent_pid, signals, options))
    except ConfigError as error:
        end_everything(f"rank {place.rank}: {error}", options["error_file"])
        ctx.exit(1)
    except EngineError as error:
        logger.error("%s", error)
        ctx.exit(1)


def _run(place: TorchrunEnvironment, agent_pid: int, signals: SignalWatch, options: dict[str, Any]) -> int:
    let_waiting_threads_sleep()
    _check_shape(place, options)
    source = find_model(options["model"])
    options = {**options, "model": source.path}
    config = read_model_config(source.path)
    split_layers(config.num_layers, place.world_size, options["pipeline_partition"])
    capture_sizes = _capture_sizes(options, tells=place.rank == 0)
    directory = RunDirectory.of_process(agent_pid)
    advertise_host = None
    if place.num_agents > 1:
        advertise_host = local_address_towards(place.master_addr, place.master_port)
    core_address, key = directory.address("workers"), ""
    if place.rank == 0 and options["error_file"] is None:
        logger.warning(
            "started by plain torchrun, whose store listens on all interfaces and trusts who connects: fine inside a "
            "trusted network; on one host `brigade serve` keeps everything on loopback"
        )
    if place.rank == 0:
        found = _ensure_core(directory, config, source.name, agent_pid, place, advertise_host, options)
        core_address, key = found
    store = None
    if place.num_agents > 1:
        store, core_address, key = _meet_in_agent_store(place, core_address, key, options["health_timeout"])
    settings = WorkerSettings(
        model=options["model"],
        config=config,
        partition=options["pipeline_partition"],
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        core_address=core_address,
        key=key,
        run_dir=str(directory.path),
        agent_store=None if store is None else (place.master_addr, place.master_port),
        advertise_host=advertise_host,
        device=options["device"],
        dtype=options["dtype"],
        max_num_seqs=_max_num_seqs(options),
        max_num_batched_tokens=options["max_num_batched_tokens"],
        block_size=options["block_size"],
        max_model_len=options["max_model_len"],
        num_kv_blocks=options["num_kv_blocks"],
        kv_cache_memory=options["kv_cache_memory"],
        attention_backend=options["attention_backend"],
        logits_processors=options["logits_processor"],
        cudagraph_mode=options["cudagraph_mode"],
        cudagraph_capture_sizes=capture_sizes,
        num_threads=threads_set_by_user(agent_pid),
        transport=options["transport"],
        link_timeout_s=options["link_timeout"],
        health_timeout_s=options["health_timeout"],
        log_level=options["log_level"],
        parent_pid=agent_pid,
        signal_fd=signals.hand_over(),
    )
    # After everything that can be checked without torch, which takes seconds to load.
    from worker.worker import run_worker

    return run_worker(settings)


def _max_num_seqs(options: dict[str, Any]) -> int:
    """By default no more than fit into a step."""
    chosen: int | None = options["max_num_seqs"]
    return min(DEFAULT_MAX_NUM_SEQS, options["max_num_batched_tokens"]) if chosen is None else chosen


def _capture_sizes(options: dict[str, Any], *, tells: bool) -> tuple[int, ...] | None:
    asked: tuple[int, ...] | None = options["cudagraph_capture_sizes"]
    if asked is None:
        return None
    sizes, notes = put_right(asked, max_num_batched_tokens=options["max_num_batched_tokens"])
    if notes and tells:
        logger.warning("%s: %s", SIZES_FLAG, "; ".join(notes))
    return sizes


def _check_shape(place: TorchrunEnvironment, options: dict[str, Any]) -> None:
    stages = options["pipeline_parallel_size"]
    if options["tensor_parallel_size"] != 1:
        raise ConfigError("--tensor-parallel-size", f"{options['tensor_parallel_size']} is not supported yet; use 1")
    if stages is not None and stages != place.world_size:
        raise ConfigError(
            "--pipeline-parallel-size",
            f"{stages} stages need {stages} ranks, torchrun started {place.world_size}; give --nproc-per-node {stages}",
        )
    for address in options["listen"]:
        check_listen_address(address, insecure=options["insecure"], asks_for_keys=options["client_keys"] is not None)


def _warn_of_open_addresses(options: dict[str, Any]) -> None:
    """What --insecure lets pass."""
    if options["client_keys"] is None:
        for address in filter(is_wide, options["listen"]):
            logger.warning(
                "%s can be reached from other machines (--insecure): %s", address,
                "nothing is encrypted and nobody is asked for a key" if options["server_key"] is None
                else "everybody who has the engine's public key comes in",
            )  # fmt: skip


def _ensure_core(
    directory: RunDirectory,
    config: ModelConfig,
    model_name: str,
    agent_pid: int,
    place: TorchrunEnvironment,
    advertise_host: str | None,
    options: dict[str, Any],
) -> tuple[str, str]:
    text = read_text_files(options["model"])
    security = server_security(options["server_key"], options["client_keys"])
    if security is not None:
        keys = "any key" if security.client_keys is None else f"one of {len(security.client_keys)} listed keys"
        logger.info("clients on tcp need the public key %s, and %s of their own", security.public_key, keys)
    _warn_of_open_addresses(options)
    core_config = CoreConfig(
        run_dir=str(directory.path),
        agent_pid=agent_pid,
        agent_start=process_start(agent_pid) or 0,
        key=secrets.token_hex(16) if advertise_host else "",
        num_stages=place.world_size,
        advertise_host=advertise_host,
        listen=tuple(options["listen"]),
        security=security,
        error_file=options["error_file"],
        model_name=model_name,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        model_max_len=config.max_position_embeddings,
        max_model_len=options["max_model_len"],
        max_num_seqs=_max_num_seqs(options),
        max_num_batched_tokens=options["max_num_batched_tokens"],
        block_size=options["block_size"],
        num_kv_blocks=options["num_kv_blocks"],
        kv_cache_memory=options["kv_cache_memory"],
        prefix_caching=options["prefix_caching"],
        generation_config=options["generation_config"],
        max_queued_requests=options["max_queued_requests"],
        max_queued_tokens=options["max_queued_tokens"],
        scheduling_policy=options["scheduling_policy"],
        async_scheduling=options["async_scheduling"],
        prefill_share=options["prefill_share"],
        num_cohorts=options["num_cohorts"],
        single_batch=options["single_batch"],
        speculative_lookup_tokens=options["speculative_lookup_tokens"],
        seed=options["seed"],
        logits_processors=options["logits_processor"],
        http=http_settings(options["http"], options),
        drain_timeout_s=options["drain_timeout"],
        health_timeout_s=options["health_timeout"],
        log_level=options["log_level"],
    )
    files = ModelFiles(
        tokenizer=text.tokenizer,
        tokenizer_config=text.tokenizer_config,
        chat_template=text.chat_template,
        generation_config=text.generation_config,
    )
    found = ensure_core(directory, core_config, files)
    return found.worker_address, found.key


def _meet_in_agent_store(
    place: TorchrunEnvironment, core_address: str, key: str, timeout_s: float
) -> tuple[Any, str, str]:
    """Rank 0 publishes where the core is; the others read it. Returns the store, which must stay referenced."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined,unused-ignore]

    serves = place.rank == 0 and not place.uses_agent_store
    store = TCPStore(
        place.master_addr, place.master_port, is_master=serves, wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    if place.rank == 0:
        store.set("brigade/core", json.dumps([core_address, key]))
        return store, core_address, key
    address, key = json.loads(store.get("brigade/core"))
    return store, address, key
