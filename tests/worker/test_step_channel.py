"""Does a rank get its plans and the masks that were promised, in order, also when it waits for one while the other comes?"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import zmq

from ipc.channel import open_socket
from ipc.codec import decode, encode
from ipc.errors import PeerLost, ProtocolError
from ipc.messages import CachedRequestData, NewRequestData, SchedulerOutput, Shutdown, WorkerReady
from ipc.params import SamplingParams
from tests.worker.test_masks import masks_of
from worker.step_channel import ShutdownRequested, StepChannel

CORE_ID, EPOCH = 7, 3
DEADLINE_S = 30.0


class Core:
    def __init__(self, address: str = "inproc://core") -> None:
        self.context = zmq.Context()
        self.router = open_socket(self.context, zmq.ROUTER)
        self.router.bind(address)
        self.channel = StepChannel(self.context, address, core_id=CORE_ID, epoch=EPOCH, timeout_s=DEADLINE_S)
        self.channel.send(WorkerReady(core_id=CORE_ID, epoch=EPOCH, rank=0, kv_bytes=1, warmup_s=0.0))
        self.identity, *frames = self.router.recv_multipart()
        assert decode(frames, (WorkerReady,)).rank == 0

    def say(self, *messages: object) -> None:
        for message in messages:
            self.router.send_multipart([self.identity, *encode(message)])

    def close(self) -> None:
        self.channel.close()
        self.router.close(0)
        self.context.destroy(0)


@pytest.fixture
def core() -> Iterator[Core]:
    core = Core()
    yield core
    core.close()


def plan(step_id: int, *, epoch: int = EPOCH) -> SchedulerOutput:
    return SchedulerOutput(
        core_id=CORE_ID, epoch=epoch, step_id=step_id, freed_rows=[], new_requests=(), cached_requests=CachedRequestData(),
        rows=[0], num_scheduled_tokens=[1], needs_tokens_of_step=0, has_grammar=True,
    )  # fmt: skip


def shutdown() -> Shutdown:
    return Shutdown(core_id=CORE_ID, epoch=EPOCH, reason="test", exit_code=5)


def test_plans_that_come_while_masks_are_awaited_are_kept(core):
    core.say(plan(1), plan(2), masks_of(1, {0: [1]}), plan(3), masks_of(2, {}))
    assert core.channel.next_plan().step_id == 1
    assert core.channel.take_masks(1, DEADLINE_S).rows == [0]
    assert core.channel.next_plan().step_id == 2
    assert core.channel.take_masks(2, DEADLINE_S).rows == []
    assert [upcoming.step_id for upcoming in core.channel.take_waiting()] == [3]


def test_masks_that_come_while_a_plan_is_awaited_are_kept(core):
    core.say(plan(1), masks_of(1, {0: [1]}), plan(2))
    assert [core.channel.next_plan().step_id for _ in range(2)] == [1, 2]
    assert core.channel.take_masks(1, DEADLINE_S).step_id == 1


def test_masks_that_do_not_come_are_a_lost_peer(core):
    core.say(plan(1), plan(2))
    with pytest.raises(PeerLost, match=r"step 1: the core sent no masks within 0.05 s"):
        core.channel.take_masks(1, 0.05)


def test_masks_of_another_step_are_refused(core):
    core.say(masks_of(2, {}))
    with pytest.raises(ProtocolError, match="is 2, the masks of step 1 are to come next"):
        core.channel.take_masks(1, DEADLINE_S)


def test_a_shutdown_ends_the_wait_for_masks(core):
    core.say(plan(1), shutdown())
    core.channel.next_plan()
    with pytest.raises(ShutdownRequested) as caught:
        core.channel.take_masks(1, DEADLINE_S)
    assert caught.value.exit_code == 5


def test_masks_that_came_before_a_shutdown_are_taken(core):
    core.say(plan(1), masks_of(1, {}), shutdown())
    core.channel.next_plan()
    assert core.channel.take_masks(1, DEADLINE_S).step_id == 1
    with pytest.raises(ShutdownRequested):
        core.channel.next_plan()


def test_messages_of_another_epoch_are_dropped(core):
    core.say(plan(9, epoch=2), plan(1))
    assert core.channel.next_plan().step_id == 1 and core.channel.num_dropped == 1


def test_a_step_that_can_not_be_read_ends_the_rank_and_is_not_left_out(core):
    version, tag, _ = encode(plan(1))
    core.router.send_multipart([core.identity, version, tag, b"broken"])
    with pytest.raises(ProtocolError, match="SchedulerOutput"):
        core.channel.next_plan()


def test_a_step_with_much_to_tell_arrives(tmp_path):
    """Parameters and prompts of hundreds of new requests, masks of a large vocabulary; in memory there is no limit to meet."""
    core = Core(f"ipc://{tmp_path}/core")
    try:
        new = NewRequestData(
            row=0, request_id="a", token_ids=np.zeros(5 << 20, np.int32), num_prompt_tokens=5 << 20, num_computed_tokens=0,
            block_ids=([0],), params=SamplingParams(temperature=0.0, seed=0),
        )  # fmt: skip
        core.say(replace(plan(1), new_requests=(new,)), plan(2))
        assert [core.channel.next_plan().step_id for _ in range(2)] == [1, 2]
    finally:
        core.close()
