"""What does the core count about requests and stages, over all epochs of its life? ``metrics_text`` shows it to Prometheus.

Counting costs an addition or two per token and a search in a short table per step or request; nothing is kept for either.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from engine.request import Request
from engine.scheduler import RequestProgress
from engine.scheduler_config import SchedulerStats, totals_of
from engine.timeline import stage_seconds
from ipc.messages import Scalars, StageReport

FINISH_REASONS = ("stop", "length", "abort", "timeout", "error", "disconnect")
"""How a choice may end: as its client is told, with an error, or with a client that is gone."""

REQUEST_BOUNDS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0,
)  # fmt: skip
"""From a cached prompt on a fast device to a long answer behind a long queue."""

TOKEN_BOUNDS_S = (
    0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Between two tokens: close together where readers notice a difference."""

Reports = Mapping[int, tuple[StageReport, StageReport | None]]
"""By rank, the newest one and the one before it."""


class Histogram:
    """Counts of observed seconds by fixed upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """So many observations of the same length."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def values(self, name: str) -> Scalars:
        """``NAME_le_BOUND``: observations up to each bound, as they add up; ``NAME_count`` and ``NAME_sum``."""
        values: Scalars = {}
        num_observed = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            num_observed += count
            values[f"{name}_le_{bound:g}"] = num_observed
        values[f"{name}_count"] = num_observed + self._counts[-1]
        values[f"{name}_sum"] = self._sum
        return values


class Metrics:
    """One core's sums and histograms. Times are the caller's, on the clock of ``Request.arrival_time``."""

    def __init__(self) -> None:
        self._queue = Histogram(REQUEST_BOUNDS_S)
        self._first_token = Histogram(REQUEST_BOUNDS_S)
        self._inter_token = Histogram(TOKEN_BOUNDS_S)
        self._end_to_end = Histogram(REQUEST_BOUNDS_S)
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._num_restarts = 0
        self._totals = totals_of(None)
        """Of past epochs, as the two below."""
        self._stage_totals: dict[int, dict[str, float]] = {}

    def tokens_came(self, progresses: Iterable[RequestProgress], now: float) -> None:
        """A step returned. Several tokens of one request share the time since the one before them."""
        gaps: dict[float, int] = {}
        for progress in progresses:
            count = len(progress.new_token_ids)
            if not count:
                continue
            request = progress.request
            before, request.last_token_at = request.last_token_at, now
            if count == 1 and before:
                gaps[before] = gaps.get(before, 0) + 1
                continue
            if not before:
                self._first_token.observe(now - request.arrival_time)
                self._queue.observe(request.started_at - request.arrival_time)
                before, count = now, count - 1
            if count:
                self._inter_token.observe((now - before) / count, count)
        for before, count in gaps.items():
            self._inter_token.observe(now - before, count)

    def ended(self, request: Request, reason: str, now: float) -> None:
        """A choice is over for one of FINISH_REASONS. Those that came to their own end have an end-to-end time."""
        self._finished[reason] += 1
        if reason in ("stop", "length"):
            self._end_to_end.observe(now - request.arrival_time)

    def epoch_ended(self, stats: SchedulerStats | None, reports: Mapping[int, StageReport]) -> None:
        """Keep what an epoch leaves: its scheduler's sums, if it had one, and each rank's newest report."""
        self._num_restarts += 1
        self._totals = self._totals_with(stats)
        for rank, report in reports.items():
            self._stage_totals[rank] = self._stage_totals_with(rank, report)

    def values(self, stats: SchedulerStats | None, reports: Reports, *, num_outside: int) -> Scalars:
        """All of it by name, with the numbers of the present; ``num_outside`` wait outside the scheduler."""
        values: Scalars = {
            "requests_running": 0 if stats is None else stats.running,
            "requests_waiting": num_outside + (0 if stats is None else stats.waiting),
            "kv_blocks_total": 0 if stats is None else stats.total_blocks,
            "kv_blocks_free": 0 if stats is None else stats.free_blocks,
            "steps_in_flight": 0 if stats is None else stats.steps_in_flight,
            "worker_restarts_total": self._num_restarts,
        }
        if stats is not None:
            values["num_cohorts"] = stats.num_cohorts
        values |= self._totals_with(stats)
        values |= {f"requests_finished_total_{reason}": count for reason, count in self._finished.items()}
        values |= self._queue.values("queue_seconds")
        values |= self._first_token.values("time_to_first_token_seconds")
        values |= self._inter_token.values("inter_token_seconds")
        values |= self._end_to_end.values("end_to_end_seconds")
        for rank in sorted({*self._stage_totals, *reports}):
            newest = reports[rank][0] if rank in reports else None
            totals = self._stage_totals_with(rank, newest)
            values |= {f"stage_{rank}_{name}_total": total for name, total in totals.items()}
        return values

    def _totals_with(self, stats: SchedulerStats | None) -> dict[str, int]:
        return {name: self._totals[name] + count for name, count in totals_of(stats).items()}

    def _stage_totals_with(self, rank: int, report: StageReport | None) -> dict[str, float]:
        past = self._stage_totals.get(rank, {})
        return {name: past.get(name, 0) + value for name, value in _stage_sums(report).items()}


def _stage_sums(report: StageReport | None) -> dict[str, float]:
    """What of a report only grows within an epoch."""
    sums: dict[str, float] = {f"{cause}_seconds": seconds for cause, seconds in stage_seconds(report).items()}
    sums["steps"] = 0 if report is None else report.num_steps
    sums["full_graph_steps"] = 0 if report is None else report.num_full_graph_steps
    sums["piecewise_graph_steps"] = 0 if report is None else report.num_piecewise_graph_steps
    sums["tokens"] = 0 if report is None else report.num_tokens
    sums["padding_tokens"] = 0 if report is None else report.num_padded_tokens
    return sums
