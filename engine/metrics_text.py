"""What does Prometheus get to read? The engine's stats as text in its format; needs the extra ``[http]``."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Scalar = int | float | str | bool

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what ``render_metrics`` returns."""

GAUGES = {
    "ready": "Whether the workers are ready: 1, or 0 while they start.",
    "epoch": "Which life of the worker group this is.",
    "num_stages": "Stages of the pipeline.",
    "requests_running": "Answers that are being computed.",
    "requests_waiting": "Answers that wait: in the queue, or for the first token of another answer to the same prompt.",
    "kv_blocks_total": "Blocks of the KV cache.",
    "kv_blocks_free": "Blocks that hold nothing in use; cached but unused ones count as free.",
    "steps_in_flight": "Steps that were sent and have not come back.",
    "num_cohorts": "Groups into which decodes were split last.",
    "core_peak_bytes": "The most memory that the core's process ever held.",
}
"""Name in the stats, which is the metric's behind ``brigade_``, to its help."""

COUNTERS = {
    "preemptions_total": "Answers that gave their blocks back to others and were computed again.",
    "prompt_tokens_total": "Prompt tokens of answers that have run, computed or found in the prefix cache.",
    "generation_tokens_total": "Tokens generated.",
    "prefix_cache_query_tokens_total": "Prompt tokens for which the prefix cache was asked.",
    "prefix_cache_hit_tokens_total": "Prompt tokens that the prefix cache had.",
    "draft_tokens_total": "Guessed tokens that were computed (speculation).",
    "accepted_draft_tokens_total": "Guessed tokens that were right.",
    "worker_restarts_total": "Worker groups that ended, each followed by a new one.",
    "requests_resumed_total": "Answers that had begun when their worker group ended, and went back to the queue.",
    "connections_refused_total": "Handshakes of clients whose key is not among --client-keys.",
}
"""The same for what only grows."""

LABELLED_COUNTERS = {
    "requests_finished_total": ("reason", "Answers that are over, by how they ended."),
    "requests_refused_total": ("code", "Messages of clients that were turned away, by error code."),
}
"""``NAME_LABEL`` in the stats."""

HISTOGRAMS = {
    "queue_seconds": "From a request's arrival to its first step.",
    "time_to_first_token_seconds": "From a request's arrival at the core to the first token of an answer.",
    "inter_token_seconds": "Between two tokens of an answer; tokens that come together share the time equally.",
    "end_to_end_seconds": "From a request's arrival to the end of an answer that stopped or reached its length.",
}

STAGE_GAUGES = {
    "busy_share": "Share of the last second that a stage computed.",
    "queue_depth": "Steps that a stage has been sent and has not begun.",
    "resident_bytes": "Memory of a stage's process.",
    "full_graph_share": "Share of a stage's steps, since its start, that were one graph.",
    "piecewise_graph_share": "Share of a stage's steps, since its start, whose segments were graphs.",
    "padding_share": "Share of a stage's computed tokens, since its start, that were padding.",
}
"""``stage_RANK_NAME`` in the stats, ``brigade_stage_NAME`` with a label here."""

STAGE_COUNTERS = {
    "busy_seconds_total": "Seconds that a stage computed.",
    "steps_total": "Steps that a stage computed.",
    "full_graph_steps_total": "Steps that a stage computed as one graph.",
    "piecewise_graph_steps_total": "Steps that a stage computed with graphs between attention calls.",
    "tokens_total": "Tokens that a stage computed, without padding.",
    "padding_tokens_total": "Tokens that a stage computed to give steps the shape of a graph.",
}

WAITING_SHARE = "Share of the last second that a stage waited, by what for."
WAITING_SECONDS = "Seconds that a stage waited, by what for."

CORE_SECONDS = {
    "core_busy_s": ("core_busy_seconds_total", "Seconds that the core worked, by the clock."),
    "core_cpu_s": ("core_cpu_seconds_total", "Seconds that the core's thread was on a processor."),
}

_STAGE = re.compile(r"stage_(\d+)_(.+)")
_WAITING = re.compile(r"(\w+)_wait_(share|seconds_total)")

Stages = Mapping[str, list[tuple[str, float]]]
"""Name of a stage's value to the ranks, as labels, that tell it."""


