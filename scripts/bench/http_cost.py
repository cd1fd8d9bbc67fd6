"""What does the HTTP server cost beside the Python client? ``python -m scripts.bench.http_cost MODEL``"""

import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import click

from engine import AsyncClient, SamplingParams
from ipc.errors import EngineError, PeerLost
from scripts.bench.cases import ID_RANGE, Case, CaseType
from scripts.bench.engine import Engine
from scripts.bench.results import Verdict, fail, finish, markdown, say, script_options

THROUGHPUT_BAR = 0.9
"""Of the Python client's."""

TTFT_BAR = 1 / 1.2
"""Of the Python client's time, over that through HTTP."""

URL = re.compile(r"^brigade ready: .*\bhttp=(?P<http>http://\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load, all requests sent at once."""

    tokens_per_s: float
    ttft_s: float
    """Median."""


Ask = Callable[[list[int], int], Awaitable[float]]
"""Generates so many tokens behind a prompt, and gives the seconds to the first."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("model")
@click.option("--case", type=CaseType(), default=Case(64, 128, 64))
@click.option("--pp", type=click.IntRange(1), default=2, help="Stages.")
@click.option("--flag", "flags", multiple=True, help="One more word for `brigade serve`; repeatable.")
@script_options
def command(model: str, case: Case, pp: int, flags: tuple[str, ...], rounds: int, json_path: str | None, check: bool) -> None:
    """Print throughput and median time to the first token, through the Python client and through HTTP, in turn."""
    words = [model, "--pp", str(pp), "--http", "127.0.0.1:0", "--no-prefix-caching", *flags]
    try:
        with Engine(words) as engine:
            found = engine.first_match(URL)
            if found is None:
                raise PeerLost("the ready line does not say where HTTP is served")
            runs = asyncio.run(_measure(engine.address, found["http"], case, rounds))
    except EngineError as error:
        fail(str(error))
    medians = {
        name: Run(
            tokens_per_s=statistics.median(run.tokens_per_s for run in own), ttft_s=statistics.median(run.ttft_s for run in own)
        )
        for name, own in runs.items()
    }
    rows = [[name, run.tokens_per_s, f"{run.ttft_s:.3f}"] for name, run in medians.items()]
    client, http = medians["Python client"], medians["HTTP"]
    verdicts = [
        Verdict(name=f"throughput through HTTP, {case}", value=http.tokens_per_s / client.tokens_per_s, bar=THROUGHPUT_BAR),
        Verdict(name=f"time to the first token, client over HTTP, {case}", value=client.ttft_s / http.ttft_s, bar=TTFT_BAR),
    ]
    result = {"runs": {name: [[run.tokens_per_s, run.ttft_s] for run in own] for name, own in runs.items()}, "case": str(case)}
    finish(result, markdown(["through", "output tokens/s", "median TTFT, s"], rows), verdicts, json_path=json_path, check=check)


async def _measure(address: str, url: str, case: Case, rounds: int) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {"Python client": [], "HTTP": []}
    async with AsyncClient(address) as client:
        asks = {"Python client": _ask_client(client), "HTTP": _ask_http(url)}
        for number in range(-1, rounds):
            for name, ask in asks.items():
                run = await _run(ask, case, seed=number)
                say(f"{name}, {'warm-up' if number < 0 else f'round {number + 1}'}: {run.tokens_per_s:.1f} tokens/s, TTFT {run.ttft_s:.3f} s")
                if number >= 0:
                    found[name].append(run)
    return found


async def _run(ask: Ask, case: Case, *, seed: int) -> Run:
    draw = random.Random(seed)
    prompts = [[draw.randrange(*ID_RANGE) for _ in range(case.num_prompt)] for _ in range(case.num_requests)]
    began = time.perf_counter()
    times: Sequence[float] = await asyncio.gather(*(ask(prompt, case.num_output) for prompt in prompts))
    wall_s = time.perf_counter() - began
    return Run(tokens_per_s=case.num_requests * case.num_output / wall_s, ttft_s=statistics.median(times))


def _ask_client(client: AsyncClient) -> Ask:
    async def ask(prompt: list[int], num_tokens: int) -> float:
        began = time.perf_counter()
        first = 0.0
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        async for output in client.generate(prompt, params):
            first = first or time.perf_counter() - began
            if output.finish_reason is not None and len(output.token_ids) != num_tokens:
                raise PeerLost(f"an answer has {len(output.token_ids)} tokens instead of {num_tokens}")
        return first

    return ask


def _ask_http(url: str) -> Ask:
    """By bare sockets: what a client library costs is not the server's."""
    host, port = urlsplit(url).hostname, urlsplit(url).port

    async def ask(prompt: list[int], num_tokens: int) -> float:
        began = time.perf_counter()
        options = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({"prompt": prompt, "max_tokens": num_tokens, **options}).encode()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        first, usage = 0.0, b""
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                usage = line
        writer.close()
        if f'"completion_tokens":{num_tokens},'.encode() not in usage:
            raise PeerLost(f"an answer through HTTP ended with {usage[-200:]!r}")
        return first

    return ask


if __name__ == "__main__":
    command()
