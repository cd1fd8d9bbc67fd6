"""What do the spans add up to? Busy and waiting time of each stage, the core's work per step, a token's way back."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ipc.spans import NUM_KINDS, WAITS, Kind
from scripts.timeline.lanes import END, KIND, START, STEP, Lane, Timeline, Times, idle_times, time_within

STAGE_WORK = (Kind.PREPARE, Kind.ACCEPT, Kind.FORWARD, Kind.SAMPLE, Kind.SEND, Kind.RETURN, Kind.OTHER)
CORE_WORK = (
    Kind.CLIENTS, Kind.RECEIVE, Kind.APPLY, Kind.ANSWER, Kind.SCHEDULE, Kind.SEND_PLAN, Kind.MASKS, Kind.OTHER,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of some durations, in seconds; all 0 when there are none."""

    count: int
    mean_s: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """Where one stage's time went while the engine had work. Seconds."""

    rank: int
    num_steps: int
    work: dict[str, float]
    """By kind."""
    waits: dict[str, float]
    """By cause."""
    busy_s: float
    wait_s: float
    explained_s: float
    """How much less there was to do here than on the busiest stage: waiting that only another split would remove."""
    unexplained_s: float
    """The rest of the waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSummary:
    """What the core did itself."""

    num_steps: int
    """Steps that were sent."""
    busy_s: float
    per_step: Spread
    """All its work between sending one step and the next: receiving, applying, answering, scheduling, sending."""
    work: dict[str, float]
    """Seconds by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReturn:
    """The way of sampled tokens to the first stage, and into its next input."""

    to_first_stage: Spread
    """From the end of sampling on the last stage to where the first stage takes the tokens."""
    to_next_input: Spread
    """From there to the beginning of the first stage's next forward pass."""
    num_inputs: int
    """Forward passes of the first stage that came right behind tokens it took."""
    planned_ahead: float
    """Share of these whose plan had left the core before those tokens were sampled: no round trip through the core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A timeline in numbers."""

    window_s: float
    idle_s: float
    """Of the window, without work: nothing below counts it."""
    stages: tuple[StageSummary, ...]
    core: CoreSummary
    tokens: TokenReturn
    clock_error_s: float
    """How wrong times of other hosts may be."""
    problems: tuple[str, ...]

    @property
    def active_s(self) -> float:
        return self.window_s - self.idle_s

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self) | {"active_s": self.active_s}


def summarize(timeline: Timeline) -> Summary:
    """All figures of a timeline; those for which spans are missing are 0."""
    idle = idle_times(timeline.core)
    stages = [_times_by_kind(lane, idle) for lane in timeline.stages]
    active_s = timeline.window_s - float((idle[:, 1] - idle[:, 0]).sum()) / 1e9
    most_busy_s = max((_busy_s(seconds) for seconds in stages), default=0.0)
    return Summary(
        window_s=timeline.window_s,
        idle_s=timeline.window_s - active_s,
        stages=tuple(
            _stage(lane, seconds, most_busy_s) for lane, seconds in zip(timeline.stages, stages, strict=True)
        ),
        core=_core(timeline.core),
        tokens=_token_return(timeline),
        clock_error_s=max(lane.clock_error_ns for lane in timeline.lanes) / 1e9,
        problems=timeline.problems,
    )


def _times_by_kind(lane: Lane, idle: Times) -> NDArray[np.float64]:
    """[NUM_KINDS] seconds outside of the idle times."""
    idle_before = time_within(idle)
    start, end = lane.spans[:, START], lane.spans[:, END]
    lasted = (end - start) - (idle_before(end) - idle_before(start))
    return _sums_by_kind(lane, lasted / 1e9)


