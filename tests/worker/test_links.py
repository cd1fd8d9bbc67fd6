"""Hops between two stages, by every transport: bytes arrive as they were sent, and whatever goes wrong names rank, step and
peer. Devices are stood in for by fake streams that are as late, or as early, as a device may be.
"""

import random
import threading
import time

import pytest
import torch
from torch.distributed import FileStore

from ipc.errors import PeerLost
from tests.worker.links import (
    BOUNDARY,
    EPOCH,
    KINDS,
    MAX_TOKENS,
    Pair,
    activations,
    assert_same,
    message_bytes,
)
from worker.links.gloo import NUM_RECEIVE_BUFFERS, NUM_SEND_BUFFERS, connect_group
from worker.links.link import TRAILER, HopBuffer, write_trailer
from worker.links.nccl import NcclReceiver

MUCH_LATER_S = 20.0
"""Longer than a deadline of a fraction of a second on a busy machine, shorter than the 30 s of the other waits."""


@pytest.fixture
def groups(tmp_path):
    """Two ranks in one process, each connected from a thread of its own."""
    made = {}

    def connect(rank: int) -> None:
        made[rank] = connect_group(FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2, host=None, timeout_s=60)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pair = [made.pop(0), made.pop(1)]
    yield pair
    pair.clear()  # pytest keeps what was yielded; the sockets close with the last reference


@pytest.fixture(params=KINDS)
def pair(request, groups):
    made = Pair(request.param, groups)
    yield made
    made.groups.clear()


def test_many_steps_of_any_size_arrive_unchanged(pair):
    sender, receiver = pair.make_sender(), pair.make_receiver()
    sizes = [1, 9, 3, 9, 1, 1, 2, 7, 9, 4]
    posted, got = 0, []
    for step_id, size in enumerate(sizes, start=1):
        while receiver.has_room and posted < len(sizes):
            posted += 1
            receiver.post(posted, sizes[posted - 1])
        pair.give(sender, step_id, activations(size, step_id))
        got.append(pair.take(receiver, step_id))
    sender.flush(30)
    pair.finish()
    for step_id, size in enumerate(sizes, start=1):
        assert_same(got[step_id - 1], activations(size, step_id))


def test_either_side_may_be_ahead_by_as_much_as_it_likes(pair):
    """Sends, receives and the devices' own progress in random order."""
    sender, receiver = pair.make_sender(), pair.make_receiver()
    generator = random.Random(7)
    sent, posted, got = 0, 0, []
    while len(got) < 60:
        may = []
        if sent < 60 and sent - len(got) < NUM_SEND_BUFFERS:
            may.append("send")
        if posted < 60 and receiver.has_room:
            may.append("post")
        if len(got) < min(sent, posted):
            may.append("take")
        match generator.choice(may or ["finish"]):
            case "send":
                sent += 1
                pair.give(sender, sent, activations(1 + sent % MAX_TOKENS, sent))
            case "post":
                posted += 1
                receiver.post(posted, 1 + posted % MAX_TOKENS)
            case "take":
                got.append(pair.take(receiver, len(got) + 1))
        if generator.random() < 0.1:
            pair.finish()
    sender.flush(30)
    pair.finish()
    for step_id, tensors in enumerate(got, start=1):
        assert_same(tensors, activations(1 + step_id % MAX_TOKENS, step_id))


def test_what_was_received_lasts_until_the_next_wait(pair):
    sender, receiver = pair.make_sender(), pair.make_receiver()
    receiver.post(1, 9)
    pair.give(sender, 1, activations(9, 1))
    held = receiver.wait(1)
    for step_id in (2, 3):
        receiver.post(step_id, 9)
        pair.give(sender, step_id, activations(9, step_id))
    assert not receiver.has_room
    pair.finish()
    assert_same(held, activations(9, 1))
    got = [pair.take(receiver, step_id) for step_id in (2, 3)]
    sender.flush(30)
    pair.finish()
    assert_same(got[0], activations(9, 2))
    assert_same(got[1], activations(9, 3))


