"""What have the stages of all decoder-only families in common? What is around their layers, and whose tensors are whose."""

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from worker.attention import AttentionBackend
from worker.layers.decoder_layer import DecoderLayer
from worker.layers.embedding import Embedding
from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryAngles
from worker.layers.weight_format import borrowed_format
from worker.layers.weight_slot import WeightSlot
from worker.model_config import ModelConfig
from worker.models.stage import BoundaryTensor, Flow, StageModel, Turns

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlace:
    """What a layer's parts are computed with."""

    backend: AttentionBackend
    dtype: torch.dtype
    device: torch.device


class DecoderStage(StageModel):
    """Embedding, layers, norm and head. A family says what its layers are, and where it differs around them."""

    norm_offset = 0.0
    """Of the weights of the family's norms."""

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        *,
        is_first: bool,
        is_last: bool,
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_range = layers
        self.is_first, self.is_last = is_first, is_last
        self.dtype = dtype
        self.angles = RotaryAngles(config.rope, config.head_size, device=device)
        self.local_angles = (
            None if config.local_rope is None else RotaryAngles(config.local_rope, config.head_size, device=device)
        )
        self.embedding = (
            Embedding(
                EMBEDDING, config.vocab_size, config.hidden_size, dtype=dtype, device=device,
                scale=config.embedding_scale,
            )
            if is_first
            else None
        )  # fmt: skip
        self._is_turned_locally = [config.local_rope is not None and config.windows[layer] is not None for layer in layers]
        place = LayerPlace(backend=backend, dtype=dtype, device=device)
        self._in_order = [self.make_layer(config, layer, place) for layer in layers]
        self.layers = nn.ModuleList(self._in_order)
        self.norm = self.make_norm(config, FINAL_NORM, config.hidden_size, device) if is_last else None
        self.head = self._make_head(device) if is_last else None

    @classmethod
    @abstractmethod
    def make_layer(cls, config: ModelConfig, layer: int, place: LayerPlace) -> DecoderLayer:
        """The layer of this global number."""

    @classmethod
    def make_norm(cls, config: ModelConfig, name: str, width: int, device: torch.device) -> RMSNorm:
        return RMSNorm(name, width, config.rms_norm_eps, device=device, offset=cls.norm_offset)

    def boundary(self) -> tuple[BoundaryTensor, ...]:
        return (BoundaryTensor(name="hidden", width=self.config.hidden_size, dtype=self.dtype),)

    def embed(self, token_ids: Tensor) -> Tensor:
        assert self.embedding is not None, "only the first stage embeds"
        return self.embedding(token_ids)

    def begin(self, hidden: Tensor, positions: Tensor) -> Flow:
        turns = self.angles(positions)
        local_turns = turns if self.local_angles is None else self.local_angles(positions)
        return self._before_attention(0, hidden, None, (turns, local_turns))

    def attend(self, index: int, flow: Flow, cache: Tensor, metadata: Any) -> None:
        assert flow.heads is not None, "every segment but the last leads to an attention"
        self._in_order[index].attention.attend(flow.heads, cache, metadata)

    def resume(self, index: int, flow: Flow) -> Flow:
        assert flow.heads is not None, "every segment but the last leads to an attention"
        hidden, delta = self._in_order[index].after_attention(flow.hidden, flow.heads.attended)
        if index + 1 < len(self._in_order):
            return self._before_attention(index + 1, hidden, delta, flow.turns)
        return Flow(hidden + delta, flow.turns, None)

    def _before_attention(self, index: int, hidden: Tensor, delta: Tensor | None, turns: tuple[Turns, Turns]) -> Flow:
        cos, sin = turns[self._is_turned_locally[index]]
        hidden, heads = self._in_order[index].before_attention(hidden, delta, cos, sin)
        return Flow(hidden, turns, heads)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.norm is not None and self.head is not None, "only the last stage has a head"
        logits = self.head(self.norm(hidden), torch.float32)
        cap = self.config.logit_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        for module in self._owners():
            slots |= module.weight_slots()
        shared = f"{EMBEDDING}.weight"
        if self.config.tie_word_embeddings and shared in slots:
            slots[shared] = replace(slots[shared], aliases=(f"{HEAD}.weight",))
        return slots

    def owns(self, name: str) -> bool:
        """Layers' tensors by their number; those of no layer of the model belong to everyone, so that one complains."""
        match = _LAYER_NAME.match(name)
        if match and int(match[1]) < self.config.num_layers:
            return int(match[1]) in self.layer_range
        if name == f"{EMBEDDING}.weight":
            return self.is_first
        if name in (f"{FINAL_NORM}.weight", f"{HEAD}.weight"):
            return self.is_last
        return True

    def ignores(self, name: str) -> bool:
        """A tied head's second copy, and tables that old checkpoints carry though they follow from the config."""
        is_copy = name == f"{HEAD}.weight" and self.config.tie_word_embeddings
        return is_copy or name.endswith(".rotary_emb.inv_freq")

    def prepare(self) -> None:
        for module in self._owners():
            if isinstance(module, Linear):
                module.prepare()

    def weight_bytes(self) -> int:
        return sum(module.size_bytes for module in self._owners())

    def _make_head(self, device: torch.device) -> Linear:
        """A tied head computes with the embedding's matrix: a copy with several stages, or where it is packed."""
        config = self.config
        return Linear(
            config.hidden_size,
            {EMBEDDING if config.tie_word_embeddings else HEAD: config.vocab_size},
            bias=False,
            dtype=self.dtype,
            device=device,
            weight=borrowed_format(self.embedding.weight) if config.tie_word_embeddings and self.embedding else None,
        )

    def _owners(self) -> Iterator[Embedding | Linear | RMSNorm]:
        return (module for module in self.modules() if isinstance(module, Embedding | Linear | RMSNorm))
