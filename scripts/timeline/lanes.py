"""From the core's answer to lanes that can be compared: one window of time for all."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ipc.messages import TimelineReply
from ipc.spans import SPAN_FIELDS, Kind, Spans

Times = NDArray[np.int64]

KIND, STEP, START, END = range(SPAN_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What one thread did within the window, without gaps."""

    name: str
    rank: int | None
    """None for the core."""
    spans: Spans
    clock_error_ns: int

    def of(self, *kinds: Kind) -> Spans:
        """The spans of these kinds."""
        return self.spans[np.isin(self.spans[:, KIND], kinds)]

    def newest(self, kind: Kind) -> dict[int, tuple[int, int]]:
        """Start and end of the last span of this kind, by step."""
        return {int(step): (int(start), int(end)) for _, step, start, end in self.of(kind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All lanes, cut to the part of the window that each of them covers."""

    begin_ns: int
    end_ns: int
    core: Lane
    stages: tuple[Lane, ...]
    """Those that answered, in order."""
    problems: tuple[str, ...]
    """What is missing."""

    @property
    def window_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return (self.core, *self.stages)


def read_timeline(reply: TimelineReply) -> Timeline:
    """Cut all lanes to the same window: as long as was asked for, or as far back as every lane goes."""
    found = [(lane, lane.spans.reshape(-1, SPAN_FIELDS)) for lane in reply.lanes if lane.spans.size]
    begin = max([reply.now_ns - int(reply.seconds * 1e9), *(int(spans[0, START]) for _, spans in found)])
    end = max(begin, min([reply.now_ns, *(int(spans[-1, END]) for _, spans in found)]))
    lanes = [
        Lane(
            name="core" if lane.rank is None else f"stage {lane.rank}",
            rank=lane.rank,
            spans=cut(spans, begin, end),
            clock_error_ns=lane.clock_error_ns,
        )
        for lane, spans in found
    ]
    empty = Lane(name="core", rank=None, spans=np.zeros((0, SPAN_FIELDS), np.int64), clock_error_ns=0)
    return Timeline(
        begin_ns=begin,
        end_ns=end,
        core=next((lane for lane in lanes if lane.rank is None), empty),
        stages=tuple(lane for lane in lanes if lane.rank is not None),
        problems=tuple(lane.error for lane in reply.lanes if lane.error),
    )


def cut(spans: Spans, begin: int, end: int) -> Spans:
    """The parts of the spans between two times, as new spans."""
    inside = spans[(spans[:, END] > begin) & (spans[:, START] < end)].copy()
    inside[:, START:] = inside[:, START:].clip(begin, end)
    return inside


def idle_times(core: Lane) -> Times:
    """[number, 2]: starts and ends of the times without work: the core waits, and no step is under way.

    A core that is slow to plan is not idle: then no step is under way either, but it does not wait.
    """
    in_flight = _sent_before(core)
    newest = 0
    found = []
    for kind, step, start, end in core.spans.tolist():
        if kind == Kind.SEND_PLAN:
            if step <= newest:
                in_flight.clear()  # another epoch: what was under way is lost
            newest = step
            in_flight.add(step)
        elif kind == Kind.APPLY:
            in_flight.discard(step)
        elif kind == Kind.IDLE and not in_flight:
            found.append((start, end))
    return np.array(found, np.int64).reshape(-1, 2)


def _sent_before(core: Lane) -> set[int]:
    """Steps that were under way when the window began."""
    seen: set[int] = set()
    under_way: set[int] = set()
    for kind, step in core.spans[:, : STEP + 1].tolist():
        if kind in (Kind.SEND_PLAN, Kind.APPLY):
            if kind == Kind.APPLY and step not in seen:
                under_way.add(step)
            seen.add(step)
    return under_way


def time_within(intervals: Times) -> Callable[[Times], NDArray[np.float64]]:
    """A function that tells how much of these intervals lies before each of some times.

    ``intervals``: [number, 2], in order of time, apart from each other.
    """
    edges = intervals.reshape(-1)
    if not edges.size:
        return lambda times: np.zeros(len(times))
    origin = int(edges[0])  # floats hold times since then to the nanosecond, but not since the machine's start
    passed = np.repeat(np.cumsum(intervals[:, 1] - intervals[:, 0]), 2)
    passed[0::2] -= intervals[:, 1] - intervals[:, 0]
    return lambda times: np.interp((times - origin).astype(np.float64), edges - origin, passed)


def runs_of_steps(lane: Lane, apart: tuple[Kind, ...]) -> Iterator[Spans]:
    """Consecutive spans of one step, without those of the kinds that stand apart."""
    spans = lane.spans
    is_apart = np.isin(spans[:, KIND], apart) | (spans[:, STEP] < 0)
    begins = np.flatnonzero(np.diff(spans[:, STEP]) | np.diff(is_apart)) + 1
    for run in np.split(spans, begins):
        if len(run) and run[0, STEP] >= 0 and run[0, KIND] not in apart:
            yield run
