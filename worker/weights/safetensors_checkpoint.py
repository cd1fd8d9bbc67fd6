"""How are tensors read from a Hugging Face folder?"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ipc.errors import ConfigError
from worker.config_fields import check_regular
from worker.weights.checkpoint import Checkpoint, StoredTensor
from worker.weights.mapping import map_bytes

FIELD = "MODEL"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class SafetensorsCheckpoint(Checkpoint):
    """One file, or several with an index. Heads of files are read when the first of their tensors is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open_files: dict[str, Any] = {}
        self.starts: dict[str, dict[str, int]] = {}
        """File to tensor to where its bytes begin in the file."""
        if (folder / INDEX_NAME).exists():
            self.file_of = _read_index(folder / INDEX_NAME)
        else:
            file_name = _only_file(folder)
            self.file_of = dict.fromkeys(self._open(file_name).keys(), file_name)

    def names(self) -> set[str]:
        return set(self.file_of)

    def describe(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def stored(self, name: str) -> StoredTensor:
        type_name = self._slice(name).get_dtype()
        # Types are called after their bits: F32, BF16, F8_E4M3, BOOL.
        digits = re.search(r"\d+", type_name)
        bits = int(digits[0]) if digits else 8
        return StoredTensor(type_name=type_name, size_bytes=math.prod(self.describe(name)) * bits // 8)

    def where(self, name: str) -> str:
        return str(self.folder / self.file_of[name]) if name in self.file_of else str(self.folder)

    def load(self, name: str) -> Tensor:
        dtype = self._slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ConfigError(
                FIELD, f"tensor {name} in {self.where(name)} is of type {dtype}; supported are {', '.join(_DTYPES)}"
            )
        file_name = self.file_of[name]
        if file_name not in self.starts:
            self.starts[file_name] = _read_starts(self.folder / file_name)
        size_bytes = self.stored(name).size_bytes
        raw = map_bytes(str(self.folder / file_name), self.starts[file_name][name], size_bytes)
        return raw.view(_DTYPES[dtype]).view(self.describe(name))

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
                # It checks the head. Not for torch: that would map the whole file privately, see map_bytes.
                self.open_files[file_name] = safe_open(str(path), framework="np")
            except FileNotFoundError:
                raise ConfigError(FIELD, f"{path} is missing, though {INDEX_NAME} names it") from None
            except SafetensorError as error:
                raise ConfigError(FIELD, f"{path} is damaged or cut off ({error}); fetch it again") from None
            except OSError as error:
                raise ConfigError(FIELD, f"cannot read {path}: {error.strerror or error}") from None
        return self.open_files[file_name]


def _read_starts(path: Path) -> dict[str, int]:
    """Of a file whose head is known to be sound: eight bytes with the size of a JSON object, that, and the data."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(size))
    except OSError as error:
        raise ConfigError(FIELD, f"cannot read {path}: {error.strerror}") from None
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in head.items() if name != "__metadata__"}


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
