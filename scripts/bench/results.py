"""Under which circumstances was something measured, how is it written down, and does it reach its bar?"""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import click

ROOT = Path(__file__).resolve().parents[2]
EXIT_BELOW_BAR = 1
EXIT_FAILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A figure that was promised."""

    name: str
    value: float
    bar: float
    """The least that it should be."""

    @property
    def holds(self) -> bool:
        return self.value >= self.bar

    def __str__(self) -> str:
        return f"{'ok   ' if self.holds else 'BELOW'} {self.name}: {self.value:.3f}, bar {self.bar:.3f}"


def circumstances() -> dict[str, Any]:
    """Hardware, software, commit and command: without them a figure says nothing."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "is_changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; numbers get one decimal, ratios come as text."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def script_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that all of these scripts have: --rounds, --json, --check."""
    for option in reversed((
        click.option("--rounds", type=click.IntRange(1), default=3, show_default=True,
                     help="How often everything is measured, in turn; medians count."),
        click.option("--json", "json_path", metavar="FILE", help="Write the result as JSON; '-' prints it alone."),
        click.option("--check", is_flag=True, help=f"Exit with code {EXIT_BELOW_BAR} when a figure is below its bar."),
    )):
        function = option(function)
    return function


def finish(
    result: dict[str, Any], table: str, verdicts: Sequence[Verdict], *, json_path: str | None, check: bool
) -> NoReturn:
    """Print the table and the verdicts, write the JSON, and end the process."""
    result = {**circumstances(), **result, "verdicts": [{**asdict(one), "holds": one.holds} for one in verdicts]}
    text = json.dumps(result, indent=1)
    if json_path == "-":
        click.echo(text)
    else:
        if json_path is not None:
            Path(json_path).write_text(text + "\n", encoding="utf-8")
        here = "{cpu}, {cores} cores, commit {commit}{changed}, torch {torch}".format(
            changed=" with changes" if result["is_changed"] else "", **result
        )
        click.echo("\n\n".join([here, f"`{result['command']}`", table, *filter(None, ["\n".join(map(str, verdicts))])]))
    sys.exit(EXIT_BELOW_BAR if check and not all(verdict.holds for verdict in verdicts) else 0)


def say(text: str) -> None:
    """A line of progress."""
    click.echo(text, err=True)


def fail(text: str) -> NoReturn:
    """One line, and an exit code that is not the one of a figure below its bar."""
    click.echo(f"Error: {text}", err=True)
    sys.exit(EXIT_FAILED)


def _cell(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
