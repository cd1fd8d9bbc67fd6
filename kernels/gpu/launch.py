"""What does a launch consist of? A description that can be run here, or compiled for a GPU that is not here."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel over a grid."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    """By the kernel's parameter names, its constants included."""

    num_warps: int = 4
    num_stages: int = 1
    """How many turns of a loop have their loads under way at once."""

    def run(self) -> None:
        """Enqueue it on the current stream; an empty grid does nothing."""
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)


def rows_of(x: Tensor) -> tuple[int, int, int, int]:
    """[…, C] or [T, N, C], seen as T * N rows: their number, N, and how far tokens and heads lie apart.

    Raises:
        ValueError: elements of a row do not lie together, or rows lie more irregularly than that.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"the elements of a row must lie together, got strides {x.stride()}")
    if x.dim() == 3 and not x.is_contiguous():
        return x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0), 0
    if not x.is_contiguous():
        raise ValueError(f"no regular rows: shape {tuple(x.shape)}, strides {x.stride()}")
    width = x.shape[-1]
    return x.numel() // max(width, 1), 1, width, 0


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def warps_for(num_elements: int) -> int:
    """Of a program that holds so many elements: about 16 a thread."""
    return min(8, max(1, num_elements // 512))


ELEMENT_SIZES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
"""Element types that the kernels know, and bytes of an element."""
