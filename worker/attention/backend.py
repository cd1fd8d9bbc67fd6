"""What must an attention backend be able to do, and what does it declare about itself?"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from worker.attention.metadata import CommonAttentionMetadata
from worker.graphs.modes import GraphSupport
from worker.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can serve; for sets and bounds None means anything."""

    device_types: frozenset[str]
    dtypes: frozenset[torch.dtype]
    """Of the model: queries, keys and values as they are computed."""

    cache_dtypes: frozenset[torch.dtype] | None = None
    """Of the cache; None: that of the model, whichever it is."""

    compute_capability: tuple[int, int] | None = None
    """The least that a GPU must have."""

    head_sizes: frozenset[int] | None = None
    block_sizes: frozenset[int] | None = None

    group_ratios: frozenset[int] | None = None
    """Query heads for each key head."""

    full: bool = True
    """Causal attention to all that a sequence holds."""

    windowed: bool = False
    soft_capped: bool = False
    sinks: bool = False
    graphs: GraphSupport = GraphSupport.NEVER
    """Of which steps its work can be recorded once and replayed for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """What a model asks of its backend, in one place: all layers are served by the same one."""

    device: torch.device
    dtype: torch.dtype
    head_size: int
    block_size: int
    cache_dtype: torch.dtype | None = None
    """None: the model's."""

    group_ratio: int = 1
    full: bool = True
    """Some layer attends to all that a sequence holds."""

    windowed: bool = False
    """Some layer attends to a window."""

    soft_capped: bool = False
    sinks: bool = False

    @classmethod
    def of(
        cls, config: ModelConfig, *, device: torch.device, dtype: torch.dtype, block_size: int
    ) -> "AttentionNeeds":
        """What this model needs when it is computed so."""
        return cls(
            device=device,
            dtype=dtype,
            head_size=config.head_size,
            block_size=block_size,
            group_ratio=config.num_heads // config.num_kv_heads,
            full=None in config.windows,
            windowed=any(config.windows),
            soft_capped=config.attention_soft_cap is not None,
        )


class AttentionMetadataBuilder(ABC):
    """Compiles a step's common metadata into the layout that its backend wants; called once per step and KV group."""

    @abstractmethod
    def build(self, common: CommonAttentionMetadata) -> Any:
        """Metadata for ``write`` and ``attend`` in every layer of the group. It may keep ``common``'s tensors."""

    def reserve(self, *, max_tokens: int, max_seqs: int, max_seq_len: int) -> None:
        """Make memory that stays, for ``build_in_place``. Only where the backend supports graphs, as that."""
        raise NotImplementedError

    def build_in_place(self, common: CommonAttentionMetadata) -> Any:
        """As ``build``, for a step within what was reserved, and fit to be recorded.

        Of two steps with as many tokens, sequences and leading decodes the tensors lie at the same addresses, and all else
        is equal: what was recorded with the metadata of one computes the other. So nothing may depend on lengths, but on
        the longest that was reserved for.
        """
        raise NotImplementedError


class AttentionBackend(ABC):
    """Attention over a paged cache. Stateless: the same object serves all layers."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    preference: ClassVar[int] = 0
    """``auto`` takes the highest that fits, of equal ones the one registered first. The plain one that serves everything
    has 0, ours that are made for one kind of device have 100."""

    @staticmethod
    def missing() -> str | None:
        """What it would need and this process does not have."""
        return None

    @staticmethod
    @abstractmethod
    def cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor."""

    @abstractmethod
    def make_builder(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
    ) -> AttentionMetadataBuilder:
        """A builder for steps of one KV group, all of whose layers have this window, or none."""

    @abstractmethod
    def write(self, cache: Tensor, k: Tensor, v: Tensor, metadata: Any) -> None:
        """Put this step's keys and values, [T, G, D] each, into their slots of one layer's cache."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        cache: Tensor,
        metadata: Any,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of queries [T, H, D] to what their sequences hold in the cache; [T, H, D].

        With a ``window`` a query sees that many tokens, its own included; it is the one that the metadata was built for.
        A ``soft_cap`` c turns a scaled score x into c * tanh(x / c). ``sinks``, [H] float32, are scores that take their
        share of the weight and bring no value.

        This step's keys and values must have been written. Rows of padding come out as zeros. The result is ``out``,
        [T, H, D] and contiguous, or without one a new tensor.
        """
