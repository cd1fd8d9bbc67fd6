"""A steady mix of requests through every way in, of which some are aborted and some are wrong on purpose."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from ipc.aclient import AsyncTokenClient
from ipc.client import TokenClient
from ipc.errors import EngineError, RequestError
from ipc.messages import ModelInfo
from ipc.params import SamplingParams

ABORT_SHARE = 0.10
ERROR_SHARE = 0.05
PROMPT_TOKENS = (4, 96)
OUTPUT_TOKENS = (8, 64)
GREEDY_SHARE = 0.5
NUM_THREADS = 32
"""Requests that are open at once through the blocking client; more of them wait here."""

ANSWER_S = 300.0
"""A request that takes longer counts as one that went wrong."""

COMPLETED, ABORTED, REFUSED = "completed", "aborted", "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. ``stop_after``: tokens after which its sender goes away; None waits for the end."""

    prompt: list[int]
    num_tokens: int
    temperature: float
    seed: int
    stop_after: int | None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.num_tokens, temperature=self.temperature, seed=self.seed, ignore_eos=True)


class Way(Protocol):
    """Sends a request and says how it ended: COMPLETED, ABORTED or REFUSED. Raises EngineError for anything else."""

    def __call__(self, ask: Ask) -> Awaitable[str]: ...


def draw_ask(draw: random.Random, model: ModelInfo) -> Ask:
    """Prompts are without special tokens as far as small ids are such; a wrong one has a token beyond the vocabulary."""
    num_tokens = draw.randint(*OUTPUT_TOKENS)
    kind = draw.random()
    prompt = [draw.randrange(model.vocab_size // 2, model.vocab_size) for _ in range(draw.randint(*PROMPT_TOKENS))]
    if kind < ERROR_SHARE:
        prompt[draw.randrange(len(prompt))] = model.vocab_size
    return Ask(
        prompt=prompt, num_tokens=num_tokens, temperature=0.0 if draw.random() < GREEDY_SHARE else 0.8, seed=draw.getrandbits(32),
        stop_after=draw.randrange(num_tokens - 1) if ERROR_SHARE <= kind < ERROR_SHARE + ABORT_SHARE else None,
    )  # fmt: skip


async def run_load(
    address: str, url: str | None, *, seconds: float, rate: float, seed: int, is_over: Callable[[], bool] = lambda: False
) -> Counter[str]:
    """Poisson arrivals for so long, each through the blocking client, the asyncio one or HTTP by chance; waits for every end.

    How many ended how; what went wrong stands under its error. ``is_over``: ends it early.
    """
    counts: Counter[str] = Counter()
    draw = random.Random(seed)
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="blocking client")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncTokenClient(address))
        blocking = stack.enter_context(TokenClient(address))
        ways = {"blocking": through_blocking(blocking, pool), "asyncio": through_asyncio(client)}
        if url is not None:
            ways["http"] = through_http(url)
        loop = asyncio.get_running_loop()
        due, end = loop.time(), loop.time() + seconds
        async with asyncio.TaskGroup() as group:
            while (due := due + draw.expovariate(rate)) < end and not is_over():
                await asyncio.sleep(due - loop.time())
                name = draw.choice(sorted(ways))
                group.create_task(_send(name, ways[name], draw_ask(draw, client.model), counts))
    pool.shutdown()
    return counts


async def _send(name: str, way: Way, ask: Ask, counts: Counter[str]) -> None:
    try:
        async with asyncio.timeout(ANSWER_S):
            outcome = await way(ask)
    except (EngineError, OSError, TimeoutError) as error:
        outcome = f"went wrong: {type(error).__name__}: {error}"[:200]
    counts[f"{name} {outcome}"] += 1


# ---------------------------------------------------------------------------------------------- the ways in


def through_asyncio(client: AsyncTokenClient) -> Way:
    async def send(ask: Ask) -> str:
        count = 0
        try:
            async with aclosing(client.generate(ask.prompt, ask.params)) as outputs:
                async for output in outputs:
                    count += len(output.new_token_ids)
                    if ask.stop_after is not None and count > ask.stop_after:
                        return ABORTED
        except RequestError as error:
            return _refused(error)
        return _complete(ask, count)

    return send


def through_blocking(client: TokenClient, pool: ThreadPoolExecutor) -> Way:
    def send(ask: Ask) -> str:
        count = 0
        try:
            with client.generate(ask.prompt, ask.params) as stream:
                for output in stream:
                    count += len(output.new_token_ids)
                    if ask.stop_after is not None and count > ask.stop_after:
                        return ABORTED
        except RequestError as error:
            return _refused(error)
        return _complete(ask, count)

    return lambda ask: asyncio.get_running_loop().run_in_executor(pool, send, ask)


def through_http(url: str) -> Way:
    """A connection for each request, by bare sockets; who goes away closes it in the middle of the stream."""
    host, port = urlsplit(url).hostname, urlsplit(url).port

    async def send(ask: Ask) -> str:
        body = json.dumps({
            "prompt": ask.prompt, "max_tokens": ask.num_tokens, "temperature": ask.temperature, "seed": ask.seed,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }).encode()  # fmt: skip
        reader, writer = await asyncio.open_connection(host, port)
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 400 " in status:
                return REFUSED
            if b" 200 " not in status:
                raise EngineError(f"HTTP answered {status[:80]!r}")
            return await _read_events(ask, reader)
        finally:
            writer.close()

    return send


async def _read_events(ask: Ask, reader: asyncio.StreamReader) -> str:
    num_events, usage = 0, b""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            num_events, usage = num_events + 1, line
            if ask.stop_after is not None and num_events > ask.stop_after:
                return ABORTED
    if ask.stop_after is not None:
        return ABORTED  # several tokens came at a time
    if f'"completion_tokens":{ask.num_tokens},'.encode() not in usage:
        raise EngineError("an answer through HTTP is not as long as it should be")
    return COMPLETED


def _refused(error: RequestError) -> str:
    if error.code != "bad_request":
        raise error
    return REFUSED


def _complete(ask: Ask, count: int) -> str:
    if count != ask.num_tokens:
        raise EngineError(f"an answer has {count} tokens instead of {ask.num_tokens}")
    return COMPLETED
