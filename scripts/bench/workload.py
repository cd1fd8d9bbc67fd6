"""Our side of a comparison: ``python -m scripts.bench.workload MODEL --pp 2 --dtype bfloat16``

Starts an engine with these words, warms it, runs the workload that peers run, and prints one JSON line per case. The
words are those of ``brigade serve``; options of this script come first.
"""

import asyncio
import json
import sys

import click

from ipc.aclient import AsyncTokenClient
from ipc.errors import EngineError
from scripts.bench.cases import PEER_CASES, Case, CaseType, Figures, fresh_prompts, peer_prompts, run_case
from scripts.bench.engine import Engine
from scripts.bench.results import fail, say

WARM_UP = (Case(1, 32, 16), Case(16, 128, 16))
"""Enough steps for the cost model's first fits; with prompts that do not come again."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True})
@click.option("--case", "cases", type=CaseType(), multiple=True, default=PEER_CASES, show_default=True, help="Repeatable.")
@click.option("--name", help="The engine's name in the output.  [default: brigade and its stages]")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
def command(cases: tuple[Case, ...], name: str | None, words: tuple[str, ...]) -> None:
    """Run the peers' workload on `brigade serve WORDS` and print JSON lines as peers do."""
    try:
        with Engine(words) as engine:
            asyncio.run(_run(engine.address, cases, name))
    except EngineError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


async def _run(address: str, cases: tuple[Case, ...], name: str | None) -> None:
    async with AsyncTokenClient(address, name="brigade-bench") as client:
        model = client.model
        say("engine ready")
        for case in WARM_UP:
            say(f"warming with {case}")
            await run_case(client, case, fresh_prompts(case, 0, model.vocab_size))
        for case in cases:
            say(f"measuring {case}")
            figures = await run_case(client, case, peer_prompts(case))
            click.echo(json.dumps(line(name or f"brigade stages={model.num_stages}", case, figures)))


def line(engine: str, case: Case, figures: Figures) -> dict[str, object]:
    """What a peer prints for one case."""
    return {
        "engine": engine,
        "requests": case.num_requests,
        "prompt": case.num_prompt,
        "output": case.num_output,
        "seconds": round(figures.seconds, 3),
        "output_tok_s": round(figures.output_tok_s, 1),
        "total_tok_s": round(figures.total_tok_s, 1),
    }


if __name__ == "__main__":
    command()
