"""What does a simulated run say, in lines and in a picture?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipc.errors import ConfigError
from scripts.bench.pipeline import PLAN, TOKENS, UPSTREAM
from scripts.bench.simulation import RequestRecord, SimulationResult

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None  # type: ignore[misc,assignment,unused-ignore]

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one run, or their means over several. Times in seconds."""

    tokens_per_s: float
    """Answer tokens, from the first arrival to the last end."""
    requests_per_s: float
    """Ends per second over the middle 60 % of all ends: without the filling and the draining."""
    ttft: tuple[float, float, float]
    inter_token: tuple[float, float, float]
    unexplained_wait: float
    """Mean over the stages: share of the time waited that the head's imbalance does not explain."""
    peak_kv: float
    preemptions: float


def summarize(result: SimulationResult) -> Summary:
    """Figures of one run."""
    records = result.records
    ends = np.sort([record.token_times[-1] for record in records])
    num_tokens = sum(len(record.token_times) for record in records)
    low, high = int(0.2 * (len(ends) - 1)), int(0.8 * (len(ends) - 1))
    span = float(ends[high] - ends[low])
    return Summary(
        tokens_per_s=num_tokens / max(result.end - min(record.arrival for record in records), 1e-12),
        requests_per_s=(high - low) / span if span > 0 else float(len(ends)) / max(result.end, 1e-12),
        ttft=_percentiles([record.token_times[0] - record.arrival for record in records]),
        inter_token=_percentiles(gaps_of(records)),
        unexplained_wait=float(np.mean(result.unexplained_waits())),
        peak_kv=max((used for _, _, _, used in result.samples), default=0.0),
        preemptions=result.preemptions,
    )


def mean_of(summaries: Sequence[Summary]) -> Summary:
    """The means of several runs, figure by figure."""

    def mean(name: str) -> Any:
        values = np.array([getattr(summary, name) for summary in summaries])
        return tuple(values.mean(axis=0).tolist()) if values.ndim == 2 else float(values.mean())

    return Summary(**{name: mean(name) for name in Summary.__dataclass_fields__})


def gaps_of(records: Sequence[RequestRecord]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Times between consecutive tokens of each request, all together."""
    gaps = [np.diff(record.token_times) for record in records if len(record.token_times) > 1]
    return np.concatenate(gaps) if gaps else np.zeros(1)


def table(rows: Sequence[tuple[str, Summary]]) -> str:
    """Runs side by side."""
    lines = [
        f"{'':16}{'tok/s':>9}{'req/s':>8}  {'TTFT p50/p90/p99 (s)':>24}  {'inter-token p50/p90/p99 (ms)':>30}"
        f"{'unexpl.':>9}{'KV max':>8}{'preempt':>9}"
    ]
    for name, summary in rows:
        ttft = "/".join(f"{value:.3f}" for value in summary.ttft)
        gaps = "/".join(f"{value * 1e3:.1f}" for value in summary.inter_token)
        lines.append(
            f"{name:16}{summary.tokens_per_s:9.1f}{summary.requests_per_s:8.2f}  {ttft:>24}  {gaps:>30}"
            f"{summary.unexplained_wait:9.1%}{summary.peak_kv:8.0%}{summary.preemptions:9.1f}"
        )
    return "\n".join(lines)


def stage_table(result: SimulationResult) -> str:
    """Waiting per stage and cause, as shares of the time with requests."""
    window = result.window_s or 1.0
    lines = [f"{'stage':>7}{'busy':>8}{'plan':>8}{'tokens':>8}{'upstream':>10}{'unexplained':>13}"]
    for index, (times, unexplained) in enumerate(zip(result.stage_times, result.unexplained_waits(), strict=True)):
        waits = times.waits
        lines.append(
            f"{index:7}{times.busy_s / window:8.1%}{waits[PLAN] / window:8.1%}{waits[TOKENS] / window:8.1%}"
            f"{waits[UPSTREAM] / window:10.1%}{unexplained:13.1%}"
        )
    return "\n".join(lines)


def draw(path: str, runs: Sequence[tuple[str, SimulationResult]]) -> None:
    """Waiting per stage, load and KV use over time, and the distributions of TTFT and gaps. Raises ConfigError."""
    if Figure is None:
        raise ConfigError("--png", "needs matplotlib: pip install -e '.[bench]' in the clone")
    figure: Any = Figure(figsize=(12, 3 * (len(runs) + 1)), layout="constrained")
    axes = figure.subplots(len(runs) + 1, 2, squeeze=False)
    for (name, result), (left, right) in zip(runs, axes[:-1], strict=True):
        _draw_stages(left, name, result)
        _draw_load(right, name, result)
    for name, result in runs:
        ttft = np.sort([record.token_times[0] - record.arrival for record in result.records])
        axes[-1][0].plot(ttft, np.linspace(0, 1, len(ttft)), label=name)
        gaps = np.sort(gaps_of(result.records)) * 1e3
        axes[-1][1].plot(gaps, np.linspace(0, 1, len(gaps)), label=name)
    for axis, label in zip(axes[-1], ("TTFT (s)", "inter-token time (ms)"), strict=True):
        axis.set(xlabel=label, ylabel="share of all", xscale="log")
        axis.legend()
    figure.savefig(path)


def _draw_stages(axis: Any, name: str, result: SimulationResult) -> None:
    window = result.window_s or 1.0
    stages = np.arange(len(result.stage_times))
    bottom = np.zeros(len(stages))
    for cause in ("busy", PLAN, TOKENS, UPSTREAM):
        shares = np.array([
            (times.busy_s if cause == "busy" else times.waits[cause]) / window for times in result.stage_times
        ])
        axis.bar(stages, shares, bottom=bottom, label=cause)
        bottom += shares
    axis.set(title=f"{name}: where each stage's time went", xlabel="stage", ylabel="share")
    axis.legend()


def _draw_load(axis: Any, name: str, result: SimulationResult) -> None:
    times, running, waiting, used = zip(*result.samples, strict=True)
    axis.plot(times, running, label="running")
    axis.plot(times, waiting, label="waiting")
    axis.set(title=f"{name}: requests and KV use", xlabel="s")
    axis.legend(loc="upper left")
    share = axis.twinx()
    share.plot(times, used, color="gray", linewidth=0.8)
    share.set(ylim=(0, 1), ylabel="share of KV blocks in use")


def _percentiles(values: Any) -> tuple[float, float, float]:
    low, middle, high = (float(value) for value in np.percentile(values, PERCENTILES))
    return low, middle, high
