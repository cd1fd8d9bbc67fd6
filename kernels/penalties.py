"""Penalties: what was said already becomes less likely, by how often it was said or by whether it was."""

import torch
from torch import Tensor

from kernels.cpu.native import native_for
from kernels.gpu.dispatch import triton_for


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    in_prompt: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """First the repetition penalty on all tokens of prompt and answer, then the other two by the answer's counts.

    The repetition penalty r divides a positive logit and multiplies another one; then each logit loses ``frequency`` times
    its count, and ``presence`` if it has a count.

    Shapes:
        logits:    [S, V] float32
        rows:      [S] int64         which row of the next two is whose
        in_prompt: [R, V / 32] int32 bit i of word w: token 32 w + i is in the prompt; rounded up
        counts:    [R, V] int32      how often the answer has each token
        repetition, presence, frequency: [S] float32; 1, 0 and 0 are off

    Mutates ``logits``. Rows whose three penalties are off are left as they are.

    Bytes: of rows with a penalty, logits read and written, counts read, once.
    """
    num_words = -(-logits.shape[1] // 32)
    if logits.dtype != torch.float32 or counts.dtype != torch.int32 or in_prompt.dtype != torch.int32:
        raise TypeError(f"logits, in_prompt, counts: {logits.dtype}, {in_prompt.dtype}, {counts.dtype}")
    if counts.shape[1] != logits.shape[1] or in_prompt.shape != (counts.shape[0], num_words):
        raise ValueError(f"counts {tuple(counts.shape)}, in_prompt {tuple(in_prompt.shape)}, logits {tuple(logits.shape)}")
    for name, column in (("rows", rows), ("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        if column.shape != logits.shape[:1]:
            raise ValueError(f"{name} of shape {tuple(column.shape)} for {logits.shape[0]} rows")
    gpu = triton_for(logits, rows, in_prompt, counts, repetition, presence, frequency)
    if gpu is not None:
        gpu.apply_penalties(logits, rows, in_prompt, counts, repetition, presence, frequency)
        return
    tensors = (logits, rows, in_prompt, counts, repetition, presence, frequency)
    library = native_for(logits)
    if library is None or not all(tensor.is_contiguous() for tensor in tensors):
        logits.copy_(apply_penalties_definition(*tensors))
    else:
        library.penalties(*(tensor.data_ptr() for tensor in tensors), *logits.shape, torch.get_num_threads())


def apply_penalties_definition(
    logits: Tensor,
    rows: Tensor,
    in_prompt: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    repetition, presence, frequency = repetition[:, None], presence[:, None], frequency[:, None]
    counts = counts[rows]
    is_said = counts > 0
    is_known = is_said | unpack_bits(in_prompt[rows], logits.shape[1])
    lowered = torch.where(logits > 0, logits / repetition, logits * repetition)
    out = torch.where(is_known, lowered, logits) - frequency * counts - presence * is_said
    is_on = (repetition != 1) | (presence != 0) | (frequency != 0)
    return torch.where(is_on, out, logits)


def unpack_bits(words: Tensor, num_bits: int) -> Tensor:
    """[N, W] int32 -> [N, num_bits] bool; the lowest bit of a word is its first."""
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    return bits.flatten(1)[:, :num_bits].bool()
