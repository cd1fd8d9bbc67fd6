"""What does a step cost the core? ``python -m scripts.bench.core_work MODEL``

Its loop's time on a processor, from its own clock, so that what others do to its caches is in it and waiting for a core
that others hold is not.
"""

import asyncio
from statistics import median

import click

from ipc.aclient import AsyncTokenClient, AsyncTokenStream
from ipc.errors import EngineError
from ipc.params import SamplingParams
from scripts.bench.engine import Engine
from scripts.bench.load import PromptSource
from scripts.bench.results import Verdict, fail, finish, markdown, script_options

BAR_S = 300e-6
WARM_UP_S = 3.0
WINDOW_S = 2.0
MAX_OUTPUT_TOKENS = 1500
PROMPT_TOKENS = 32


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("model")
@click.option("--pp", default=2, type=click.IntRange(1), help="Stages.")
@click.option("--dtype", default="bfloat16")
@click.option("--requests", "num_requests", default=64, type=click.IntRange(1), help="Requests that decode meanwhile.")
@click.option("--flag", "flags", multiple=True, help="One more word for `brigade serve`; repeatable.")
@script_options
def command(
    model: str, pp: int, dtype: str, num_requests: int, flags: tuple[str, ...], rounds: int, json_path: str | None, check: bool
) -> None:
    """Print the core's processor time per step while requests decode, in windows of two seconds."""
    try:
        with Engine([model, "--pp", str(pp), "--dtype", dtype, *flags]) as engine:
            windows = asyncio.run(_measure(engine.wait_ready().address, num_requests, rounds))
    except EngineError as error:
        fail(str(error))
    per_step_s = median(cpu_s / num_steps for cpu_s, num_steps in windows)
    rows = [[num_requests, num_steps, f"{1e6 * cpu_s / num_steps:.0f}"] for cpu_s, num_steps in windows]
    table = markdown(["requests", "steps", "us per step"], rows)
    verdict = Verdict(name=f"{num_requests} requests, bar / time per step", value=BAR_S / per_step_s, bar=1.0)
    result = {"windows": [{"cpu_s": cpu_s, "steps": num_steps} for cpu_s, num_steps in windows]}
    finish(result, table, [verdict], json_path=json_path, check=check)


async def _measure(address: str, num_requests: int, num_windows: int) -> list[tuple[float, int]]:
    """Processor time and steps of each window."""
    async with AsyncTokenClient(address) as client:
        source = PromptSource(client.model, seed=0)
        params = SamplingParams(max_tokens=MAX_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        streams = [client.generate(source.draw(PROMPT_TOKENS), params) for _ in range(num_requests)]
        decoding = [asyncio.Event() for _ in streams]
        readers = [asyncio.ensure_future(_read(*pair)) for pair in zip(streams, decoding, strict=True)]
        try:
            await asyncio.gather(*(event.wait() for event in decoding))
            await asyncio.sleep(WARM_UP_S)
            return [await _window(client, num_requests) for _ in range(num_windows)]
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


async def _window(client: AsyncTokenClient, num_requests: int) -> tuple[float, int]:
    before = await client.stats()
    await asyncio.sleep(WINDOW_S)
    after = await client.stats()
    if after["requests_running"] != num_requests:
        raise EngineError("requests ended before the measurement did; ask for fewer --rounds")
    cpu_s, num_steps = (float(after[name]) - float(before[name]) for name in ("core_cpu_s", "stage_0_steps"))
    return cpu_s, int(num_steps)


async def _read(stream: AsyncTokenStream, decoding: asyncio.Event) -> None:
    try:
        async for _ in stream:
            decoding.set()
    finally:
        decoding.set()  # one that failed must not be waited for


if __name__ == "__main__":
    command()