def test_a_buffer_is_not_touched_while_its_send_waits_for_the_peer(pair):
    """The peer stands still: two steps are in flight, the third must wait although its tensors are ready."""
    sender, receiver = pair.make_sender(), pair.make_receiver()
    pair.give(sender, 1, activations(9, 1))
    pair.give(sender, 2, activations(9, 2))
    third = threading.Thread(target=pair.give, args=(sender, 3, activations(9, 3)))
    third.start()
    third.join(0.3)
    assert third.is_alive()
    got = []
    for step_id in (1, 2, 3):
        receiver.post(step_id, 9)
        got.append(pair.take(receiver, step_id))
    third.join(30)
    assert not third.is_alive()
    sender.flush(30)
    pair.finish()
    for step_id in (1, 2, 3):
        assert_same(got[step_id - 1], activations(9, step_id))


def test_a_flush_gives_up_after_its_own_time_not_that_of_a_hop(groups):
    """Whoever leaves has less time than a step: a peer that takes nothing may not hold it longer."""
    for kind in ("gloo", "staged"):
        sender = Pair(kind, groups).make_sender(timeout_s=30)
        sender.send(1, activations(9, 1))
        started = time.monotonic()
        with pytest.raises(PeerLost, match="step 1: sending to rank 1 failed"):
            sender.flush(0.2)
        assert time.monotonic() - started < MUCH_LATER_S


def test_each_transfer_is_waited_for_once(pair):
    sender, receiver = pair.make_sender(), pair.make_receiver()
    for step_id in range(1, 8):
        receiver.post(step_id, 3)
        pair.give(sender, step_id, activations(3))
        pair.take(receiver, step_id)
    sender.flush(30)
    sender.flush(30)
    pair.finish()
    for group in pair.groups:
        assert list(group.waits.values()) == [1] * 7


def test_receives_are_posted_when_the_step_is_known(pair):
    """On a device an early receive takes up part of it, so there it is asked for when the step before is under way."""
    receiver = pair.make_receiver()
    num_posted = 0
    while receiver.has_room:
        num_posted += 1
        receiver.post(num_posted, 3)
    assert num_posted == NUM_RECEIVE_BUFFERS
    assert pair.groups[1].calls == ([] if pair.transport == "nccl" else ["recv"] * NUM_RECEIVE_BUFFERS)


def test_a_step_that_was_not_posted_is_our_own_fault(pair):
    receiver = pair.make_receiver()
    receiver.post(3, 2)
    with pytest.raises(ValueError, match="step 4 is awaited, but the oldest receive was posted for step 3"):
        receiver.wait(4)


def test_a_peer_that_takes_nothing_is_lost_at_the_deadline(pair):
    sender = pair.make_sender(timeout_s=0.3)
    pair.give(sender, 1, activations(3))
    pair.give(sender, 2, activations(3))
    started = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 0, step 1: sending to rank 1 failed: Timed out waiting \d+ms"):
        sender.send(3, activations(3))
    assert 0.2 < time.monotonic() - started < MUCH_LATER_S
    assert pair.nccl.num_aborts == (pair.transport == "nccl")


def test_a_peer_that_sends_nothing_is_lost_at_the_deadline(pair):
    receiver = pair.make_receiver(timeout_s=0.3)
    receiver.post(8, 3)
    started = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 1, step 8: nothing came from rank 0: Timed out waiting 300ms"):
        receiver.wait(8)
    assert 0.2 < time.monotonic() - started < MUCH_LATER_S
    assert pair.nccl.num_aborts == (pair.transport == "nccl")


# ------------------------------------------------------------------------------------------------ foreign data


def run_three_steps(pair, sender, receiver, num_tokens=3):
    """Afterwards every buffer of the receiver holds a whole message."""
    for step_id in (1, 2, 3):
        receiver.post(step_id, num_tokens)
        pair.give(sender, step_id, activations(num_tokens, step_id))
        receiver.wait(step_id)


