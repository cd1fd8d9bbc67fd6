"""Hops between two stages over gloo: bytes arrive as they were sent, and whatever goes wrong names rank, step and peer."""

import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.distributed import FileStore

from ipc.errors import PeerLost
from worker.links.gloo import GlooReceiver, GlooSender, connect_group
from worker.links.link import TRAILER, HopBuffer
from worker.models import BoundaryTensor

# An odd width in a 2-byte dtype before one of 4 bytes: the second tensor must start at an aligned place.
BOUNDARY = (
    BoundaryTensor(name="hidden", width=7, dtype=torch.bfloat16),
    BoundaryTensor(name="residual", width=5, dtype=torch.float32),
)
MAX_TOKENS = 9
EPOCH = 4


def make_sender(group, *, timeout_s: float = 5.0, epoch: int = EPOCH) -> GlooSender:
    return GlooSender(group, BOUNDARY, rank=0, peer=1, epoch=epoch, max_tokens=MAX_TOKENS, timeout_s=timeout_s)


def make_receiver(group, *, timeout_s: float = 5.0) -> GlooReceiver:
    return GlooReceiver(group, BOUNDARY, rank=1, peer=0, epoch=EPOCH, max_tokens=MAX_TOKENS, timeout_s=timeout_s)


def activations(num_tokens: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_tokens, part.width, generator=generator).to(part.dtype) for part in BOUNDARY]


@pytest.fixture
def groups(tmp_path):
    """Two ranks in one process, each connected from a thread of its own."""
    made = {}

    def connect(rank: int) -> None:
        made[rank] = connect_group(FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2, host=None, timeout_s=20)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pair = [made.pop(0), made.pop(1)]
    yield pair
    pair.clear()  # pytest keeps what was yielded; the sockets close with the last reference


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_many_steps_of_any_size_arrive_unchanged(groups):
    sender, receiver = make_sender(groups[0]), make_receiver(groups[1])
    sizes = [1, 9, 3, 9, 1, 1, 2, 7, 9, 4]
    posted = 0
    for step_id, _ in enumerate(sizes, start=1):
        while receiver.has_room and posted < len(sizes):
            posted += 1
            receiver.post(posted, sizes[posted - 1])
        sender.send(step_id, activations(sizes[step_id - 1], step_id))
        assert_same(receiver.wait(step_id), activations(sizes[step_id - 1], step_id))
    sender.flush(5)


def test_what_was_received_lasts_until_the_next_wait(groups):
    sender, receiver = make_sender(groups[0]), make_receiver(groups[1])
    receiver.post(1, 9)
    sender.send(1, activations(9, 1))
    held = receiver.wait(1)
    for step_id in (2, 3):
        receiver.post(step_id, 9)
        sender.send(step_id, activations(9, step_id))
    assert not receiver.has_room
    sender.flush(5)
    assert_same(held, activations(9, 1))
    assert_same(receiver.wait(2), activations(9, 2))


def test_a_buffer_is_not_touched_while_its_send_waits_for_the_peer(groups):
    """The peer stands still: two steps are in flight, the third must wait although its tensors are ready."""
    sender, receiver = make_sender(groups[0]), make_receiver(groups[1])
    tensors = activations(9, 1)
    sender.send(1, tensors)
    for tensor in tensors:
        tensor.zero_()  # the sender's caller goes on computing in its own memory
    sender.send(2, activations(9, 2))
    third = threading.Thread(target=sender.send, args=(3, activations(9, 3)))
    third.start()
    third.join(0.3)
    assert third.is_alive()
    for step_id in (1, 2, 3):
        receiver.post(step_id, 9)
        assert_same(receiver.wait(step_id), activations(9, step_id))
    third.join(5)
    assert not third.is_alive()
    sender.flush(5)


def test_a_peer_that_takes_nothing_is_lost_at_the_deadline(groups):
    sender = make_sender(groups[0], timeout_s=0.3)
    sender.send(1, activations(3))
    sender.send(2, activations(3))
    with pytest.raises(PeerLost, match=r"rank 0, step 1: sending to rank 1 failed: Timed out waiting 300ms"):
        sender.send(3, activations(3))


def test_a_peer_that_sends_nothing_is_lost_at_the_deadline(groups):
    receiver = make_receiver(groups[1], timeout_s=0.3)
    receiver.post(8, 3)
    with pytest.raises(PeerLost, match=r"rank 1, step 8: nothing came from rank 0: Timed out waiting 300ms"):
        receiver.wait(8)


