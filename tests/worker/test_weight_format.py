"""Does a packed matrix compute what the dense one does, hold the memory it says it holds, and stand back where it can't?"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tests import tiny
from tests.native import INSTRUCTION_SETS, use_instruction_set
from tests.worker.stages import CPU, Pipeline, load_stage
from worker.layers import weight_format
from worker.layers.linear import Linear
from worker.layers.weight_format import (
    MAX_PADDING,
    PackedFormat,
    PanelFormat,
    PlainFormat,
    WeightFormat,
    borrowed_format,
    can_pack,
    computes_in_panels,
    empty_format,
)

BF16 = torch.bfloat16
META = torch.device("meta")

needs_packing = pytest.mark.skipif(not can_pack(BF16), reason="this torch or CPU does not pack")


@pytest.fixture
def without_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where our own kernels were not compiled."""
    use_instruction_set("torch", monkeypatch)


@pytest.fixture
def without_packing(without_panels: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And with a torch whose private operators are gone."""
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    can_pack.cache_clear()
    yield
    can_pack.cache_clear()


@pytest.fixture(
    params=[
        pytest.param(PackedFormat, marks=needs_packing),
        pytest.param(PanelFormat, marks=pytest.mark.skipif(not INSTRUCTION_SETS, reason="no native library")),
    ]
)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[WeightFormat]:
    """Either way to rearrange a matrix, chosen for every matrix that it fits."""
    monkeypatch.setattr(weight_format, "computes_in_panels", lambda dtype: request.param is PanelFormat)
    return request.param


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(weight: Tensor, kind: type[WeightFormat]) -> WeightFormat:
    form = empty_format(*weight.shape, weight.dtype, CPU)
    assert type(form) is kind
    form.load(0, weight)
    form.prepare()
    return form


def fill(layer: Linear, tensors: dict[str, Tensor]) -> None:
    for name, slot in layer.weight_slots().items():
        slot.load(tensors[name])
    layer.prepare()


def assert_as_good(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """No further from the exact product than rounding to bfloat16 makes it."""
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert actual.dtype == BF16
    assert actual.shape == exact.shape
    torch.testing.assert_close(actual.double(), exact, rtol=2**-7, atol=2e-2)


# ------------------------------------------------------------------------------------------------ the product


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 513])
@pytest.mark.parametrize("shape", [(192, 128), (640, 576), (1000, 128)])
def test_packed_computes_what_dense_does(kind: type[WeightFormat], shape: tuple[int, int], num_rows: int) -> None:
    weight, x = draw(*shape), draw(num_rows, shape[1], seed=1)
    assert_as_good(packed(weight, kind).apply(x, None), x, weight)


def test_a_bias_is_added(kind: type[WeightFormat]) -> None:
    weight, x, bias = draw(128, 64), draw(5, 64, seed=1), draw(128, seed=2) * 10
    assert_as_good(packed(weight, kind).apply(x, bias), x, weight, bias)


@pytest.mark.parametrize("bends", ["columns", "every second", "transposed", "offset", "backwards in rows"])
def test_inputs_may_lie_anyhow(kind: type[WeightFormat], bends: str) -> None:
    weight = draw(128, 64)
    x = {
        "columns": draw(6, 100)[:, :64],
        "every second": draw(6, 128)[:, ::2],
        "transposed": draw(64, 6).T,
        "offset": draw(6 * 64 + 1)[1:].view(6, 64),
        "backwards in rows": draw(6, 64).expand(6, 64)[::3],
    }[bends]
    before = x.clone()
    assert_as_good(packed(weight, kind).apply(x, None), x, weight)
    assert torch.equal(x, before)


def test_a_row_does_not_depend_on_its_neighbours(kind: type[WeightFormat]) -> None:
    form, x = packed(draw(640, 576), kind), draw(64, 576, seed=1)
    together = form.apply(x, None)
    for i in (0, 13, 63):
        torch.testing.assert_close(form.apply(x[i : i + 1], None)[0], together[i], rtol=2**-7, atol=1e-2)


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no native library")
def test_in_panels_a_row_is_the_same_bits_beside_any_others() -> None:
    weight, x = draw(640, 576), draw(64, 576, seed=1)
    form = PanelFormat(weight)
    form.prepare()
    together = form.apply(x, None)
    for i in (0, 13, 63):
        assert torch.equal(form.apply(x[i : i + 1], None)[0], together[i])


def test_logits_in_float32(kind: type[WeightFormat]) -> None:
    """In panels they are the sums, never rounded."""
    weight, x = draw(640, 576), draw(9, 576, seed=1)
    logits = packed(weight, kind).apply(x, None, torch.float32)
    assert logits.dtype == torch.float32
    exact = linear(x.double(), weight.double())
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-4 if kind is PanelFormat else 0.5)


def test_plain_gives_the_dtype_that_is_asked_for() -> None:
    form = PlainFormat(draw(8, 8))
    assert form.apply(draw(2, 8), None).dtype == BF16
    assert form.apply(draw(2, 8), None, torch.float32).dtype == torch.float32


# ------------------------------------------------------------------------------------------------ parts and memory


def test_parts_in_any_order_and_dtype_are_one_matrix(kind: type[WeightFormat]) -> None:
    parts = {"q": 128, "k": 64, "v": 64}
    layer = Linear(64, parts, bias=True, dtype=BF16, device=CPU)
    tensors = {f"{name}.weight": draw(rows, 64, dtype=torch.float32, seed=rows + len(name)) for name, rows in parts.items()}
    tensors |= {f"{name}.bias": draw(rows, dtype=torch.float32, seed=9) for name, rows in parts.items()}
    slots = layer.weight_slots()
    for name in sorted(slots):
        slots[name].load(tensors[name])
    layer.prepare()
    x = draw(5, 64, seed=3)
    weight = torch.cat([tensors[f"{name}.weight"] for name in parts]).to(BF16)
    assert_as_good(layer(x), x, weight, torch.cat([tensors[f"{name}.bias"] for name in parts]).to(BF16))


def test_each_matrix_is_packed_when_its_last_part_is_there(
    kind: type[WeightFormat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that dense and packed stand side by side for one matrix at a time."""
    packs = []
    pack = kind._pack  # type: ignore[attr-defined]
    monkeypatch.setattr(kind, "_pack", lambda form, weight: packs.append(ref(weight)) or pack(form, weight))
    layer = Linear(64, {"gate": 64, "up": 64}, bias=False, dtype=BF16, device=CPU)
    slots = layer.weight_slots()
    slots["gate.weight"].load(draw(64, 64))
    assert not packs
    slots["up.weight"].load(draw(64, 64))
    assert [dense() for dense in packs] == [None], "packed once, and nobody holds the dense matrix"
    layer.prepare()
    assert len(packs) == 1


@pytest.mark.parametrize("shape", [(128, 64), (576, 1536), (1001, 64)])
def test_size_is_what_is_held(kind: type[WeightFormat], shape: tuple[int, int]) -> None:
    """Both pad outputs to 64, and that counts."""
    layer = Linear(shape[1], {"a": shape[0]}, bias=True, dtype=BF16, device=CPU)
    bias_bytes = 2 * shape[0]
    assert layer.size_bytes == 2 * shape[0] * shape[1] + bias_bytes
    fill(layer, {"a.weight": draw(*shape), "a.bias": draw(shape[0])})
    held = layer.size_bytes - bias_bytes
    if kind is PanelFormat or shape[0] % 64 == 0:
        assert held == 2 * -(-shape[0] // 64) * 64 * shape[1]
    else:
        assert 2 * shape[0] * shape[1] < held <= 2 * MAX_PADDING * shape[0] * shape[1]


def test_a_borrowed_matrix_is_packed_as_it_is_at_the_end_and_stays_with_its_owner(kind: type[WeightFormat]) -> None:
    table = torch.zeros(256, 64, dtype=BF16)
    head = Linear(64, {"table": 256}, bias=False, dtype=BF16, device=CPU, weight=borrowed_format(table))
    assert head.weight_slots() == {}
    table.copy_(draw(256, 64))
    head.prepare()
    before, x = table.clone(), draw(3, 64, seed=4)
    assert_as_good(head(x), x, table)
    assert torch.equal(table, before)
    assert head.size_bytes == table.nbytes, "its own copy"


def test_a_borrowed_matrix_that_is_not_packed_costs_nothing() -> None:
    table = draw(256, 64, dtype=torch.float32)
    head = Linear(64, {"table": 256}, bias=False, dtype=torch.float32, device=CPU, weight=borrowed_format(table))
    head.prepare()
    assert head.size_bytes == 0
    table[3] = 0
    assert not head(torch.ones(1, 64))[0, 3], "the owner's memory"


# ------------------------------------------------------------------------------------------------ who stays plain


@pytest.mark.parametrize(
    ("shape", "dtype", "device"),
    [
        ((128, 64), torch.float32, CPU),
        ((128, 64), torch.float16, CPU),
        ((128, 48), BF16, CPU),
        ((97, 64), BF16, CPU),
        ((7, 5), BF16, CPU),
        ((128, 64), BF16, META),
    ],
)
def test_plain_where_packing_is_less_exact_unknown_or_mostly_padding(
    without_panels: None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    assert isinstance(empty_format(*shape, dtype, device), PlainFormat)


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no native library")
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_our_kernel_where_it_is_the_fastest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not without vectors worth the name, and not where only the library uses the matrix unit."""
    use_instruction_set(name, monkeypatch)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert computes_in_panels(BF16) == (name != "baseline")
    if name != "baseline":
        assert isinstance(empty_format(128, 48, BF16, CPU), PanelFormat)
        assert isinstance(borrowed_format(draw(1001, 64)), PanelFormat)
        for shape, dtype, device in [((97, 64), BF16, CPU), ((128, 64), torch.float32, CPU), ((128, 64), BF16, META)]:
            assert isinstance(empty_format(*shape, dtype, device), PlainFormat)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    assert computes_in_panels(BF16) == (name == "amx")


def wrong_numbers(x: Tensor, packed: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    return torch.zeros(x.shape[0], packed.shape[0], dtype=x.dtype)


def wrong_dtype(x: Tensor, packed: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    return linear(x.float(), packed.float(), None if bias is None else bias.float())


def other_arguments(x: Tensor, packed: Tensor) -> Tensor:
    return linear(x, packed)


def refuses(*_: Any) -> Tensor:
    raise RuntimeError("bf16 path needs a newer CPU")


@pytest.mark.parametrize("product", [wrong_numbers, wrong_dtype, other_arguments, refuses])
def test_operators_that_do_not_do_what_is_expected_are_not_used(
    without_packing: None, monkeypatch: pytest.MonkeyPatch, product: Any
) -> None:
    operators = SimpleNamespace(
        _reorder_linear_weight=lambda weight: weight, _linear_pointwise=product, _nbytes=lambda weight: weight.nbytes
    )
    monkeypatch.setattr(torch.ops, "mkldnn", operators)
    assert not can_pack(BF16)
    assert isinstance(empty_format(128, 64, BF16, CPU), PlainFormat)


def test_the_probe_accepts_operators_that_do(without_packing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    operators = SimpleNamespace(
        _reorder_linear_weight=lambda weight: weight,
        _linear_pointwise=lambda x, weight, bias, *_: linear(x, weight, bias),
        _nbytes=lambda weight: weight.nbytes,
    )
    monkeypatch.setattr(torch.ops, "mkldnn", operators)
    assert can_pack(BF16)


# ------------------------------------------------------------------------------------------------ whole models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama all of whose matrices but one are packed."""
    return tiny.random_llama(tmp_path_factory.mktemp("model") / "wide", hidden_size=128, intermediate_size=256)


def logits_of(model: Path, num_stages: int) -> Tensor:
    tokens = torch.randint(0, 500, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    pipeline = Pipeline(model, num_stages, dtype=BF16)
    return torch.cat([pipeline.step({0: tokens[:30]})[0], *(pipeline.step({0: [token]})[0] for token in tokens[30:])])


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_model_computes_the_same_with_and_without(
    kind: type[WeightFormat], model: Path, num_stages: int, request: pytest.FixtureRequest
) -> None:
    with_packing = logits_of(model, num_stages)
    request.getfixturevalue("without_packing")
    monkeypatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setattr(weight_format, "computes_in_panels", computes_in_panels)
    without = logits_of(model, num_stages)
    assert without.std() > 0.05
    torch.testing.assert_close(with_packing, without, rtol=0.05, atol=0.05 * without.std().item())


def test_bytes_of_a_stage_count_a_packed_head(
    kind: type[WeightFormat], model: Path, request: pytest.FixtureRequest
) -> None:
    stage = load_stage(model, range(0, 5), is_first=True, is_last=True, dtype=BF16)
    assert stage.embedding is not None
    assert type(stage.head.format) is kind
    packed_bytes = stage.weight_bytes()
    request.getfixturevalue("without_packing")
    monkeypatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setattr(weight_format, "computes_in_panels", computes_in_panels)
    plain = load_stage(model, range(0, 5), is_first=True, is_last=True, dtype=BF16)
    assert isinstance(plain.head.format, PlainFormat)
    assert packed_bytes == plain.weight_bytes() + stage.embedding.weight.nbytes
