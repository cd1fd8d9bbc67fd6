"""``brigade bench``: how fast does an engine answer under a load of random prompts?"""

import asyncio
import json
import math
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ipc.aclient import AsyncTokenClient
from ipc.endpoints import DEFAULT_LISTEN
from ipc.errors import ConfigError
from ipc.params import SamplingParams
from scripts.bench.engine import Engine
from scripts.bench.lengths import Lengths, LengthsType
from scripts.bench.load import PromptSource, Record, check_lengths, run_load
from scripts.bench.measures import summarize, table
from scripts.bench.traces import TraceRequest, draw_trace, read_trace
from scripts.exits import EXIT_REQUEST_FAILED, errors_told
from scripts.options import GroupedCommand, client_key_options
from scripts.sampling_options import TEXT_FIELDS, sampling_options, sampling_values

DEFAULT_CONCURRENCY = 16
WARM_UP_SEED = 1 << 40
"""Beyond every seed of the option: warm-up prompts are others than the measured ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be sent."""

    requests: list[TraceRequest]
    concurrency: int | None
    num_warm_up: int
    seed: int
    params: SamplingParams
    settings: dict[str, Any]
    """As they stand in the result."""


OWN_PARAMS = ("temperature", "ignore_eos", "seed", "n", "max_tokens", "min_tokens", *TEXT_FIELDS)
"""Sampling parameters that the benchmark sets itself, or that need a client that knows the text."""


@click.command(
    name="bench", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}
)
@click.option("--connect", metavar="ADDR", default=DEFAULT_LISTEN, show_default=True, help="Address of the engine.")
@client_key_options
@click.option("--serve", metavar="WORDS", help='Start an engine for this run instead, as in --serve "MODEL --pp 2".')
@click.option("--concurrency", type=click.IntRange(1), metavar="N",
              help=f"Closed loop: so many requests open at a time.  [default: {DEFAULT_CONCURRENCY}]")
@click.option("--rate", type=click.FloatRange(0, min_open=True), metavar="R",
              help="Open loop: Poisson arrivals, requests per second; inf sends all at once.")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False),
              help="Open loop: arrivals and lengths from a file, one object with arrival (s), prompt and output (tokens) a "
              "line; with --concurrency its lengths only.")
@click.option("--num-requests", type=click.IntRange(1), default=64, show_default=True, help="Requests to measure.")
@click.option("--prompt-tokens", type=LengthsType(), default="128", show_default=True,
              help="Length of prompts: fixed, uniform, or log-uniform.")
@click.option("--output-tokens", type=LengthsType(), default="64", show_default=True, help="The same for answers.")
@click.option("--ignore-eos/--stop-at-eos", default=True, show_default=True,
              help="Go on after the model's end token, so that every answer has the length asked for.")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True,
              help="0 takes the likeliest token.")
@click.option("--seed", type=click.IntRange(0, (1 << 31) - 1), default=0, show_default=True,
              help="Same seed, same arrivals, lengths and prompts.")
@click.option("--warm-up", "num_warm_up", type=click.IntRange(0), default=4, show_default=True,
              help="Requests of the same kind that are sent before and not counted.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, allow_dash=True), metavar="FILE",
              help="Write the result as JSON; '-' prints it instead of the table.")
@sampling_options(without=OWN_PARAMS)
def command(
    connect: str, server_key: str | None, client_key: str | None, serve: str | None, concurrency: int | None, rate: float | None, trace: str | None, num_requests: int,
    prompt_tokens: Lengths, output_tokens: Lengths, ignore_eos: bool, temperature: float, seed: int, num_warm_up: int,
    json_path: str | None, **sampling: Any,
) -> None:  # fmt: skip
    """Load a running engine, or one started for this run, and report latencies and tokens per second.

    Prompts are random token ids, without special tokens. Latencies count from when a request was due.

    \b
    Exit codes:
      0    every request was answered
      1    a request failed; the result counts the others
      2    an option can't be used; nothing was sent
      3    no engine at the address, or it went away or did not start
      130  interrupted
    """
    with errors_told():
        _check_folder(json_path)
        params = SamplingParams(**sampling_values(sampling), temperature=temperature, ignore_eos=ignore_eos, seed=seed)
        requests, settings = _requests(
            trace, concurrency, rate, num_requests, prompt_tokens, output_tokens, seed
        )
        plan = Plan(
            requests=requests,
            concurrency=settings["concurrency"],
            num_warm_up=num_warm_up,
            seed=seed,
            params=params,
            settings={
                **settings, "ignore_eos": ignore_eos, "temperature": temperature, "seed": seed, "warm_up": num_warm_up,
                **_further(params),
            },
        )
        with _engine(serve, connect) as address:
            summary = asyncio.run(_measure(address, plan, server_key, client_key))
        _write(summary, json_path)
    if summary["requests"]["failed"]:
        sys.exit(EXIT_REQUEST_FAILED)


