"""Random draws without a generator: noise keyed by (seed, position, token id), and filters with settled ties.

A draw is the token with the largest sum of scaled logit and noise, of those that the filters leave.

The noise of a token does not depend on which other tokens are looked at, nor on where in a tensor it stands. So the
same draw comes out in any batch, after a restart, and from a vocabulary that is cut in pieces.
"""

import torch
from torch import Tensor

from kernels.cpu.native import NativeLibrary, native_for
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


def kept_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor | None = None
) -> Tensor:
    """Which tokens the filters leave: top_k, then top_p, then min_p, then typical_p, each looking at what is left.

    Tokens are ranked by their logits, of equal ones lower ids first; their weights are the exponentials of the logits
    divided by the temperature, in float64.

    - top_k leaves exactly the first k.
    - top_p leaves the smallest beginning of the ranking whose share of the weight reaches p.
    - min_p leaves tokens of at least this share of the first one's weight.
    - typical_p leaves the smallest set whose share of the weight reaches p, of tokens whose surprise -log(share) is nearest
      to the mean surprise, of equally near ones lower ids first (arXiv:2202.00666).

    Shapes:
        logits:           [S, V] float32, the largest of each row finite
        temperature:      [S] float32; of a row with 0 all tokens are left
        top_k:            [S] int64; 0 is off
        top_p, typical_p: [S] float64 in (0, 1]; 1 is off
        min_p:            [S] float64 in [0, 1]; 0 is off
        returns           [S, V] bool
    """
    _check_columns(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    library = native_for(logits)
    if typical_p is not None or library is None or not logits.is_contiguous():
        return kept_tokens_definition(logits, temperature, top_k, top_p, min_p, typical_p)
    floors, last_ids = _cut(library, logits, temperature, top_k, top_p, min_p)
    ids = torch.arange(logits.shape[1])
    return (logits > floors[:, None]) | ((logits == floors[:, None]) & (ids <= last_ids[:, None]))


def kept_tokens_definition(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor | None = None
) -> Tensor:
    vocab_size = logits.shape[1]
    is_drawn = (temperature > 0)[:, None]
    heat = torch.where(temperature > 0, temperature, 1.0).double()[:, None]
    order = logits.sort(dim=1, descending=True, stable=True).indices
    ranked = logits.gather(1, order).double()
    weights = ((ranked - ranked[:, :1]) / heat).exp()
    count = torch.where(top_k > 0, top_k, vocab_size)[:, None]
    kept = torch.arange(vocab_size, device=logits.device) < count
    weights = weights.where(kept, 0.0)
    kept &= _before(weights) < top_p.double()[:, None] * weights.sum(dim=1, keepdim=True)
    kept |= (top_p >= 1)[:, None] & (weights > 0)
    kept &= weights >= min_p.double()[:, None]
    kept = torch.zeros_like(kept).scatter(1, order, kept)
    if typical_p is not None:
        kept &= _typical(logits.double().where(kept, -torch.inf) / heat, typical_p.double())
    return kept | ~is_drawn


def _typical(scaled: Tensor, typical_p: Tensor) -> Tensor:
    surprise = -scaled.log_softmax(dim=1)
    shares = (-surprise).exp()
    mean = (shares * surprise).nan_to_num(nan=0.0).sum(dim=1, keepdim=True)  # of a share of 0 the product is 0
    order = (surprise - mean).abs().sort(dim=1, stable=True).indices
    kept = (_before(shares.gather(1, order)) < typical_p[:, None]) | (typical_p >= 1)[:, None]
    return torch.zeros_like(kept).scatter(1, order, kept)


def _before(weights: Tensor) -> Tensor:
    """Of each the sum of those before it."""
    sums = weights.cumsum(dim=1).roll(1, dims=1)
    sums[:, 0] = 0.0
    return sums


def draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """One token for each row: the most likely one at temperature 0, else one drawn from what the filters leave.

    Shapes:
        logits:           [S, V] float32; not changed. A row with NaN or +inf, or -inf alone, gets some id in range
        temperature, top_k, top_p, min_p: as ``kept_tokens`` has them
        seeds, positions: [S] int64
        returns           [S] int64

    Bytes on a GPU: logits read twice; about 35 times with top_k or top_p, 65 times with both.
    """
    columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    _check_columns(logits, **columns, seeds=seeds, positions=positions)
    gpu = triton_for(logits, temperature, top_k, top_p, min_p, seeds, positions)
    if gpu is not None:
        return gpu.draw(logits, temperature, top_k, top_p, min_p, seeds, positions)
    library = native_for(logits)
    if library is None or not logits.is_contiguous():
        return draw_definition(logits, temperature, top_k, top_p, min_p, seeds, positions)
    floors, last_ids = _cut(library, logits, temperature, top_k, top_p, min_p)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    pointers = (tensor.data_ptr() for tensor in (tokens, logits, floors, last_ids, temperature, seeds, positions))
    library.draw(*pointers, *logits.shape, torch.get_num_threads())
    return tokens


def draw_definition(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Filters sort a row, and noise is made for every token: each only for rows that need it."""
    vocab_size = logits.shape[1]
    tokens = logits.argmax(dim=1)
    drawn = (temperature > 0).nonzero()[:, 0]
    heat = temperature[drawn, None]
    scores = (logits[drawn] - logits[drawn].amax(dim=1, keepdim=True)) / heat
    scores += gumbel_noise_definition(seeds[drawn], positions[drawn], torch.arange(vocab_size, device=logits.device)[None])
    has_filter = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0)
    filtered = has_filter[drawn].nonzero()[:, 0]
    if len(filtered):
        rows = drawn[filtered]
        kept = kept_tokens_definition(logits[rows], temperature[rows], top_k[rows], top_p[rows], min_p[rows])
        scores[filtered] = scores[filtered].masked_fill(~kept, -torch.inf)
    tokens[drawn] = scores.argmax(dim=1)
    return tokens


def _cut(
    library: NativeLibrary, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """The last token that each row's filters leave: [S] its logit and [S] its id; -inf where nothing is left out."""
    floors = torch.empty(logits.shape[0], dtype=torch.float32)
    last_ids = torch.empty(logits.shape[0], dtype=torch.int64)
    pointers = (tensor.data_ptr() for tensor in (floors, last_ids, logits, temperature, top_k, top_p, min_p))
    if not library.cut(*pointers, *logits.shape, torch.get_num_threads()):
        raise MemoryError(f"no memory to rank {logits.shape[1]} tokens")
    return floors, last_ids


_COLUMN_TYPES = {
    "temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64,
    "seeds": torch.int64, "positions": torch.int64,
}  # fmt: skip


def _check_columns(logits: Tensor, **columns: Tensor) -> None:
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, got {logits.dtype}")
    for name, column in columns.items():
        if column.shape != logits.shape[:1] or not column.is_contiguous():
            raise ValueError(f"{name} of shape {tuple(column.shape)} for {logits.shape[0]} rows")
        if column.dtype != _COLUMN_TYPES[name]:
            raise TypeError(f"{name} must be {_COLUMN_TYPES[name]}, got {column.dtype}")