class Family(NamedTuple):
    """One metric as it is told; a histogram's samples have ``_bucket``, ``_count`` and ``_sum`` behind the name."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def families() -> list[Family]:
    """All that an engine may tell."""
    stage, by_cause = ("stage",), ("stage", "cause")
    return [
        *(Family(f"brigade_{name}", "gauge", (), text) for name, text in GAUGES.items()),
        *(Family(f"brigade_{name}", "counter", (), text) for name, text in COUNTERS.items()),
        *(Family(f"brigade_{name}", "counter", (), text) for name, text in CORE_SECONDS.values()),
        *(Family(f"brigade_{name}", "counter", (label,), text) for name, (label, text) in LABELLED_COUNTERS.items()),
        *(Family(f"brigade_{name}", "histogram", (), text) for name, text in HISTOGRAMS.items()),
        *(Family(f"brigade_stage_{name}", "gauge", stage, text) for name, text in STAGE_GAUGES.items()),
        *(Family(f"brigade_stage_{name}", "counter", stage, text) for name, text in STAGE_COUNTERS.items()),
        Family("brigade_stage_waiting_share", "gauge", by_cause, WAITING_SHARE),
        Family("brigade_stage_waiting_seconds_total", "counter", by_cause, WAITING_SECONDS),
    ]


def render_metrics(stats: Mapping[str, Scalar]) -> bytes:
    """What ``Client.stats()`` returned, as text for Prometheus. What is not there is left out, what is unknown passed over."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Stats(stats))
    return generate_latest(registry)


class _Stats(Collector):
    def __init__(self, stats: Mapping[str, Scalar]) -> None:
        self._numbers = {name: float(value) for name, value in stats.items() if not isinstance(value, str)}

    def collect(self) -> Iterator[Metric]:
        numbers = self._numbers
        for name, text in GAUGES.items():
            if name in numbers:
                yield GaugeMetricFamily(f"brigade_{name}", text, numbers[name])
        for name, text in COUNTERS.items():
            if name in numbers:
                yield CounterMetricFamily(f"brigade_{name}", text, numbers[name])
        for source, (name, text) in CORE_SECONDS.items():
            if source in numbers:
                yield CounterMetricFamily(f"brigade_{name}", text, numbers[source])
        for name, (label, text) in LABELLED_COUNTERS.items():
            yield from self._labelled(name, label, text)
        for name, text in HISTOGRAMS.items():
            yield from self._histogram(name, text)
        yield from _stage_families(self._stages())

    def _labelled(self, name: str, label: str, text: str) -> Iterator[Metric]:
        family = CounterMetricFamily(f"brigade_{name}", text, labels=[label])
        for key, value in self._numbers.items():
            if key.startswith(f"{name}_"):
                family.add_metric([key.removeprefix(f"{name}_")], value)
        if family.samples:
            yield family

    def _histogram(self, name: str, text: str) -> Iterator[Metric]:
        numbers, prefix = self._numbers, f"{name}_le_"
        if f"{name}_count" not in numbers or f"{name}_sum" not in numbers:
            return
        buckets = [(key.removeprefix(prefix), value) for key, value in numbers.items() if key.startswith(prefix)]
        buckets.sort(key=lambda bucket: float(bucket[0]))
        buckets.append(("+Inf", numbers[f"{name}_count"]))
        yield HistogramMetricFamily(f"brigade_{name}", text, buckets=buckets, sum_value=numbers[f"{name}_sum"])

    def _stages(self) -> Stages:
        stages: dict[str, list[tuple[str, float]]] = {}
        for key, value in self._numbers.items():
            if (match := _STAGE.fullmatch(key)) is not None:
                stages.setdefault(match[2], []).append((match[1], value))
        return stages


def _stage_families(stages: Stages) -> Iterator[Metric]:
    waiting_share = GaugeMetricFamily("brigade_stage_waiting_share", WAITING_SHARE, labels=["stage", "cause"])
    waiting = CounterMetricFamily("brigade_stage_waiting_seconds_total", WAITING_SECONDS, labels=["stage", "cause"])
    for name, values in stages.items():
        family: GaugeMetricFamily | CounterMetricFamily
        if (match := _WAITING.fullmatch(name)) is not None:
            family = waiting_share if match[2] == "share" else waiting
            for stage, value in values:
                family.add_metric([stage, match[1]], value)
            continue
        if name in STAGE_GAUGES:
            family = GaugeMetricFamily(f"brigade_stage_{name}", STAGE_GAUGES[name], labels=["stage"])
        elif name in STAGE_COUNTERS:
            family = CounterMetricFamily(f"brigade_stage_{name}", STAGE_COUNTERS[name], labels=["stage"])
        else:
            continue
        for stage, value in values:
            family.add_metric([stage], value)
        yield family
    yield from (family for family in (waiting_share, waiting) if family.samples)
