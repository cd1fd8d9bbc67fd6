"""How does a GPU draw the noise of ``kernels.sampling``? The same integers, whoever computes them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Launch, next_power_of_2

_ELEMENTS = 1024
_LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """As ``kernels.sampling``."""
    noise = torch.empty(seeds.shape[0], token_ids.shape[1], dtype=torch.float32, device=seeds.device)
    noise_launch(noise, seeds, positions, token_ids).run()
    return noise


def noise_launch(noise: Tensor, seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Launch:
    num_ids = noise.shape[1]
    width = min(_ELEMENTS, next_power_of_2(num_ids))
    return Launch(
        kernel=noise_kernel,
        grid=(noise.shape[0], -(-num_ids // width)),
        arguments={
            "noise": noise, "seeds": seeds, "positions": positions, "token_ids": token_ids, "num_ids": num_ids,
            "id_row_stride": token_ids.stride(0) if token_ids.shape[0] > 1 else 0, "id_stride": token_ids.stride(1),
            "WIDTH": width,
        },
        num_warps=min(4, max(1, width // 256)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_ids", "id_row_stride"])
def noise_kernel(noise, seeds, positions, token_ids, num_ids, id_row_stride, id_stride, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = columns < num_ids
    first, second = noise_keys(tl.load(seeds + row), tl.load(positions + row))
    ids = tl.load(token_ids + row * id_row_stride + columns * id_stride, mask=mask, other=0)
    tl.store(noise + row * num_ids + columns, gumbel(ids, first, second), mask=mask)


@triton.jit
def noise_keys(seed, position):
    """Two 32-bit keys: the halves of a 64-bit mix."""
    x = _mix64(_mix64(seed.to(tl.uint64)) + position.to(tl.uint64))
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def gumbel(ids, first, second):
    bits = ids.to(tl.uint32) ^ first
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits ^= second
    bits *= 0x846CA68B
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    uniform = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / (1 << 31))
    uniform = tl.minimum(uniform, _LARGEST_BELOW_ONE)
    # log(1 - u), times what rounding took from u: the winners of a draw have a small one.
    rest = 1.0 - uniform
    taken = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * tl.div_rn(uniform, taken))
    return -tl.log(exponential)


@triton.jit
def _mix64(x):
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
