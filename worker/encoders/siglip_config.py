"""What is a SigLIP vision encoder's description? Without torch."""

import math
from dataclasses import dataclass

from worker.config_fields import Fields, errors_name, refused
from worker.model_config import BOUNDS

_MOST_PIXELS = 1 << 14
"""Of an image's side."""

_BOUNDS = {name: BOUNDS[name] for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads")} | {
    "num_channels": (1, 1 << 10),
    "image_size": (1, _MOST_PIXELS),
    "patch_size": (1, _MOST_PIXELS),
}
"""Least and most of each size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipConfig:
    """Sizes of the encoder; nothing in it depends on how it is run."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_channels: int
    image_size: int
    """Pixels on each side of the images whose positions were trained."""

    patch_size: int
    """Pixels on each side of what becomes one token."""

    layer_norm_eps: float

    @property
    def grid_size(self) -> int:
        """Patches on each side of such an image."""
        return self.image_size // self.patch_size

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise refused(name, getattr(self, name), f"must be at least {least} and at most {most}")
        if self.hidden_size % self.num_heads:
            raise refused("num_heads", self.num_heads, f"must divide hidden_size={self.hidden_size}")
        if self.patch_size > self.image_size:
            raise refused("patch_size", self.patch_size, f"must be at most image_size={self.image_size}")
        if not (math.isfinite(self.layer_norm_eps) and self.layer_norm_eps > 0):
            raise refused("layer_norm_eps", self.layer_norm_eps, "must be above 0")


def read_siglip(fields: Fields) -> SiglipConfig:
    """From a config.json, or from the object ``vision_config`` inside one; absent fields have the family's defaults.

    Raises:
        ConfigError: for a field of another type, out of bounds or not supported; it names the file and the field.
    """
    fields.must_be("hidden_act", "gelu_pytorch_tanh")
    with errors_name(fields.where):
        return SiglipConfig(
            num_layers=fields.get("num_hidden_layers", int, 12),
            hidden_size=fields.get("hidden_size", int, 768),
            intermediate_size=fields.get("intermediate_size", int, 3072),
            num_heads=fields.get("num_attention_heads", int, 12),
            num_channels=fields.get("num_channels", int, 3),
            image_size=fields.get("image_size", int, 224),
            patch_size=fields.get("patch_size", int, 16),
            layer_norm_eps=fields.get("layer_norm_eps", float, 1e-6),
        )
