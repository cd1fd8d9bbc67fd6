"""What does a rank need to be told before it starts?"""

from dataclasses import dataclass

from ipc.errors import ConfigError
from worker.graphs.modes import MODE_FLAG, MODE_NAMES
from worker.model_config import ModelConfig

TRANSPORTS = ("auto", "gloo", "staged", "nccl")
"""What may carry activations between stages."""

ATTENTION_BACKENDS = ("torch", "cpu", "triton")
"""Attention backends of ours; help names them where torch, which they need, isn't loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything that the serve script hands to ``run_worker``; resolved before it is frozen."""

    model: str
    """Path of a folder (HF layout) or of a .gguf file."""

    config: ModelConfig
    partition: str
    """Layers per stage: "auto", "even", or numbers such as "16,14"."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    core_address: str
    """ZMQ address of the core's socket for workers."""

    key: str
    """What the core published to its own ranks; sent in the hello."""

    run_dir: str
    """Private directory of this agent's run: stage 0's token socket and the FileStores live there."""

    agent_store: tuple[str, int] | None = None
    """Host and port of the agents' TCPStore; None with one agent, where each epoch has a FileStore."""

    advertise_host: str | None = None
    """Host under which other machines reach this rank; None when all ranks are on this one: loopback is enough then."""

    device: str = "auto"
    dtype: str = "auto"
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_model_len: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    """Bytes of KV cache per stage. These three as given by flags; the partition heeds them."""

    attention_backend: str = "auto"

    cudagraph_mode: str = "auto"
    """One of MODE_NAMES."""

    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Tokens, ascending and within ``max_num_batched_tokens``; None: by rule."""

    logits_processors: tuple[str, ...] = ()
    """``module:attribute`` names of functions that the last stage loads; see ``worker.logits_processors``."""

    num_threads: int | None = None
    """Threads for computing; None: this rank's share of the cores."""

    transport: str = "auto"
    """One of TRANSPORTS; the same on every rank."""

    link_timeout_s: float = 60.0
    """Longest wait for a neighbour inside a step."""

    health_timeout_s: float = 10.0
    """A core that says nothing for this long is lost."""

    log_level: str = "info"
    parent_pid: int
    """The agent's pid at start; the rank ends when it has another parent."""

    signal_fd: int
    """One byte, the signal's number, is readable here for each signal this process was sent."""

    def __post_init__(self) -> None:
        for name in ("world_size", "local_world_size", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError("rank", f"must be between 0 and {self.world_size - 1}, got {self.rank}")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError("num_threads", f"must be at least 1, got {self.num_threads}")
        if self.transport not in TRANSPORTS:
            raise ConfigError("--transport", f"{self.transport!r:.80} must be one of {', '.join(TRANSPORTS)}")
        if self.cudagraph_mode not in MODE_NAMES:
            raise ConfigError(MODE_FLAG, f"{self.cudagraph_mode!r:.80} must be one of {', '.join(MODE_NAMES)}")
        for name in ("link_timeout_s", "health_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, f"must be above 0, got {getattr(self, name)}")
