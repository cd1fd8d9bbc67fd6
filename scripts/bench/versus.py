"""Ours against a peer, in turn, in one run: ``python -m scripts.bench.versus --help``

Both sides are commands that print one JSON object per case on standard output: engine, requests, prompt, output, seconds,
output_tok_s, total_tok_s. What else they print is passed over.
"""

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from ipc.errors import ConfigError, PeerLost
from scripts.bench.cases import Case
from scripts.bench.results import Verdict, fail, finish, markdown, say, script_options

BARS = ("1x32:128=1.2", "16x128:64=1.3", "64x128:64=1.3")
"""What two stages owe against the peer with two stages."""

FIELDS: dict[str, type | tuple[type, ...]] = {
    "engine": str, "requests": int, "prompt": int, "output": int,
    "seconds": (int, float), "output_tok_s": (int, float), "total_tok_s": (int, float),
}  # fmt: skip
TAIL_LINES = 15

Line = dict[str, Any]


@dataclass(slots=True)
class Side:
    """One of the two, and what it has printed."""

    name: str
    words: list[str]
    rounds: list[dict[Case, Line]] = field(default_factory=list)

    def values(self, case: Case) -> list[float]:
        """Output tokens per second by round."""
        return [float(lines[case]["output_tok_s"]) for lines in self.rounds]

    @property
    def cases(self) -> set[Case]:
        """Those that every round has."""
        return set.intersection(*(set(lines) for lines in self.rounds)) if self.rounds else set()

    @property
    def engine(self) -> str:
        """As it calls itself."""
        return next((str(line["engine"]) for lines in self.rounds for line in lines.values()), self.name)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--peer", required=True, metavar="COMMAND", help="Runs the peer once and prints its lines.")
@click.option("--ours", metavar="COMMAND", help="The same for ours.  [default: the workload script on --model, two stages, bfloat16]")
@click.option("--model", help="For the default of --ours: the model that the peer runs.")
@click.option("--bar", "bars", multiple=True, default=BARS, show_default=True, metavar="NxPROMPT:OUTPUT=RATIO",
              help="Least ratio of ours to the peer's, for a case that both ran. Repeatable.")
@click.option("--timeout", type=click.FloatRange(1), default=1800.0, show_default=True, help="Seconds for one run of a side.")
@click.option("--markdown", "markdown_path", metavar="FILE", help="Write the table there, too.")
@script_options
def command(
    peer: str, ours: str | None, model: str | None, bars: tuple[str, ...], timeout: float, markdown_path: str | None,
    rounds: int, json_path: str | None, check: bool,
) -> None:  # fmt: skip
    """Print medians of output tokens per second of both sides, and their ratios."""
    try:
        if ours is None:
            if model is None:
                raise ConfigError("--model", "is needed unless --ours is given")
            ours = shlex.join([sys.executable, "-m", "scripts.bench.workload", model, "--pp", "2", "--dtype", "bfloat16"])
        least = dict(map(_parse_bar, bars))
        sides = [Side("ours", _split("--ours", ours)), Side("peer", _split("--peer", peer))]
        compete(sides, rounds, lambda side: run_side(side, timeout))
    except (ConfigError, PeerLost) as error:
        fail(str(error))
    columns, rows, verdicts = compare(sides[0], sides[1], least)
    table = markdown(columns, rows)
    if markdown_path is not None:
        Path(markdown_path).write_text(table + "\n", encoding="utf-8")
    result = {"sides": {side.name: {"command": side.words, "rounds": [list(r.values()) for r in side.rounds]} for side in sides}}
    finish(result, table, verdicts, json_path=json_path, check=check)


def compete(sides: Sequence[Side], rounds: int, run: Callable[[Side], dict[Case, Line]]) -> None:
    """Let all sides run in each round, each of them first in turn."""
    for number in range(rounds):
        for side in [*sides[number % len(sides) :], *sides[: number % len(sides)]]:
            say(f"round {number + 1} of {rounds}: {side.name}")
            lines = run(side)
            side.rounds.append(lines)
            for case, line in lines.items():
                say(f"  {line['engine']} {case}: {line['output_tok_s']} tokens/s")


def run_side(side: Side, timeout_s: float) -> dict[Case, Line]:
    """Run its command once. Raises PeerLost when that fails, takes too long, or prints no case."""
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                side.words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            raise PeerLost(f"{side.name} did not end within {timeout_s:g} s: {shlex.join(side.words)}") from None
        except OSError as error:
            raise PeerLost(f"{side.name} can't be started: {error}") from None
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
    lines = parse_lines(done.stdout.decode("utf-8", "replace"))
    if done.returncode or not lines:
        what = f"ended with code {done.returncode}" if done.returncode else "printed no case"
        raise PeerLost("\n  ".join([f"{side.name} {what}: {shlex.join(side.words)}", *said]))
    return lines


def parse_lines(text: str) -> dict[Case, Line]:
    """The JSON objects with all of the fields, by case; other lines are passed over."""
    found = {}
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict) and all(isinstance(values.get(name), kind) for name, kind in FIELDS.items()):
            found[Case(values["requests"], values["prompt"], values["output"])] = values
    return found


def compare(
    ours: Side, peer: Side, least: dict[Case, float]
) -> tuple[list[str], list[list[str]], list[Verdict]]:
    """Columns and rows of the table, and the verdicts on cases that have a bar."""
    rows, verdicts = [], []
    for case in sorted(ours.cases & peer.cases):
        mine, theirs = ours.values(case), peer.values(case)
        ratio = statistics.median(mine) / statistics.median(theirs)
        each = [a / b for a, b in zip(mine, theirs, strict=True)]
        rows.append([
            str(case), f"{statistics.median(mine):.1f}", f"{statistics.median(theirs):.1f}", f"{ratio:.2f}",
            f"{min(each):.2f} to {max(each):.2f}",
        ])  # fmt: skip
        if case in least:
            verdicts.append(Verdict(name=f"{case}, {ours.engine} to {peer.engine}", value=ratio, bar=least[case]))
    missing = [case for case in least if case not in ours.cases & peer.cases]
    verdicts += [Verdict(name=f"{case} (not run by both)", value=0.0, bar=least[case]) for case in missing]
    return ["requests x prompt:output", ours.engine, peer.engine, "ratio", "by round"], rows, verdicts


def _parse_bar(text: str) -> tuple[Case, float]:
    case, _, ratio = text.partition("=")
    try:
        return Case.parse(case), float(ratio)
    except ValueError as error:
        field = error.message if isinstance(error, ConfigError) else f"{text!r:.80} must be NxPROMPT:OUTPUT=RATIO"
        raise ConfigError("--bar", field) from None


def _split(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(option, f"{text!r:.200} can't be split into words: {error}") from None


if __name__ == "__main__":
    command()
