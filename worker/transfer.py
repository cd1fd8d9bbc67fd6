"""How do numbers get to a device, and tokens back from it, without anybody waiting for anybody?

An ordinary copy between host and device has the host wait for all that the device was asked to do before. On the CPU
nothing is copied: the result shares its memory with the source.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """The same numbers on the device, for what is computed behind this call. ``host`` must not change afterwards.

    From pinned memory, which torch gives to nobody else before the copy is complete.
    """
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def write_to_device(target: Tensor, host: Tensor) -> None:
    """Put these numbers into a tensor that stays, for what is computed behind this call. As ``to_device``."""
    target.copy_(host if target.device.type == "cpu" else host.pin_memory(), non_blocking=True)


class HostCopy:
    """A tensor on its way to the host. It may be changed afterwards, in the order of its device's stream."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._copied = tensor, None
        if tensor.device.type != "cpu":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def numpy(self) -> NDArray[Any]:
        """Wait for this copy, and for nothing that the device was asked to do behind it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()
