"""How close does the real pipeline come to its ceiling, the same steps on stages that never wait?"""

import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from engine.cost_model import Coefficients
from engine.scheduler import SchedulerConfig
from ipc.aclient import AsyncTokenClient
from ipc.conversation import Scalar
from ipc.errors import ConfigError
from ipc.messages import ModelInfo
from scripts.bench.cases import Case, Figures, fresh_prompts, run_case
from scripts.bench.engine import Engine
from scripts.bench.replay import (
    PlannedStep,
    Span,
    StageJob,
    StageProcesses,
    plan_steps,
    steady,
    time_of,
    whole,
    write_steps,
)
from scripts.bench.results import say

DECODE, PREFILL, WHOLE = "decode", "prefill", "whole"
"""What counts: tokens while all requests decode; prompt tokens of the whole run; answer tokens of the whole run."""

BLOCK_SIZE = 16
REPORT_S = 1.5
"""Ranks tell once a second how many steps they have done."""


@dataclass(frozen=True, slots=True)
class Work:
    """A case, and what of it counts."""

    kind: str
    case: Case

    def __str__(self) -> str:
        return f"{self.kind} {self.case}"

    def real_rate(self, figures: Figures) -> float:
        """Tokens per second of the real engine."""
        if self.kind == DECODE:
            return figures.steady_tok_s
        return self._num_tokens / figures.seconds

    def span(self, steps: Sequence[PlannedStep]) -> Span:
        """The steps that count of those that were planned."""
        return steady(steps) if self.kind == DECODE else whole(steps, self._num_tokens)

    @property
    def _num_tokens(self) -> int:
        return self.case.num_requests * (self.case.num_prompt if self.kind == PREFILL else self.case.num_output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An engine to be measured."""

    model: str
    dtype: str
    num_stages: int
    max_num_batched_tokens: int = 2048
    flags: tuple[str, ...] = ()
    """More words for ``brigade serve``."""
    is_pinned: bool = False
    """The real ranks are kept to their own cores, as those of the ceiling are."""

    @property
    def words(self) -> list[str]:
        return [
            self.model, "--pp", str(self.num_stages), "--dtype", self.dtype,
            "--max-num-batched-tokens", str(self.max_num_batched_tokens), "--block-size", str(BLOCK_SIZE), *self.flags,
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One measurement of one work."""

    real: float
    """Tokens per second."""
    ceiling: float
    stage_s: list[float]
    """What each stage alone took for the steps that count."""
    planned_steps: int
    real_steps: int
    client_cpu_share: float

    @property
    def ratio(self) -> float:
        return self.real / self.ceiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All rounds of one setup."""

    partition: str
    coefficients: Coefficients
    """What the engine believed in the end."""
    model: ModelInfo
    rounds: dict[Work, list[Round]]

    def median(self, work: Work, name: str) -> float:
        """Of real, ceiling or ratio."""
        return statistics.median(getattr(one, name) for one in self.rounds[work])

    def as_json(self) -> dict[str, Any]:
        return {
            "partition": self.partition,
            "coefficients": asdict(self.coefficients),
            "works": {
                str(work): {
                    **{name: self.median(work, name) for name in ("real", "ceiling", "ratio")},
                    "rounds": [{**asdict(one), "ratio": one.ratio} for one in rounds],
                }
                for work, rounds in self.rounds.items()
            },
        }


def compare_with_ceiling(setup: Setup, works: Sequence[Work], num_rounds: int) -> Measured:
    """Run each work on the real engine and on its stages alone, in turn. Raises PeerLost, RequestError."""
    rounds: dict[Work, list[Round]] = {work: [] for work in works}
    cores = cores_per_stage(setup.num_stages)
    with tempfile.TemporaryDirectory(prefix="brigade-bench-") as folder, Engine(setup.words) as engine:
        if setup.is_pinned:
            engine.pin(cores)
        say(f"engine ready, layers per stage {engine.partition()}")
        model = asyncio.run(_warm(engine.address, works))
        jobs = _jobs(setup, model, engine.partition(), works, num_threads=len(cores[0]))
        with StageProcesses(jobs, cores) as stages:
            for number in range(-1, num_rounds):
                for work in works:
                    # The round before the first one warms.
                    done, costs = _round(engine.address, stages, jobs[0], model, work, number, Path(folder))
                    if number >= 0:
                        rounds[work].append(done)
                        say(f"round {number + 1} of {num_rounds}, {work}: {done.real:.1f} of {done.ceiling:.1f} tokens/s")
        return Measured(partition=engine.partition(), coefficients=costs, model=model, rounds=rounds)


def cores_per_stage(num_stages: int) -> list[list[int]]:
    """Equal shares of the cores that this process may use, as ranks take them; with more stages than cores, one each."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // num_stages)
    return [[cores[(stage * share + i) % len(cores)] for i in range(share)] for stage in range(num_stages)]


def one_stage_alone(setup: Setup, measured: Measured, works: Sequence[Work], num_threads: int, num_rounds: int) -> dict[Work, float]:
    """Tokens per second of the whole model in one process with so many threads, inputs at hand; medians."""
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    single = replace(setup, num_stages=1)
    (job,) = _jobs(single, measured.model, "even", works, num_threads=num_threads)
    costs = _of_one_stage(measured.coefficients, setup.num_stages)
    with tempfile.TemporaryDirectory(prefix="brigade-bench-") as folder, StageProcesses([job], [cores]) as stage:
        rates: dict[Work, list[float]] = {work: [] for work in works}
        for number in range(-1, num_rounds):
            for work in works:
                _, rate, _ = _replay(stage, job, costs, work, Path(folder))
                if number >= 0:
                    rates[work].append(rate)
                    say(f"one stage, {num_threads} threads, round {number + 1} of {num_rounds}, {work}: {rate:.1f} tokens/s")
    return {work: statistics.median(values) for work, values in rates.items()}


def _round(
    address: str, stages: StageProcesses, job: StageJob, model: ModelInfo, work: Work, number: int, folder: Path
) -> tuple[Round, Coefficients]:
    figures, costs, real_steps = asyncio.run(_real(address, work.case, number))
    check_rate(work, work.real_rate(figures))
    steps, rate, stage_s = _replay(stages, job, costs, work, folder)
    done = Round(
        real=work.real_rate(figures), ceiling=rate, stage_s=stage_s, planned_steps=len(steps), real_steps=real_steps,
        client_cpu_share=figures.client_cpu_share,
    )  # fmt: skip
    return done, costs


def _replay(
    stages: StageProcesses, job: StageJob, costs: Coefficients, work: Work, folder: Path
) -> tuple[list[PlannedStep], float, list[float]]:
    """Steps, tokens per second of the slowest stage, and each stage's seconds."""
    steps = plan_steps(_scheduler_config(job), costs, work.case)
    path = folder / "steps"
    write_steps(path, steps)
    span = work.span(steps)
    stage_s = [time_of(span, ends) for ends in stages.run(path)]
    rate = span.num_tokens / max(*stage_s, 1e-9)
    check_rate(work, rate)
    return steps, rate, stage_s


def check_rate(work: Work, rate: float) -> None:
    """Raises ConfigError for a decode that is never steady."""
    if not rate:
        raise ConfigError(str(work), "there was no time in which all requests decoded; give longer answers or shorter prompts")


async def _real(address: str, case: Case, seed: int) -> tuple[Figures, Coefficients, int]:
    async with AsyncTokenClient(address, name="brigade-bench") as client:
        await asyncio.sleep(REPORT_S)
        before = await client.stats()
        figures = await run_case(client, case, fresh_prompts(case, seed, client.model.vocab_size))
        await asyncio.sleep(REPORT_S)
        after = await client.stats()
    # Those with which it planned, as far as nothing was learned meanwhile.
    return figures, coefficients_of(before), int(after["stage_0_steps"]) - int(before["stage_0_steps"])


async def _warm(address: str, works: Sequence[Work]) -> ModelInfo:
    async with AsyncTokenClient(address, name="brigade-bench") as client:
        for work in works:
            await run_case(client, work.case, fresh_prompts(work.case, -2, client.model.vocab_size))
        return client.model


def coefficients_of(stats: dict[str, Scalar]) -> Coefficients:
    """What the engine has fitted, from its stats."""
    return Coefficients(**{field.name: float(stats[f"cost_{field.name}"]) for field in fields(Coefficients)})


def _jobs(setup: Setup, model: ModelInfo, partition: str, works: Sequence[Work], *, num_threads: int) -> list[StageJob]:
    longest = max(work.case.num_prompt + work.case.num_output + 1 for work in works)
    blocks = max(work.case.num_requests for work in works) * (longest // BLOCK_SIZE + 1)
    return [
        StageJob(
            model=str(Path(setup.model).resolve()),
            dtype=setup.dtype,
            partition=partition,
            stage=stage,
            num_stages=setup.num_stages,
            num_threads=num_threads,
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=longest,
            block_size=BLOCK_SIZE,
            # Room enough that the scheduler never paces by free blocks, as on an engine with a quarter of the memory.
            num_blocks=4 * blocks,
        )
        for stage in range(setup.num_stages)
    ]


def _scheduler_config(job: StageJob) -> SchedulerConfig:
    return SchedulerConfig(
        num_stages=job.num_stages,
        max_num_seqs=job.max_num_seqs,
        max_num_batched_tokens=job.max_num_batched_tokens,
        max_model_len=job.max_model_len,
        block_size=job.block_size,
        num_blocks=job.num_blocks,
        prefix_caching=False,
    )


def _of_one_stage(costs: Coefficients, num_stages: int) -> Coefficients:
    """All layers in one stage take as long as all stages in turn."""
    shares = {name: getattr(costs, name) * num_stages for name in ("step_s", "row_s", "token_s", "attention_s")}
    return replace(costs, **shares)
