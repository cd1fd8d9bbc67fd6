"""How would this scheduler do on that pipeline? ``python -m scripts.bench.simulate --help``"""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial

import click

from engine.cost_model import Coefficients
from engine.pacing import PREFILL_SHARE
from engine.policies import SchedulingPolicy
from engine.scheduler import SchedulerConfig
from ipc.errors import ConfigError
from scripts.bench.report import Summary, draw, mean_of, stage_table, summarize, table
from scripts.bench.simulation import Simulation, SimulationResult
from scripts.bench.traces import Mix, TraceRequest, read_trace

VARIANTS = ("auto", "greedy", "unthrottled")

WARM_UP_SHARE = 0.2
"""Of the arrivals' time span: until then waiting is not counted, since the pipeline fills and costs are fitted."""


class Range(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Two token counts, LOW:HIGH."""

    name = "low:high"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Both as integers; fails with a usage error."""
        if isinstance(value, tuple):
            return value
        low, _, high = str(value).partition(":")
        if not (low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high)):
            self.fail(f"{value!r} is not LOW:HIGH with 1 <= LOW <= HIGH", param, ctx)
        return int(low), int(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all runs of one command have in common."""

    config: SchedulerConfig
    coefficients: Coefficients
    knows_costs: bool
    core_s: float


def make_variant(config: SchedulerConfig, variant: str) -> SchedulerConfig:
    """A scheduler's settings under a name: auto, greedy, unthrottled, or a fixed number of cohorts. Raises ConfigError."""
    if variant == "auto":
        return config
    if variant == "greedy":
        return replace(config, is_greedy=True, async_scheduling=False)
    if variant == "unthrottled":
        return replace(config, prefill_share=1.0)
    if variant.isdigit():
        return replace(config, num_cohorts=int(variant))
    raise ConfigError("--variant", f"{variant!r} is not one of {', '.join(VARIANTS)} or a number of cohorts")


def run_variant(setup: Setup, variant: str, trace: list[TraceRequest]) -> SimulationResult:
    """One run of a trace."""
    longest = max(request.num_prompt + request.num_output for request in trace)
    config = make_variant(setup.config, variant)
    if config.max_model_len < longest:
        config = replace(config, max_model_len=longest)
    return Simulation(
        config,
        setup.coefficients,
        trace,
        knows_costs=setup.knows_costs,
        core_s=setup.core_s,
        warm_up_s=WARM_UP_SHARE * trace[-1].arrival,
    ).run()


def saturated_rate(setup: Setup, mix: Mix, count: int, seed: int) -> float:
    """Requests per second that the greedy policy serves when all are there from the start."""
    return count / run_variant(setup, "greedy", mix.draw(count, math.inf, seed)).end


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--stages", type=click.IntRange(1, 64), default=8, help="Pipeline stages.")
@click.option("--coefficients", type=click.Path(), default=None,
              help="JSON file with step_s, row_s, token_s, attention_s, head_s, return_s in seconds.  [default: a guess]")
@click.option("--costs", type=click.Choice(["fitted", "known"]), default="fitted",
              help="Whether the scheduler learns the coefficients from its steps, as in the engine, or is told.")
@click.option("--variant", "variants", multiple=True, default=("auto",), metavar="NAME|N",
              help=f"{', '.join(VARIANTS)}, or a fixed number of cohorts; repeatable.")
@click.option("--trace", "trace_path", type=click.Path(), default=None, help="JSON lines or CSV: arrival (s), prompt, output (tokens).")
@click.option("--requests", "num_requests", type=click.IntRange(1), default=400, help="Requests of a synthetic trace.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=None,
              help="Poisson arrivals per second.  [default: all at once]")
@click.option("--load", type=click.FloatRange(0, min_open=True), default=None,
              help="The rate as a share of what the greedy policy serves of this mix when saturated.")
@click.option("--prompt", type=Range(), default="100:4000", help="Prompt tokens, log-uniform.")
@click.option("--output", type=Range(), default="50:500", help="Answer tokens, log-uniform.")
@click.option("--seed", "seeds", type=click.IntRange(0), multiple=True, default=(0,),
              help="Of a synthetic trace; repeatable, the table shows means.")
@click.option("--scheduling-policy", type=click.Choice([p.value for p in SchedulingPolicy]), default="fcfs",
              help="Order of requests.")
@click.option("--prefill-share", type=click.FloatRange(0, 1, min_open=True), default=PREFILL_SHARE,
              help="Share of the time for a prompt while decodes run; 1 does not throttle.")
@click.option("--async-scheduling/--no-async-scheduling", default=True, help="One step more in flight than stages.")
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, help="Most running requests.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=2048, help="Most tokens of a step.")
@click.option("--block-size", type=click.IntRange(1), default=16, help="Tokens per KV block.")
@click.option("--num-kv-blocks", type=click.IntRange(1), default=65536, help="KV blocks.")
@click.option("--core-us", type=click.FloatRange(0), default=0.0, help="Time of the core for each event, in microseconds.")
@click.option("--details", is_flag=True, help="Print waiting per stage and cause, and the fitted coefficients.")
@click.option("--png", type=click.Path(), default=None, help="Draw the runs of the last seed.")
def command(
    stages: int, coefficients: str | None, costs: str, variants: tuple[str, ...], trace_path: str | None,
    num_requests: int, rate: float | None, load: float | None, prompt: tuple[int, int], output: tuple[int, int],
    seeds: tuple[int, ...], scheduling_policy: str, prefill_share: float, async_scheduling: bool, max_num_seqs: int,
    max_num_batched_tokens: int, block_size: int, num_kv_blocks: int, core_us: float, details: bool, png: str | None,
) -> None:  # fmt: skip
    """Run the engine's scheduler and KV ledger against a modelled pipeline, and report what requests and stages saw."""
    try:
        setup = Setup(
            config=SchedulerConfig(
                num_stages=stages,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=2,
                block_size=block_size,
                num_blocks=num_kv_blocks,
                prefix_caching=False,
                policy=SchedulingPolicy(scheduling_policy),
                async_scheduling=async_scheduling,
                prefill_share=prefill_share,
            ),
            coefficients=Coefficients() if coefficients is None else Coefficients.read(coefficients),
            knows_costs=costs == "known",
            core_s=core_us * 1e-6,
        )
        mix = Mix(prompt=prompt, output=output)
        if load is not None:
            saturated = saturated_rate(setup, mix, num_requests, seeds[0])
            rate = load * saturated
            click.echo(f"greedy, saturated: {saturated:.2f} requests/s; arrivals at {rate:.2f} requests/s")
        if trace_path is not None:
            traces = [read_trace(trace_path)]
        else:
            traces = list(map(partial(mix.draw, num_requests, math.inf if rate is None else rate), seeds))
        _run_all(setup, variants, traces, details=details, png=png)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def _run_all(
    setup: Setup, variants: tuple[str, ...], traces: list[list[TraceRequest]], *, details: bool, png: str | None
) -> None:
    rows: list[tuple[str, Summary]] = []
    last_runs: list[tuple[str, SimulationResult]] = []
    for variant in variants:
        results = [run_variant(setup, variant, trace) for trace in traces]
        name = f"{variant} cohorts" if variant.isdigit() else variant
        rows.append((name, mean_of([summarize(result) for result in results])))
        last_runs.append((name, results[-1]))
    click.echo(table(rows))
    if details:
        for name, result in last_runs:
            fitted = ", ".join(f"{part} {seconds:.3g}" for part, seconds in asdict(result.coefficients).items())
            click.echo(f"\n{name}: {result.num_steps} steps, coefficients {fitted}")
            click.echo(stage_table(result))
    if png is not None:
        draw(png, last_runs)


if __name__ == "__main__":
    command()
