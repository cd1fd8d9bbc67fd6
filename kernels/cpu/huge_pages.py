"""Where do large arrays lie so that memory gives them as fast as it can?

In large pages, where the system has them on request: in pages of 4 KiB a product with weights of SmolLM2-135M got 18 GB/s
from memory with one thread (Zen 4), in pages of 2 MiB 32 GB/s. Arrays that are small beside such a page share them.
"""

import ctypes
import functools

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
"""What is asked of the system at a time. It takes memory only for pages that are written to."""

LINE_BYTES = 64
_MADV_HUGEPAGE = 14  # Linux's


class HugePages:
    """Hands out memory of chunks that lie in large pages; a chunk is given back when no array on it is left.

    For one thread at a time.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """[num_elements], at the begin of a cache line."""
        num_bytes = num_elements * dtype.itemsize
        padded = -(-num_bytes // LINE_BYTES) * LINE_BYTES
        if 2 * padded > CHUNK_BYTES:
            return _huge_chunk(padded)[:num_bytes].view(dtype)
        if self._used + padded > self._chunk.numel():
            self._chunk, self._used = _huge_chunk(CHUNK_BYTES), 0
        found = self._chunk[self._used : self._used + num_bytes]
        self._used += padded
        return found.view(dtype)


@functools.cache
def weight_memory() -> HugePages:
    """Of this process: the weights of its stage lie side by side."""
    return HugePages()


def _huge_chunk(num_bytes: int) -> Tensor:
    whole = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE_BYTES
    chunk = whole[start : start + num_bytes]
    ask_for_huge_pages(chunk)
    return chunk


def ask_for_huge_pages(tensor: Tensor) -> None:
    """Before it is first written to. Does nothing where the system has none, or does as it likes."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "madvise"):
        return
    start = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    num_bytes = (tensor.data_ptr() + tensor.nbytes) // PAGE_BYTES * PAGE_BYTES - start
    if num_bytes > 0:
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), _MADV_HUGEPAGE)
