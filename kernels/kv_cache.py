"""Writing keys and values into their slots of a paged cache."""

from torch import Tensor

from kernels.gpu.dispatch import triton_for


def append_kv(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write this step's keys and values into their slots of one layer's cache.

    Shapes:
        cache: [2, B, K, G, D]   keys at [0], values at [1]; contiguous
        k, v:  [T, G, D]
        slots: [T] int64         slot = block_id * K + offset; -1 marks padding

    Mutates ``cache``. Slots of different tokens never coincide.

    Bytes: k and v read and written once.
    """
    if cache.dim() != 5 or cache.shape[0] != 2 or not cache.is_contiguous():
        raise ValueError(f"cache must be a contiguous [2, B, K, G, D], got {tuple(cache.shape)}")
    if k.shape != v.shape or k.shape[1:] != cache.shape[3:]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit a cache of {tuple(cache.shape)}")
    if slots.shape != k.shape[:1]:
        raise ValueError(f"{slots.numel()} slots for {k.shape[0]} tokens")
    gpu = triton_for(cache, k, v, slots)
    if gpu is None:
        append_kv_definition(cache, k, v, slots)
    else:
        gpu.append_kv(cache, k, v, slots)


def append_kv_definition(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    keep = slots >= 0
    flat = cache.flatten(1, 2)  # [2, B*K, G, D]
    flat[0].index_copy_(0, slots[keep], k[keep].to(cache.dtype))
    flat[1].index_copy_(0, slots[keep], v[keep].to(cache.dtype))
