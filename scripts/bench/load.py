"""Sends requests of random token ids to an engine at the right times, and notes when their tokens come."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ipc.aclient import AsyncTokenClient
from ipc.errors import ConfigError, RequestError
from ipc.messages import ModelInfo
from ipc.params import SamplingParams
from scripts.bench.traces import TraceRequest


@dataclass(slots=True, kw_only=True)
class Record:
    """What one request asked for, and what came when. Times are seconds from the start of the load."""

    num_prompt: int
    num_output: int
    due: float = 0.0
    """When it was to be sent: its latencies count from then, so that a late sender does not look like a fast engine."""
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)
    """One entry per token."""
    end: float = 0.0
    finish_reason: str | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """All records of one load."""

    records: list[Record]
    wall_s: float
    """From the start to the last end."""
    client_cpu_s: float
    """What this process took of a core meanwhile."""


class PromptSource:
    """Random prompts inside a vocabulary, without its special tokens. Same seed, same prompts."""

    def __init__(self, model: ModelInfo, seed: int) -> None:
        special = special_token_ids(model)
        self._ids: NDArray[np.int32] = np.array(
            [i for i in range(model.vocab_size) if i not in special] or range(model.vocab_size), np.int32
        )
        self._draw = np.random.Generator(np.random.Philox(seed))

    def draw(self, num_tokens: int) -> list[int]:
        """The next one."""
        found: list[int] = self._ids[self._draw.integers(0, len(self._ids), num_tokens)].tolist()
        return found


def special_token_ids(model: ModelInfo) -> set[int]:
    """End tokens, and what the tokenizer calls special."""
    special = set(model.eos_token_ids)
    if model.tokenizer:
        try:
            added = json.loads(model.tokenizer).get("added_tokens") or []
            special.update(token["id"] for token in added if token.get("special"))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError("tokenizer", f"the one of {model.name} has no added_tokens as tokenizer.json has") from None
    return special


def check_lengths(model: ModelInfo, requests: Sequence[TraceRequest]) -> None:
    """Raises ConfigError for a request that the engine would refuse, before anything is sent."""
    for number, request in enumerate(requests, 1):
        total = request.num_prompt + request.num_output
        if total > model.max_model_len:
            raise ConfigError(
                "lengths",
                f"request {number} has a prompt of {request.num_prompt} tokens and an answer of {request.num_output}, "
                f"{total} together; the engine takes at most max_model_len={model.max_model_len}",
            )


async def run_load(
    client: AsyncTokenClient,
    requests: Sequence[TraceRequest],
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: int | None = None,
    params: SamplingParams | None = None,
    on_end: Callable[[Record], None] = lambda record: None,
) -> LoadResult:
    """Send them all and wait for every end.

    Args:
        concurrency: closed loop: so many are open at a time and arrival times don't count; None sends each at its
            arrival, however many are open.
        params: max_tokens comes from the request.
        on_end: called as each request is over.

    Raises:
        PeerLost: the engine is gone. What the engine says about a single request stands on its record.
    """
    base = params or SamplingParams(temperature=0.0, ignore_eos=True)
    records = [Record(num_prompt=request.num_prompt, num_output=request.num_output) for request in requests]
    items = [_Item(*item) for item in zip(requests, records, prompts, strict=True)]
    cpu, start = time.process_time(), time.perf_counter()
    sender = _Sender(client, start, base, on_end)
    try:
        async with asyncio.TaskGroup() as group:
            if concurrency is None:
                await _open_loop(group, sender, items)
            else:
                _closed_loop(group, sender, items, concurrency)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return LoadResult(
        records=records,
        wall_s=max((record.end for record in records), default=0.0),
        client_cpu_s=time.process_time() - cpu,
    )


@dataclass(frozen=True, slots=True)
class _Item:
    request: TraceRequest
    record: Record
    prompt: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Sender:
    client: AsyncTokenClient
    start: float
    params: SamplingParams
    on_end: Callable[[Record], None]

    async def send(self, item: _Item) -> None:
        now, start, record = time.perf_counter, self.start, item.record
        params = replace(self.params, max_tokens=record.num_output)
        times = record.token_times
        record.sent = now() - start
        try:
            async for output in self.client.generate(item.prompt, params):
                times.extend([now() - start] * len(output.new_token_ids))
                record.finish_reason = output.finish_reason
        except RequestError as error:
            record.error = error
        record.end = now() - start
        self.on_end(record)


async def _open_loop(group: asyncio.TaskGroup, sender: _Sender, items: Sequence[_Item]) -> None:
    for item in items:
        item.record.due = item.request.arrival
        left = sender.start + item.record.due - time.perf_counter()
        if left > 0:
            await asyncio.sleep(left)
        group.create_task(sender.send(item))


def _closed_loop(group: asyncio.TaskGroup, sender: _Sender, items: Sequence[_Item], concurrency: int) -> None:
    queue = iter(items)

    async def one_after_another() -> None:
        for item in queue:
            item.record.due = time.perf_counter() - sender.start
            await sender.send(item)

    for _ in range(min(concurrency, len(items))):
        group.create_task(one_after_another())
