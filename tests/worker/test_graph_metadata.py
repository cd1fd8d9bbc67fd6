"""Does what was recorded with the metadata of padding compute the steps that are written over it later?"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreter import use_interpreter
from tests.worker.fake_graphs import places
from tests.worker.test_attention import BACKENDS, TOLERANCES, D, H, Step
from worker.graphs.dispatcher import BatchDescriptor
from worker.graphs.padding import padded_inputs, padding_alone

DECODES = BatchDescriptor(8, 8, True)
MIXED = BatchDescriptor(64, 6, False)

STEPS = {
    "one decode": (DECODES, [(5, 1)]),
    "decodes": (DECODES, [(5, 1), (0, 1), (40, 1), (17, 1), (1, 1)]),
    "as many as there is room for": (DECODES, [(5, 1)] * 8),
    "a prompt": (MIXED, [(0, 33)]),
    "mixed": (MIXED, [(5, 1), (40, 1), (3, 20), (0, 9)]),
    "decodes among others": (MIXED, [(9, 1), (20, 1)]),
}


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "backend" in request.fixturenames and request.getfixturevalue("backend") == "triton":
        use_interpreter(monkeypatch)


def padded(values: Tensor, num_tokens: int) -> Tensor:
    filler = torch.full((num_tokens - len(values), *values.shape[1:]), torch.nan)
    return torch.cat((values, filler))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_recorded_metadata_serves_every_step_of_its_shape(backend: str, name: str) -> None:
    shape, sizes = STEPS[name]
    step = Step(sizes, dtype=torch.float32, backend=backend)
    step.builder.reserve(max_tokens=64, max_seqs=8, max_seq_len=256)
    recorded = step.builder.build_in_place(padding_alone(shape))
    addresses = tables_of(recorded)
    # Another step in between, of another shape, leaves nothing behind.
    step.builder.build_in_place(padding_alone(MIXED if shape is DECODES else DECODES))
    rebuilt = step.builder.build_in_place(padded_inputs(step.common, shape))
    assert tables_of(rebuilt) == addresses
    assert all(address % 16 == 0 for address, *_ in addresses), "or a kernel is compiled once more"
    assert numbers_of(rebuilt) == numbers_of(recorded)
    q, k, v = (padded(part, shape.num_tokens) for part in (step.q, step.k, step.v))
    step.backend.write(step.cache, k, v, recorded)
    out = step.backend.attend(q, step.cache, recorded, D**-0.5)
    num_tokens = len(step.q)
    assert (out[:num_tokens] - step.expected()).abs().max() <= TOLERANCES[torch.float32] * out.nan_to_num().abs().max()
    assert torch.equal(out[num_tokens:], torch.zeros(shape.num_tokens - num_tokens, H, D))


def tables_of(metadata: Any) -> list[Any]:
    return places([metadata.slots, metadata.query_starts, metadata.seq_lens, metadata.block_table])


def numbers_of(metadata: Any) -> dict[str, Any]:
    """What is recorded with a launch, as it stands."""
    values = {each.name: getattr(metadata, each.name) for each in fields(metadata)}
    return {name: value for name, value in values.items() if not isinstance(value, Tensor)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_says_whether_it_can(backend: str) -> None:
    step = Step([(5, 1)], dtype=torch.float32, backend=backend)
    reserve: Callable[..., None] = step.builder.reserve
    if step.backend.capabilities.graphs:
        reserve(max_tokens=1, max_seqs=1, max_seq_len=16)
    else:
        with pytest.raises(NotImplementedError):
            reserve(max_tokens=1, max_seqs=1, max_seq_len=16)


def test_padding_behind_sequences_holds_nothing() -> None:
    step = Step([(5, 1), (9, 1)], dtype=torch.float32, backend="torch")
    decodes = padded_inputs(step.common, BatchDescriptor(4, 4, True))
    assert decodes.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert decodes.seq_lens.tolist() == [6, 10, 0, 0]
    assert decodes.slots.tolist()[2:] == [-1, -1]
    assert decodes.num_decodes == 4
    mixed = padded_inputs(step.common, BatchDescriptor(5, 3, False))
    assert mixed.query_starts.tolist() == [0, 1, 2, 2]
    assert mixed.slots.tolist()[2:] == [-1, -1, -1]
    piecewise = padded_inputs(step.common, BatchDescriptor(5, None, False))
    assert piecewise.query_starts.tolist() == [0, 1, 2]
    assert len(piecewise.slots) == 5
