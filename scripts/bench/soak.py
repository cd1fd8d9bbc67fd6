"""Does anything grow or leak under a steady load? ``python -m scripts.bench.soak MODEL --minutes 30``"""

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import click
import numpy as np

from ipc.client import TokenClient
from ipc.errors import ConfigError, EngineError, PeerLost
from scripts.bench.engine import Engine
from scripts.bench.http_cost import URL
from scripts.bench.process_use import Use, read_use
from scripts.bench.results import fail, markdown, say
from scripts.bench.soak_load import run_load

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None  # type: ignore[assignment,misc,unused-ignore]

MAX_SLOPE = 1.0
"""MB in 10 minutes."""

WARM_UP_SHARE = 0.25
"""Of the time: until then caches fill and pools grow."""

NUM_KV_BLOCKS = 512
"""Memory of a block counts from its first use on: so few that all have been used when the warm-up is over."""

MAX_SAMPLES = 600
SETTLE_S = 30.0
"""What an idle engine gets to let go of the last requests."""

BRIEF_S = 3.0
"""Of the load before the first look: what is opened once, at the first request of its kind, is no leak."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """Of one soak."""

    counts: dict[str, int]
    """Requests by the way that they came and how they ended."""
    times_s: list[float]
    uses: dict[str, list[Use]]
    """For each process by its name, one for each of the times."""
    slopes: dict[str, float]
    """MB in 10 minutes, of each process's own memory."""
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A running engine."""

    address: str
    url: str | None
    """Of its HTTP server."""
    pids: Mapping[str, int]


class Sampler:
    """Looks at every process again and again, in a thread, until it is stopped."""

    def __init__(self, pids: Mapping[str, int], interval_s: float) -> None:
        self.times_s: list[float] = []
        self.uses: dict[str, list[Use]] = {name: [] for name in pids}
        self.gone: set[str] = set()
        self._pids = pids
        self._interval_s = interval_s
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._is_stopped.wait(self._interval_s) and not self.gone:
            uses = look(self._pids)
            self.gone |= set(self._pids) - set(uses)
            if not self.gone:
                self.times_s.append(time.monotonic() - began)
                for name, use in uses.items():
                    self.uses[name].append(use)


def soak(target: Target, *, seconds: float, rate: float, seed: int, max_slope: float = MAX_SLOPE) -> Findings:
    """Load for so long. What is open when the engine is idle, before and after it, has to be the same.

    Raises PeerLost when the engine is gone.
    """
    asyncio.run(run_load(target.address, target.url, seconds=BRIEF_S, rate=max(rate, 5.0), seed=seed + 1))
    problems = settle(target.address)
    at_first = look(target.pids)
    with Sampler(target.pids, max(seconds / MAX_SAMPLES, 0.5)) as sampler:
        counts = asyncio.run(run_load(
            target.address, target.url, seconds=seconds, rate=rate, seed=seed, is_over=lambda: bool(sampler.gone)
        ))
    problems += [f"{name} is gone" for name in sorted(sampler.gone)]
    problems += [f"{count} requests: {how}" for how, count in sorted(counts.items()) if "went wrong" in how]
    problems += settle(target.address)
    problems += leaks(target.pids, at_first)
    slopes = {name: slope(sampler.times_s, [use.anonymous_bytes for use in uses]) for name, uses in sampler.uses.items()}
    problems += [
        f"{name}'s memory grows by {found:.2f} MB in 10 minutes, more than {max_slope:g}"
        for name, found in slopes.items() if found > max_slope
    ]  # fmt: skip
    return Findings(counts=dict(counts), times_s=sampler.times_s, uses=sampler.uses, slopes=slopes, problems=problems)


def look(pids: Mapping[str, int]) -> dict[str, Use]:
    """Of those that live."""
    return {name: use for name, pid in pids.items() if (use := read_use(pid)) is not None}


def settle(address: str) -> list[str]:
    """Wait until the engine is idle; what it still holds at the deadline."""
    deadline = time.monotonic() + SETTLE_S
    with TokenClient(address) as client:
        while True:
            stats = client.stats()
            held = {name: int(stats[name]) for name in ("requests_running", "requests_waiting")}
            held["blocks"] = int(stats["kv_blocks_total"]) - int(stats["kv_blocks_free"])
            if not any(held.values()):
                return []
            if time.monotonic() > deadline:
                return [f"an idle engine holds {', '.join(f'{count} {name}' for name, count in held.items() if count)}"]
            time.sleep(0.1)


def leaks(pids: Mapping[str, int], at_first: Mapping[str, Use], timeout_s: float = SETTLE_S) -> list[str]:
    """Descriptors that each process has more than at first; connections that are being closed get until the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        now = look(pids)
        found = [
            f"{name} has {getattr(now[name], of)} {what} open, {getattr(before, of)} before the load"
            for name, before in at_first.items() if name in now
            for of, what in (("num_files", "files"), ("num_sockets", "sockets")) if getattr(now[name], of) > getattr(before, of)
        ]  # fmt: skip
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def slope(times_s: Sequence[float], sizes: Sequence[int]) -> float:
    """MB in 10 minutes, by least squares over what comes behind the warm-up; 0 for too few points to tell."""
    if len(times_s) < 4:
        return 0.0
    times, values = np.array(times_s), np.array(sizes) / 1e6
    is_warm = times >= times[0] + WARM_UP_SHARE * (times[-1] - times[0])
    if np.ptp(times[is_warm]) == 0:
        return 0.0
    return float(np.polyfit(times[is_warm], values[is_warm], 1)[0]) * 600


