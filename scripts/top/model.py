"""From what an engine counts to what a person wants to see: rates, shares, and one line for each stage and request."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ipc.conversation import Scalar
from ipc.views import RequestsReply, RequestState
from scripts.top.reading import Reading

WAITS = {
    "plan_wait": "plan", "receive_wait": "activations", "token_wait": "tokens", "send_wait": "send", "mask_wait": "masks",
}  # fmt: skip
"""Causes of waiting in the stats, and how people call them (docs/timeline.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage over the last second or so."""

    rank: int
    busy: float
    """Share of its time."""
    waits: dict[str, float]
    """Shares by cause."""
    step_ms: float | None
    """From one step to the next; None without steps."""
    busy_ms: float | None
    """Of it, work."""
    steps_per_s: float
    tokens_per_s: float
    """Computed, prompts included."""
    graph: float
    """Share of steps that were replayed from graphs, in one piece or several."""
    padding: float
    """Share of computed tokens that were padding, since the start."""
    queue_depth: int
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """One choice of a request."""

    id: str
    index: int
    client: str
    state: str
    age_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that is shown. Rates are None until two readings were made of one engine."""

    address: str
    model: str
    num_stages: int
    max_model_len: int
    is_ready: bool
    state: str
    epoch: int
    restarts: int
    running: int
    waiting: int
    generation_tokens: int
    prompt_tokens: int
    generation_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    kv_blocks_total: int
    kv_blocks_free: int
    prefix_hit_share: float | None
    """Of the prompt tokens that were looked up, since the start; None when none was."""
    prefix_hit_share_now: float | None
    """The same between two readings."""
    preemptions: int
    preemptions_per_s: float | None
    draft_tokens: int
    accepted_share: float | None
    """Of all drafts so far, those that stood; None without any."""
    steps_in_flight: int
    num_cohorts: int
    core_share: float | None
    """Of one processor that the core took."""
    stages: tuple[Stage, ...]
    num_open: int | None
    """None when the engine does not tell of its requests."""
    requests: tuple[RequestLine, ...]

    @property
    def kv_share(self) -> float:
        """Of the KV blocks, those in use."""
        return 1 - self.kv_blocks_free / self.kv_blocks_total if self.kv_blocks_total else 0.0

    def as_json(self) -> dict[str, Any]:
        """The numbers, for machines."""
        return asdict(self) | {"kv_share": self.kv_share}


class History:
    """The reading before, for rates. Counters start anew with another core."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._before: Reading | None = None
        self._stages: dict[int, Stage] = {}

    def view(self, reading: Reading) -> View:
        """What this reading, which has no error, and the one before it say."""
        before = self._before
        if before is None or before.model is None or reading.model is None or before.model.core_id != reading.model.core_id:
            before, self._stages = None, {}
        self._before = reading
        rates = _Rates(reading, before)
        stats, model = reading.stats, reading.model
        assert model is not None
        num = _ints(stats)
        num_stages = num("num_stages")
        self._stages = {
            rank: _stage(rank, stats, None if before is None else before.stats, self._stages.get(rank))
            for rank in range(num_stages) if f"stage_{rank}_steps" in stats
        }  # fmt: skip
        return View(
            address=self._address, model=model.name, num_stages=num_stages, max_model_len=model.max_model_len,
            is_ready=bool(reading.health.get("ready")), state=str(reading.health.get("state", "")),
            epoch=num("epoch"), restarts=num("worker_restarts_total"),
            running=num("requests_running"), waiting=num("requests_waiting"),
            generation_tokens=num("generation_tokens_total"), prompt_tokens=num("prompt_tokens_total"),
            generation_tokens_per_s=rates.of("generation_tokens_total"), prompt_tokens_per_s=rates.of("prompt_tokens_total"),
            kv_blocks_total=num("kv_blocks_total"), kv_blocks_free=num("kv_blocks_free"),
            prefix_hit_share=_ratio(num("prefix_cache_hit_tokens_total"), num("prefix_cache_query_tokens_total")),
            prefix_hit_share_now=rates.ratio("prefix_cache_hit_tokens_total", "prefix_cache_query_tokens_total"),
            preemptions=num("preemptions_total"), preemptions_per_s=rates.of("preemptions_total"),
            draft_tokens=num("draft_tokens_total"),
            accepted_share=_ratio(num("accepted_draft_tokens_total"), num("draft_tokens_total")),
            steps_in_flight=num("steps_in_flight"), num_cohorts=num("num_cohorts"), core_share=rates.of("core_cpu_s"),
            stages=tuple(self._stages.values()),
            num_open=None if reading.requests is None else reading.requests.num_open,
            requests=() if reading.requests is None else tuple(request_lines(reading.requests)),
        )  # fmt: skip


def request_lines(reply: RequestsReply) -> list[RequestLine]:
    """Row by row what the engine told in columns."""
    return [
        RequestLine(
            id=reply.request_ids[i], index=reply.indices[i], client=reply.clients[reply.client_indices[i]],
            state=_state(reply.states[i]), age_s=reply.ages_ms[i] / 1e3,
            num_prompt_tokens=reply.num_prompt_tokens[i], num_cached_tokens=reply.num_cached_tokens[i],
            num_output_tokens=reply.num_output_tokens[i], num_preemptions=reply.num_preemptions[i],
        )
        for i in range(len(reply.request_ids))
    ]  # fmt: skip


class _Rates:
    def __init__(self, now: Reading, before: Reading | None) -> None:
        self._now, self._before = now, before

    def _gained(self, name: str) -> float:
        assert self._before is not None
        return max(0.0, _number(self._now.stats.get(name)) - _number(self._before.stats.get(name)))

    def of(self, name: str) -> float | None:
        """Per second since the reading before."""
        if self._before is None or self._now.at <= self._before.at:
            return None
        return self._gained(name) / (self._now.at - self._before.at)

    def ratio(self, part: str, whole: str) -> float | None:
        return None if self._before is None else _ratio(self._gained(part), self._gained(whole))


def _stage(rank: int, stats: Mapping[str, Scalar], before: Mapping[str, Scalar] | None, shown: Stage | None) -> Stage:
    """A stage's own clock counts: it reports once a second, which may be not at all, or twice, between two readings."""

    def value(name: str, of: Mapping[str, Scalar] = stats) -> float:
        return _number(of.get(f"stage_{rank}_{name}"))

    def clock(of: Mapping[str, Scalar]) -> float:
        return sum(value(f"{cause}_s", of) for cause in ("busy", *WAITS))

    def gained(name: str) -> float:
        assert before is not None
        return max(0.0, value(name) - value(name, before))

    passed = 0.0 if before is None else clock(stats) - clock(before)
    if passed == 0 and shown is not None:
        return shown
    # In a new epoch all counters begin at zero.
    has_rates = passed > 0 and before is not None and value("steps") >= value("steps", before)
    num_steps = gained("steps") if has_rates else 0.0
    num_graph = gained("full_graph_steps") + gained("piecewise_graph_steps") if has_rates else 0.0
    return Stage(
        rank=rank,
        busy=value("busy_share"),
        waits={label: value(f"{cause}_share") for cause, label in WAITS.items()},
        step_ms=1e3 * passed / num_steps if num_steps else None,
        busy_ms=1e3 * gained("busy_s") / num_steps if num_steps else None,
        steps_per_s=num_steps / passed if has_rates else 0.0,
        tokens_per_s=gained("tokens") / passed if has_rates else 0.0,
        graph=num_graph / num_steps if num_steps else 0.0,
        padding=value("padding_share"),
        queue_depth=int(value("queue_depth")),
        resident_bytes=int(value("resident_bytes")),
    )


def _state(number: int) -> str:
    try:
        return RequestState(number).name.lower()
    except ValueError:
        return f"state {number}"


def _ints(stats: Mapping[str, Scalar]) -> Any:
    return lambda name: int(_number(stats.get(name)))


def _number(value: Scalar | None) -> float:
    return 0.0 if value is None or isinstance(value, str) else float(value)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
