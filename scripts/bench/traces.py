"""Which requests come when? Drawn at random, or replayed from a file.

A trace file has one request a line, in one of two forms:

- JSON lines: an object with ``arrival`` (seconds from the start), ``prompt`` and ``output`` (tokens)::

      {"arrival": 0.25, "prompt": 128, "output": 64}

- CSV with the header ``arrival,prompt,output``.
"""

import csv
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from ipc.errors import ConfigError
from scripts.bench.lengths import Lengths

COLUMNS = ["arrival", "prompt", "output"]

MAX_ARRIVAL_S = 1e9
"""More than thirty years: what is later is a mistake."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: when it comes, in seconds from the start, and its lengths in tokens."""

    arrival: float
    num_prompt: int
    num_output: int


def draw_trace(count: int, rate: float, prompt: Lengths, output: Lengths, seed: int) -> list[TraceRequest]:
    """Poisson arrivals at ``rate`` requests per second; an infinite rate brings all at once. Same seed, same trace."""
    source = random.Random(seed)
    arrival = 0.0
    trace = []
    for _ in range(count):
        arrival += source.expovariate(rate) if math.isfinite(rate) else 0.0
        trace.append(TraceRequest(arrival, prompt.draw(source), output.draw(source)))
    return trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Lengths drawn log-uniformly between two bounds, both included."""

    prompt: tuple[int, int] = (100, 4000)
    output: tuple[int, int] = (50, 500)

    def draw(self, count: int, rate: float, seed: int) -> list[TraceRequest]:
        """See ``draw_trace``."""
        prompt, output = (Lengths(low=low, high=high, is_log=True) for low, high in (self.prompt, self.output))
        return draw_trace(count, rate, prompt, output, seed)


def read_trace(path: str) -> list[TraceRequest]:
    """Requests from a trace file, in order of arrival.

    Raises:
        ConfigError: naming the line that is broken.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--trace", f"{path} can't be read: {error}") from None
    trace = _read_json(path, lines) if lines and lines[0].lstrip().startswith("{") else _read_csv(path, lines)
    if not trace:
        raise ConfigError("--trace", f"{path} has no requests")
    return sorted(trace, key=lambda request: request.arrival)


def _read_json(path: str, lines: list[str]) -> list[TraceRequest]:
    trace = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError("--trace", f"{where}: {line!r:.80} is not JSON") from None
        if not isinstance(values, dict) or set(values) != set(COLUMNS):
            raise ConfigError("--trace", f"{where}: must be an object with {', '.join(COLUMNS)} and nothing else")
        arrival, prompt, output = (values[name] for name in COLUMNS)
        if type(arrival) not in (int, float) or type(prompt) is not int or type(output) is not int:
            raise ConfigError("--trace", f"{where}: {line!r:.80} must hold a number of seconds and two of tokens")
        trace.append(_checked(where, arrival, prompt, output))
    return trace


def _read_csv(path: str, lines: list[str]) -> list[TraceRequest]:
    try:
        rows = list(csv.reader(lines))
    except csv.Error as error:
        raise ConfigError("--trace", f"{path} can't be read: {error}") from None
    if not rows or [name.strip() for name in rows[0]] != COLUMNS:
        raise ConfigError(
            "--trace", f"{path}, line 1: must be the header {','.join(COLUMNS)}, or an object in JSON with these keys"
        )
    return [_parse(f"{path}, line {number}", row) for number, row in enumerate(rows[1:], 2)]


def _parse(where: str, row: list[str]) -> TraceRequest:
    if len(row) != len(COLUMNS):
        raise ConfigError("--trace", f"{where}: has {len(row)} fields, needs {len(COLUMNS)} ({','.join(COLUMNS)})")
    try:
        return _checked(where, float(row[0]), int(row[1]), int(row[2]))
    except ConfigError:
        raise
    except ValueError:
        raise ConfigError("--trace", f"{where}: {','.join(row)!r:.80} is not a number of seconds and two of tokens") from None


def _checked(where: str, arrival: float, num_prompt: int, num_output: int) -> TraceRequest:
    # An integer of JSON may be too large for a float, so it is compared first.
    if not 0 <= arrival <= MAX_ARRIVAL_S:
        raise ConfigError("--trace", f"{where}: arrival={arrival!s:.20} must be a number of seconds from 0 to {MAX_ARRIVAL_S:g}")
    if num_prompt < 1 or num_output < 1:
        raise ConfigError("--trace", f"{where}: prompt={num_prompt} and output={num_output} must be at least 1 token")
    return TraceRequest(float(arrival), num_prompt, num_output)
