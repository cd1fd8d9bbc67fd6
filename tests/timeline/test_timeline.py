"""What spans add up to, on timelines made by hand; trace files and pictures of them."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc.messages import TimelineLane, TimelineReply
from ipc.spans import NO_STEP, Kind
from scripts.timeline import picture
from scripts.timeline.lanes import Timeline, idle_times, read_timeline, time_within
from scripts.timeline.summary import Summary, as_text, name_of, summarize
from scripts.timeline.trace_file import trace_of

MS = 10**6
T0 = 5_000_000_000_000_000_000 // 1000
"""Far from zero, as the clock of a machine that runs for long."""

Piece = tuple[Kind, int, float]
"""Kind, step, milliseconds."""


def lane(rank: int | None, *pieces: Piece, begin_ms: float = 0.0, error: str = "", clock_error_ns: int = 0) -> TimelineLane:
    spans, now = [], T0 + int(begin_ms * MS)
    for kind, step, milliseconds in pieces:
        spans.append((int(kind), step, now, now + int(milliseconds * MS)))
        now += int(milliseconds * MS)
    return TimelineLane(
        rank=rank, host="h", error=error, clock_error_ns=clock_error_ns, spans=np.array(spans, np.int64).reshape(-1)
    )


def reply(*lanes: TimelineLane, end_ms: float = 100.0, seconds: float = 0.1) -> TimelineReply:
    return TimelineReply(core_id=1, control_id=1, now_ns=T0 + int(end_ms * MS), seconds=seconds, lanes=lanes)


CORE = lane(
    None,
    (Kind.CLIENTS, NO_STEP, 1), (Kind.SCHEDULE, NO_STEP, 1), (Kind.SEND_PLAN, 1, 1), (Kind.SCHEDULE, NO_STEP, 0.5),
    (Kind.SEND_PLAN, 2, 0.5), (Kind.IDLE, NO_STEP, 46),                                                         # to 50
    (Kind.RECEIVE, NO_STEP, 1), (Kind.APPLY, 1, 1), (Kind.ANSWER, 1, 1), (Kind.SCHEDULE, NO_STEP, 1),
    (Kind.SEND_PLAN, 3, 1), (Kind.IDLE, NO_STEP, 25), (Kind.APPLY, 2, 1), (Kind.APPLY, 3, 1),                   # to 82
    (Kind.IDLE, NO_STEP, 18),
)  # fmt: skip
"""Idle without work in the last 18 ms. Work between plans: 1 ms, then 5 ms."""

FIRST = lane(
    0,
    (Kind.WAIT_PLAN, NO_STEP, 4), (Kind.PREPARE, 1, 1), (Kind.FORWARD, 1, 9), (Kind.SEND, 1, 1),                # to 15
    (Kind.PREPARE, 2, 1), (Kind.WAIT_TOKENS, 2, 10), (Kind.ACCEPT, 1, 1), (Kind.FORWARD, 2, 12), (Kind.SEND, 2, 1),  # 40
    (Kind.WAIT_PLAN, 2, 15), (Kind.PREPARE, 3, 1), (Kind.ACCEPT, 2, 1), (Kind.FORWARD, 3, 10), (Kind.WAIT_SEND, 3, 3),  # 70
    (Kind.WAIT_PLAN, 3, 30),
)  # fmt: skip
LAST = lane(
    1,
    (Kind.WAIT_PLAN, NO_STEP, 4), (Kind.PREPARE, 1, 1), (Kind.WAIT_ACTIVATIONS, 1, 10), (Kind.FORWARD, 1, 8),   # to 23
    (Kind.SAMPLE, 1, 2), (Kind.RETURN, 1, 1), (Kind.WAIT_ACTIVATIONS, 2, 14), (Kind.FORWARD, 2, 9),             # to 49
    (Kind.SAMPLE, 2, 1.5), (Kind.RETURN, 2, 0.5), (Kind.WAIT_PLAN, 2, 9), (Kind.FORWARD, 3, 20),                # to 80
    (Kind.WAIT_PLAN, 3, 20),
)  # fmt: skip


@pytest.fixture
def timeline() -> Timeline:
    return read_timeline(reply(CORE, FIRST, LAST))


@pytest.fixture
def summary(timeline: Timeline) -> Summary:
    return summarize(timeline)


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)


def test_time_without_work_is_left_out(summary: Summary) -> None:
    assert (ms(summary.window_s), ms(summary.idle_s), ms(summary.active_s)) == (100, 18, 82)
    for stage in summary.stages:
        assert ms(stage.busy_s + stage.wait_s) == 82


def test_busy_and_waits_of_each_stage(summary: Summary) -> None:
    first, last = summary.stages
    assert (first.num_steps, last.num_steps) == (3, 3)
    assert ms(first.busy_s) == 1 + 9 + 1 + 1 + 1 + 12 + 1 + 1 + 1 + 10
    assert {name: ms(seconds) for name, seconds in first.waits.items()} == {
        "wait plan": 4 + 15 + 12, "wait activations": 0, "wait tokens": 10, "wait send": 3, "wait masks": 0,
    }  # fmt: skip
    assert ms(last.busy_s) == 1 + 8 + 2 + 1 + 9 + 1.5 + 0.5 + 20
    assert {name: ms(seconds) for name, seconds in last.waits.items()} == {
        "wait plan": 4 + 9 + 2, "wait activations": 24, "wait tokens": 0, "wait send": 0, "wait masks": 0,
    }  # fmt: skip
    assert ms(last.work["forward"]) == 37 and ms(last.work["sample"]) == 3.5


def test_the_busiest_stage_explains_the_others_waiting_as_far_as_it_has_more_to_do(summary: Summary) -> None:
    first, last = summary.stages
    assert (ms(first.explained_s), ms(last.explained_s)) == (43 - 38, 0)
    assert (ms(first.unexplained_s), ms(last.unexplained_s)) == (82 - 43, 82 - 43)


def test_the_cores_work_between_two_plans(summary: Summary) -> None:
    core = summary.core
    assert (core.num_steps, core.per_step.count) == (3, 2)
    assert ms(core.per_step.mean_s) == 3 and ms(core.per_step.p50_s) == 3
    assert ms(core.busy_s) == 4 + 5 + 2
    assert ms(core.work["apply"]) == 3 and ms(core.work["schedule"]) == 2.5


def test_the_way_of_a_token(summary: Summary) -> None:
    """Step 1 is sampled at 25 ms and taken at 26; step 2 at 50.5 and taken at 56. Step 3 is planned after both."""
    tokens = summary.tokens
    assert tokens.to_first_stage.count == 2
    assert ms(tokens.to_first_stage.mean_s) == (1 + 5.5) / 2
    assert ms(tokens.to_next_input.p50_s) == 0
    assert (tokens.num_inputs, tokens.planned_ahead) == (2, 0.5)


def test_all_lanes_are_cut_to_what_all_of_them_cover() -> None:
    late = lane(1, (Kind.FORWARD, 1, 50), (Kind.WAIT_PLAN, 1, 10), begin_ms=30)
    timeline = read_timeline(reply(CORE, FIRST, late))
    assert (timeline.begin_ns, timeline.end_ns) == (T0 + 30 * MS, T0 + 90 * MS)
    for one in timeline.lanes:
        assert (one.spans[0, 2], one.spans[-1, 3]) == (timeline.begin_ns, timeline.end_ns)
        assert (one.spans[1:, 2] == one.spans[:-1, 3]).all()
    assert read_timeline(reply(CORE, FIRST, seconds=0.02)).begin_ns == T0 + 80 * MS


def test_a_missing_rank_is_named() -> None:
    silent = replace(LAST, error="rank 1 did not answer within 2 s", spans=np.zeros(0, np.int64))
    summary = summarize(read_timeline(reply(CORE, FIRST, silent)))
    assert [stage.rank for stage in summary.stages] == [0]
    assert summary.problems == ("rank 1 did not answer within 2 s",)
    assert "missing: rank 1 did not answer within 2 s" in as_text(summary)


@pytest.mark.parametrize("lanes", [[], [lane(None)], [lane(None, (Kind.IDLE, NO_STEP, 100)), lane(0, error="x")]])
def test_next_to_nothing_is_summed_up_all_the_same(lanes: list[TimelineLane]) -> None:
    timeline = read_timeline(reply(*lanes))
    summary = summarize(timeline)
    assert summary.stages == () and summary.core.per_step.count == 0
    assert as_text(summary).startswith("the last ")
    assert "core's own work per step: no step was sent" in as_text(summary)
    assert "none came back to stage 0" in as_text(summary)
    json.dumps(trace_of(timeline))


def test_a_new_epoch_forgets_the_steps_of_the_old_one() -> None:
    core = lane(
        None, (Kind.SEND_PLAN, 7, 1), (Kind.SEND_PLAN, 8, 1), (Kind.IDLE, NO_STEP, 3), (Kind.SEND_PLAN, 1, 1),
        (Kind.APPLY, 1, 1), (Kind.IDLE, NO_STEP, 5),
    )  # fmt: skip
    assert (idle_times(read_timeline(reply(core, end_ms=12)).core) - T0).tolist() == [[7 * MS, 12 * MS]]


def test_steps_sent_before_the_window_are_work() -> None:
    core = lane(None, (Kind.IDLE, NO_STEP, 3), (Kind.APPLY, 5, 1), (Kind.IDLE, NO_STEP, 2))
    assert (idle_times(read_timeline(reply(core, end_ms=6)).core) - T0).tolist() == [[4 * MS, 6 * MS]]


def test_times_within_intervals_are_exact_far_from_zero() -> None:
    within = time_within(np.array([[T0 + 10, T0 + 20], [T0 + 30, T0 + 31]], np.int64))
    times = np.array([0, 10, 15, 20, 25, 30, 31, 99], np.int64) + T0
    assert within(times).tolist() == [0, 0, 5, 10, 10, 10, 11, 11]


def test_the_text_holds_the_figures(summary: Summary) -> None:
    text = as_text(summary)
    assert "the last 0.10 s, 18.0% of it without work" in text
    assert "52.4%" in text and "47.6%" in text  # 43 of 82 ms busy, 39 unexplained
    assert "core's own work per step: p50 3000 us, p99 4960 us" in text
    assert "50.0% of 2" in text
    json.dumps(summary.as_dict())


# ------------------------------------------------------------------------------------------ trace and picture


def slices_of(trace: dict[str, Any]) -> dict[int, list[tuple[float, float, str]]]:
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return found


def test_a_trace_is_json_and_its_slices_are_nested(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(trace_of(timeline)))
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "core", 1: "stage 0", 2: "stage 1"}
    for slices in slices_of(trace).values():
        slices.sort(key=lambda one: (one[0], -one[1]))
        open_until: list[float] = []
        for begin, end, name in slices:
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{name} sticks out"
            open_until.append(end)
            assert len(open_until) <= 2
    steps = [one for one in slices_of(trace)[1] if one[2].startswith("step")]
    assert (4000, 15000, "step 1") in steps and (56000 + 1000, 70000, "step 3") in steps


def test_arrows_begin_and_end_inside_the_slices_that_they_join(timeline: Timeline) -> None:
    trace = trace_of(timeline)
    slices = slices_of(trace)
    ends: dict[int, dict[str, tuple[int, str]]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            inside = [n for b, e, n in slices[event["pid"]] if b <= event["ts"] < e and not n.startswith("step")]
            ends[event["id"]][event["ph"]] = (event["pid"], inside[0])
    arrows = [(one["s"], one["f"]) for one in ends.values()]
    assert arrows == [((1, "send"), (2, "forward"))] * 2 + [((2, "return"), (1, "accept"))] * 2


def test_a_picture_is_a_png(timeline: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "t.png"
    picture.draw(str(path), timeline)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_every_kind_has_a_colour_and_a_name() -> None:
    assert set(picture.COLOURS) == set(Kind)
    assert (name_of(Kind.WAIT_PLAN), name_of(63)) == ("wait plan", "kind 63")
