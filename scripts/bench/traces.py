"""Which requests come when? Drawn at random, or replayed from a CSV file."""

import csv
import math
import random
from dataclasses import dataclass
from pathlib import Path

from ipc.errors import ConfigError

COLUMNS = ["arrival", "prompt", "output"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: when it comes, in seconds from the start, and its lengths in tokens."""

    arrival: float
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Lengths drawn log-uniformly between two bounds, both included."""

    prompt: tuple[int, int] = (100, 4000)
    output: tuple[int, int] = (50, 500)

    def draw(self, count: int, rate: float, seed: int) -> list[TraceRequest]:
        """Poisson arrivals at ``rate`` requests per second; an infinite rate brings all at once."""
        source = random.Random(seed)
        arrival = 0.0
        trace = []
        for _ in range(count):
            arrival += source.expovariate(rate) if math.isfinite(rate) else 0.0
            trace.append(TraceRequest(arrival, _log_uniform(source, self.prompt), _log_uniform(source, self.output)))
        return trace


def read_trace(path: str) -> list[TraceRequest]:
    """Requests from a CSV file with the header ``arrival,prompt,output``, in order of arrival.

    Raises:
        ConfigError: naming the line that is broken.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--trace", f"{path} can't be read: {error}") from None
    lines = list(csv.reader(text.splitlines()))
    if not lines or [name.strip() for name in lines[0]] != COLUMNS:
        raise ConfigError("--trace", f"{path}, line 1: must be the header {','.join(COLUMNS)}")
    trace = [_parse(path, number, line) for number, line in enumerate(lines[1:], 2)]
    if not trace:
        raise ConfigError("--trace", f"{path} has no requests")
    return sorted(trace, key=lambda request: request.arrival)


def _parse(path: str, number: int, line: list[str]) -> TraceRequest:
    where = f"{path}, line {number}"
    if len(line) != len(COLUMNS):
        raise ConfigError("--trace", f"{where}: has {len(line)} fields, needs {len(COLUMNS)} ({','.join(COLUMNS)})")
    try:
        request = TraceRequest(float(line[0]), int(line[1]), int(line[2]))
    except ValueError:
        raise ConfigError("--trace", f"{where}: {','.join(line)!r:.80} is not a number of seconds and two of tokens") from None
    if not (math.isfinite(request.arrival) and request.arrival >= 0):
        raise ConfigError("--trace", f"{where}: arrival={line[0]} must be a finite number of seconds, at least 0")
    if request.num_prompt < 1 or request.num_output < 1:
        raise ConfigError("--trace", f"{where}: prompt={line[1]} and output={line[2]} must be at least 1 token")
    return request


def _log_uniform(source: random.Random, bounds: tuple[int, int]) -> int:
    low, high = bounds
    return min(high, int(math.exp(source.uniform(math.log(low), math.log(high + 1)))))
