"""Which steps would the engine run for a case, and how fast are stages that do nothing but compute them?

The engine's own scheduler plans the steps, against a model of the pipeline and with made-up tokens. Then each stage runs
in a process on its own cores, all at the same time, each with its inputs at hand: no links, no core, no waiting. What
the slowest stage takes is the least that a pipeline could.
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from engine.cost_model import Coefficients
from engine.in_flight import InFlightStep
from engine.scheduler import SchedulerConfig
from ipc.codec import decode, encode
from ipc.endpoints import let_waiting_threads_sleep
from ipc.errors import PeerLost
from ipc.messages import ModelRunnerOutput, SchedulerOutput
from scripts.bench.cases import Case
from scripts.bench.engine import clean_environment
from scripts.bench.simulation import Simulation
from scripts.bench.traces import TraceRequest

END_S = 20.0


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step, what comes back for it, and whose tokens those are."""

    plan: SchedulerOutput
    output: ModelRunnerOutput
    sampling: list[int]
    """Numbers of the requests that sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive steps, and the tokens that count for them."""

    begin: int
    """The first step of it; its time starts at the end of the one before."""
    end: int
    """Behind its last step."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageJob:
    """What one stage's process is told."""

    model: str
    dtype: str
    partition: str
    stage: int
    num_stages: int
    num_threads: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int


def plan_steps(config: SchedulerConfig, coefficients: Coefficients, case: Case) -> list[PlannedStep]:
    """The steps in which the scheduler would run this case on an idle engine whose costs are these."""
    steps: list[PlannedStep] = []

    def note(plan: SchedulerOutput, step: InFlightStep) -> None:
        sampling = [r.internal_id for r, samples in zip(step.requests, step.samples, strict=True) if samples]
        rows = [row for row, samples in zip(step.rows, step.samples, strict=True) if samples]
        count = len(rows)
        output = ModelRunnerOutput(
            core_id=plan.core_id, epoch=plan.epoch, step_id=plan.step_id, rows=rows, token_ids=[0] * count, counts=[1] * count
        )
        steps.append(PlannedStep(plan, output, sampling))

    trace = [TraceRequest(0.0, case.num_prompt, case.num_output)] * case.num_requests
    Simulation(config, coefficients, trace, knows_costs=True, on_step=note).run()
    return steps


def whole(steps: Sequence[PlannedStep], num_tokens: int) -> Span:
    """All steps."""
    return Span(begin=0, end=len(steps), num_tokens=num_tokens)


def steady(steps: Sequence[PlannedStep]) -> Span:
    """As ``measures.steady_rate``: behind the last request's first token, up to the first request's last token."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        for number in step.sampling:
            first.setdefault(number, index)
            last[number] = index
    begin, end = max(first.values()) + 1, min(last.values()) + 1
    return Span(begin=begin, end=max(begin, end), num_tokens=sum(len(step.sampling) for step in steps[begin:end]))


def time_of(span: Span, ends: Sequence[float]) -> float:
    """Seconds that a stage took for these steps; ``ends``: when it was through with each step."""
    if span.end <= span.begin:
        return 0.0
    return ends[span.end - 1] - (ends[span.begin - 1] if span.begin else 0.0)


def write_steps(path: Path, steps: Iterable[PlannedStep]) -> None:
    """For ``read_steps``: the messages as they travel."""
    with path.open("wb") as file:
        for step in steps:
            for message in (step.plan, step.output):
                frames = [bytes(frame) for frame in encode(message)]
                file.write(struct.pack(f"<{1 + len(frames)}I", len(frames), *map(len, frames)))
                file.writelines(frames)


def read_steps(path: Path) -> list[tuple[SchedulerOutput, ModelRunnerOutput]]:
    """Plans with their outputs."""
    with path.open("rb") as file:
        frames = iter(list(_read_messages(file)))
    return [
        (decode(plan, (SchedulerOutput,)), decode(output, (ModelRunnerOutput,)))
        for plan, output in zip(frames, frames, strict=True)
    ]


def _read_messages(file: IO[bytes]) -> Iterator[list[bytes]]:
    while head := file.read(4):
        (count,) = struct.unpack("<I", head)
        sizes = struct.unpack(f"<{count}I", file.read(4 * count))
        yield [file.read(size) for size in sizes]


class StageProcesses:
    """One process per stage, ready to run steps; a context manager.

    Raises:
        PeerLost: on entry and from ``run``: a process ended; its own words are on standard error.
    """

    def __init__(self, jobs: Sequence[StageJob], cores: Sequence[Iterable[int]]) -> None:
        self._processes = [_start(job, set(own)) for job, own in zip(jobs, cores, strict=True)]

    def run(self, path: Path) -> list[list[float]]:
        """Run a file of steps on all stages at once; per stage, seconds from its start to the end of each step."""
        for process in self._processes:
            # Read and decoded by all before anybody starts.
            _tell(process, {"load": str(path)})
        for process in self._processes:
            _answer(process)
        for process in self._processes:
            _tell(process, {"run": True})
        return [_answer(process)["ends"] for process in self._processes]

    def __enter__(self) -> "StageProcesses":
        try:
            for process in self._processes:
                _answer(process)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End them. Idempotent."""
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def _start(job: StageJob, cores: set[int]) -> "subprocess.Popen[str]":
    # As a rank's, whom torchrun gives the number of threads.
    environment = {**clean_environment(), "OMP_NUM_THREADS": str(job.num_threads)}
    let_waiting_threads_sleep(environment)
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.bench.replay_stage", json.dumps(asdict(job))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=environment,
    )  # fmt: skip
    # Before it has made any thread: they inherit it.
    os.sched_setaffinity(process.pid, cores)
    return process


def _tell(process: "subprocess.Popen[str]", message: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise PeerLost(f"a stage's process ended with code {process.wait(END_S)}") from None


def _answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise PeerLost(f"a stage's process ended with code {process.wait(END_S)}; what it said is above")
    answer: dict[str, Any] = json.loads(line)
    return answer