def _sums_by_kind(lane: Lane, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    kinds = lane.spans[:, KIND].clip(0, NUM_KINDS - 1)
    return np.asarray(np.bincount(kinds, weights=weights, minlength=NUM_KINDS), np.float64)


def _busy_s(seconds: NDArray[np.float64]) -> float:
    return float(seconds.sum() - seconds[list(WAITS)].sum())


def _stage(lane: Lane, seconds: NDArray[np.float64], most_busy_s: float) -> StageSummary:
    assert lane.rank is not None
    wait_s = float(seconds[list(WAITS)].sum())
    explained_s = most_busy_s - _busy_s(seconds)
    return StageSummary(
        rank=lane.rank,
        num_steps=len(np.unique(lane.of(Kind.FORWARD)[:, STEP])),
        work=_named(seconds, STAGE_WORK),
        waits=_named(seconds, WAITS),
        busy_s=_busy_s(seconds),
        wait_s=wait_s,
        explained_s=explained_s,
        unexplained_s=max(0.0, wait_s - explained_s),
    )


def _core(core: Lane) -> CoreSummary:
    lasted = (core.spans[:, END] - core.spans[:, START]) / 1e9
    seconds = _sums_by_kind(core, lasted)
    is_sent = core.spans[:, KIND] == Kind.SEND_PLAN
    worked = np.cumsum(np.where(core.spans[:, KIND] == Kind.IDLE, 0.0, lasted))
    return CoreSummary(
        num_steps=int(is_sent.sum()),
        busy_s=float(seconds.sum() - seconds[Kind.IDLE]),
        per_step=spread(np.diff(worked[is_sent])),
        work=_named(seconds, CORE_WORK),
    )


def _token_return(timeline: Timeline) -> TokenReturn:
    if not timeline.stages:
        return TokenReturn(to_first_stage=spread([]), to_next_input=spread([]), num_inputs=0, planned_ahead=0.0)
    first, last = timeline.stages[0], timeline.stages[-1]
    sampled = last.newest(Kind.SAMPLE)
    sent = timeline.core.newest(Kind.SEND_PLAN)
    way, gaps, ahead = [], [], []
    taken: tuple[int, int] | None = None
    for kind, step, start, end in first.of(Kind.ACCEPT, Kind.FORWARD).tolist():
        if kind == Kind.ACCEPT:
            taken = (step, end)
            if step in sampled:
                way.append(start - sampled[step][1])
        elif taken is not None:
            tokens_step, taken_ns = taken
            gaps.append(start - taken_ns)
            if tokens_step in sampled:
                # A plan that was sent before the window began was ahead of everything in it.
                ahead.append(sent.get(step, (0, 0))[1] <= sampled[tokens_step][1])
            taken = None
    return TokenReturn(
        to_first_stage=spread(np.array(way) / 1e9),
        to_next_input=spread(np.array(gaps) / 1e9),
        num_inputs=len(ahead),
        planned_ahead=float(np.mean(ahead)) if ahead else 0.0,
    )


def spread(seconds: Any) -> Spread:
    """Of a list or an array of durations."""
    values = np.asarray(seconds, np.float64)
    if not values.size:
        return Spread(count=0, mean_s=0.0, p50_s=0.0, p99_s=0.0)
    p50, p99 = np.percentile(values, (50, 99))
    return Spread(count=values.size, mean_s=float(values.mean()), p50_s=float(p50), p99_s=float(p99))


def _named(seconds: NDArray[np.float64], kinds: Sequence[Kind]) -> dict[str, float]:
    return {name_of(kind): float(seconds[kind]) for kind in kinds}


def name_of(kind: int) -> str:
    """A kind as people read it."""
    try:
        return Kind(kind).name.lower().replace("_", " ")
    except ValueError:
        return f"kind {kind}"


# ------------------------------------------------------------------------------------------ as text


def as_text(summary: Summary) -> str:
    """The summary as lines for a terminal."""
    idle = f", {summary.idle_s / summary.window_s:.1%} of it without work" if summary.window_s else ""
    lines = [f"the last {summary.window_s:.2f} s{idle}; shares are of the rest"]
    lines += [f"missing: {problem}" for problem in summary.problems]
    lines += ["", *_stage_lines(summary), "", *_work_lines(summary), "", *_core_lines(summary), *_token_lines(summary)]
    if summary.clock_error_s:
        lines.append(f"times of other hosts are right within {summary.clock_error_s * 1e6:.0f} us")
    return "\n".join(lines)


def _stage_lines(summary: Summary) -> list[str]:
    active_s = summary.active_s or 1.0
    causes = [name_of(kind) for kind in WAITS]
    lines = [
        f"{'stage':>7}{'steps':>8}{'busy':>9}" + "".join(f"{cause:>18}" for cause in causes)
        + f"{'imbalance':>12}{'unexplained':>13}"
    ]  # fmt: skip
    for stage in summary.stages:
        waits = "".join(f"{stage.waits[cause] / active_s:18.1%}" for cause in causes)
        lines.append(
            f"{stage.rank:7}{stage.num_steps:8}{stage.busy_s / active_s:9.1%}{waits}"
            f"{stage.explained_s / active_s:12.1%}{stage.unexplained_s / active_s:13.1%}"
        )
    return lines


def _work_lines(summary: Summary) -> list[str]:
    names = [name_of(kind) for kind in STAGE_WORK]
    lines = [f"{'stage':>7}" + "".join(f"{name:>11}" for name in names) + "   (work, ms per step)"]
    for stage in summary.stages:
        per_step = [1e3 * stage.work[name] / max(stage.num_steps, 1) for name in names]
        lines.append(f"{stage.rank:7}" + "".join(f"{value:11.3f}" for value in per_step))
    return lines


def _core_lines(summary: Summary) -> list[str]:
    core = summary.core
    if not core.num_steps:
        return ["core's own work per step: no step was sent in this time"]
    parts = ", ".join(f"{name} {1e6 * seconds / max(core.num_steps, 1):.0f}" for name, seconds in core.work.items())
    return [
        f"core's own work per step: p50 {core.per_step.p50_s * 1e6:.0f} us, p99 {core.per_step.p99_s * 1e6:.0f} us, "
        f"mean {core.per_step.mean_s * 1e6:.0f} us ({core.busy_s / (summary.window_s or 1.0):.1%} of a core)",
        f"  us per step: {parts}",
    ]


def _token_lines(summary: Summary) -> list[str]:
    tokens = summary.tokens
    if not tokens.to_first_stage.count:
        return ["sampled tokens: none came back to stage 0 in this time"]
    way, gap = tokens.to_first_stage, tokens.to_next_input
    return [
        f"sampled tokens are on stage 0 after: p50 {way.p50_s * 1e3:.3f} ms, p99 {way.p99_s * 1e3:.3f} ms; "
        f"its next forward begins p50 {gap.p50_s * 1e3:.3f} ms, p99 {gap.p99_s * 1e3:.3f} ms later",
        f"plans that had left the core before the tokens they need were sampled: {tokens.planned_ahead:.1%} "
        f"of {tokens.num_inputs}",
    ]
