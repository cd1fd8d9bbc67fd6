"""Has anything become slower? The pipeline's ratio to its own ceiling, against the one that was stored (F7):
``python -m scripts.bench.tracked MODEL``

A ratio within one run says more than tokens per second, which depend on the machine and on who else uses it.
"""

import json
from pathlib import Path

import click

from ipc.errors import ConfigError, EngineError
from scripts.bench.cases import Case
from scripts.bench.comparison import WHOLE, Setup, Work, compare_with_ceiling
from scripts.bench.results import Verdict, circumstances, fail, finish, markdown, say, script_options

FLOORS = Path(__file__).with_name("floors.json")
TOLERANCE = 0.15
"""What a ratio may lie below the stored one."""

WORKS = (Work(WHOLE, Case(1, 512, 64)), Work(WHOLE, Case(8, 512, 64)))

Floors = dict[str, dict[str, float]]
"""By model, type and stages; then by work."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("model")
@click.option("--stages", "stages", type=click.IntRange(1), multiple=True, default=(1, 2), help="Repeatable.")
@click.option("--dtype", default="bfloat16")
@click.option("--floors", "path", type=click.Path(path_type=Path, dir_okay=False), default=FLOORS, help="Where ratios are stored.")
@click.option("--update", is_flag=True, help="Store the ratios that were measured.")
@script_options
def command(
    model: str, stages: tuple[int, ...], dtype: str, path: Path, update: bool, rounds: int, json_path: str | None, check: bool
) -> None:
    """Measure prompts of 512 and answers of 64 tokens, 1 and 8 requests, with one stage and two."""
    try:
        stored = read_floors(path)
        measured = {
            f"{Path(model).resolve().name} {dtype} stages={count}": compare_with_ceiling(
                Setup(model=model, dtype=dtype, num_stages=count), WORKS, rounds
            )
            for count in stages
        }
    except EngineError as error:
        fail(str(error))
    ratios = {key: {str(work): one.median(work, "ratio") for work in WORKS} for key, one in measured.items()}
    rows, verdicts = judge(ratios, stored)
    for row, (work, one) in zip(rows, [(work, one) for one in measured.values() for work in WORKS], strict=True):
        row[2:2] = [f"{one.median(work, 'real'):.1f}", f"{one.median(work, 'ceiling'):.1f}"]
    if update:
        here = circumstances()
        path.write_text(json.dumps({"measured": {name: here[name] for name in ("date", "commit", "cpu", "cores", "torch")},
                                    "ratios": {**stored, **ratios}}, indent=1) + "\n", encoding="utf-8")  # fmt: skip
        say(f"stored in {path}")
    columns = ["engine", "work", "tokens/s", "ceiling", "ratio", "stored"]
    result = {"works": {key: one.as_json() for key, one in measured.items()}}
    finish(result, markdown(columns, rows), verdicts, json_path=json_path, check=check)


def judge(ratios: Floors, stored: Floors) -> tuple[list[list[str]], list[Verdict]]:
    """Rows of the table, and a verdict on each ratio; one that has none stored is below its bar."""
    rows, verdicts = [], []
    for key, works in ratios.items():
        for work, ratio in works.items():
            before = stored.get(key, {}).get(work)
            rows.append([key, work, f"{ratio:.3f}", "-" if before is None else f"{before:.3f}"])
            if before is None:
                verdicts.append(Verdict(name=f"{key}, {work} (none stored: measure with --update)", value=0.0, bar=1.0))
            else:
                verdicts.append(Verdict(name=f"{key}, {work}", value=ratio, bar=(1 - TOLERANCE) * before))
    return rows, verdicts


def read_floors(path: Path) -> Floors:
    """Ratios that were stored. Raises ConfigError for a file that is not ours."""
    if not path.exists():
        return {}
    try:
        ratios = json.loads(path.read_text(encoding="utf-8"))["ratios"]
        return {str(key): {str(work): float(ratio) for work, ratio in works.items()} for key, works in ratios.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("--floors", f"{path} does not hold ratios by engine and work: {error!r}") from None


if __name__ == "__main__":
    command()
