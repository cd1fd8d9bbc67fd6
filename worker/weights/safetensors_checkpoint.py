"""How are tensors read from a Hugging Face folder?"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ipc.errors import ConfigError
from worker.model_config import check_regular
from worker.weights.checkpoint import Checkpoint

FIELD = "MODEL"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_DTYPES = ("F32", "BF16", "F16", "F64")


class SafetensorsCheckpoint(Checkpoint):
    """One file, or several with an index. Files are memory-mapped when the first of their tensors is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open_files: dict[str, Any] = {}
        if (folder / INDEX_NAME).exists():
            self.file_of = _read_index(folder / INDEX_NAME)
        else:
            file_name = _only_file(folder)
            self.file_of = dict.fromkeys(self._open(file_name).keys(), file_name)

    def names(self) -> set[str]:
        return set(self.file_of)

    def describe(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def where(self, name: str) -> str:
        return str(self.folder / self.file_of[name]) if name in self.file_of else str(self.folder)

    def load(self, name: str) -> Tensor:
        dtype = self._slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ConfigError(
                FIELD, f"tensor {name} in {self.where(name)} is of type {dtype}; supported are {', '.join(_DTYPES)}"
            )
        return self._open(self.file_of[name]).get_tensor(name)

    def _slice(self, name: str) -> Any:
        file = self._open(self.file_of[name])
        try:
            return file.get_slice(name)
        except SafetensorError:
            raise ConfigError(
                FIELD, f"{self.where(name)} has no tensor {name}, though {INDEX_NAME} says so; fetch both again"
            ) from None

    def _open(self, file_name: str) -> Any:
        if file_name not in self.open_files:
            path = self.folder / file_name
            check_regular(path)
            try:
                self.open_files[file_name] = safe_open(str(path), framework="pt")
            except FileNotFoundError:
                raise ConfigError(FIELD, f"{path} is missing, though {INDEX_NAME} names it") from None
            except SafetensorError as error:
                raise ConfigError(FIELD, f"{path} is damaged or cut off ({error}); fetch it again") from None
            except OSError as error:
                raise ConfigError(FIELD, f"cannot read {path}: {error.strerror or error}") from None
        return self.open_files[file_name]


def _read_index(path: Path) -> dict[str, str]:
    """Tensor names to file names, which must lie in the same folder."""
    check_regular(path)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(FIELD, f"{path} is not readable JSON ({error})") from None
    except OSError as error:
        raise ConfigError(FIELD, f"cannot read {path}: {error.strerror}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(FIELD, f"{path} has no 'weight_map'")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ConfigError(FIELD, f"{path}: tensor {name} has file {file_name!r:.80}, must be a plain file name")
    return weight_map


def _only_file(folder: Path) -> str:
    if (folder / SINGLE_NAME).exists():
        return SINGLE_NAME
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(FIELD, f"{folder} has {len(found)} safetensors files and no {INDEX_NAME}; fetch it too")
    raise ConfigError(FIELD, f"{folder} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME}")
