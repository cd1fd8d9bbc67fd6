"""Rows: what changes them, who samples, and that late tokens never reach a new owner."""

import numpy as np
import pytest

from ipc.errors import ProtocolError
from ipc.messages import NewRequestData
from ipc.params import SamplingParams
from worker.request_states import RequestStates


def request(row: int, num_tokens: int, *, num_computed: int = 0, first: int = 100, **params) -> NewRequestData:
    return NewRequestData(
        row=row, request_id="r", token_ids=np.arange(first, first + num_tokens, dtype=np.int32),
        num_prompt_tokens=num_tokens, num_computed_tokens=num_computed, block_ids=([],),
        params=SamplingParams(seed=5, **params),
    )  # fmt: skip


def states(**changes) -> RequestStates:
    return RequestStates(**({"num_rows": 4, "max_model_len": 32, "is_first": True, "is_last": True} | changes))


def advance(held: RequestStates, **counts: int):
    rows = np.asarray([int(name[1:]) for name in counts], np.int64)
    return held.advance(rows, np.asarray(list(counts.values()), np.int64))


def test_a_row_samples_when_it_has_computed_all_it_knows():
    held = states()
    held.add(request(1, 10))
    assert advance(held, r1=4).samples.tolist() == [False]
    assert advance(held, r1=6).samples.tolist() == [True]
    span = advance(held, r1=1)
    assert (span.starts.tolist(), span.ends.tolist(), span.samples.tolist()) == ([10], [11], [True])


def test_a_row_can_start_behind_a_cached_prefix():
    held = states()
    held.add(request(0, 10, num_computed=8))
    assert advance(held, r0=2).samples.tolist() == [True]


def test_more_tokens_than_are_known_are_refused():
    held = states()
    held.add(request(2, 5))
    with pytest.raises(ProtocolError, match="row 2: 6 tokens from 0 on, 5 are known"):
        advance(held, r2=6)
    with pytest.raises(ProtocolError, match="row 2: 0 tokens"):
        advance(held, r2=0)


@pytest.mark.parametrize(("num_tokens", "num_computed"), [(33, 0), (5, 5)])
def test_a_request_that_cannot_be_is_refused(num_tokens, num_computed):
    with pytest.raises(ProtocolError, match="row 0"):
        states().add(request(0, num_tokens, num_computed=num_computed))


def test_a_reused_row_begins_anew():
    held = states()
    held.add(request(0, 4))
    held.free([0])
    held.add(request(0, 2))
    assert (held.num_known[0], held.num_computed[0], held.num_prompt[0]) == (2, 0, 2)


def test_sampled_tokens_land_at_their_positions():
    held = states()
    held.add(request(0, 3))
    held.add(request(3, 5))
    rows = np.asarray([3, 0])
    span = held.advance(rows, np.asarray([5, 3]))
    held.await_tokens(1, rows, span.ends.astype(np.int64))
    held.accept_tokens(1, [3, 0], [42, 43])
    assert held.token_ids[3, :6].tolist() == [100, 101, 102, 103, 104, 42]
    assert held.token_ids[0, :4].tolist() == [100, 101, 102, 43]


@pytest.mark.parametrize("is_freed_first", [True, False])
def test_late_tokens_do_not_reach_the_next_owner(is_freed_first):
    held = states()
    held.add(request(0, 3))
    span = advance(held, r0=3)
    held.await_tokens(1, np.asarray([0]), span.ends.astype(np.int64))
    if is_freed_first:
        held.free([0])
    held.add(request(0, 10, first=500))
    held.accept_tokens(1, [0], [42])
    assert held.token_ids[0, :10].tolist() == list(range(500, 510))


def test_tokens_for_other_rows_than_sampled_are_refused():
    held = states()
    held.add(request(0, 3))
    held.await_tokens(1, np.asarray([0]), np.asarray([3]))
    with pytest.raises(ProtocolError, match="step 1"):
        held.accept_tokens(1, [1], [42])
    with pytest.raises(ProtocolError, match="step 2"):
        held.accept_tokens(2, [], [])


def test_token_ids_are_kept_only_where_they_are_used():
    assert states(is_first=False, is_last=False).token_ids.size == 0
    last = states(is_first=False)
    last.add(request(1, 3))
    last.record(np.asarray([1, 1]), np.asarray([3, 32]), [7, 8])
    assert last.token_ids[1, :5].tolist() == [100, 101, 102, 7, 0], "and nothing behind the longest sequence"
