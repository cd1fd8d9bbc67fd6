"""How the core collects timelines: from all ranks, without waiting, whole or with what is missing named."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from engine.executor import Phase
from engine.request import ClientId
from engine.timeline import (
    ANSWER_S,
    MAX_OPEN_QUESTIONS,
    Timelines,
    clock_offset,
    core_values,
    stage_values,
)
from ipc.channel import receive_within
from ipc.codec import decode
from ipc.messages import Control, ControlReply, StageReport, TimelineReply, TimelineReport
from ipc.spans import Kind, Recorder
from tests.engine.test_core import DEADLINE_S, RawClient, add, running_core
from tests.fakes import FakeClock

CLIENT = ClientId(0, b"c")
S = 10**9


class FakeExecutor:
    def __init__(self, hosts: dict[int, str]) -> None:
        self.hosts = hosts
        self.phase = Phase.READY
        self.epoch = 1
        self.asked: list[tuple[int, float]] = []

    def ask_timelines(self, question_id: int, seconds: float) -> dict[int, str]:
        self.asked.append((question_id, seconds))
        return self.hosts


class FakeGateway:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, client: ClientId, message: Any) -> None:
        assert client == CLIENT
        self.sent.append(message)


class Setup:
    def __init__(self, hosts: dict[int, str] | None = None) -> None:
        self.seconds = FakeClock(100.0)
        self.executor = FakeExecutor(hosts or {0: "here", 1: "here"})
        self.gateway = FakeGateway()
        self.timelines = Timelines(
            Recorder(clock=self.now_ns), self.executor, self.gateway,  # type: ignore[arg-type]
            core_id=5, host="here", num_stages=2, clock=self.now_ns,
        )  # fmt: skip

    def now_ns(self) -> int:
        return int(self.seconds.now * S)

    def ask(self, seconds: float = 1.0, control_id: int = 3) -> None:
        self.timelines.ask(CLIENT, Control(control_id=control_id, op="timeline", seconds=seconds))

    def report(self, rank: int, *spans: int, received_ns: int = 0, question_id: int = 1) -> None:
        self.timelines.take(TimelineReport(
            core_id=5, epoch=1, rank=rank, question_id=question_id, received_ns=received_ns, replied_ns=received_ns,
            spans=np.array(spans, np.int64),
        ))


def spans_of(reply: TimelineReply, lane: int) -> list[int]:
    spans: list[int] = reply.lanes[lane].spans.tolist()
    return spans


def test_the_answer_holds_the_core_and_every_rank_in_order() -> None:
    setup = Setup()
    setup.ask(seconds=0.5)
    assert setup.executor.asked == [(1, 0.5)] and setup.timelines.deadline() == 100 + ANSWER_S
    setup.report(1, 10, 4, 7, 9)
    setup.report(1, 11, 4, 7, 9)
    assert setup.gateway.sent == []
    setup.report(0)
    (reply,) = setup.gateway.sent
    assert (reply.core_id, reply.control_id, reply.now_ns, reply.seconds) == (5, 3, 100 * S, 0.5)
    assert [lane.rank for lane in reply.lanes] == [None, 0, 1]
    assert [lane.error for lane in reply.lanes] == ["", "", ""]
    assert spans_of(reply, 2) == [10, 4, 7, 9]
    assert setup.timelines.deadline() is None
    setup.report(0)  # too late for a question that is answered


def test_a_silent_rank_is_named_at_the_deadline_and_the_others_are_there() -> None:
    setup = Setup()
    setup.ask()
    setup.report(1, 10, 4, 7, 9)
    setup.seconds.advance(ANSWER_S - 0.01)
    setup.timelines.answer_overdue()
    assert setup.gateway.sent == []
    setup.seconds.advance(0.02)
    setup.timelines.answer_overdue()
    (reply,) = setup.gateway.sent
    assert reply.lanes[1].error == "rank 0 did not answer within 2 s" and spans_of(reply, 1) == []
    assert reply.lanes[2].error == "" and spans_of(reply, 2) == [10, 4, 7, 9]


@pytest.mark.parametrize("change", [{"phase": Phase.GATHERING}, {"epoch": 2}])
def test_an_epoch_that_ends_is_not_waited_for(change: dict[str, Any]) -> None:
    setup = Setup()
    setup.ask()
    for name, value in change.items():
        setattr(setup.executor, name, value)
    setup.timelines.answer_overdue()
    (reply,) = setup.gateway.sent
    assert [lane.error for lane in reply.lanes[1:]] == [f"rank {rank} was lost before it answered" for rank in (0, 1)]


def test_without_ranks_the_core_answers_at_once() -> None:
    setup = Setup()
    setup.executor.hosts = {}
    setup.ask()
    (reply,) = setup.gateway.sent
    assert [lane.error for lane in reply.lanes] == ["", "rank 0 is not there", "rank 1 is not there"]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 3601.0, float("inf"), float("nan")])
def test_a_window_that_makes_no_sense_is_refused(seconds: float) -> None:
    setup = Setup()
    setup.ask(seconds)
    (reply,) = setup.gateway.sent
    assert isinstance(reply, ControlReply)
    assert reply.error == f"seconds={seconds:g} must be above 0 and at most 3600"
    assert setup.executor.asked == []


def test_open_questions_are_bounded() -> None:
    setup = Setup()
    for number in range(MAX_OPEN_QUESTIONS + 1):
        setup.ask(control_id=number)
    (reply,) = setup.gateway.sent
    assert isinstance(reply, ControlReply) and reply.control_id == MAX_OPEN_QUESTIONS
    assert "8 timelines are being collected" in reply.error


def test_what_is_no_list_of_spans_is_an_error_of_that_rank_alone() -> None:
    setup = Setup()
    setup.ask()
    setup.report(0, 1, 2, 3)
    setup.report(1, 10, 4, 7, 9)
    (reply,) = setup.gateway.sent
    assert reply.lanes[1].error == "sent 3 numbers, which are not spans of 4" and spans_of(reply, 1) == []


def test_times_of_another_host_are_moved_to_the_cores_clock() -> None:
    """The rank's clock is 40 s behind; the question took 3 ms to it, the answer 1 ms back."""
    setup = Setup({0: "here", 1: "there"})
    setup.ask()
    setup.report(0, 10, 4, 7, 9)
    setup.seconds.advance(0.004)
    arrived = 60 * S + 3_000_000
    setup.report(1, 10, 4, arrived - 200, arrived - 100, received_ns=arrived)
    (reply,) = setup.gateway.sent
    assert spans_of(reply, 1) == [10, 4, 7, 9]
    lane = reply.lanes[2]
    assert lane.clock_error_ns == 2_000_000
    kind, step, start, end = spans_of(reply, 2)
    truth = 100 * S + 3_000_000
    assert (kind, step, end - start) == (10, 4, 100) and abs(end - (truth - 100)) <= lane.clock_error_ns


