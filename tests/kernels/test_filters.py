"""Do filters leave what they are defined to leave? Against the definitions in numpy and float64, one row at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.sampling import kept_tokens
from tests.native import INSTRUCTION_SETS, use_instruction_set
from tests.sampling_reference import Array, filtered, softmax
from worker.sampler import Filters, processed_logits


@pytest.fixture(autouse=True, params=["torch", *INSTRUCTION_SETS])
def compute(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_instruction_set(request.param, monkeypatch)


def filters(rules: Sequence[dict[str, Any]]) -> Filters:
    def column(name: str, off: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([rule.get(name, off) for rule in rules], dtype=dtype)

    return Filters(
        temperature=column("temperature", 1.0, torch.float32), top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float64), min_p=column("min_p", 0.0, torch.float64),
        typical_p=column("typical_p", 1.0, torch.float64) if any("typical_p" in rule for rule in rules) else None,
    )  # fmt: skip


def check(logits: Array, **rule: Any) -> None:
    row = torch.from_numpy(logits.astype(np.float32))[None]
    rule["temperature"] = float(np.float32(rule.get("temperature", 1.0)))
    expected = filtered(row[0].double().numpy(), **rule)
    chosen = filters([rule])
    kept = kept_tokens(row, chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p, chosen.typical_p)[0]
    is_possible = softmax(row[0].double().numpy(), rule["temperature"]) > 1e-300  # others weigh nothing in float64
    assert np.array_equal(kept.numpy() & is_possible, expected > 1e-300)
    shares = processed_logits(row, chosen).softmax(dim=1)[0].double().numpy()
    assert np.abs(shares - expected).max() < 1e-6


SHARES = st.floats(1e-6, 1 - 1e-9)
"""Nearer to 1, the order of a sum decides."""

RULES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0.01, 10), "top_k": st.integers(1, 400), "top_p": SHARES,
    "min_p": st.floats(1e-6, 1.0), "typical_p": SHARES,
}  # fmt: skip
ROWS = st.tuples(st.integers(0, 1 << 32), st.integers(2, 300), st.sampled_from([0.05, 1.0, 4.0, 30.0]))
FAST = settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


def random_row(seed: int, width: int, scale: float) -> Array:
    return np.asarray(np.random.default_rng(seed).standard_normal(width) * scale)


@pytest.mark.parametrize("name", RULES)
def test_each_parameter(name: str) -> None:
    @FAST
    @given(ROWS, RULES[name])
    def holds(row: tuple[int, int, float], value: Any) -> None:
        check(random_row(*row), **{name: value})

    holds()


@FAST
@given(ROWS, st.fixed_dictionaries({}, optional=RULES))
@example((1, 300, 4.0), {"top_k": 1, "top_p": 0.8, "temperature": 0.01, "min_p": 1.0, "typical_p": 0.5})
def test_s8_every_mix(row: tuple[int, int, float], rule: dict[str, Any]) -> None:
    check(random_row(*row), **rule)


@FAST
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=120), st.fixed_dictionaries({}, optional={**RULES, "top_k": st.integers(1, 90)}))
def test_s7_many_ties(values: list[int], rule: dict[str, Any]) -> None:
    """Equal logits at every edge: lower ids stay."""
    check(np.asarray(values, np.float64), **rule)


@pytest.mark.parametrize("p", [i / 10 for i in range(1, 10)])
def test_equal_tokens_are_counted_exactly(p: float) -> None:
    """Ten equal tokens: the p-th part of them is left, without a rounding error's extra one."""
    chosen = filters([{"top_p": p}])
    kept = kept_tokens(torch.full((1, 10), 3.0), chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p)
    assert kept[0].tolist() == [i < round(10 * p) for i in range(10)]


@pytest.mark.parametrize("width", [5000, 49152])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 20.0])
def test_large_vocabularies(width: int, scale: float) -> None:
    """Where tokens are looked at by parts and by their largest ones only."""
    logits = random_row(9, width, scale)
    if scale == 20.0:
        logits[::3] = -np.inf
    for rule in (
        {"top_k": 1}, {"top_k": 40}, {"top_k": 3000}, {"top_k": width}, {"top_p": 0.1}, {"top_p": 0.9}, {"top_p": 0.9999999},
        {"min_p": 0.02}, {"temperature": 0.3, "top_k": 500, "top_p": 0.95, "min_p": 0.01},
    ):  # fmt: skip
        check(logits, **rule)


def test_far_apart_logits() -> None:
    """All but one share a part of the range of keys."""
    logits = np.full(5000, 1e-3) * np.arange(5000)
    logits[77], logits[78] = 3e38, -3e38
    for rule in ({"top_k": 3}, {"top_k": 4999}, {"top_p": 0.5}, {"temperature": 100.0, "top_k": 7, "top_p": 0.99}):
        check(logits, **rule)


def test_rows_do_not_depend_on_each_other() -> None:
    rules = [{"top_k": 5}, {}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0, "top_k": 2}, {"typical_p": 0.3}]
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(1)) * 3
    together = kept_tokens(logits, *columns_of(filters(rules)))
    for row, rule in enumerate(rules):
        alone = kept_tokens(logits[row : row + 1], *columns_of(filters([rule])))
        assert torch.equal(together[row], alone[0])
    assert together[1].all() and together[4].all()


def columns_of(chosen: Filters) -> tuple[Any, ...]:
    return chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p, chosen.typical_p
