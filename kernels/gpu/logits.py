"""How does a GPU change logits before a draw: penalties, and tokens that a grammar forbids?"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Launch, next_power_of_2

_ELEMENTS = 1024


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    in_prompt: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """As ``kernels.penalties``."""
    penalties_launch(logits, rows, in_prompt, counts, repetition, presence, frequency).run()


def apply_token_mask(logits: Tensor, allowed: Tensor, rows: Tensor) -> None:
    """As ``kernels.token_mask``."""
    token_mask_launch(logits, allowed, rows).run()


def penalties_launch(
    logits: Tensor,
    rows: Tensor,
    in_prompt: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Launch:
    num_rows, vocab_size = logits.shape
    width = min(_ELEMENTS, next_power_of_2(vocab_size))
    return Launch(
        kernel=penalties_kernel,
        grid=(num_rows, -(-vocab_size // width)),
        arguments={
            "logits": logits, "rows": rows, "in_prompt": in_prompt, "counts": counts, "repetition": repetition,
            "presence": presence, "frequency": frequency, "row_stride": logits.stride(0), "stride": logits.stride(1),
            "prompt_stride": in_prompt.stride(0), "count_stride": counts.stride(0), "VOCAB_SIZE": vocab_size, "WIDTH": width,
        },
    )  # fmt: skip


def token_mask_launch(logits: Tensor, allowed: Tensor, rows: Tensor) -> Launch:
    vocab_size = logits.shape[1]
    width = min(_ELEMENTS, next_power_of_2(vocab_size))
    return Launch(
        kernel=token_mask_kernel,
        grid=(allowed.shape[0], -(-vocab_size // width)),
        arguments={
            "logits": logits, "allowed": allowed, "rows": rows, "row_stride": logits.stride(0),
            "stride": logits.stride(1), "mask_stride": allowed.stride(0), "VOCAB_SIZE": vocab_size, "WIDTH": width,
        },
    )  # fmt: skip


@triton.jit(do_not_specialize=["row_stride"])
def penalties_kernel(
    logits, rows, in_prompt, counts, repetition, presence, frequency, row_stride, stride, prompt_stride, count_stride,
    VOCAB_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    repeated = tl.load(repetition + row)
    present = tl.load(presence + row)
    frequent = tl.load(frequency + row)
    if (repeated == 1.0) & (present == 0.0) & (frequent == 0.0):
        return
    owner = tl.load(rows + row)
    ids = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = ids < VOCAB_SIZE
    places = logits + row * row_stride + ids * stride
    values = tl.load(places, mask=mask, other=0.0)
    num_said = tl.load(counts + owner * count_stride + ids, mask=mask, other=0)
    words = tl.load(in_prompt + owner * prompt_stride + ids // 32, mask=mask, other=0)
    is_known = (num_said > 0) | (((words >> (ids % 32)) & 1) != 0)
    factor = tl.zeros_like(values) + repeated
    lowered = tl.where(values > 0, tl.div_rn(values, factor), values * factor)
    values = tl.where(is_known, lowered, values) - frequent * num_said.to(tl.float32)
    tl.store(places, tl.where(num_said > 0, values - present, values), mask=mask)


@triton.jit(do_not_specialize=["row_stride"])
def token_mask_kernel(
    logits, allowed, rows, row_stride, stride, mask_stride, VOCAB_SIZE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    words = tl.load(allowed + index * mask_stride + ids // 32, mask=ids < VOCAB_SIZE, other=-1)
    is_forbidden = ((words >> (ids % 32)) & 1) == 0
    places = logits + tl.load(rows + index) * row_stride + ids * stride
    tl.store(places, tl.full((WIDTH,), -float("inf"), tl.float32), mask=is_forbidden)
