"""Is a draw exact, and a function of logits, seed and position alone?"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels import sampling
from tests.native import INSTRUCTION_SETS, use_instruction_set
from tests.sampling_reference import filtered
from tests.worker.draws import assert_fair
from worker.sampler import Filters, SamplingBatch, gather_logprobs, nan_rows, sample


@pytest.fixture(autouse=True, params=[*INSTRUCTION_SETS[:1], "torch"])
def compute(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With native code and without; tests/kernels looks at each instruction set."""
    use_instruction_set(request.param, monkeypatch)


CHI_SQUARE_999 = {3: 16.3, 5: 20.5, 9: 27.9, 19: 43.8, 49: 85.4}
"""Degrees of freedom to the value that one in a thousand fair tables exceeds."""


def batch_of(
    num_rows: int,
    *,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    typical_p: float | Sequence[float] = 1.0,
    seed: int | Sequence[int] | Tensor = 0,
    position: int | Sequence[int] | Tensor = 0,
) -> SamplingBatch:
    def column(value: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(num_rows).contiguous()

    heat, typical = column(temperature, torch.float32), column(typical_p, torch.float64)
    rows = (typical < 1).nonzero()[:, 0]
    filters = Filters(
        temperature=heat, top_k=column(top_k, torch.int64), top_p=column(top_p, torch.float64),
        min_p=column(min_p, torch.float64), typical_p=typical if len(rows) else None,
    )  # fmt: skip
    return SamplingBatch(
        filters=filters,
        seed=column(seed, torch.int64),
        position=column(position, torch.int64),
        is_greedy=not heat.any(),
        typical_rows=rows if len(rows) else None,
    )


def allowed_tokens(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities after the filters, in float64, one row: the definition, written without regard for speed."""
    ranked = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    kept = ranked[:top_k] if top_k else ranked
    weights = ((logits.double() - logits.double().max()) / temperature).exp()
    total = float(weights[kept].sum())
    chosen, mass = [], 0.0
    for token in kept:
        chosen.append(token)
        mass += float(weights[token]) / total
        if mass >= float(torch.tensor(top_p)):
            break
    result = torch.zeros(len(logits), dtype=torch.float64)
    result[chosen] = weights[chosen] / weights[chosen].sum()
    return result


def assert_drawn_from(tokens: Tensor, expected: Tensor) -> None:
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0, "a token was drawn that the filters exclude"
    wanted = expected * len(tokens)
    common = wanted >= 10
    counts, wanted = (torch.cat((x[common], x[~common].sum()[None])) for x in (counts, wanted))
    if wanted[-1] < 10:  # the rare ones are too rare even together
        counts, wanted = counts[:-1], wanted[:-1]
    assert len(wanted) > 1, "the test is too small to see anything"
    chi_square = ((counts - wanted) ** 2 / wanted).sum().item()
    degrees = len(wanted) - 1
    limit = CHI_SQUARE_999.get(degrees, degrees + 3.1 * (2 * degrees) ** 0.5 + 5)
    assert chi_square < limit, f"chi-square {chi_square:.1f} with {degrees} degrees of freedom"


def draws(logits: Tensor, count: int, **params: object) -> Tensor:
    """Many draws from the same logits: half with different seeds, half with different positions."""
    half = count // 2
    seed = torch.cat((torch.arange(half) * 7 + 1, torch.full((count - half,), 12345)))
    position = torch.cat((torch.full((half,), 9), torch.arange(count - half)))
    most = max(1, (1 << 22) // len(logits))
    return torch.cat([
        sample(logits.expand(len(seeds), -1).contiguous(), batch_of(len(seeds), seed=seeds, position=positions, **params))  # type: ignore[arg-type]
        for seeds, positions in zip(seed.split(most), position.split(most), strict=True)
    ])


@pytest.mark.parametrize(
    "params",
    [
        {}, {"temperature": 0.6}, {"temperature": 2.5}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.7},
        {"temperature": 1.3, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9},
    ],
    ids=str,
)  # fmt: skip
def test_a_hundred_thousand_draws(params: dict[str, float]) -> None:
    """Shares are those of the definition in float64."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(12)) * 1.5
    shares = filtered(logits.double().numpy(), **{"temperature": 1.0} | params)  # type: ignore[arg-type]
    assert_fair(draws(logits, 100_000, **params), shares)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 0, 1.0),
        (1.0, 4, 1.0),
        (1.0, 0, 0.8),
        (1.3, 10, 0.9),
        (0.8, 1, 1.0),
        (1.0, 50, 1.0),
    ],
)
def test_distribution(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(1)) * 1.2
    expected = allowed_tokens(logits, temperature, top_k, top_p)
    tokens = draws(logits, 20_000, temperature=temperature, top_k=top_k, top_p=top_p)
    if (expected > 0).sum() == 1:
        assert (tokens == expected.argmax()).all()
        return
    assert_drawn_from(tokens, expected)


