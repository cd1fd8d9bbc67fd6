"""How does a SigLIP vision encoder compute? Patches become tokens, which attend to all tokens of their image.

Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (2023); without its pooling head, as language models take an
image's tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate

from ipc.errors import RequestError
from worker.encoders.encoder import Item, PackedEncoder, PackedInput
from worker.encoders.siglip_config import SiglipConfig
from worker.layers.bidirectional_attention import BidirectionalAttention
from worker.layers.embedding import Embedding
from worker.layers.linear import Linear
from worker.layers.mlp import MLP
from worker.layers.norm import LayerNorm
from worker.layers.weight_slot import WeightSlot
from worker.transfer import to_device

PATCHES, POSITIONS = "patches", "positions"

MAX_MAGNITUDE = 16.0
"""Of a pixel. Normalised ones lie between -1 and 1, or within 3 where a data set's mean and deviation are used. One that is
not finite, or overflows inside, would reach the other images of its pass."""

_PREFIX = "vision_model."
"""Before the names in checkpoints that were written before transformers 5, or hold a text encoder as well."""

_PARTS = ("embeddings.", "encoder.", "post_layernorm.", "head.")


class PatchEmbedding(Linear):
    """A convolution whose windows don't overlap is one product for each patch; checkpoints have its weight in 4-D."""

    def __init__(self, name: str, config: SiglipConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        num_inputs = config.num_channels * config.patch_size**2
        super().__init__(num_inputs, {name: config.hidden_size}, bias=True, dtype=dtype, device=device)
        self.name = name
        self.window = (config.num_channels, config.patch_size, config.patch_size)

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots = super().weight_slots()
        flat = slots[f"{self.name}.weight"]
        slots[f"{self.name}.weight"] = WeightSlot(
            shape=(flat.shape[0], *self.window), load=lambda weight: flat.load(weight.flatten(1))
        )
        return slots


class SiglipLayer(nn.Module):
    def __init__(self, name: str, config: SiglipConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention_norm = LayerNorm(f"{name}.layer_norm1", width, eps, dtype=dtype, device=device)
        self.attention = BidirectionalAttention(
            f"{name}.self_attn", width, config.num_heads, dtype=dtype, device=device
        )
        self.mlp_norm = LayerNorm(f"{name}.layer_norm2", width, eps, dtype=dtype, device=device)
        self.mlp = MLP(
            f"{name}.mlp",
            width,
            config.intermediate_size,
            partial(gelu, approximate="tanh"),
            dtype=dtype,
            device=device,
        )

    def forward(self, hidden: Tensor, sees: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), sees)
        return hidden + self.mlp(self.mlp_norm(hidden))


class SiglipEncoder(PackedEncoder):
    """Its parameters are allocated and filled by ``load_weights``, as those of a stage."""

    def __init__(self, config: SiglipConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.output_width, self.dtype, self.device = config.hidden_size, dtype, device
        self.patch_embedding = PatchEmbedding("embeddings.patch_embedding", config, dtype=dtype, device=device)
        self.position_embedding = Embedding(
            "embeddings.position_embedding", config.grid_size**2, config.hidden_size, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            SiglipLayer(f"encoder.layers.{layer}", config, dtype=dtype, device=device)
            for layer in range(config.num_layers)
        )
        self.norm = LayerNorm("post_layernorm", config.hidden_size, config.layer_norm_eps, dtype=dtype, device=device)
        self.eval().requires_grad_(False)

    def inputs(self) -> tuple[PackedInput, ...]:
        return (
            PackedInput(name=PATCHES, shape=(self.patch_embedding.in_features,), dtype=self.dtype, padding=0.0),
            PackedInput(name=POSITIONS, shape=(self.output_width,), dtype=self.dtype, padding=0.0),
        )

    def item(self, pixels: Tensor) -> Item:
        """One image [channels, height, width] on the host as its patches, row by row, and what is added for their places.

        Its sides may differ from those of the images in training, then the places are interpolated. ``pixels`` must not
        change afterwards.

        Raises:
            RequestError: for a shape that isn't cut into whole patches, and for pixels that can't be normalised ones.
        """
        channels, side = self.config.num_channels, self.config.patch_size
        if pixels.ndim != 3 or pixels.shape[0] != channels:
            raise _bad_pixels(f"have shape {list(pixels.shape)}, must be [{channels}, height, width]")
        if any(size == 0 or size % side for size in pixels.shape[1:]):
            raise _bad_pixels(f"have shape {list(pixels.shape)}, height and width must be multiples of {side} above 0")
        if not pixels.is_floating_point():
            raise _bad_pixels(f"are of type {pixels.dtype}, must be normalised floats")
        largest = pixels.abs().max().item()
        if not largest <= MAX_MAGNITUDE:  # NaN is not below anything
            raise _bad_pixels(f"reach {largest:g}, must be finite and within {MAX_MAGNITUDE:g} of 0")
        windows = pixels.unfold(1, side, side).unfold(2, side, side)  # [channels, rows, columns, side, side]
        patches = windows.permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1)
        return {
            PATCHES: to_device(patches.to(self.dtype), self.device),
            POSITIONS: self._positions(windows.shape[1], windows.shape[2]),
        }

    def forward(self, inputs: Mapping[str, Tensor], item_ids: Tensor) -> Tensor:
        sees = item_ids[:, None] == item_ids
        hidden = self.patch_embedding(inputs[PATCHES]) + inputs[POSITIONS]
        for layer in self.layers:
            hidden = layer(hidden, sees)
        return self.norm(hidden)

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        for module in self._owners():
            slots |= module.weight_slots()
        return {name: replace(slot, aliases=(_PREFIX + name,)) for name, slot in slots.items()}

    def owns(self, name: str) -> bool:
        """Not a text encoder's, nor a language model's."""
        return name.startswith((_PREFIX, *_PARTS))

    def ignores(self, name: str) -> bool:
        """The pooling head, and a table that old checkpoints carry though it follows from the config."""
        return name.removeprefix(_PREFIX).startswith(("head.", "embeddings.position_ids"))

    def prepare(self) -> None:
        for module in self._owners():
            if isinstance(module, Linear):
                module.prepare()

    def weight_bytes(self) -> int:
        return sum(module.size_bytes for module in self._owners())

    def _positions(self, num_rows: int, num_columns: int) -> Tensor:
        """[rows * columns, C]: the trained grid, stretched over an image of another size or shape."""
        grid = self.config.grid_size
        table = self.position_embedding.weight
        if (num_rows, num_columns) == (grid, grid):
            return table
        stretched = interpolate(
            table.view(1, grid, grid, -1).permute(0, 3, 1, 2).float(), size=(num_rows, num_columns), mode="bicubic"
        )
        return stretched[0].flatten(1).t().to(self.dtype)

    def _owners(self) -> Iterator[Embedding | Linear | LayerNorm]:
        return (module for module in self.modules() if isinstance(module, Embedding | Linear | LayerNorm))


def _bad_pixels(rule: str) -> RequestError:
    return RequestError(f"pixels {rule}", field="pixels")
