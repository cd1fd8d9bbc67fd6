"""What the EngineCore is told when it starts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack

from engine.openai.settings import HttpSettings
from engine.pacing import PREFILL_SHARE
from engine.policies import SchedulingPolicy
from ipc.errors import ConfigError
from ipc.security import ServerSecurity

MAX_LOOKUP_TOKENS = 16
"""Drafts stay within a KV block, which has this many tokens by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Settings of one core, resolved and checked; sent by the rank that starts it."""

    run_dir: str
    agent_pid: int
    agent_start: int
    """Start time of the agent in clock ticks: with its pid, its identity."""
    key: str
    """Shared by the ranks of this run; a hello with another key is not answered."""
    num_stages: int
    advertise_host: str | None = None
    """Several agents: the address under which other machines reach this one; None keeps the core off the network."""
    listen: tuple[str, ...] = ()
    """Client addresses; empty means the default one if it is free, else a free port."""
    security: ServerSecurity | None = None
    """Of tcp client addresses; None for none."""
    error_file: str | None = None
    """Where the launcher looks for the cause when the engine gives up."""

    model_name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    model_max_len: int
    """Longest context that the model was made for."""
    max_model_len: int | None = None
    """Longest context by flag; None takes the model's, or what the KV pool holds if that is less."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    """Bytes of KV cache per rank by flag."""
    kv_memory_share: float = 0.25
    """Share of the measured free memory that the caches of all ranks on a host may take together."""
    kv_gpu_memory_share: float = 0.9
    """As above for all ranks on a GPU, of what is free there beside their largest steps. The rest is for what nobody
    measures: communicators, graphs, gaps between allocations."""
    prefix_caching: bool = True
    max_queued_requests: int = 4096
    max_queued_tokens: int = 1 << 22
    """Prompt tokens that may wait; a request that finds nobody waiting is always taken."""
    scheduling_policy: str = SchedulingPolicy.FCFS.value
    async_scheduling: bool = True
    prefill_share: float = PREFILL_SHARE
    """See ``engine.pacing``."""
    num_cohorts: int | None = None
    """Fixes the number of groups of decodes, for comparison; None lets the cost model choose."""
    single_batch: bool = False
    """One step in flight, which takes all that is ready: for comparison."""
    speculative_lookup_tokens: int = 0
    """Most tokens that a step may guess for one request; 0 for none."""
    logits_processors: tuple[str, ...] = ()
    """Names that the last stage has loaded functions for: requests may use them."""
    generation_config: str = "auto"
    """Whether unset sampling parameters take the model's defaults: see ``engine.sampling_defaults``."""
    seed: int | None = None
    """Makes the seeds that the core draws for unseeded requests repeatable."""
    http: HttpSettings | None = None
    """Of the HTTP server that the core keeps; None for none."""
    drain_timeout_s: float = 30.0
    health_timeout_s: float = 30.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        if isinstance(self.http, Mapping):
            object.__setattr__(self, "http", HttpSettings(**self.http))
        if isinstance(self.security, Mapping):
            object.__setattr__(self, "security", ServerSecurity(**self.security))
        rules = (
            ("--block-size", self.block_size, self.block_size > 0 and not self.block_size & (self.block_size - 1),
             "must be a power of two"),
            ("--max-num-seqs", self.max_num_seqs, 1 <= self.max_num_seqs <= 1 << 16, "must be between 1 and 65536"),
            ("--max-num-batched-tokens", self.max_num_batched_tokens, self.max_num_batched_tokens >= 1,
             "must be at least 1"),
            ("--max-model-len", self.max_model_len, self.max_model_len is None or self.max_model_len >= 2,
             "must be at least 2 (one prompt token and one answer token)"),
            ("--num-kv-blocks", self.num_kv_blocks, self.num_kv_blocks is None or self.num_kv_blocks >= 1,
             "must be at least 1"),
            ("--kv-cache-memory", self.kv_cache_memory, self.kv_cache_memory is None or self.kv_cache_memory >= 1,
             "must be at least 1 byte"),
            ("--max-queued-requests", self.max_queued_requests, self.max_queued_requests >= 1, "must be at least 1"),
            ("--max-queued-tokens", self.max_queued_tokens, self.max_queued_tokens >= 1, "must be at least 1"),
            ("--scheduling-policy", self.scheduling_policy,
             self.scheduling_policy in [policy.value for policy in SchedulingPolicy], "must be fcfs or priority"),
            ("--generation-config", self.generation_config, self.generation_config in ("auto", "none"),
             "must be auto or none"),
            ("--prefill-share", self.prefill_share, 0 < self.prefill_share <= 1, "must be above 0 and at most 1"),
            ("--num-cohorts", self.num_cohorts, self.num_cohorts is None or 1 <= self.num_cohorts <= self.num_stages + 1,
             f"must be between 1 and {self.num_stages + 1} (stages + 1)"),
            ("--speculative-lookup-tokens", self.speculative_lookup_tokens,
             0 <= self.speculative_lookup_tokens <= MAX_LOOKUP_TOKENS, f"must be between 0 (off) and {MAX_LOOKUP_TOKENS}"),
            ("--drain-timeout", self.drain_timeout_s, self.drain_timeout_s >= 0, "must not be negative"),
            ("--health-timeout", self.health_timeout_s, self.health_timeout_s >= 1, "must be at least 1 second"),
        )
        for field, value, holds, rule in rules:
            if not holds:
                raise ConfigError(field, f"{value} {rule}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "--max-num-batched-tokens",
                f"{self.max_num_batched_tokens} is below --max-num-seqs={self.max_num_seqs}: a step must have room for one "
                "token of every running request; raise the one or lower the other",
            )
        if self.max_model_len is not None and self.max_model_len > self.model_max_len:
            raise ConfigError(
                "--max-model-len", f"{self.max_model_len} is above the {self.model_max_len} that the model was made for"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The parts of a checkpoint that clients need, as bytes; see ModelInfo."""

    tokenizer: bytes = b""
    tokenizer_config: bytes = b"{}"
    chat_template: str | None = None
    generation_config: bytes = b"{}"


def pack_start(config: CoreConfig, files: ModelFiles) -> bytes:
    """What a starting core reads from its standard input."""
    packed: bytes = msgpack.packb({"config": asdict(config), "files": asdict(files)})
    return packed


def unpack_start(data: bytes) -> tuple[CoreConfig, ModelFiles]:
    """The inverse of pack_start."""
    start = msgpack.unpackb(data, use_list=False, raw=False, max_bin_len=1 << 28)
    return _rebuild(CoreConfig, start["config"]), _rebuild(ModelFiles, start["files"])


def _rebuild(cls: type, values: Mapping[str, Any]) -> Any:
    names = {f.name for f in fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in names})