def test_distribution_over_a_large_vocabulary() -> None:
    """Uniform over 49152 tokens: by residue and by range, as a weak hash would show in either."""
    tokens = draws(torch.zeros(49152), 2000)
    uniform = torch.full((20,), 1 / 20, dtype=torch.float64)
    assert_drawn_from(tokens * 20 // 49152, uniform)
    assert_drawn_from(tokens % 4, uniform[:4] * 5)
    assert_drawn_from((tokens ^ (tokens >> 3)) % 4, uniform[:4] * 5)
    assert len(tokens.unique()) > 1900, "too many repeat themselves"


def test_consecutive_positions_are_independent() -> None:
    logits = torch.zeros(4)
    for key in ("position", "seed"):
        column = torch.arange(20_001)
        tokens = sample(logits.expand(20_001, -1), batch_of(20_001, **{key: column}))  # type: ignore[arg-type]
        pairs = tokens[:-1] * 4 + tokens[1:]
        assert_drawn_from(pairs, torch.full((16,), 1 / 16, dtype=torch.float64))


def test_every_bit_of_seed_and_position_counts() -> None:
    logits = torch.zeros(1000)
    seeds = torch.tensor([0] + [1 << bit for bit in range(63)])
    by_seed = sample(logits.expand(64, -1), batch_of(64, seed=seeds))
    by_position = sample(logits.expand(25, -1), batch_of(25, position=torch.tensor([0] + [1 << b for b in range(24)])))
    assert len(by_seed.unique()) > 55
    assert len(by_position.unique()) > 21


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 40, 1.0), (1.0, 0, 0.9), (1.0, 300, 0.95)]
)
def test_rows_do_not_depend_on_their_batch(temperature: float, top_k: int, top_p: float) -> None:
    """Alone, in a batch of the same kind, and in a batch of all kinds, the same token comes out."""
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(40, 5000, generator=draw) * 3
    seed, position = torch.arange(40) * 31, torch.arange(40) % 7
    same = sample(logits, batch_of(40, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, position=position))
    mixed_temperature = [temperature if i % 2 else (0.0, 1.0, 0.9)[i % 3] for i in range(40)]
    mixed_k = [top_k if i % 2 else (0, 7, 4000)[i % 3] for i in range(40)]
    mixed_p = [top_p if i % 2 else (1.0, 0.3, 0.99)[i % 3] for i in range(40)]
    mixed = sample(
        logits,
        batch_of(40, temperature=mixed_temperature, top_k=mixed_k, top_p=mixed_p, seed=seed, position=position),
    )
    for row in range(1, 40, 2):
        alone = sample(
            logits[row : row + 1],
            batch_of(
                1,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=[int(seed[row])],
                position=[int(position[row])],
            ),
        )
        assert same[row] == mixed[row] == alone[0]


def test_filters_do_not_change_the_draw_among_what_they_keep() -> None:
    """A filter that keeps everything draws what no filter draws: the noise belongs to the token."""
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(3)) * 4
    free = sample(logits, batch_of(64, seed=torch.arange(64)))
    assert torch.equal(sample(logits, batch_of(64, seed=torch.arange(64), top_k=299, top_p=0.999999)), free)


