"""How does a GPU choose tokens? One program a row, which goes over the logits as often as the row's filters need.

A filter keeps what lies above some logit, and of the tokens at that logit those with the lowest ids. The logit is found
by halving the range of all float32 numbers, taken as integers that rise with them: exact, and without sorting.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Launch, next_power_of_2
from kernels.gpu.noise import gumbel, noise_keys

_ELEMENTS = 4096
_LOWEST = tl.constexpr(-(1 << 31))
"""Below the integer of every number."""


def most_likely(logits: Tensor) -> Tensor:
    """As ``kernels.sampling``."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    argmax_launch(tokens, logits).run()
    return tokens


def draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """As ``kernels.sampling``."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    draw_launch(tokens, logits, temperature, top_k, top_p, min_p, seeds, positions).run()
    return tokens


def argmax_launch(tokens: Tensor, logits: Tensor) -> Launch:
    return Launch(
        kernel=argmax_kernel,
        grid=(logits.shape[0],),
        arguments={"tokens": tokens, **_rows(logits)},
        num_warps=8,
    )


def draw_launch(
    tokens: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Launch:
    return Launch(
        kernel=draw_kernel,
        grid=(logits.shape[0],),
        arguments={
            "tokens": tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
            "seeds": seeds, "positions": positions, **_rows(logits),
        },
        num_warps=8,
    )  # fmt: skip


def _rows(logits: Tensor) -> dict[str, object]:
    vocab_size = logits.shape[1]
    return {
        "logits": logits, "row_stride": logits.stride(0), "stride": logits.stride(1), "VOCAB_SIZE": vocab_size,
        "WIDTH": min(_ELEMENTS, next_power_of_2(vocab_size)),
    }  # fmt: skip


@triton.jit(do_not_specialize=["row_stride"])
def argmax_kernel(tokens, logits, row_stride, stride, VOCAB_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, token = _argmax(logits + row * row_stride, stride, VOCAB_SIZE, WIDTH)
    tl.store(tokens + row, token)


@triton.jit(do_not_specialize=["row_stride"])
def draw_kernel(
    tokens, logits, temperature, top_k, top_p, min_p, seeds, positions, row_stride, stride,
    VOCAB_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    peak, token = _argmax(logits, stride, VOCAB_SIZE, WIDTH)
    heat = tl.load(temperature + row)
    if heat > 0.0:
        k = tl.load(top_k + row)
        k = tl.where((k <= 0) | (k > VOCAB_SIZE), VOCAB_SIZE, k).to(tl.int32)
        p = tl.load(top_p + row)
        share = tl.load(min_p + row).to(tl.float32)
        least = tl.where(share > 0.0, tl.log(tl.where(share > 0.0, share, 1.0)), -float("inf"))
        floor = _LOWEST + 0
        num_at_floor = 0
        if (k < VOCAB_SIZE) | (p < 1.0):
            floor, num_at_floor = _filter(logits, peak, heat, k, p, stride, VOCAB_SIZE, WIDTH)
        first, second = noise_keys(tl.load(seeds + row), tl.load(positions + row))
        best = -float("inf")
        num_seen = 0
        for start in range(0, VOCAB_SIZE, WIDTH):
            scaled, height, ids = _scaled(logits, peak, heat, start, stride, VOCAB_SIZE, WIDTH)
            is_at_floor = (height == floor).to(tl.int32)
            order = num_seen + tl.cumsum(is_at_floor, 0)
            is_kept = (height > floor) | ((is_at_floor != 0) & (order <= num_at_floor))
            is_kept = is_kept & (scaled >= least)
            scores = tl.where(is_kept & (ids < VOCAB_SIZE), scaled + gumbel(ids, first, second), -float("inf"))
            num_seen += tl.sum(is_at_floor, 0)
            best, token = _better(best, token, scores, ids)
    tl.store(tokens + row, tl.minimum(token, VOCAB_SIZE - 1))


@triton.jit
def _filter(logits, peak, heat, k, p, stride, VOCAB_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """The integer above which all tokens are kept, and how many of those at it are."""
    floor = _LOWEST + 0
    num_at_floor = 0
    if k < VOCAB_SIZE:
        floor, count, mass = _floor(logits, peak, heat, k, float("inf"), stride, VOCAB_SIZE, WIDTH)
        num_at_floor = k - count
        total = mass + num_at_floor * _weight_at(floor, peak, heat)
    else:
        _, total = _above(logits, peak, heat, floor, stride, VOCAB_SIZE, WIDTH)
    if p < 1.0:
        wanted = p.to(tl.float64) * total
        floor, count, mass = _floor(logits, peak, heat, k, wanted, stride, VOCAB_SIZE, WIDTH)
        # At the floor so many more that their weight is enough; at least one, or the floor would be higher.
        weight = _weight_at(floor, peak, heat)
        missing = tl.where(weight > 0.0, (wanted - mass) / weight, VOCAB_SIZE)
        missing = tl.ceil(tl.minimum(missing, VOCAB_SIZE)).to(tl.int32)
        num_at_floor = tl.minimum(k - count, tl.maximum(missing, 1))
    return floor, num_at_floor


@triton.jit
def _floor(logits, peak, heat, k, wanted, stride, VOCAB_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """The lowest integer above which there are fewer than ``k`` tokens, of less than the ``wanted`` weight in all; their
    number and weight."""
    low = _LOWEST + 0
    high = _height(peak)
    count = 0
    mass = tl.full((), 0.0, tl.float64)
    while high - 1 > low:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        num_above, mass_above = _above(logits, peak, heat, middle, stride, VOCAB_SIZE, WIDTH)
        if (num_above < k) & (mass_above < wanted):
            high = middle
            count = num_above
            mass = mass_above
        else:
            low = middle
    return high, count, mass


@triton.jit
def _above(logits, peak, heat, floor, stride, VOCAB_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """How many tokens lie above the floor, and their weight, of which the most likely token has 1."""
    count = 0
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, VOCAB_SIZE, WIDTH):
        scaled, height, ids = _scaled(logits, peak, heat, start, stride, VOCAB_SIZE, WIDTH)
        is_above = (height > floor) & (ids < VOCAB_SIZE)
        count += tl.sum(is_above.to(tl.int32), 0)
        mass += tl.sum(tl.where(is_above, tl.exp(scaled), 0.0), 0).to(tl.float64)
    return count, mass


@triton.jit
def _scaled(logits, peak, heat, start, stride, VOCAB_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Logits below their peak, divided by the temperature; integers that rise with the logits; their token ids."""
    ids = start + tl.arange(0, WIDTH)
    values = tl.load(logits + ids.to(tl.int64) * stride, mask=ids < VOCAB_SIZE, other=-float("inf"))
    scaled = tl.div_rn(values - peak, tl.zeros_like(values) + heat)
    return scaled, _height(values), ids


@triton.jit
def _height(value):
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight_at(height, peak, heat):
    bits = height ^ ((height >> 31) & 0x7FFFFFFF)
    value = bits.to(tl.float32, bitcast=True)
    return tl.exp(tl.div_rn(value - peak, heat)).to(tl.float64)


@triton.jit
def _argmax(logits, stride, VOCAB_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """The largest logit and its id; of equal ones the lowest."""
    best = -float("inf")
    token = VOCAB_SIZE
    for start in range(0, VOCAB_SIZE, WIDTH):
        ids = start + tl.arange(0, WIDTH)
        values = tl.load(logits + ids.to(tl.int64) * stride, mask=ids < VOCAB_SIZE, other=-float("inf"))
        best, token = _better(best, token, values, ids)
    return best, tl.where(token < VOCAB_SIZE, token, 0)


@triton.jit
def _better(best, token, values, ids):
    """The best so far, or a better one of these; lower ids come first."""
    highest = tl.max(values, 0)
    first = tl.min(tl.where(values == highest, ids, 0x7FFFFFFF), 0)
    return tl.where(highest > best, highest, best), tl.where(highest > best, first, token)
