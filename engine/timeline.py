"""How does the core answer where everybody's time went? It asks all ranks, waits for none, and adds its own spans."""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.executor import Executor, Phase
from engine.gateway import Gateway
from engine.request import ClientId
from ipc.messages import Control, ControlReply, Scalars, StageReport, TimelineLane, TimelineReply, TimelineReport
from ipc.spans import SPAN_FIELDS, Kind, Recorder, Spans

MAX_SECONDS = 3600.0
"""A ring holds less than that of any busy process."""

MAX_OPEN_QUESTIONS = 8
"""Each may hold a megabyte per rank until the last one has answered."""

ANSWER_S = 2.0
"""What the ranks get to answer; a control thread that is alive takes milliseconds."""

_NONE = np.zeros(0, np.int64)


@dataclass(slots=True, kw_only=True)
class _Question:
    client: ClientId
    control_id: int
    seconds: float
    epoch: int
    asked_ns: int
    hosts: dict[int, str]
    """Of the ranks that were asked."""
    core_spans: Spans
    lanes: dict[int, TimelineLane] = field(default_factory=dict)
    """Of the ranks that have answered."""

    @property
    def deadline(self) -> float:
        return self.asked_ns / 1e9 + ANSWER_S

    @property
    def is_complete(self) -> bool:
        return len(self.lanes) == len(self.hosts)


