"""Which loads do engines run side by side: so many requests of this length, all sent at once?"""

import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import click

from ipc.aclient import AsyncTokenClient
from ipc.errors import ConfigError
from scripts.bench.load import LoadResult, run_load
from scripts.bench.measures import steady_rate
from scripts.bench.traces import TraceRequest

ID_RANGE = (100, 40_000)
"""Clear of special tokens, and inside the vocabulary of the models that engines are compared on."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """Requests that all come at once, with equal lengths in tokens."""

    num_requests: int
    num_prompt: int
    num_output: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """From ``16x128:64``. Raises ConfigError."""
        match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,7}):([1-9]\d{0,7})", text, re.ASCII)
        if match is None:
            raise ConfigError("case", f"{text!r:.80} must be REQUESTSxPROMPT:OUTPUT, such as 16x128:64")
        return cls(*(int(number) for number in match.groups()))

    def __str__(self) -> str:
        return f"{self.num_requests}x{self.num_prompt}:{self.num_output}"


class CaseType(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A case on a command line."""

    name = "NxPROMPT:OUTPUT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Case:
        """Fails with a usage error."""
        if isinstance(value, Case):
            return value
        try:
            return Case.parse(str(value))
        except ConfigError as error:
            self.fail(error.message, param, ctx)


PEER_CASES = (Case(1, 32, 128), Case(16, 128, 64), Case(64, 128, 64))
"""The workload that peers run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run of a case gave."""

    seconds: float
    """From the first request sent to the last answer's end."""
    output_tok_s: float
    total_tok_s: float
    steady_tok_s: float
    """While every request decoded; 0 when they never did."""
    client_cpu_share: float

    @classmethod
    def of(cls, case: Case, result: LoadResult) -> "Figures":
        """Raises RequestError when a request failed: such a run gives no figures."""
        for record in result.records:
            if record.error is not None:
                raise record.error
        seconds = result.wall_s
        return cls(
            seconds=seconds,
            output_tok_s=case.num_requests * case.num_output / seconds,
            total_tok_s=case.num_requests * (case.num_prompt + case.num_output) / seconds,
            steady_tok_s=steady_rate(result.records),
            client_cpu_share=result.client_cpu_s / seconds,
        )


def median(figures: Sequence[Figures], name: str) -> float:
    """Of one of the fields."""
    return statistics.median(getattr(one, name) for one in figures)


def peer_prompts(case: Case) -> list[list[int]]:
    """The very prompts that peers get for this case."""
    return _draw(random.Random(1000 * case.num_requests + case.num_prompt), case, ID_RANGE[1])


def fresh_prompts(case: Case, seed: int, vocab_size: int) -> list[list[int]]:
    """Others for every seed, so that no prefix cache knows them."""
    return _draw(random.Random(f"{case} {seed}"), case, min(vocab_size, ID_RANGE[1]))


async def run_case(client: AsyncTokenClient, case: Case, prompts: Sequence[Sequence[int]]) -> Figures:
    """Send all at once, greedy and past end tokens. Raises RequestError, PeerLost."""
    trace = [TraceRequest(0.0, case.num_prompt, case.num_output)] * case.num_requests
    return Figures.of(case, await run_load(client, trace, prompts))


def _draw(source: random.Random, case: Case, end: int) -> list[list[int]]:
    low = min(ID_RANGE[0], end // 2)
    return [[source.randrange(low, end) for _ in range(case.num_prompt)] for _ in range(case.num_requests)]
