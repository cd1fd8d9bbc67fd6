"""Which class computes which architecture?"""

from importlib import import_module

import torch

from ipc.errors import ConfigError
from worker.attention import AttentionBackend
from worker.model_config import ModelConfig
from worker.models.stage import StageModel

_CLASSES = {
    "llama": ("worker.models.llama", "LlamaStage"),
    "mistral": ("worker.models.mistral", "MistralStage"),
    "qwen2": ("worker.models.qwen2", "Qwen2Stage"),
    "qwen3": ("worker.models.qwen3", "Qwen3Stage"),
    "gemma2": ("worker.models.gemma", "Gemma2Stage"),
    "gemma3": ("worker.models.gemma", "Gemma3Stage"),
}
"""Loaded only when named: a family may need packages that others don't."""


def build_stage(
    config: ModelConfig,
    layers: range,
    *,
    is_first: bool,
    is_last: bool,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
) -> StageModel:
    """A stage with its layers' parameters allocated and not yet filled.

    Raises:
        ConfigError: for an unknown family, and when there is not memory enough for the weights.
    """
    if config.architecture not in _CLASSES:
        raise ConfigError("MODEL", f"no model class for {config.architecture!r}; known are {', '.join(_CLASSES)}")
    module, name = _CLASSES[config.architecture]
    try:
        stage: StageModel = getattr(import_module(module), name)(
            config, layers, is_first=is_first, is_last=is_last, dtype=dtype, device=device, backend=backend
        )
    except RuntimeError as error:  # the only type that torch has for it on a CPU
        raise ConfigError(
            "MODEL",
            f"no memory for the weights of layers {layers.start} to {layers.stop - 1} in {dtype} on {device}: "
            f"{str(error).splitlines()[0]:.200}",
        ) from error
    return stage.eval().requires_grad_(False)
