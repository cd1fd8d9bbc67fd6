"""Random draws without a generator: noise keyed by (seed, position, token id), and filters with settled ties.

The noise of a token does not depend on which other tokens are looked at, nor on where in a tensor it stands. So the
same draw comes out in any batch, after a restart, and from a vocabulary that is cut in pieces.
"""

import torch
from torch import Tensor

from kernels.cpu.native import native_for
from kernels.gpu.dispatch import triton_for

_LOW_31_BITS = 0x7FFFFFFF
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise: the argmax of log p + noise is a draw from p.

    Shapes:
        seeds, positions: [S] int64, positions below 2**32
        token_ids:        [1, N] or [S, N], below 2**31
        returns           [S, N] float32, between -2.9 and 22.2
    """
    if seeds.shape != positions.shape or seeds.dim() != 1 or token_ids.dim() != 2:
        raise ValueError(f"shapes {tuple(seeds.shape)}, {tuple(positions.shape)}, {tuple(token_ids.shape)}")
    if seeds.dtype != torch.int64 or positions.dtype != torch.int64:
        raise TypeError(f"seeds and positions must be int64, got {seeds.dtype} and {positions.dtype}")
    gpu = triton_for(seeds, positions, token_ids)
    if gpu is not None:
        return gpu.gumbel_noise(seeds, positions, token_ids)
    return gumbel_noise_definition(seeds, positions, token_ids)


def gumbel_noise_definition(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """A 32-bit hash of the token id under two 32-bit keys, made uniform, then Gumbel.

    The uniform number keeps its relative precision near zero, where the winners of a draw come from.
    """
    first, second = _keys(seeds, positions)
    bits = _hash(token_ids.to(torch.int32), first[:, None], second[:, None])
    uniform = bits.bitwise_and_(_LOW_31_BITS).to(torch.float32)
    uniform.add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit keys of each (seed, position): the halves of a 64-bit mix (splitmix64's), as int32."""
    x = _mix64(_mix64(seeds) + positions)
    return _low32(x), _low32(_shift_right64(x, 32))


def _mix64(x: Tensor) -> Tensor:
    x = x + (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ _shift_right64(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shift_right64(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shift_right64(x, 31)


def _shift_right64(x: Tensor, bits: int) -> Tensor:
    """Unsigned shift: torch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _low32(x: Tensor) -> Tensor:
    low = x & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)


def _hash(ids: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Two rounds of multiply and shift, a key before each; products wrap at 32 bits."""
    bits = ids ^ first
    shifted = torch.empty_like(bits)
    _xor_shift(bits, shifted, 16)
    bits.mul_(0x7FEB352D)
    _xor_shift(bits, shifted, 15)
    bits.bitwise_xor_(second)
    bits.mul_(0x846CA68B - (1 << 32))
    _xor_shift(bits, shifted, 16)
    bits.mul_(0x7FEB352D)
    _xor_shift(bits, shifted, 15)
    return bits


def _xor_shift(bits: Tensor, scratch: Tensor, count: int) -> None:
    torch.bitwise_right_shift(bits, count, out=scratch)
    bits.bitwise_xor_(scratch.bitwise_and_((1 << (32 - count)) - 1))


def most_likely(logits: Tensor) -> Tensor:
    """The largest logit's id in each row; of equal ones the lowest.

    Shapes:
        logits:  [S, V] float32, V > 0; a row with NaN gets some id in range
        returns  [S] int64

    Bytes: logits read once.
    """
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, got {logits.dtype}")
    gpu = triton_for(logits)
    if gpu is not None:
        return gpu.most_likely(logits)
    library = native_for(logits)
    if library is None or not logits.is_contiguous():
        return logits.argmax(dim=1)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    library.argmax(tokens.data_ptr(), logits.data_ptr(), *logits.shape, torch.get_num_threads())
    return tokens


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest logits of each row in falling order; of equal ones, lower ids come first.

    Shapes:
        logits:  [S, V] float32, no NaN
        returns  values [S, count], ids [S, count] int64
    """
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, got {logits.dtype}")
    if not 0 <= count <= logits.shape[1]:
        raise ValueError(f"{count} of {logits.shape[1]} tokens")
    return top_tokens_definition(logits, count)


def top_tokens_definition(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """One integer a token, the value's bits above the id's: no two are equal, so any top-k settles ties alike."""
    vocab_size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, so that the two are a tie
    rising = bits ^ ((bits >> 31) & _LOW_31_BITS)
    backwards = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (rising.to(torch.int64) << 32) | backwards
    ids = vocab_size - 1 - (keys.topk(count, dim=1, sorted=True).values & 0xFFFFFFFF)
    return logits.gather(1, ids), ids


def nucleus(values: Tensor, totals: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Which of a row's most likely tokens make up the smallest set whose probability reaches ``top_p``.

    Shapes:
        values:  [S, N] scaled logits in falling order, the row's maximum first
        totals:  [S], sum over all tokens in question of exp(value - maximum)
        top_p:   [S] float32
        returns  kept [S, N] bool, reached [S] bool: false where the N tokens do not suffice
    """
    mass = (values - values[:, :1]).double().exp().div_(totals.double()[:, None]).cumsum(1)
    p = top_p.double()[:, None]
    kept = torch.ones_like(values, dtype=torch.bool)
    kept[:, 1:] = mass[:, :-1] < p
    return kept, mass[:, -1] >= p[:, 0]


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """One token for each row: the most likely one at temperature 0, else one drawn after the filters.

    Filters act in this order: temperature, top_k (exactly k tokens), top_p (the smallest set of these, renormalised, that
    reaches p). Of equal logits lower ids come first.

    Shapes:
        logits:           [S, V] float32; not changed. A row with NaN or +inf, or -inf alone, gets some id in range
        temperature:      [S] float32
        top_k:            [S] int64; 0 is off
        top_p:            [S] float32 in (0, 1]
        seeds, positions: [S] int64
        returns           [S] int64

    Bytes: logits read twice; about 35 times with one filter, 65 times with both.
    """
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, got {logits.dtype}")
    for name, column in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("seeds", seeds), ("positions", positions)):
        if column.shape != logits.shape[:1]:
            raise ValueError(f"{name} of shape {tuple(column.shape)} for {logits.shape[0]} rows")
    gpu = triton_for(logits, temperature, top_k, top_p, seeds, positions)
    if gpu is not None:
        return gpu.draw(logits, temperature, top_k, top_p, seeds, positions)
    return draw_definition(logits, temperature, top_k, top_p, seeds, positions)


def draw_definition(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    vocab_size = logits.shape[1]
    heat = torch.where(temperature > 0, temperature, 1.0)[:, None]
    values, ids = top_tokens_definition((logits - logits.amax(dim=1, keepdim=True)) / heat, vocab_size)
    count = torch.where(top_k > 0, top_k, vocab_size)[:, None]
    within_k = torch.arange(vocab_size, device=logits.device) < count
    kept, _ = nucleus(values, (values.exp() * within_k).sum(dim=1), top_p)
    scores = values + gumbel_noise_definition(seeds, positions, ids)
    drawn = scores.masked_fill(~((kept | (top_p >= 1)[:, None]) & within_k), -torch.inf).argmax(dim=1, keepdim=True)
    return torch.where(temperature > 0, ids.gather(1, drawn)[:, 0], ids[:, 0])
