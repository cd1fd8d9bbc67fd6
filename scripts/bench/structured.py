"""What do grammars cost those who ask for none, and the core? ``python -m scripts.bench.structured MODEL --pp 2``"""

import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from ipc.aclient import AsyncTokenClient
from ipc.errors import EngineError
from ipc.params import SamplingParams
from ipc.structured import StructuredOutput
from scripts.bench.cases import Case, CaseType, fresh_prompts
from scripts.bench.engine import Engine
from scripts.bench.load import run_load
from scripts.bench.measures import steady_rate
from scripts.bench.results import Verdict, fail, finish, markdown, say, script_options
from scripts.bench.traces import TraceRequest

BAR = 0.95
"""Of their speed, that requests without a grammar keep beside others with one."""

CORE_BYTES = 150e6
"""Most that the core may ever have held."""

NUM_GRAMMARS = 64
"""Compiled before the memory counts: as many as the core keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Tokens per second of the requests without a grammar, beside neighbours of each kind."""

    beside_free: float
    beside_constrained: float

    @property
    def ratio(self) -> float:
        return self.beside_constrained / self.beside_free


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "ignore_unknown_options": True})
@click.option("--case", type=CaseType(), default=Case(16, 128, 96), help="Requests without a grammar.")
@click.option("--neighbours", type=click.IntRange(1), default=16, help="Requests beside them, of the same lengths.")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
@script_options
def command(
    case: Case, neighbours: int, words: tuple[str, ...], rounds: int, json_path: str | None, check: bool
) -> None:  # fmt: skip
    """Measure `brigade serve WORDS` with neighbours that answer in JSON, and with neighbours that do not, in turn."""
    try:
        with Engine(words) as engine:
            measured, core_bytes = asyncio.run(_measure(engine.address, case, neighbours, rounds))
    except EngineError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    ratio = statistics.median(one.ratio for one in measured)
    rows = [[i + 1, one.beside_free, one.beside_constrained, f"{one.ratio:.3f}"] for i, one in enumerate(measured)]
    table = markdown(["round", f"tokens/s beside {neighbours} free", f"beside {neighbours} in JSON", "ratio"], rows)
    table += f"\n\nthe core held at most {core_bytes / 1e6:.0f} MB, with {NUM_GRAMMARS} grammars compiled"
    verdicts = [
        Verdict(name=f"{case} beside {neighbours} with grammars", value=ratio, bar=BAR),
        Verdict(name="150 MB / the most that the core held", value=CORE_BYTES / core_bytes, bar=1.0),
    ]
    result = {"rounds": [{"free": one.beside_free, "constrained": one.beside_constrained} for one in measured],
              "core_peak_bytes": core_bytes}  # fmt: skip
    finish(result, table, verdicts, json_path=json_path, check=check)


async def _measure(address: str, case: Case, neighbours: int, rounds: int) -> tuple[list[Round], float]:
    async with AsyncTokenClient(address, name="brigade-bench") as client:
        say("engine ready; compiling grammars")
        await asyncio.gather(*(_answer(client, _tool_calls(number)) for number in range(NUM_GRAMMARS)))
        measured = []
        for number in range(-1, rounds):
            free = await _speed(client, case, neighbours, None, 2 * number)
            constrained = await _speed(client, case, neighbours, _tool_calls(number % NUM_GRAMMARS), 2 * number + 1)
            if number >= 0:
                # The round before the first one warms.
                measured.append(Round(beside_free=free, beside_constrained=constrained))
                say(f"round {number + 1} of {rounds}: {constrained:.1f} of {free:.1f} tokens/s")
        return measured, float((await client.stats())["core_peak_bytes"])


async def _answer(client: AsyncTokenClient, form: StructuredOutput) -> None:
    async for _ in client.generate([1], SamplingParams(max_tokens=2, structured=form)):
        pass


async def _speed(client: AsyncTokenClient, case: Case, neighbours: int, form: StructuredOutput | None, seed: int) -> float:
    """Of the requests without a grammar, while all of them decode."""
    beside = Case(neighbours, case.num_prompt, case.num_output)
    params = SamplingParams(temperature=1.0, seed=seed & 0xFFFF, ignore_eos=True)
    free, _ = await asyncio.gather(
        run_load(client, _trace(case), _prompts(client, case, seed), params=params),
        run_load(client, _trace(beside), _prompts(client, beside, seed + 1_000_000),
                 params=SamplingParams(temperature=1.0, seed=seed & 0xFFFF, ignore_eos=True, structured=form)),
    )  # fmt: skip
    for record in free.records:
        if record.error is not None:
            raise record.error
    return steady_rate(free.records)


def _trace(case: Case) -> list[TraceRequest]:
    return [TraceRequest(0.0, case.num_prompt, case.num_output)] * case.num_requests


def _prompts(client: AsyncTokenClient, case: Case, seed: int) -> Sequence[Sequence[int]]:
    return fresh_prompts(case, seed, client.model.vocab_size)


def _tool_calls(number: int) -> StructuredOutput:
    """Calls of a tool, far more than fit into an answer: so every answer has the length that was asked for."""
    call: dict[str, Any] = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "unit": {"enum": ["celsius", "fahrenheit", f"unit {number}"]},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 14}, "maxItems": 3},
            "date": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        },
        "required": ["city", "unit", "days"],
        "additionalProperties": False,
    }
    return StructuredOutput(json_schema=json.dumps({"type": "array", "items": call, "minItems": 100, "maxItems": 200}))


if __name__ == "__main__":
    command()