# ---------------------------------------------------------------------------------------------- what is shown


def table(findings: Findings) -> str:
    rows = [
        [
            name, uses[0].anonymous_bytes / 1e6, uses[-1].anonymous_bytes / 1e6, f"{findings.slopes[name]:.2f}",
            f"{uses[0].num_files} / {uses[-1].num_files}", f"{uses[0].num_sockets} / {uses[-1].num_sockets}",
        ]
        for name, uses in findings.uses.items() if uses
    ]  # fmt: skip
    return markdown(["process", "own memory first, MB", "last", "MB in 10 min", "files first / last", "sockets first / last"], rows)


def draw(path: str, findings: Findings) -> None:
    """Memory, files and sockets of each process over time, as a PNG file."""
    figure: Any = Figure(figsize=(10, 9), layout="constrained")
    for axes, (of, label, scale) in zip(
        figure.subplots(3), (("anonymous_bytes", "own memory, MB", 1e6), ("num_files", "files", 1), ("num_sockets", "sockets", 1)), strict=True
    ):  # fmt: skip
        for name, uses in findings.uses.items():
            axes.plot(np.array(findings.times_s) / 60, [getattr(use, of) / scale for use in uses], label=name)
        axes.set(ylabel=label, xlabel="minutes")
        axes.set_ylim(bottom=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=6)
    figure.savefig(path, format="png", dpi=120)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("model")
@click.option("--minutes", type=click.FloatRange(0.1), default=30.0)
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=2.0, help="Requests per second; Poisson arrivals.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the requests and their times.")
@click.option("--pp", type=click.IntRange(1), default=2, help="Stages.")
@click.option("--max-slope", type=click.FloatRange(0), default=MAX_SLOPE, help="MB in 10 minutes that a process may grow by.")
@click.option("--flag", "flags", multiple=True, help="One more word for `brigade serve`; repeatable.")
@click.option("--json", "json_path", metavar="FILE", help="Write counts, slopes and all samples as JSON.")
@click.option("--png", "png_path", metavar="FILE", help="Draw them over time; needs matplotlib.")
def command(
    model: str, minutes: float, rate: float, seed: int, pp: int, max_slope: float, flags: tuple[str, ...],
    json_path: str | None, png_path: str | None,
) -> None:  # fmt: skip
    """Start an engine and load it through the blocking client, the asyncio client and HTTP; 10 % of the requests are aborted, 5 %
    are wrong. Ends with code 1 when the memory of a process grows, when a file, socket, block or row leaks, or when a request goes wrong.
    """
    if png_path is not None and Figure is None:
        raise click.UsageError(str(ConfigError("--png", "needs matplotlib: pip install -e '.[bench]' in the clone")))
    try:
        with Engine([model, "--pp", str(pp), "--http", "127.0.0.1:0", "--num-kv-blocks", str(NUM_KV_BLOCKS), *flags]) as engine:
            target = Target(address=engine.address, url=_url(engine), pids=engine.processes())
            say(f"ready: {', '.join(target.pids)}; {minutes:g} minutes of {rate:g} requests/s")
            findings = soak(target, seconds=60 * minutes, rate=rate, seed=seed, max_slope=max_slope)
    except EngineError as error:
        fail(str(error))
    if json_path is not None:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump({"minutes": minutes, "rate": rate, "seed": seed, **asdict(findings)}, file, indent=1)
    if png_path is not None:
        draw(png_path, findings)
    click.echo(table(findings))
    click.echo("\n".join(f"{count:6d} {how}" for how, count in sorted(findings.counts.items())))
    for problem in findings.problems:
        click.echo(f"PROBLEM: {problem}", err=True)
    sys.exit(1 if findings.problems else 0)


def _url(engine: Engine) -> str:
    found: re.Match[str] | None = engine.first_match(URL)
    if found is None:
        raise PeerLost("the ready line does not say where HTTP is served")
    return found["http"]


if __name__ == "__main__":
    command()
