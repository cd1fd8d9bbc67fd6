"""What does the core's own work cost per step and per request? ``python -m scripts.bench.scheduler_cost --help``

Every block of the pool holds cached content; then decode-only steps run, with a queue of requests that have no seat.
"""

import statistics
import time
from collections.abc import Callable

import click
import numpy as np

from engine.cost_model import Coefficients, FixedCosts
from engine.request import ClientId, Request
from engine.scheduler import Scheduler, SchedulerConfig
from ipc import codec
from ipc.messages import ModelRunnerOutput, SchedulerOutput
from ipc.params import SamplingParams

CLIENT = ClientId(0, b"bench")
PROMPT_TOKENS = 40
FILLER_BLOCKS = 500
BLOCK_SIZE = 16


class Bench:
    """A scheduler of one stage whose workers answer at once."""

    def __init__(self, num_running: int, num_waiting: int, num_blocks: int) -> None:
        self.config = SchedulerConfig(
            num_stages=1,
            max_num_seqs=num_running,
            max_num_batched_tokens=max(1 << 16, num_running),
            max_model_len=FILLER_BLOCKS * BLOCK_SIZE + 2,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            async_scheduling=False,
            prefill_share=1.0,
        )
        self.scheduler = Scheduler(self.config, core_id=1 << 60, epoch=1, costs=FixedCosts(Coefficients(head_s=0.0)))
        self._source = np.random.default_rng(1)
        self._num_requests = 0
        self._fill_cache()
        for _ in range(num_running):
            self.add()
        while any(request.num_computed_tokens < PROMPT_TOKENS for request in self.scheduler.unfinished()):
            self.step()
        for _ in range(num_waiting):
            self.add()

    def add(self, num_tokens: int = PROMPT_TOKENS, max_tokens: int | None = None) -> Request:
        """A request with a prompt of its own."""
        self._num_requests += 1
        request = Request(
            request_id=f"r{self._num_requests}",
            internal_id=self._num_requests,
            client=CLIENT,
            prompt_token_ids=self._source.integers(0, 1 << 20, num_tokens, dtype=np.int32),
            params=SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True),
        )
        self.scheduler.add(request)
        return request

    def step(self) -> SchedulerOutput:
        """Send and return one step."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.update(answer(plan, self.scheduler.newest_step.samples))
        return plan

    def timed_step(self) -> tuple[float, int]:
        """Seconds for schedule, encode and update of one step, and how many requests it had."""
        begin = time.perf_counter()
        plan = self.scheduler.schedule()
        assert plan is not None
        codec.encode(plan)
        middle = time.perf_counter()
        output = answer(plan, self.scheduler.newest_step.samples)
        again = time.perf_counter()
        self.scheduler.update(output)
        return time.perf_counter() - again + middle - begin, len(plan.rows)

    def _fill_cache(self) -> None:
        for _ in range(self.config.num_blocks // FILLER_BLOCKS + 1):
            self.add(FILLER_BLOCKS * BLOCK_SIZE, max_tokens=1)
            while self.scheduler.has_unfinished():
                self.step()


def answer(plan: SchedulerOutput, samples: list[bool]) -> ModelRunnerOutput:
    """What workers would return: some token for each row that samples."""
    rows = [row for row, does in zip(plan.rows, samples, strict=True) if does]
    return ModelRunnerOutput(
        core_id=plan.core_id, epoch=1, step_id=plan.step_id, rows=rows, token_ids=[9] * len(rows), counts=[1] * len(rows)
    )


def median_us(action: Callable[[], object], count: int) -> float:
    """Median time of a call."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def come_and_go(bench: Bench) -> tuple[float, float, float]:
    """Medians of adding a request, of ending one that waits, and of ending one that runs."""
    scheduler = bench.scheduler
    running = iter(scheduler.unfinished()[:50])
    added: list[Request] = []

    def add() -> None:
        added.append(bench.add())

    def abort_waiting() -> None:
        scheduler.finish(added.pop(), "abort")

    def abort_running() -> None:
        scheduler.finish(next(running), "abort")

    return median_us(add, 200), median_us(abort_waiting, 200), median_us(abort_running, 50)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--running", "sizes", type=click.IntRange(50), multiple=True, default=(64, 256, 1024, 4096),
              help="Repeatable.")
@click.option("--waiting", type=click.IntRange(0), default=10_000)
@click.option("--blocks", type=click.IntRange(1000), default=1_000_000)
@click.option("--steps", type=click.IntRange(3), default=60, help="Steps of which the median is taken.")
def command(sizes: tuple[int, ...], waiting: int, blocks: int, steps: int) -> None:
    """Print one line per number of running requests, and the straight line through the steps' times."""
    medians = []
    click.echo(f"{'running':>8}{'step (us)':>12}{'us/request':>12}{'add (us)':>10}{'abort waiting':>15}{'abort running':>15}")
    for size in sizes:
        bench = Bench(size, waiting, blocks)
        measured = [bench.timed_step() for _ in range(steps)]
        assert all(count == size for _, count in measured)
        step_us = statistics.median(seconds for seconds, _ in measured) * 1e6
        medians.append(step_us)
        add_us, waiting_us, running_us = come_and_go(bench)
        click.echo(f"{size:8}{step_us:12.1f}{step_us / size:12.2f}{add_us:10.1f}{waiting_us:15.2f}{running_us:15.2f}")
    if len(sizes) > 1:
        slope, fixed = np.polyfit(sizes, medians, 1)
        click.echo(f"a step costs {fixed:.0f} us and {slope:.2f} us for each scheduled request")


if __name__ == "__main__":
    command()