@pytest.mark.parametrize("num_sent", [1, 2, 4, MAX_TOKENS])
def test_a_shorter_or_longer_message_is_noticed(pair, num_sent):
    """gloo accepts a shorter one without a word; and one that is longer than the receive would end the process."""
    sender, receiver = pair.make_sender(), pair.make_receiver()
    run_three_steps(pair, sender, receiver)
    receiver.post(4, 3)
    pair.give(sender, 4, activations(num_sent, 4))
    with pytest.raises(PeerLost, match=r"rank 1, step 4: rank 0 sent something else than 3 tokens of epoch 4"):
        receiver.wait(4)


def test_a_message_that_ends_before_its_trailer_is_noticed(pair):
    """Not even the trailer that an earlier message left in the buffer may vouch for it."""
    sender, receiver = pair.make_sender(), pair.make_receiver()
    run_three_steps(pair, sender, receiver)
    sender.flush(30)
    pair.finish()
    for buffer in free_buffers(receiver):
        write_trailer(buffer.trailer(3), EPOCH, 4, 3)
    receiver.post(4, 3)
    kept = pair.inject(torch.ones(message_bytes(3) - TRAILER.size, dtype=torch.uint8))
    with pytest.raises(PeerLost, match=r"step 4: .*trailer: epoch 0, step 0, 0 tokens"):
        receiver.wait(4)
    del kept


def free_buffers(receiver) -> list[HopBuffer]:
    if isinstance(receiver, NcclReceiver):
        return [slot.device for slot, _ in receiver._free]
    return list(getattr(receiver, "_host", receiver)._free)


def test_another_dtype_is_noticed(pair):
    receiver = pair.make_receiver()
    receiver.post(1, 3)
    kept = pair.inject(torch.ones(message_bytes(3) // 4, dtype=torch.float32))
    with pytest.raises(PeerLost, match=r"rank 1, step 1: rank 0 sent something else"):
        receiver.wait(1)
    del kept


@pytest.mark.parametrize(("step_id", "epoch"), [(6, EPOCH), (5, EPOCH + 1)])
def test_another_step_or_epoch_is_noticed(pair, step_id, epoch):
    sender, receiver = pair.make_sender(epoch=epoch), pair.make_receiver()
    receiver.post(5, 3)
    pair.give(sender, step_id, activations(3))
    with pytest.raises(PeerLost, match=rf"rank 1, step 5: rank 0 .*trailer: epoch {epoch}, step {step_id}, 3 tokens"):
        receiver.wait(5)


def test_tensors_that_do_not_fit_the_boundary_are_our_own_fault(pair):
    sender = pair.make_sender()
    hidden, residual = activations(3)
    with pytest.raises(ValueError, match="boundary is torch.bfloat16"):
        sender.send(1, [hidden.float(), residual])
    with pytest.raises(ValueError, match="zip"):
        sender.send(1, [hidden])
    with pytest.raises(ValueError, match=r"boundary is torch.float32 \[3, 5\], got torch.float32 \[2, 5\]"):
        sender.send(1, [hidden, residual[:2]])


def test_the_two_ends_may_be_of_gloo_and_staged(groups):
    """A CPU beside a GPU: what is on the wire is the same."""
    plain, staged = Pair("gloo", groups), Pair("staged, beside first", groups)
    sender, receiver = plain.make_sender(), staged.make_receiver()
    receiver.post(1, 9)
    plain.give(sender, 1, activations(9, 1))
    got = staged.take(receiver, 1)
    sender.flush(30)
    staged.finish()
    assert_same(got, activations(9, 1))
    assert [part.width for part in BOUNDARY] == [tensor.shape[1] for tensor in got]


def test_a_staged_sender_that_is_no_longer_used_ends_its_thread(groups):
    pair = Pair("staged", groups)
    before = set(threading.enumerate())
    sender = pair.make_sender()
    (thread,) = set(threading.enumerate()) - before
    del sender
    thread.join(30)
    assert not thread.is_alive()


def test_ranks_that_never_come_are_lost_at_the_deadline(tmp_path):
    with pytest.raises(PeerLost, match="rank 0: could not connect to the other 1 ranks"):
        connect_group(FileStore(str(tmp_path / "store"), 2), rank=0, world_size=2, host=None, timeout_s=0.5)