def test_same_draws_forever() -> None:
    """Golden: seeds that users wrote down must go on giving their tokens."""
    logits = torch.linspace(-3, 3, 1000).sin().expand(8, -1) * 5
    batch = batch_of(8, seed=torch.tensor([0, 1, 2, 3, 1 << 40, (1 << 63) - 1, 77, 77]), position=torch.arange(8))
    assert sample(logits, batch).tolist() == [793, 749, 856, 665, 798, 676, 857, 839]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_top_k_is_exact_with_ties_at_the_edge(count: int) -> None:
    """Equal logits at the edge: the lower ids stay, exactly k of them."""
    logits = torch.tensor([1.0, 3.0, 1.0, 3.0, 1.0, 1.0, 2.0, 1.0])
    expected = allowed_tokens(logits, 1.0, count, 1.0)
    assert (expected > 0).sum() == count
    assert_drawn_from(draws(logits, 4000, top_k=count), expected) if count > 1 else None
    assert set(draws(logits, 4000, top_k=count).tolist()) == set(expected.nonzero()[:, 0].tolist())


def test_top_k_is_exact_whatever_the_rounding() -> None:
    """The k shares add up to 1 or a little less; that must not let another token in."""
    logits = torch.randn(4000, 60, generator=torch.Generator().manual_seed(8)) * 0.1
    tokens = sample(logits, batch_of(4000, top_k=30, seed=torch.arange(4000)))
    ranks = (logits > logits.gather(1, tokens[:, None])).sum(1)
    assert ranks.max() == 29


