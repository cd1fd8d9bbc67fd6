"""Does a step's plan stay small, and does nothing on it grow with the context?"""

from typing import Any

import pytest

from ipc.codec import encode
from ipc.messages import CachedRequestData, ModelRunnerOutput, NewRequestData, SampledTokens, SchedulerOutput
from ipc.params import DrawRules, SamplingParams
from tests.wire_samples import ids

MOST_BYTES = 400
"""Of a step that schedules 64 decodes."""

BIG = (1 << 64) - 1


def size(message: Any) -> int:
    return sum(len(frame) for frame in encode(message))


def decode_step(rows: list[int], block_ids: list[int], **fields: Any) -> SchedulerOutput:
    taking = len(block_ids)
    cached = CachedRequestData(
        indices=list(range(taking)), num_new_blocks=([1] * taking,) if taking else (), new_block_ids=(block_ids,) if taking else ()
    )
    base: dict[str, Any] = {
        "core_id": BIG, "epoch": 1000, "step_id": BIG // 2, "freed_rows": [], "new_requests": (), "cached_requests": cached,
        "rows": rows, "num_scheduled_tokens": [1] * len(rows), "needs_tokens_of_step": BIG // 2 - 2,
    }  # fmt: skip
    return SchedulerOutput(**base | fields)


def test_64_decodes_that_all_take_a_block() -> None:
    """Rows up to 511 and block ids below 65,536, in no order that could help."""
    rows = [(i * 389) % 512 for i in range(64)]
    blocks = [65535 - (i * 1021) % 65536 for i in range(64)]
    assert max(rows) > 255 and max(blocks) == 65535 and len(set(rows)) == len(set(blocks)) == 64
    assert size(decode_step(rows, blocks)) <= MOST_BYTES


def test_64_decodes_without_a_new_block() -> None:
    assert size(decode_step(list(range(448, 512)), [])) <= 200


def test_64_new_blocks_and_a_few_that_leave() -> None:
    assert size(decode_step(list(range(448, 512)), list(range(60000, 60064)), freed_rows=[3, 300, 511])) <= MOST_BYTES


@pytest.mark.parametrize("num_rows", [1, 64, 256])
def test_a_decode_step_does_not_grow_with_the_context(num_rows: int) -> None:
    """Nothing in it depends on how long the sequences are; only ids of new blocks may need wider numbers."""
    early = size(decode_step(list(range(num_rows)), [256 + i for i in range(num_rows)], step_id=10**9, needs_tokens_of_step=10**9))
    late = size(decode_step(list(range(num_rows)), [60000 + i for i in range(num_rows)], step_id=10**9, needs_tokens_of_step=10**9))
    assert early == late


def test_a_new_request_costs_its_tokens_and_little_else() -> None:
    def step(num_tokens: int) -> int:
        new = NewRequestData(
            row=500, request_id="r" * 32, token_ids=ids(*range(num_tokens)), num_prompt_tokens=num_tokens, num_computed_tokens=0,
            block_ids=(list(range(1000, 1000 + num_tokens // 16)),), params=SamplingParams(temperature=0.7).resolved(DrawRules(), seed=1 << 62),
        )  # fmt: skip
        return size(decode_step([500], [], new_requests=(new,)))

    assert step(1600) - step(160) <= (4 + 2 / 16) * 1440 + 8
    assert step(16) <= 64 + 330


def test_what_comes_back_for_64_rows_is_small_too() -> None:
    rows = [(i * 389) % 512 for i in range(64)]
    tokens = [128_000 + i for i in range(64)]
    ones = [1] * 64
    assert size(SampledTokens(epoch=1000, step_id=BIG, rows=rows, token_ids=tokens, counts=ones)) <= 450
    assert size(ModelRunnerOutput(core_id=BIG, epoch=1000, step_id=BIG, rows=rows, token_ids=tokens, counts=ones)) <= 470
