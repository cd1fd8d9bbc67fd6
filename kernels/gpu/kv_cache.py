"""How does a GPU write keys and values into their slots? One program a token."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Launch, next_power_of_2


def append_kv(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """As ``kernels.kv_cache``."""
    append_kv_launch(cache, k, v, slots).run()


def append_kv_launch(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Launch:
    num_kv_heads, head_size = k.shape[1:]
    heads, width = next_power_of_2(num_kv_heads), next_power_of_2(head_size)
    return Launch(
        kernel=append_kv_kernel,
        grid=(k.shape[0],),
        arguments={
            "key_cache": cache[0], "value_cache": cache[1], "k": k, "v": v, "slots": slots,
            "k_token_stride": k.stride(0), "k_head_stride": k.stride(1), "k_stride": k.stride(2),
            "v_token_stride": v.stride(0), "v_head_stride": v.stride(1), "v_stride": v.stride(2),
            "NUM_HEADS": num_kv_heads, "HEAD_SIZE": head_size, "HEADS": heads, "WIDTH": width,
        },
        num_warps=min(4, max(1, heads * width // 256)),
    )  # fmt: skip


@triton.jit
def append_kv_kernel(
    key_cache, value_cache, k, v, slots, k_token_stride, k_head_stride, k_stride, v_token_stride, v_head_stride, v_stride,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads, columns = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask = (heads < NUM_HEADS) & (columns < HEAD_SIZE)
    places = slot * NUM_HEADS * HEAD_SIZE + heads * HEAD_SIZE + columns
    keys = tl.load(k + token * k_token_stride + heads * k_head_stride + columns * k_stride, mask=mask)
    values = tl.load(v + token * v_token_stride + heads * v_head_stride + columns * v_stride, mask=mask)
    tl.store(key_cache + places, keys.to(key_cache.dtype.element_ty), mask=mask)
    tl.store(value_cache + places, values.to(value_cache.dtype.element_ty), mask=mask)