def test_a_clock_offset_is_right_within_its_error() -> None:
    for there, back in ((0, 0), (5, 0), (0, 8), (3, 4)):
        received, replied = 1000 + 50 + there, 1000 + 50 + there + 20
        offset, error = clock_offset(1000, received, replied, 1000 + there + 20 + back)
        assert abs(offset - -50) <= error <= 4


def report_at(seconds: float, **waits: float) -> StageReport:
    return StageReport(
        core_id=1, epoch=1, rank=1, num_steps=9, busy_s=seconds, queue_depth=2, resident_bytes=77,
        num_full_graph_steps=6, num_piecewise_graph_steps=2, num_tokens=60, num_padded_tokens=20,
        **{"plan_wait_s": 0.0, "receive_wait_s": 0.0, "token_wait_s": 0.0, **waits},
    )  # fmt: skip


def test_stats_tell_each_stages_shares_of_the_last_second() -> None:
    before = report_at(5.0, plan_wait_s=1.0)
    values = stage_values({1: (report_at(5.5, plan_wait_s=1.25, receive_wait_s=0.125, send_wait_s=0.125), before)})
    assert values == {
        "stage_1_resident_bytes": 77, "stage_1_steps": 9, "stage_1_queue_depth": 2,
        "stage_1_busy_s": 5.5, "stage_1_busy_share": 0.5, "stage_1_plan_wait_s": 1.25, "stage_1_plan_wait_share": 0.25,
        "stage_1_full_graph_steps": 6, "stage_1_full_graph_share": 6 / 9, "stage_1_piecewise_graph_steps": 2,
        "stage_1_piecewise_graph_share": 2 / 9, "stage_1_tokens": 60, "stage_1_padding_share": 0.25,
        "stage_1_receive_wait_s": 0.125, "stage_1_receive_wait_share": 0.125, "stage_1_token_wait_s": 0.0,
        "stage_1_token_wait_share": 0.0, "stage_1_send_wait_s": 0.125, "stage_1_send_wait_share": 0.125,
        "stage_1_mask_wait_s": 0.0, "stage_1_mask_wait_share": 0.0,
    }  # fmt: skip
    assert stage_values({0: (report_at(0.0), None)})["stage_0_busy_share"] == 0.0


