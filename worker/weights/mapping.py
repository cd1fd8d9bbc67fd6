"""How do bytes of a file become a tensor's memory without being read before they are used?"""

import numpy as np
import torch
from torch import Tensor

from ipc.errors import ConfigError

FIELD = "MODEL"


def map_bytes(path: str, offset: int, size_bytes: int) -> Tensor:
    """[size_bytes] uint8, mapped from the file. Raises ConfigError when that fails.

    The mapping is private, since torch wants memory that may be written. So map single tensors: the system refuses a
    private mapping that is larger than its whole memory, as the file may well be.
    """
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", offset=offset, shape=(size_bytes,)))
    except (OSError, ValueError) as error:  # ValueError: the file has become shorter
        raise ConfigError(FIELD, f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
