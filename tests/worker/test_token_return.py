"""Sampled tokens from the last stage to the first: order, strangers, deadlines, and what is left behind."""

import pytest
import zmq

from ipc.channel import open_socket
from ipc.codec import encode
from ipc.errors import PeerLost
from ipc.messages import SampledTokens
from worker.token_return import TokenInbox, TokenOutbox

EPOCH, KEY = 5, 77


class Accepted(list):
    def __call__(self, step_id: int, rows: list[int], token_ids: list[int], counts: list[int]) -> None:
        assert counts == [1] * len(rows)
        self.append((step_id, rows, token_ids))


@pytest.fixture
def context():
    made = zmq.Context()
    yield made
    made.destroy(0)


@pytest.fixture
def inbox(context, tmp_path):
    made = TokenInbox(context, run_dir=str(tmp_path), nonce=1, host=None)
    made.begin(EPOCH, KEY)
    yield made
    made.close()


@pytest.fixture
def outbox(context, inbox):
    made = TokenOutbox(context, address=inbox.address, epoch=EPOCH, key=KEY)
    yield made
    made.close()


def take(inbox: TokenInbox, step_id: int, timeout_s: float = 30.0) -> Accepted:
    accepted = Accepted()
    inbox.take_until(step_id, accepted, timeout_s=timeout_s, peer=1)
    return accepted


def test_tokens_come_in_step_order_and_nothing_piles_up(inbox, outbox):
    outbox.send(0, [], [], [], timeout_s=30)
    outbox.send(1, [4, 2], [70000, 9], [1, 1], timeout_s=30)
    assert take(inbox, 1) == [(0, [], []), (1, [4, 2], [70000, 9])]
    for step_id in range(2, 6):
        outbox.send(step_id, [step_id], [1], [1], timeout_s=30)
    first = take(inbox, 4)
    rest = take(inbox, 5)
    assert [step_id for step_id, _, _ in first + rest] == [2, 3, 4, 5]
    assert take(inbox, 0) == []


def test_tokens_that_nobody_needs_yet_are_taken_all_the_same(inbox, outbox):
    for step_id in range(3):
        outbox.send(step_id, [], [], [], timeout_s=30)
    seen = take(inbox, 0)
    while len(seen) < 3:
        seen += take(inbox, 0)
    assert [step_id for step_id, _, _ in seen] == [0, 1, 2]


def test_strangers_and_other_epochs_are_dropped(context, inbox):
    stranger = open_socket(context, zmq.PUSH)
    stranger.connect(inbox.address)
    stranger.send_multipart([b"\x01", b"junk", b"\xc1"])
    stranger.send_multipart([KEY.to_bytes(8, "little"), b"\x01", b"junk", b"\xc1"])
    stranger.send_multipart([KEY.to_bytes(8, "little")])

    def send(rows, *, key=KEY, **fields):
        ones = [1] * len(rows)
        said = {"epoch": EPOCH, "step_id": 0, **fields}
        stranger.send_multipart([key.to_bytes(8, "little"), *encode(SampledTokens(rows=rows, token_ids=ones, counts=ones, **said))])

    send([1], epoch=EPOCH - 1)
    send([2], key=KEY - 1)
    send([3], key=0, step_id=7)  # from the future: the tokens in between aren't lost, it is a stranger's
    send([])
    send([9])
    send([], step_id=1)
    assert take(inbox, 1) == [(0, [], []), (1, [], [])]
    assert inbox.num_dropped == 7
    stranger.close(0)


def test_a_step_that_is_missing_or_late_means_that_the_peer_is_lost(inbox, outbox):
    with pytest.raises(PeerLost, match="rank 0, step 0: rank 1 sent no sampled tokens within 0.1 s"):
        take(inbox, 0, timeout_s=0.1)
    outbox.send(1, [], [], [], timeout_s=30)
    with pytest.raises(PeerLost, match="tokens of step 0 from rank 1 were lost, 1 came"):
        take(inbox, 1)


def test_over_tcp_it_listens_on_the_given_host_alone(context, tmp_path):
    made = TokenInbox(context, run_dir=str(tmp_path), nonce=1, host="127.0.0.1")
    assert made.address.startswith("tcp://127.0.0.1:")
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_the_socket_file_is_removed(context, tmp_path):
    made = TokenInbox(context, run_dir=str(tmp_path), nonce=255, host=None)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens-00000000000000ff"]
    made.close()
    assert list(tmp_path.iterdir()) == []