def test_stats_tell_the_cores_own_seconds() -> None:
    clock = FakeClock(1.0)
    recorder = Recorder(clock=lambda: int(clock.now * S))
    recorder.doing(Kind.IDLE)
    clock.advance(5)
    recorder.doing(Kind.SCHEDULE)
    clock.advance(0.5)
    before = time.thread_time()
    values = core_values(recorder)
    assert values.keys() == {"core_busy_s", "core_cpu_s", "core_peak_bytes"}
    assert psutil.Process().memory_info().rss * 0.5 < values["core_peak_bytes"] < 100e9
    assert values["core_busy_s"] == 0.5 and before <= values["core_cpu_s"] <= time.thread_time()


# ------------------------------------------------------------------------------------------ over the core's sockets


def hear_timeline(client: RawClient) -> TimelineReply:
    reply: TimelineReply = decode(receive_within(client.socket, DEADLINE_S, "the core"), (TimelineReply,))
    return reply


def test_the_core_answers_requests_while_it_waits_for_a_silent_rank(tmp_path: Path) -> None:
    with running_core(tmp_path) as engine:
        group, client, asker = engine.group(), engine.client(), engine.client()
        group.spans = {1: np.array([Kind.FORWARD, 1, 5, 6], np.int64)}
        client.attach()
        began = time.monotonic()
        asker.ask(Control(control_id=4, op="timeline", seconds=60.0))
        client.ask(add("a", [1, 2, 3]))
        assert client.collect("a")[1] == "length"
        assert not asker.socket.poll(0), "the answer does not wait for rank 0, or requests wait for the answer"
        reply = hear_timeline(asker)
        assert ANSWER_S <= time.monotonic() - began < ANSWER_S + DEADLINE_S
        assert [lane.error for lane in reply.lanes] == ["", "rank 0 did not answer within 2 s", ""]
        kind, step, start, end = spans_of(reply, 2)  # moved: the fake ranks say that they are on another host
        assert (kind, step, end - start) == (Kind.FORWARD, 1, 1)
        group.spans[0] = np.zeros(0, np.int64)
        asker.ask(Control(control_id=5, op="timeline", seconds=60.0))
        lane = hear_timeline(asker).lanes[0]
        spans = lane.spans.reshape(-1, 4)
        assert (spans[1:, 2] == spans[:-1, 3]).all()
        steps = {kind: {int(step) for step in spans[spans[:, 0] == kind, 1]} for kind in (Kind.SEND_PLAN, Kind.APPLY)}
        assert steps[Kind.SEND_PLAN] == steps[Kind.APPLY] == set(range(1, group.num_steps + 1))
        assert client.stats()["core_busy_s"] > 0
        group.stop()


def test_a_lost_group_does_not_hold_up_the_answer(tmp_path: Path) -> None:
    with running_core(tmp_path) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        client.ask(Control(control_id=4, op="timeline"))
        group.fail("made to", fatal=False)
        reply = hear_timeline(client)
        assert [lane.error for lane in reply.lanes[1:]] == [f"rank {r} was lost before it answered" for r in (0, 1)]
        client.ask(Control(control_id=4, op="timeline", seconds=-1))
        reply = client.hear()
        assert isinstance(reply, ControlReply) and "must be above 0" in reply.error
        group.stop()
