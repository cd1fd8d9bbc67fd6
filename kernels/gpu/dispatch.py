"""Are these tensors for Triton kernels?"""

import functools
import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

LOWEST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 matrices and asynchronous copies."""

logger = logging.getLogger(__name__)


def triton_for(*tensors: Tensor) -> Any:
    """``kernels.gpu.library`` if Triton serves the device of all these tensors, else None."""
    for tensor in tensors:
        if not serves(tensor.device):
            return None
    return _library()


@functools.cache
def serves(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LOWEST_CAPABILITY


@functools.cache
def is_installed() -> bool:
    """Told without loading it."""
    return find_spec("triton") is not None


@functools.cache
def _library() -> Any:
    try:
        from kernels.gpu import library
    except ImportError as error:
        logger.warning("plain torch instead of Triton kernels: %s", error)
        return None
    return library
