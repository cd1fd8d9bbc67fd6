"""How does a timeline become a trace file for Perfetto (ui.perfetto.dev) or chrome://tracing?

One process per lane. A slice "step 17" encloses what belongs to it; arrows lead activations to the next stage and
sampled tokens to the first.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from ipc.spans import Kind
from scripts.timeline.lanes import END, START, STEP, Lane, Timeline, runs_of_steps
from scripts.timeline.summary import name_of

STAND_APART = (Kind.WAIT_PLAN, Kind.IDLE)
"""Belong to no step."""

Event = dict[str, Any]


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """The trace as an object to be written as JSON. Times are microseconds since the window began."""
    events: list[Event] = []
    for pid, lane in enumerate(timeline.lanes):
        events += _names(pid, lane)
        events += _slices(pid, lane, timeline.begin_ns)
    return {"traceEvents": events + list(_arrows(timeline)), "displayTimeUnit": "ms"}


def _names(pid: int, lane: Lane) -> list[Event]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": lane.name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
    ]


def _slices(pid: int, lane: Lane, begin_ns: int) -> Iterator[Event]:
    for run in runs_of_steps(lane, STAND_APART):
        if len(run) > 1:
            yield _slice(pid, f"step {run[0, STEP]}", int(run[0, START]), int(run[-1, END]), begin_ns)
    for kind, step, start, end in lane.spans.tolist():
        made = _slice(pid, name_of(kind), start, end, begin_ns)
        yield made | {"args": {"step": step}} if step >= 0 else made


def _slice(pid: int, name: str, start: int, end: int, begin_ns: int) -> Event:
    return {"ph": "X", "name": name, "pid": pid, "tid": 0, "ts": (start - begin_ns) / 1e3, "dur": (end - start) / 1e3}


def _arrows(timeline: Timeline) -> Iterator[Event]:
    numbers = itertools.count(1)
    stages = list(enumerate(timeline.stages, start=1))
    for (pid, lane), (next_pid, next_lane) in itertools.pairwise(stages):
        targets = next_lane.newest(Kind.FORWARD)
        for step, (start, _) in lane.newest(Kind.SEND).items():
            if step in targets:
                yield from _arrow("activations", next(numbers), timeline, (pid, start), (next_pid, targets[step][0]))
    if len(stages) > 1:
        targets = timeline.stages[0].newest(Kind.ACCEPT)
        for step, (start, _) in timeline.stages[-1].newest(Kind.RETURN).items():
            if step in targets:
                yield from _arrow("tokens", next(numbers), timeline, (len(stages), start), (1, targets[step][0]))


def _arrow(name: str, number: int, timeline: Timeline, begin: tuple[int, int], end: tuple[int, int]) -> Iterator[Event]:
    """``begin``, ``end``: process and time (ns) within the slice that the arrow's end is bound to."""
    for phase, (pid, at) in (("s", begin), ("f", end)):
        event = {"ph": phase, "cat": name, "name": name, "id": number, "pid": pid, "tid": 0,
                 "ts": (at - timeline.begin_ns) / 1e3}  # fmt: skip
        yield event | {"bp": "e"} if phase == "f" else event


