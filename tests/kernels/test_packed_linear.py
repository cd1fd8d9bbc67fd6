"""Does a packed product give the exact one's numbers, rounded once, for any shape, rows, threads and instruction set?"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.packed_linear import pack_linear, pack_linear_definition, packed_linear, packed_size
from tests.native import INSTRUCTION_SETS, use_instruction_set

BF16 = torch.bfloat16
SHAPES = [(64, 64), (192, 576), (100, 37), (1, 1), (33, 2), (129, 130), (65, 577), (7, 48), (256, 15), (3, 1000)]
"""Outputs and inputs: whole panels and cut ones, inputs that fill vectors, pairs, and neither."""

ROWS = [*range(8), 11, 12, 13, 16, 18, 19, 24, 25, 31, 33, 48, 63, 64, 65, 70, 127, 129, 191, 192, 193, 512]
WAYS = [*INSTRUCTION_SETS, "torch"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_instruction_set(request.param, monkeypatch)
    return request.param


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def pack(weight: Tensor) -> Tensor:
    packed = torch.full((packed_size(*weight.shape),), float("nan"), dtype=BF16)
    pack_linear(packed, weight)
    return packed


def assert_exact(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Sums in float32 are 1e-6 of the largest from the exact ones; bfloat16 adds half a unit of its 8 bits to each."""
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert actual.shape == exact.shape
    if not exact.numel():
        return
    rtol = 0.0 if actual.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(actual.double(), exact, rtol=rtol, atol=2e-6 * exact.abs().max().item())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_as_the_definition(way: str, shape: tuple[int, int]) -> None:
    for weight in (draw(*shape), draw(shape[1], shape[0]).T, draw(2 * shape[0], shape[1])[::2]):
        expected = torch.empty(packed_size(*shape), dtype=BF16)
        pack_linear_definition(expected, weight)
        assert torch.equal(pack(weight), expected)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_the_exact_product(way: str, shape: tuple[int, int], num_threads: int) -> None:
    weight, bias = draw(*shape), draw(shape[0], seed=2) * 10
    packed, rows = pack(weight), draw(max(ROWS), shape[1], seed=1)
    with threads(num_threads):
        for num_rows in ROWS[:: 3 * num_threads - 2]:
            x = rows[:num_rows]
            for added in (None, bias):
                for dtype in (BF16, torch.float32):
                    y = packed_linear(x, packed, shape[0], added, dtype)
                    assert y.dtype == dtype
                    assert_exact(y, x, weight, added)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("shape", [(192, 576), (65, 577)], ids=str)
def test_neither_other_rows_nor_threads_change_a_bit(
    instruction_set: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_instruction_set(instruction_set, monkeypatch)
    packed, rows = pack(draw(*shape)), draw(300, shape[1], seed=1)
    whole = packed_linear(rows, packed, shape[0], dtype=torch.float32)
    for count in (1, 2, 3, 4, 5, 6, 7, 20, 64, 193):
        for num_threads in (1, 2, 3):
            with threads(num_threads):
                assert torch.equal(packed_linear(rows[:count], packed, shape[0], dtype=torch.float32), whole[:count])
    assert torch.equal(packed_linear(rows[250:251], packed, shape[0], dtype=torch.float32), whole[250:251])


def test_nan_and_infinity_stay_in_their_rows(way: str) -> None:
    """Nor do they come out of memory beyond a row's end, or get into it from padding."""
    for num_inputs in (64, 37):
        weight, x = draw(70, num_inputs), draw(9, num_inputs + 3, seed=1)
        x[:, num_inputs:] = float("nan")
        clean = packed_linear(x[:, :num_inputs].clone(), pack(weight), 70)
        x[4, num_inputs - 1], x[7, 0] = float("nan"), float("inf")
        y = packed_linear(x[:, :num_inputs], pack(weight), 70)
        assert y[4].isnan().all()
        assert not y[7].isfinite().any()
        others = [0, 1, 2, 3, 5, 6, 8]
        assert torch.equal(y[others], clean[others])


def test_rows_may_lie_anyhow(way: str) -> None:
    weight, whole = draw(70, 64), draw(12, 200, seed=1)
    odd = draw(6 * 64 + 1)[1:].view(6, 64)
    for x in (whole[:, 3:67], whole[::2, :64], whole[:, :128:2], draw(64, 5).T, odd, whole[:1, :64].expand(4, 64)):
        before = x.clone()
        assert_exact(packed_linear(x, pack(weight), 70), before, weight, None)
        assert torch.equal(x, before)


def test_what_does_not_fit_is_refused() -> None:
    packed, x = pack(draw(70, 64)), draw(2, 64)
    with pytest.raises(ValueError, match="no packed matrix of 200 outputs"):
        packed_linear(x, packed, 200)
    with pytest.raises(ValueError, match="no packed matrix of 70 outputs and 66"):
        packed_linear(draw(2, 66), packed, 70)
    with pytest.raises(ValueError, match="bias of"):
        packed_linear(x, packed, 70, draw(64))
    with pytest.raises(ValueError, match="float16"):
        packed_linear(x, packed, 70, dtype=torch.float16)
    with pytest.raises(ValueError, match="do not hold"):
        pack_linear(packed, draw(200, 64))