class Timelines:
    """Questions for timelines that are not answered yet. Every method returns at once."""

    def __init__(
        self,
        recorder: Recorder,
        executor: Executor,
        gateway: Gateway,
        *,
        core_id: int,
        host: str,
        num_stages: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._recorder = recorder
        self._executor = executor
        self._gateway = gateway
        self._core_id = core_id
        self._host = host
        self._num_stages = num_stages
        self._clock = clock
        self._ids = itertools.count(1)
        self._open: dict[int, _Question] = {}

    def ask(self, client: ClientId, message: Control) -> None:
        """Begin to answer a Control "timeline"; what can't be answered is refused at once."""
        seconds = message.seconds
        if not 0 < seconds <= MAX_SECONDS:
            self._refuse(client, message, f"seconds={seconds:g} must be above 0 and at most {MAX_SECONDS:g}")
            return
        if len(self._open) >= MAX_OPEN_QUESTIONS:
            self._refuse(client, message, f"{MAX_OPEN_QUESTIONS} timelines are being collected; try again later")
            return
        question_id = next(self._ids)
        self._open[question_id] = _Question(
            client=client,
            control_id=message.control_id,
            seconds=seconds,
            epoch=self._executor.epoch,
            asked_ns=self._clock(),
            hosts=self._executor.ask_timelines(question_id, seconds),
            core_spans=self._recorder.snapshot(seconds),
        )
        self._close_if_complete(question_id)

    def take(self, report: TimelineReport) -> None:
        """A rank's answer; one that nobody waits for any more is dropped."""
        question = self._open.get(report.question_id)
        if question is None or report.rank not in question.hosts or report.rank in question.lanes:
            return
        question.lanes[report.rank] = self._lane(question, report)
        self._close_if_complete(report.question_id)

    def deadline(self) -> float | None:
        """When ``answer_overdue`` has something to do, on the monotonic clock in seconds."""
        return min((question.deadline for question in self._open.values()), default=None)

    def answer_overdue(self) -> None:
        """Answer with what is there where a rank was too slow, or its epoch has ended."""
        if not self._open:
            return
        now = self._clock() / 1e9
        is_over = self._executor.phase is Phase.GATHERING
        for question_id, question in list(self._open.items()):
            if is_over or question.epoch != self._executor.epoch:
                self._close(question_id, "was lost before it answered")
            elif now >= question.deadline:
                self._close(question_id, f"did not answer within {ANSWER_S:g} s")

    def _lane(self, question: _Question, report: TimelineReport) -> TimelineLane:
        host = question.hosts[report.rank]
        spans = report.spans
        if spans.size % SPAN_FIELDS:
            error = f"sent {spans.size} numbers, which are not spans of {SPAN_FIELDS}"
            return TimelineLane(rank=report.rank, host=host, error=error, clock_error_ns=0, spans=_NONE)
        clock_error_ns = 0
        if host != self._host:
            offset_ns, clock_error_ns = clock_offset(
                question.asked_ns, report.received_ns, report.replied_ns, self._clock()
            )
            spans = spans.reshape(-1, SPAN_FIELDS).copy()
            spans[:, 2:] += offset_ns
        return TimelineLane(
            rank=report.rank, host=host, error="", clock_error_ns=clock_error_ns, spans=spans.reshape(-1)
        )

    def _close_if_complete(self, question_id: int) -> None:
        if self._open[question_id].is_complete:
            self._close(question_id, "")

    def _close(self, question_id: int, why_missing: str) -> None:
        question = self._open.pop(question_id)
        lanes = [
            TimelineLane(rank=None, host=self._host, error="", clock_error_ns=0, spans=question.core_spans.reshape(-1))
        ]
        for rank in range(self._num_stages):
            why = why_missing if rank in question.hosts else "is not there"
            absent = TimelineLane(
                rank=rank, host=question.hosts.get(rank, ""), error=f"rank {rank} {why}", clock_error_ns=0, spans=_NONE
            )
            lanes.append(question.lanes.get(rank, absent))
        self._gateway.send(question.client, TimelineReply(
            core_id=self._core_id,
            control_id=question.control_id,
            now_ns=question.asked_ns,
            seconds=question.seconds,
            lanes=tuple(lanes),
        ))

    def _refuse(self, client: ClientId, message: Control, error: str) -> None:
        self._gateway.send(client, ControlReply(
            core_id=self._core_id, control_id=message.control_id, error=error, values={}
        ))


def clock_offset(asked_ns: int, received_ns: int, replied_ns: int, answered_ns: int) -> tuple[int, int]:
    """What to add to another host's times to have them on ours, and how wrong that may be.

    The two middle times are the other host's. A message takes at least no time, so the truth lies within the error.
    """
    offset_ns = ((asked_ns - received_ns) + (answered_ns - replied_ns)) // 2
    under_way_ns = (answered_ns - asked_ns) - (replied_ns - received_ns)
    return offset_ns, max(0, -(-under_way_ns // 2))


def stage_values(reports: Mapping[int, tuple[StageReport, StageReport | None]]) -> Scalars:
    """Live numbers of each stage for the engine's stats: seconds since its start, and shares of the last second."""
    values: Scalars = {}
    for rank, (report, before) in reports.items():
        name = f"stage_{rank}"
        values[f"{name}_resident_bytes"] = report.resident_bytes
        values[f"{name}_steps"] = report.num_steps
        values[f"{name}_queue_depth"] = report.queue_depth
        values |= {f"{name}_{key}": value for key, value in _graph_values(report).items()}
        seconds, seconds_before = stage_seconds(report), stage_seconds(before)
        passed = sum(seconds.values()) - sum(seconds_before.values())
        for cause, total in seconds.items():
            values[f"{name}_{cause}_s"] = total
            values[f"{name}_{cause}_share"] = (total - seconds_before[cause]) / passed if passed > 0 else 0.0
    return values


def _graph_values(report: StageReport) -> Scalars:
    """Shares of all steps by how they were computed, and of all computed tokens those that were padding."""
    # A step under way may be counted here and not there.
    num_steps = max(1, report.num_steps, report.num_full_graph_steps + report.num_piecewise_graph_steps)
    num_computed = max(1, report.num_tokens + report.num_padded_tokens)
    return {
        "full_graph_steps": report.num_full_graph_steps,
        "full_graph_share": report.num_full_graph_steps / num_steps,
        "piecewise_graph_steps": report.num_piecewise_graph_steps,
        "piecewise_graph_share": report.num_piecewise_graph_steps / num_steps,
        "tokens": report.num_tokens,
        "padding_share": report.num_padded_tokens / num_computed,
    }


def stage_seconds(report: StageReport | None) -> dict[str, float]:
    """Where a stage's time went, by cause, since its epoch began; all zero without a report."""
    if report is None:
        return dict.fromkeys(("busy", "plan_wait", "receive_wait", "token_wait", "send_wait", "mask_wait"), 0.0)
    return {
        "busy": report.busy_s,
        "plan_wait": report.plan_wait_s,
        "receive_wait": report.receive_wait_s,
        "token_wait": report.token_wait_s,
        "send_wait": report.send_wait_s,
        "mask_wait": report.mask_wait_s,
    }


def core_values(recorder: Recorder) -> Scalars:
    """Seconds since the core's start: of work as its spans have them, and on a processor; and the most memory it ever held.

    The first are longer when others take the processor away meanwhile. To be called by the core's own thread.
    """
    totals = recorder.totals_ns()
    return {
        "core_busy_s": (sum(totals) - totals[Kind.IDLE]) / 1e9,
        "core_cpu_s": time.thread_time(),
        "core_peak_bytes": _peak_bytes(),
    }


def _peak_bytes() -> int:
    """``getrusage`` would count what the process that started this one held."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
