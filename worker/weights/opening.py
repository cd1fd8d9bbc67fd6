"""Which reader fits this checkpoint?"""

from pathlib import Path

from worker.model_config import ModelConfig
from worker.weights.checkpoint import Checkpoint
from worker.weights.gguf_checkpoint import GGUFCheckpoint
from worker.weights.safetensors_checkpoint import SafetensorsCheckpoint


def open_checkpoint(path: str, config: ModelConfig) -> Checkpoint:
    """The checkpoint in a folder with safetensors files, or in a ``.gguf`` file.

    Raises:
        ConfigError: when files are missing, damaged or not readable; it names the file.
    """
    if Path(path).is_dir():
        return SafetensorsCheckpoint(Path(path))
    return GGUFCheckpoint(path, config)
