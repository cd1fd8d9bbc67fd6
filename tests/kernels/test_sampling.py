"""Is the noise Gumbel, keyed by seed, position and token alone, and are ties settled?"""

import math

import numpy as np
import pytest
import torch

from kernels.sampling import gumbel_noise, top_tokens

EULER = 0.5772156649


def noise(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), ids[None])[0]


def test_moments_and_tails() -> None:
    values = gumbel_noise(torch.arange(40), torch.arange(40) * 3, torch.arange(49152)[None]).double()
    assert torch.isfinite(values).all()
    assert values.mean().item() == pytest.approx(EULER, abs=0.004)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=0.01)
    for quantile in (1e-4, 0.01, 0.25, 0.5, 0.75, 0.99, 0.9999):
        limit = -math.log(-math.log(quantile))
        share = (values < limit).double().mean().item()
        assert share == pytest.approx(quantile, abs=4.5 * math.sqrt(quantile * (1 - quantile) / values.numel()))


def test_a_tokens_noise_is_its_own() -> None:
    everything = noise(5, 9, torch.arange(50_000))
    some = torch.tensor([49_999, 3, 77, 3, 12_345])
    assert torch.equal(noise(5, 9, some), everything[some])
    rows = gumbel_noise(torch.tensor([1, 5]), torch.tensor([2, 9]), torch.stack((some, some)))
    assert torch.equal(rows[1], everything[some])


def test_keys_are_unrelated() -> None:
    """Neighbouring seeds, positions and tokens, and seeds and positions that have the same sum."""
    ids = torch.arange(20_000)
    base = noise(100, 100, ids)
    for other in (noise(101, 100, ids), noise(100, 101, ids), noise(101, 99, ids), noise(100, 100, ids + 20_000)):
        assert abs(np.corrcoef(base.numpy(), other.numpy())[0, 1]) < 0.03
        assert torch.isin(base, other).sum() < 100, "one is a permutation of the other"
    for other in (noise(100, 100, ids + 1), noise(100, 100, ids ^ 64)):
        assert abs(np.corrcoef(base.numpy(), other.numpy())[0, 1]) < 0.03


def test_as_the_hash_in_plain_integers() -> None:
    """The definition once more with Python's integers: what another implementation has to reproduce."""

    def mix64(x: int) -> int:
        mask = (1 << 64) - 1
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    for seed, position, token in (
        (0, 0, 0),
        (1, 2, 3),
        ((1 << 63) - 1, (1 << 32) - 1, (1 << 31) - 1),
        (1 << 40, 8191, 49151),
    ):
        key = mix64((mix64(seed) + position) & ((1 << 64) - 1))
        bits = token ^ (key & 0xFFFFFFFF)
        bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        bits = bits ^ (bits >> 15) ^ (key >> 32)
        bits = (bits * 0x846CA68B) & 0xFFFFFFFF
        bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        bits = bits ^ (bits >> 15)
        uniform = min(((bits & 0x7FFFFFFF) + 0.5) * 2.0**-31, 1 - 2.0**-24)
        expected = -math.log(-math.log1p(-uniform))
        assert noise(seed, position, torch.tensor([token])).item() == pytest.approx(expected, abs=2e-6, rel=2e-6)


def test_noise_checks_its_arguments() -> None:
    with pytest.raises(TypeError, match="int64"):
        gumbel_noise(torch.zeros(1), torch.zeros(1), torch.zeros(1, 1))
    with pytest.raises(ValueError, match="shapes"):
        gumbel_noise(torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1))


def test_top_tokens_settles_ties_by_id() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randint(-3, 4, (4, 200), generator=draw).float()
        logits[0, :5] = torch.tensor([-0.0, 0.0, -torch.inf, torch.inf, -1e-40])
        values, ids = top_tokens(logits, 150)
        for row in range(4):
            expected = sorted(range(200), key=lambda i: (-logits[row, i].item(), i))[:150]
            assert ids[row].tolist() == expected
            assert torch.equal(values[row], logits[row, expected])


def test_top_tokens_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match="11 of 10"):
        top_tokens(torch.zeros(1, 10), 11)
    with pytest.raises(TypeError, match="float32"):
        top_tokens(torch.zeros(1, 10).double(), 1)