@pytest.mark.parametrize("top_p", [0.05, 0.25, 0.26, 0.5, 0.51, 0.75, 0.99, 1.0])
def test_top_p_with_ties(top_p: float) -> None:
    """Four equal tokens: the smallest set that reaches p, lower ids first."""
    kept = set(draws(torch.zeros(4), 2000, top_p=top_p).tolist())
    assert kept == set(range(-int(-top_p * 4 // 1)))


def test_top_p_counts_from_what_top_k_left() -> None:
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    assert set(draws(logits, 2000, top_p=0.7).tolist()) == {0, 1}
    assert set(draws(logits, 2000, top_k=2, top_p=0.7).tolist()) == {0}
    assert set(draws(logits, 2000, top_k=2, top_p=0.72).tolist()) == {0, 1}


@pytest.mark.parametrize("scale", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_nuclei_of_any_size(scale: float, top_p: float) -> None:
    """Flat rows need thousands of candidates: the kept set has the defined size, give or take rounding."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(4)) * scale
    expected = allowed_tokens(logits, 1.0, 0, top_p)
    tokens = draws(logits, 300, top_p=top_p)
    assert (expected[tokens] > 0).all()
    if (expected > 0).sum() > 10:
        assert (expected[tokens] < expected[expected > 0].mean()).any(), "the tail of the nucleus is never drawn"


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    for vocab_size in (2, 17, 1000, 49152):
        logits = torch.zeros(3, vocab_size)
        logits[1, vocab_size // 2 :] = 1.0
        logits[2, -1] = 1.0
        expected = [0, vocab_size // 2, vocab_size - 1]
        assert sample(logits, batch_of(3, temperature=0.0)).tolist() == expected
        assert sample(logits, batch_of(3, temperature=1.0, top_k=1)).tolist() == expected


def test_extreme_values() -> None:
    logits = torch.tensor([[-1e30, 5.0, 4.0, -torch.inf], [3e38, -3e38, 0.0, 1.0]])
    for params in ({}, {"top_k": 2}, {"top_p": 0.5}):
        for temperature in (1e-45, 1e-30, 1e-3):
            assert sample(logits, batch_of(2, temperature=temperature, **params)).tolist() == [1, 0]  # type: ignore[arg-type]
    hot = sample(
        torch.tensor([[-torch.inf, 0.0, 1.0]]).expand(500, -1), batch_of(500, temperature=100.0, seed=torch.arange(500))
    )
    assert set(hot.tolist()) == {1, 2}


def test_inputs_stay() -> None:
    logits = torch.randn(6, 100)
    before = logits.clone()
    batch = batch_of(6, temperature=[0, 1, 1, 1, 1, 0], top_k=[0, 0, 5, 0, 5, 0], top_p=[1, 1, 1, 0.5, 0.5, 1])
    sample(logits, batch)
    gather_logprobs(logits, torch.zeros(6, dtype=torch.int64), 3)
    nan_rows(logits)
    assert torch.equal(logits, before)


def test_work_that_no_row_needs_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> Tensor:
        raise AssertionError("not needed")

    use_instruction_set("torch", monkeypatch)
    monkeypatch.setattr(sampling, "kept_tokens_definition", forbidden)
    monkeypatch.setattr(sampling, "top_tokens_definition", forbidden)
    sample(torch.randn(3, 50), batch_of(3, temperature=[0.0, 1.0, 0.5]))
    sample(torch.randn(3, 50), batch_of(3, temperature=[0.0, 1.0, 0.5], top_k=[5, 0, 60], top_p=[0.5, 1.0, 1.0]))
    gather_logprobs(torch.randn(3, 50), torch.zeros(3, dtype=torch.int64), 0)
    monkeypatch.setattr(sampling, "gumbel_noise_definition", forbidden)
    sample(torch.randn(3, 50), batch_of(3, temperature=0.0, top_k=5, top_p=0.5))


def test_rows_with_nan_are_told_and_harm_nobody() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(5))
    logits[1, 200] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    assert nan_rows(logits).tolist() == [False, True, True, True, False]
    for params in ({"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}):
        batch = batch_of(5, seed=torch.arange(5), **params)  # type: ignore[arg-type]
        tokens = sample(logits, batch)
        assert ((tokens >= 0) & (tokens < 300)).all()
        clean = sample(logits.nan_to_num(0.0, 0.0, 0.0), batch)
        assert tokens[[0, 4]].tolist() == clean[[0, 4]].tolist()


def test_no_rows() -> None:
    assert sample(torch.empty(0, 10), batch_of(0)).shape == (0,)
    assert nan_rows(torch.empty(0, 10)).shape == (0,)
    ids, logprobs, ranks = gather_logprobs(torch.empty(0, 10), torch.empty(0, dtype=torch.int64), 4)
    assert (ids.shape, logprobs.shape, ranks.shape) == ((0, 5), (0, 5), (0,))


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs(num_top: int) -> None:
    logits = torch.randn(70, 5000, generator=torch.Generator().manual_seed(6)) * 5
    tokens = torch.randint(0, 5000, (70,), generator=torch.Generator().manual_seed(7))
    tokens[3] = logits[3].argmax()
    ids, logprobs, ranks = gather_logprobs(logits, tokens, num_top)
    exact = logits.double().log_softmax(1)
    assert (ids.dtype, logprobs.dtype, ranks.dtype) == (torch.int32, torch.float32, torch.int32)
    assert ids.shape == logprobs.shape == (70, 1 + num_top)
    assert torch.equal(ids[:, 0].long(), tokens)
    assert torch.equal(ids[:, 1:].long(), exact.topk(num_top).indices)
    assert (logprobs - exact.gather(1, ids.long())).abs().max() < 1e-5
    assert torch.equal(ranks.long(), (exact >= exact.gather(1, tokens[:, None])).sum(1))
    assert ranks[3] == 1


def test_logprobs_of_ties_and_of_a_tiny_vocabulary() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, -0.0, 0.0]])
    ids, logprobs, ranks = gather_logprobs(logits, torch.tensor([2]), 5)
    assert ids.tolist() == [[2, 1, 2, 0, 3, 4]]
    assert ranks.tolist() == [2]
    assert logprobs[0, 0] == logprobs[0, 1]
