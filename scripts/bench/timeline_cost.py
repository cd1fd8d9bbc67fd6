"""What does recording a timeline cost a stage? ``python -m scripts.bench.timeline_cost --help``"""

import statistics
import time
from collections.abc import Callable

import click

from ipc.spans import Kind
from worker.clock import LINK, PLAN, TOKENS, StageClock

SPANS_PER_STEP = 12


def record_step(clock: StageClock, step_id: int) -> None:
    """What the busiest stage of a step says, and a little more."""
    with clock.waiting(PLAN):
        clock.doing(Kind.PREPARE, step_id)
    with clock.waiting(TOKENS), clock.during(Kind.ACCEPT, step_id - 1):
        clock.doing(LINK)
    clock.doing(Kind.FORWARD)
    clock.doing(Kind.SAMPLE)
    clock.doing(Kind.RETURN)
    clock.doing(Kind.SEND)


def median_us(action: Callable[[int], object], count: int) -> float:
    times = []
    for number in range(count):
        begin = time.perf_counter()
        action(number)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--steps", type=click.IntRange(100), default=5000, help="Steps of which the median is taken.")
def command(steps: int) -> None:
    """Print what one step's spans cost, and what it costs to read the last second of them."""
    clock = StageClock()
    step_us = median_us(lambda number: record_step(clock, number), steps)
    read_us = median_us(lambda _: clock.snapshot(1.0), 50)
    click.echo(f"{SPANS_PER_STEP} spans of a step: {step_us:.1f} us ({step_us / SPANS_PER_STEP:.2f} us each)")
    click.echo(f"1 % of a step of {step_us / 10:.1f} ms; reading the last second: {read_us:.0f} us")


if __name__ == "__main__":
    command()
