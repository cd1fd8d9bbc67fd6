"""Which limits and policies does a scheduler work by, and what does it tell about itself?"""

from dataclasses import dataclass

from engine.config import MAX_LOOKUP_TOKENS, CoreConfig
from engine.kv_sizing import KVPlan
from engine.kv_spec import FullAttention, KVSpec, most_blocks, spec_of
from engine.pacing import PREFILL_SHARE
from engine.policies import SchedulingPolicy
from ipc.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of one epoch."""

    num_stages: int
    max_num_seqs: int
    """Running requests in all, over every step in flight."""
    max_num_batched_tokens: int
    """Tokens per step."""
    max_model_len: int
    """Most tokens of a prompt and its answer together."""
    block_size: int
    num_blocks: int
    eos_token_ids: frozenset[int] = frozenset()
    kv_groups: tuple[KVSpec, ...] = (FullAttention(),)
    prefix_caching: bool = True
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    async_scheduling: bool = True
    """One step more than there are stages is in flight, if need be with tokens that are not known yet."""
    max_steps_in_flight: int | None = None
    """Fewer than there would be otherwise: for comparison."""
    is_greedy: bool = False
    """Every step takes all that is ready, up to the token budget: for comparison."""
    num_cohorts: int | None = None
    """Fixed number of groups of decodes; None lets the cost model choose."""
    prefill_share: float = PREFILL_SHARE
    """Of the time, for prompts while decodes run."""
    speculative_lookup_tokens: int = 0
    """Most drafts for one request in a step; 0 for none."""

    def __post_init__(self) -> None:
        for name in ("num_stages", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.speculative_lookup_tokens <= MAX_LOOKUP_TOKENS:
            raise ConfigError(
                "speculative_lookup_tokens",
                f"must be between 0 and {MAX_LOOKUP_TOKENS}, got {self.speculative_lookup_tokens}",
            )
        if self.max_model_len < 2:
            raise ConfigError("max_model_len", f"must be at least 2 (a prompt and one answer token), got {self.max_model_len}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: a step must have room for one "
                "token of every running request",
            )
        needed = most_blocks(self.kv_groups, self.max_model_len, self.block_size, self.max_num_batched_tokens)
        if self.num_blocks < needed:
            raise ConfigError(
                "num_blocks",
                f"{self.num_blocks} blocks of {self.block_size} tokens hold less than one request of max_model_len="
                f"{self.max_model_len}, which takes {needed}; lower max_model_len or give the cache more memory",
            )

    @property
    def depth(self) -> int:
        """Steps that may be in flight."""
        usual = self.num_stages + 1 if self.async_scheduling else self.num_stages
        return usual if self.max_steps_in_flight is None else min(usual, self.max_steps_in_flight)


def scheduler_config_of(config: CoreConfig, plan: KVPlan) -> SchedulerConfig:
    """For an epoch whose workers have room for this pool."""
    return SchedulerConfig(
        num_stages=config.num_stages,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        eos_token_ids=frozenset(config.eos_token_ids),
        kv_groups=tuple(map(spec_of, plan.groups)),
        prefix_caching=config.prefix_caching,
        policy=SchedulingPolicy(config.scheduling_policy),
        async_scheduling=config.async_scheduling,
        num_cohorts=config.num_cohorts,
        is_greedy=config.single_batch,
        max_steps_in_flight=1 if config.single_batch else None,
        prefill_share=config.prefill_share,
        speculative_lookup_tokens=config.speculative_lookup_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts of now, and totals since this scheduler began."""

    running: int
    waiting: int
    waiting_tokens: int
    """Of the prompts that wait."""
    free_blocks: int
    total_blocks: int
    steps_in_flight: int
    num_cohorts: int
    """Into which decodes were split last, when no prompts ran."""
    preemptions: int
    num_generated_tokens: int
    num_prompt_tokens: int
    """Of requests when they run for the first time."""
    prefix_query_tokens: int
    """Tokens for which a computed beginning was looked for, when their request ran for the first time."""
    prefix_hit_tokens: int
    """Those of them that were found."""
    num_draft_tokens: int
    """Guesses that were computed."""
    num_accepted_draft_tokens: int
    """Those of them that were right."""


TOTALS = {
    "preemptions_total": "preemptions",
    "generation_tokens_total": "num_generated_tokens",
    "prompt_tokens_total": "num_prompt_tokens",
    "prefix_cache_query_tokens_total": "prefix_query_tokens",
    "prefix_cache_hit_tokens_total": "prefix_hit_tokens",
    "draft_tokens_total": "num_draft_tokens",
    "accepted_draft_tokens_total": "num_accepted_draft_tokens",
}
"""What is told as sums over all epochs, and which of SchedulerStats is an epoch's part of it."""


def totals_of(stats: SchedulerStats | None) -> dict[str, int]:
    """An epoch's part of each of TOTALS; zeros without an epoch."""
    return {name: 0 if stats is None else getattr(stats, field) for name, field in TOTALS.items()}