def test_a_shorter_message_is_noticed(groups):
    """gloo accepts it without a word, into a buffer that holds a whole message of an earlier step."""
    sender, receiver = make_sender(groups[0]), make_receiver(groups[1])
    for step_id in (1, 2, 3):
        receiver.post(step_id, 3)
        sender.send(step_id, activations(3, step_id))
        receiver.wait(step_id)
    receiver.post(4, 3)
    sender.send(4, activations(2, 4))
    with pytest.raises(PeerLost, match=r"rank 1, step 4: rank 0 sent something else than 3 tokens of epoch 4"):
        receiver.wait(4)


def test_a_message_that_ends_before_its_trailer_is_noticed(groups):
    """Not even the trailer that an earlier message left in the buffer may vouch for it."""
    sender, receiver = make_sender(groups[0]), make_receiver(groups[1])
    size = HopBuffer(BOUNDARY, MAX_TOKENS).message(3).numel()
    receiver.post(1, 3)
    sender.send(1, activations(3))
    receiver.wait(1)
    for buffer in [*receiver._free, receiver._in_use]:
        buffer.write_trailer(EPOCH, 2, 3)
    receiver.post(2, 3)
    groups[0].send([torch.ones(size - TRAILER.size, dtype=torch.uint8)], 1, 0).wait()
    with pytest.raises(PeerLost, match=r"step 2: .*trailer: epoch 0, step 0, 0 tokens"):
        receiver.wait(2)


def test_another_dtype_is_noticed(groups):
    receiver = make_receiver(groups[1])
    size = HopBuffer(BOUNDARY, MAX_TOKENS).message(3).numel()
    receiver.post(1, 3)
    groups[0].send([torch.ones(size // 4, dtype=torch.float32)], 1, 0).wait()
    with pytest.raises(PeerLost, match=r"rank 1, step 1: rank 0 sent something else"):
        receiver.wait(1)


@pytest.mark.parametrize(("step_id", "epoch"), [(6, EPOCH), (5, EPOCH + 1)])
def test_another_step_or_epoch_is_noticed(groups, step_id, epoch):
    sender, receiver = make_sender(groups[0], epoch=epoch), make_receiver(groups[1])
    receiver.post(5, 3)
    sender.send(step_id, activations(3))
    with pytest.raises(PeerLost, match=rf"rank 1, step 5: rank 0 .*trailer: epoch {epoch}, step {step_id}, 3 tokens"):
        receiver.wait(5)


def test_tensors_that_do_not_fit_the_boundary_are_our_own_fault(groups):
    sender = make_sender(groups[0])
    hidden, residual = activations(3)
    with pytest.raises(ValueError, match="boundary is torch.bfloat16"):
        sender.send(1, [hidden.float(), residual])
    with pytest.raises(ValueError, match="zip"):
        sender.send(1, [hidden])


def test_ranks_that_never_come_are_lost_at_the_deadline(tmp_path):
    with pytest.raises(PeerLost, match="rank 0: could not connect to the other 1 ranks"):
        connect_group(FileStore(str(tmp_path / "store"), 2), rank=0, world_size=2, host=None, timeout_s=0.5)


@pytest.fixture
def peer(tmp_path):
    """Rank 1 as a process, which receives two steps and then stands still; and our side's group."""
    store = str(tmp_path / "store")
    command = [sys.executable, "-m", "tests.worker.link_peer", store, "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        group = connect_group(FileStore(store, 2), rank=0, world_size=2, host=None, timeout_s=30)
        assert process.stdout.readline() == "connected\n"
        held = [process, group]
        del group
        yield held
        held.clear()
        process.kill()


def test_a_process_that_is_killed_is_noticed_at_once(peer):
    process, group = peer
    sender = make_sender(group, timeout_s=30)
    for step_id in (1, 2):
        sender.send(step_id, activations(3, step_id))
        sums = [float(tensor.sum()) for tensor in activations(3, step_id)]
        assert [float(word) for word in process.stdout.readline().split()] == [step_id, *sums]
    sender.send(3, activations(3))
    started = time.monotonic()
    process.kill()
    with pytest.raises(PeerLost, match="rank 0, step 3: sending to rank 1 failed: .*Connection (closed|reset) by peer"):
        sender.flush(30)
    assert time.monotonic() - started < 5


def test_a_process_that_is_frozen_is_lost_at_the_deadline(peer):
    process, group = peer
    sender = make_sender(group, timeout_s=0.5)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(PeerLost, match=r"rank 0, step \d: sending to rank 1 failed: Timed out waiting 500ms"):
        for step_id in range(1, 6):
            sender.send(step_id, activations(3))