def _further(params: SamplingParams) -> dict[str, Any]:
    """What was asked for beyond the benchmark's own settings; nothing when nothing was."""
    own = {name: value for name, value in params.to_wire().items() if name not in OWN_PARAMS}
    return {"sampling": own} if own else {}


def _check_folder(json_path: str | None) -> None:
    """A typing error must not cost the result of a long run."""
    if json_path is not None and json_path != "-" and not Path(json_path).parent.is_dir():
        raise ConfigError("--json", f"there is no folder {Path(json_path).parent}")


def _requests(
    trace: str | None, concurrency: int | None, rate: float | None, count: int, prompt: Lengths, output: Lengths, seed: int
) -> tuple[list[TraceRequest], dict[str, Any]]:
    """What comes when, and how the result says so."""
    if rate is not None and math.isnan(rate):
        raise ConfigError("--rate", "must be a number of requests per second, or inf")
    if rate is not None and (concurrency is not None or trace is not None):
        raise ConfigError("--rate", "can't be given with --concurrency or --trace, which have arrivals of their own")
    if trace is not None:
        requests = read_trace(trace)
        loop = "open" if concurrency is None else "closed"
        return requests, {"loop": loop, "trace": trace, "concurrency": concurrency, "num_requests": len(requests)}
    if rate is None and concurrency is None:
        concurrency = DEFAULT_CONCURRENCY
    requests = draw_trace(count, math.inf if rate is None else rate, prompt, output, seed)
    return requests, {
        "loop": "closed" if rate is None else "open", "concurrency": concurrency,
        "rate": "inf" if rate == math.inf else rate, "num_requests": count,
        "prompt_tokens": str(prompt), "output_tokens": str(output),
    }  # fmt: skip


@contextmanager
def _engine(serve: str | None, connect: str) -> Iterator[str]:
    """An address; what was started for it ends behind it."""
    if serve is None:
        yield connect
        return
    try:
        words = shlex.split(serve)
    except ValueError as error:
        raise ConfigError("--serve", f"{serve!r:.200} can't be split into words: {error}") from None
    with Engine(words) as engine:
        yield engine.address


async def _measure(address: str, plan: Plan, server_key: str | None, client_key: str | None) -> dict[str, Any]:
    async with AsyncTokenClient(address, name="brigade-bench", server_key=server_key, client_key=client_key) as client:
        check_lengths(client.model, plan.requests)
        if plan.num_warm_up:
            again = random.Random(plan.seed).choices(plan.requests, k=plan.num_warm_up)
            await run_load(
                client, again, _prompts(client, again, WARM_UP_SEED + plan.seed), concurrency=plan.concurrency or len(again)
            )
        prompts = _prompts(client, plan.requests, plan.seed)
        with _progress(len(plan.requests)) as on_end:
            result = await run_load(
                client, plan.requests, prompts, concurrency=plan.concurrency, params=plan.params, on_end=on_end
            )
        return summarize(result, client.model, plan.settings)


def _prompts(client: AsyncTokenClient, requests: Sequence[TraceRequest], seed: int) -> list[list[int]]:
    source = PromptSource(client.model, seed)
    return [source.draw(request.num_prompt) for request in requests]


@contextmanager
def _progress(length: int) -> Iterator[Callable[[Record], None]]:
    """A bar on a terminal, nothing elsewhere."""
    is_shown = sys.stderr.isatty()
    bar = click.progressbar(length=length, label="requests", file=sys.stderr) if is_shown else nullcontext()
    with bar as shown:
        yield (lambda record: None) if shown is None else (lambda record: shown.update(1))


def _write(summary: dict[str, Any], json_path: str | None) -> None:
    text = json.dumps(summary, indent=1)
    if json_path == "-":
        click.echo(text)
        return
    click.echo(table(summary))
    if json_path is not None:
        Path(json_path).write_text(text + "\n", encoding="utf-8")
