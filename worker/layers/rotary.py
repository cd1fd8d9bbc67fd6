"""By which angles does a position turn queries and keys?"""

import math

import torch
from torch import Tensor, nn

from worker.rope_config import RopeConfig


class RotaryAngles(nn.Module):
    """Angles in float32 whatever the model's dtype: a rounded angle at position 8000 is no angle at all."""

    def __init__(self, config: RopeConfig, head_size: int, *, device: torch.device) -> None:
        super().__init__()
        self.frequencies = rope_frequencies(config, head_size).to(device)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] -> cos and sin, [T, D / 2] float32 each."""
        angles = positions[:, None].float() * self.frequencies
        return angles.cos(), angles.sin()


def rope_frequencies(config: RopeConfig, head_size: int) -> Tensor:
    """Radians per token of each pair of elements: [D / 2] float32."""
    frequencies = 1.0 / (config.theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(frequencies, config)
    if config.kind == "factors":
        return frequencies / torch.tensor(config.factors, dtype=torch.float32)
    return frequencies


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, and those between are mixed of both."""
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_max_position / wavelengths
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / config.factor + kept * frequencies
