"""Do draws, penalties, token masks and step inputs come out the same in plain torch, in Triton and in plain Python?"""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.penalties import apply_penalties
from kernels.sampling import draw, draw_definition, gumbel_noise, gumbel_noise_definition, most_likely
from kernels.step_inputs import step_inputs
from kernels.token_mask import apply_token_mask
from tests.interpreter import DEVICE, use_interpreter
from tests.native import INSTRUCTION_SETS, use_instruction_set

HIGHEST = (1 << 63) - 1


@pytest.fixture(autouse=True, params=["torch", *INSTRUCTION_SETS, "triton"])
def compute(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "triton":
        use_interpreter(monkeypatch)
    else:
        use_instruction_set(request.param, monkeypatch)


def there(values: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).to(DEVICE)


# ------------------------------------------------------------------------------------------------ noise and draws


def test_noise() -> None:
    """Of equal integers; the two logarithms may round differently in the last place."""
    seeds = there([0, 1, -5, HIGHEST, -HIGHEST - 1, 77])
    positions = there([0, 1, 2, (1 << 32) - 1, 1000, 5])
    for ids in (torch.arange(3000)[None], torch.randint(0, 1 << 31, (6, 70)), torch.arange(9)[None, ::2]):
        out = gumbel_noise(seeds, positions, there(ids))
        expected = gumbel_noise_definition(seeds, positions, there(ids))
        assert (out - expected).abs().max() <= 2e-6
    assert gumbel_noise(seeds[:0], positions[:0], there([[1]])).shape == (0, 1)


def test_noise_at_its_ends() -> None:
    """Where the uniform number is smallest and largest among many, and its logarithm is most easily wrong."""
    seeds, positions = there([11]), there([3])
    expected = gumbel_noise_definition(seeds, positions, there(torch.arange(1 << 20)[None]))[0]
    ends = torch.cat((expected.topk(64).indices, (-expected).topk(64).indices))[None]
    assert expected.max() > 12 and expected.min() < -2.4
    assert (gumbel_noise(seeds, positions, ends)[0] - expected[ends[0]]).abs().max() <= 2e-6


def columns(
    temperature: list[float], top_k: list[int], top_p: list[float], trial: int = 0, min_p: list[float] | None = None
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(trial)
    return {
        "temperature": there(temperature, torch.float32), "top_k": there(top_k), "top_p": there(top_p, torch.float64),
        "min_p": there(min_p or [0.0] * len(top_k), torch.float64),
        "seeds": there(torch.randint(0, HIGHEST, (len(top_k),), generator=generator)),
        "positions": there(torch.randint(0, 1 << 20, (len(top_k),), generator=generator)),
    }  # fmt: skip


def test_draws_are_those_of_the_definition() -> None:
    """Every mix of filters, over logits with many ties."""
    for trial in range(2):
        rules = columns(
            [0, 1, 0.7, 1.3, 0.5, 2, 1, 1, 1, 3], [0, 0, 5, 0, 40, 700, 1, 900, 0, 99], [1, 1, 1, 0.9, 0.5, 0.3, 1, 1e-6, 1, 0.9], trial,
            [0, 0, 0, 0, 0, 0, 0, 0, 0.05, 0.8],
        )
        logits = there(torch.randn(10, 800).round(decimals=1) * 2)
        before = logits.clone()
        assert draw(logits, **rules).tolist() == draw_definition(logits, **rules).tolist()
        assert torch.equal(logits, before)


@pytest.mark.parametrize(("top_k", "top_p", "kept"), [(3, 1.0, {1, 4, 5}), (0, 0.5, {1, 4, 5}), (5, 0.3, {1, 4}), (1, 1.0, {1})])
def test_filters_keep_lower_ids_of_ties(top_k: int, top_p: float, kept: set[int]) -> None:
    """Six tokens of equal weight beside four of hardly any. The interpreter is slow: the definition tells what many rows draw."""
    logits = there([[-100.0, 2, -100, -100, 2, 2, 2, 2, 2, -100]]).expand(20, -1)
    rules = columns([1.0] * 20, [top_k] * 20, [top_p] * 20)
    expected = draw_definition(logits, **rules).tolist()
    assert set(expected) == kept
    assert draw(logits[:6], **{name: column[:6] for name, column in rules.items()}).tolist() == expected[:6]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
def test_extreme_logits_and_temperatures() -> None:
    logits = there([[0.0, -torch.inf, 3e38, -3e38], [-torch.inf, -torch.inf, 1, -torch.inf], [-0.0, 0, -1, -2], [5, 5, 5, 5]])
    assert draw(logits, **columns([1e-30, 2, 1, 1], [0, 0, 1, 1], [1, 0.5, 1, 1])).tolist() == [2, 2, 0, 0]
    assert draw(logits, **columns([0] * 4, [2] * 4, [0.1] * 4)).tolist() == most_likely(logits).tolist() == [2, 2, 0, 0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
def test_broken_rows_get_some_token_and_harm_nobody() -> None:
    logits = there(torch.randn(6, 50))
    rules = columns([1, 1, 1, 0, 1, 0.5], [0, 5, 0, 0, 0, 3], [1, 1, 0.5, 1, 0.9, 1])
    expected = draw(logits, **rules)
    logits[1], logits[2], logits[3], logits[4, 7] = torch.nan, -torch.inf, torch.nan, torch.inf
    tokens = draw(logits, **rules)
    assert (tokens >= 0).all() and (tokens < 50).all()
    assert tokens[[0, 5]].tolist() == expected[[0, 5]].tolist()


def test_draw_checks_its_arguments() -> None:
    rules = columns([1], [0], [1])
    with pytest.raises(TypeError, match="float32"):
        draw(there(torch.ones(1, 4)).bfloat16(), **rules)
    with pytest.raises(ValueError, match="top_p"):
        draw(there(torch.ones(1, 4)), **{**rules, "top_p": there([1.0, 1.0], torch.float64)})


# ------------------------------------------------------------------------------------------------ penalties and masks


@pytest.mark.parametrize("vocab_size", [7, 32, 1100])
def test_penalties(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, vocab_size, generator=generator)
    logits[0, 3] = -torch.inf
    counts = torch.randint(0, 3, (6, vocab_size), generator=generator, dtype=torch.int32)
    words = torch.randint(-(1 << 31), 1 << 31, (6, -(-vocab_size // 32)), generator=generator).int()
    rows = torch.tensor([5, 0, 3, 2])
    repetition, presence, frequency = torch.tensor([[1.5, 1, 1, 0.5], [0, 0.25, 0, -1], [0, 0.5, 0, 1]])
    expected = logits.clone()
    for s, row in enumerate(rows.tolist()):
        for token in range(vocab_size):
            times = int(counts[row, token])
            is_known = times > 0 or int(words[row, token // 32]) >> token % 32 & 1
            value, r = float(logits[s, token]), float(repetition[s])
            if is_known:
                value = value / r if value > 0 else value * r
            expected[s, token] = value - times * float(frequency[s]) - (times > 0) * float(presence[s])
    out = there(logits.clone())
    apply_penalties(out, there(rows), there(words), there(counts), there(repetition), there(presence), there(frequency))
    assert torch.allclose(out.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(out[2].cpu(), logits[2])


def test_penalties_that_are_off_keep_even_nan() -> None:
    logits = there([[torch.nan, torch.inf, -torch.inf, 1.0]])
    off = [there([x]) for x in (1.0, 0.0, 0.0)]
    apply_penalties(logits, there([0]), there([[15]], torch.int32), there([[1, 1, 1, 1]], torch.int32), *off)
    assert logits.isnan().tolist() == [[True, False, False, False]] and logits[0, 1:].tolist() == [torch.inf, -torch.inf, 1]


def test_penalties_check_their_arguments() -> None:
    logits, rows, one = there(torch.ones(2, 40)), there([0, 1]), there([1.0, 1.0])
    words, counts = there(torch.zeros(2, 2)).int(), there(torch.zeros(2, 40)).int()
    for wrong in ((logits, rows, words[:, :1], counts, one, one, one), (logits, rows, words, counts[:, 1:], one, one, one),
                  (logits, rows, words, counts, one[:1], one, one)):  # fmt: skip
        with pytest.raises(ValueError, match="counts|repetition"):
            apply_penalties(*wrong)
    with pytest.raises(TypeError, match="int64"):
        apply_penalties(logits, rows, words, counts.long(), one, one, one)


@pytest.mark.parametrize("vocab_size", [5, 64, 1033])
def test_token_mask(vocab_size: int) -> None:
    logits = there(torch.randn(4, vocab_size))
    before = logits.clone()
    words = torch.randint(-(1 << 31), 1 << 31, (2, -(-vocab_size // 32))).int()
    apply_token_mask(logits, there(words), there([3, 1]))
    for mask, row in ((0, 3), (1, 1)):
        allowed = [bool(int(words[mask, token // 32]) >> token % 32 & 1) for token in range(vocab_size)]
        assert torch.equal(logits[row].cpu(), before[row].cpu().masked_fill(~torch.tensor(allowed), -torch.inf))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    apply_token_mask(logits, there(words[:0]), there([], torch.int64))
    with pytest.raises(ValueError, match="masks"):
        apply_token_mask(logits, there(words), there([3]))


# ------------------------------------------------------------------------------------------------ step inputs


@pytest.mark.parametrize("padding", [0, 3, 300])
@pytest.mark.parametrize(
    "sizes", [[(0, 1)], [(15, 1), (16, 1), (0, 15), (3, 14)], [(40, 1), (0, 300), (250, 7)]], ids=["one", "edges", "long"]
)
def test_step_inputs(sizes: list[tuple[int, int]], padding: int) -> None:
    block_size, num_rows = 16, 7
    draw_from = torch.Generator().manual_seed(3)
    rows = torch.randperm(num_rows, generator=draw_from)[: len(sizes)]
    token_ids = torch.randint(0, 1000, (num_rows, 400), generator=draw_from).int()
    tables = torch.randperm(num_rows * 25, generator=draw_from).view(num_rows, 25).int()
    expected: list[tuple[int, int, int]] = []
    for row, (computed, num_queries) in zip(rows.tolist(), sizes, strict=True):
        for position in range(computed, computed + num_queries):
            slot = int(tables[row, position // block_size]) * block_size + position % block_size
            expected.append((int(token_ids[row, position]), position, slot))
    expected += [(0, 0, -1)] * padding
    starts = torch.tensor([0, *(n for _, n in sizes)]).cumsum(0).int()
    computed = torch.tensor([c for c, _ in sizes]).int()
    *flat, seq_lens = step_inputs(
        there(rows), there(starts), there(computed), there(token_ids), there(tables), block_size, len(expected)
    )
    assert list(zip(*(x.tolist() for x in flat), strict=True)) == expected
    assert seq_lens.tolist() == [c + n for c, n in sizes] and seq_lens.dtype == torch.int32
    with pytest.raises(ValueError, match="starts"):
        step_inputs(there(rows), there(starts[1:]), there(computed), there(token_ids), there(tables), block_size, 1)
