"""Which attention backend serves this model on this device, and what must a backend be able to do?"""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ipc.errors import ConfigError
from worker.attention.metadata import CommonAttentionMetadata

FIELD = "--attention-backend"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can serve; None means anything."""

    device_types: frozenset[str]
    dtypes: frozenset[torch.dtype]
    head_sizes: frozenset[int] | None = None
    block_sizes: frozenset[int] | None = None


class AttentionMetadataBuilder(ABC):
    """Compiles a step's common metadata into the layout that its backend wants; called once per step."""

    @abstractmethod
    def build(self, common: CommonAttentionMetadata) -> Any:
        """Metadata for ``write`` and ``attend`` in every layer of the step. Keeps nothing of ``common``'s tensors."""


class AttentionBackend(ABC):
    """Attention over a paged cache. Stateless: the same object serves all layers."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

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
    ) -> AttentionMetadataBuilder:
        """A builder for steps of one model."""

    @abstractmethod
    def write(self, cache: Tensor, k: Tensor, v: Tensor, metadata: Any) -> None:
        """Put this step's keys and values, [T, G, D] each, into their slots of one layer's cache."""

    @abstractmethod
    def attend(self, q: Tensor, cache: Tensor, metadata: Any, scale: float) -> Tensor:
        """Causal attention of queries [T, H, D] to all that their sequences hold in the cache; [T, H, D].

        This step's keys and values must have been written. Rows of padding come out as zeros.
        """


_BACKENDS: dict[str, type[AttentionBackend]] = {}


def register(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """Class decorator; ``auto`` prefers what was registered first."""
    _BACKENDS[backend.name] = backend
    return backend


def backend_names() -> list[str]:
    return list(_BACKENDS)


def select_backend(
    name: str, *, device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
) -> AttentionBackend:
    """The backend of that name, or for ``auto`` the first that can serve this model here.

    Raises:
        ConfigError: an unknown name, or nothing fits; it says what doesn't.
    """
    if name != "auto" and name not in _BACKENDS:
        raise ConfigError(FIELD, f"{name!r:.80} is unknown; give auto or one of {', '.join(_BACKENDS)}")
    candidates = list(_BACKENDS) if name == "auto" else [name]
    obstacles: list[str] = []
    for candidate in candidates:
        backend = _BACKENDS[candidate]
        obstacle = _obstacle(backend, device, dtype, head_size, block_size)
        if obstacle is None:
            reason = "asked for" if name != "auto" else "first that fits" + "".join(f"; {o}" for o in obstacles)
            logger.info("attention backend %s (%s)", candidate, reason)
            return backend()
        obstacles.append(f"{candidate} {obstacle}")
    raise ConfigError(FIELD, f"{name} cannot be used: {'; '.join(obstacles)}")


def _obstacle(
    backend: type[AttentionBackend], device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
) -> str | None:
    can = backend.capabilities
    if device.type not in can.device_types:
        return f"does not serve device {device.type}"
    if dtype not in can.dtypes:
        return f"does not serve dtype {str(dtype).removeprefix('torch.')}"
    if can.head_sizes is not None and head_size not in can.head_sizes:
        return f"does not serve head size {head_size}"
    if can.block_sizes is not None and block_size not in can.block_sizes:
        return f"does not serve block size {block_size}"
    missing = backend.missing()
    return f"lacks {missing}" if missing else None
