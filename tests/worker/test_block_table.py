"""The mirror of the ledger: growth, gathering, and that nothing of an old owner stays."""

import numpy as np
import pytest

from ipc.errors import ProtocolError
from worker.block_table import BlockTable, offsets_within


def rows(*values: int) -> np.ndarray:
    return np.asarray(values, np.int64)


def lens(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def test_rows_grow_by_ragged_deltas():
    table = BlockTable(4, max_model_len=64, block_size=16)
    table.set_row(2, [7])
    table.set_row(0, [5, 9])
    table.append(rows(0, 2), rows(1, 3), np.asarray([11, 21, 22, 23], np.int32))
    assert table.gather(rows(2, 0), lens(64, 40)).tolist() == [[7, 21, 22, 23], [5, 9, 11, 0]]


def test_a_reused_row_keeps_nothing_of_its_old_owner():
    table = BlockTable(2, max_model_len=64, block_size=16)
    table.set_row(0, [1, 2, 3, 4])
    table.set_row(0, [9])
    table.set_row(1, [5, 6, 7, 8])
    # As wide as the longest row: what lies behind row 0's only block must not be the old owner's.
    assert table.gather(rows(0, 1), lens(3, 64)).tolist() == [[9, 0, 0, 0], [5, 6, 7, 8]]
    with pytest.raises(ProtocolError, match="row 0 has 1 blocks, 17 tokens need 2"):
        table.gather(rows(0), lens(17))
    table.append(rows(0), rows(1), np.asarray([30], np.int32))
    assert table.gather(rows(0), lens(17)).tolist() == [[9, 30]]


def test_what_was_gathered_stays_when_the_table_changes():
    table = BlockTable(1, max_model_len=32, block_size=16)
    table.set_row(0, [1, 2])
    gathered = table.gather(rows(0), lens(32))
    table.set_row(0, [8])
    assert gathered.tolist() == [[1, 2]]


def test_impossible_growth_is_refused():
    table = BlockTable(1, max_model_len=32, block_size=16)
    with pytest.raises(ProtocolError, match="3 blocks"):
        table.set_row(0, [1, 2, 3])
    table.set_row(0, [1, 2])
    with pytest.raises(ProtocolError, match="more than the 2 blocks"):
        table.append(rows(0), rows(1), np.asarray([3], np.int32))
    with pytest.raises(ProtocolError, match="2 block ids for 1 places"):
        table.append(rows(0), rows(1), np.asarray([3, 4], np.int32))


@pytest.mark.parametrize(("counts", "expected"), [([], []), ([3], [0, 1, 2]), ([1, 2, 0, 2], [0, 0, 1, 0, 1])])
def test_offsets_within(counts, expected):
    assert offsets_within(np.asarray(counts, np.int64)).tolist() == expected
