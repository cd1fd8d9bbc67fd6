"""What does one more step in flight bring? ``python -m scripts.bench.async_sync MODEL``"""

import click

from ipc.errors import EngineError
from scripts.bench.alternate import alternate, as_json
from scripts.bench.cases import PEER_CASES, Case, CaseType
from scripts.bench.results import Verdict, fail, finish, markdown, script_options

BAR = 0.97
"""Of synchronous scheduling, everywhere."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("model")
@click.option("--stages", "stages", type=click.IntRange(1), multiple=True, default=(1, 2), help="Repeatable.")
@click.option("--dtype", default="bfloat16")
@click.option("--case", "cases", type=CaseType(), multiple=True, default=PEER_CASES, help="Repeatable.")
@click.option("--flag", "flags", multiple=True, help="One more word for `brigade serve`; repeatable.")
@click.option("--bar", type=float, default=BAR, help="Least ratio of asynchronous to synchronous scheduling.")
@script_options
def command(
    model: str, stages: tuple[int, ...], dtype: str, cases: tuple[Case, ...], flags: tuple[str, ...], bar: float, rounds: int,
    json_path: str | None, check: bool,
) -> None:  # fmt: skip
    """Print output tokens per second with asynchronous and with synchronous scheduling, and their ratio."""
    settings = {
        f"{name}, {count} stage{'s'[: count - 1]}": [model, "--pp", str(count), "--dtype", dtype, *words, *flags]
        for count in stages
        for name, words in (("async", ["--async-scheduling"]), ("sync", ["--no-async-scheduling"]))
    }
    try:
        results = alternate(settings, cases, rounds)
    except EngineError as error:
        fail(str(error))
    rows, verdicts = [], []
    for first, second in zip(list(settings)[::2], list(settings)[1::2], strict=True):
        for case in cases:
            ahead, behind = (results[name][case].median("output_tok_s") for name in (first, second))
            where = first.removeprefix("async, ")
            rows.append([where, str(case), ahead, behind, f"{ahead / behind:.3f}"])
            verdicts.append(Verdict(name=f"{where}, {case}", value=ahead / behind, bar=bar))
    table = markdown(["stages", "requests x prompt:output", "async", "sync", "ratio"], rows)
    finish({"results": as_json(results)}, table, verdicts, json_path=json_path, check=check)


if __name__ == "__main__":
    command()
