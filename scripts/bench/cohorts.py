"""Does the cost model choose the right number of cohorts? ``python -m scripts.bench.cohorts MODEL``"""

import click

from ipc.errors import EngineError
from scripts.bench.alternate import alternate, as_json
from scripts.bench.cases import Case
from scripts.bench.results import Verdict, fail, finish, markdown, script_options

BAR = 0.98
"""Of the best fixed number."""

CHOSEN = "chosen"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("model")
@click.option("--stages", type=click.IntRange(2), default=2)
@click.option("--dtype", default="bfloat16")
@click.option("--requests", "counts", type=click.IntRange(1), multiple=True, default=(4, 8, 16, 32, 64), help="Repeatable.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=32)
@click.option("--output-tokens", type=click.IntRange(8), default=96)
@click.option("--flag", "flags", multiple=True, help="One more word for `brigade serve`; repeatable.")
@click.option("--bar", type=float, default=BAR, help="Least ratio of the chosen number to the best of the fixed ones.")
@script_options
def command(
    model: str, stages: int, dtype: str, counts: tuple[int, ...], prompt_tokens: int, output_tokens: int,
    flags: tuple[str, ...], bar: float, rounds: int, json_path: str | None, check: bool,
) -> None:  # fmt: skip
    """Print tokens per second, while all requests decode, with the chosen number of cohorts and with 1, P and P + 1."""
    words = [model, "--pp", str(stages), "--dtype", dtype, *flags]
    fixed = [str(number) for number in (1, stages, stages + 1)]
    settings = {CHOSEN: words, **{number: [*words, "--num-cohorts", number] for number in fixed}}
    cases = [Case(count, prompt_tokens, output_tokens) for count in counts]
    try:
        results = alternate(settings, cases, rounds)
    except EngineError as error:
        fail(str(error))
    rows, verdicts = [], []
    for case in cases:
        rates = {name: results[name][case].median("steady_tok_s") for name in settings}
        best = max(rates[number] for number in fixed)
        rows.append([case.num_requests, *rates.values(), f"{rates[CHOSEN] / best:.3f}"])
        verdicts.append(Verdict(name=f"{case.num_requests} requests", value=rates[CHOSEN] / best, bar=bar))
    table = markdown(["requests", CHOSEN, *(f"{number} cohorts" for number in fixed), "chosen / best"], rows)
    finish({"results": as_json(results)}, table, verdicts, json_path=json_path, check=check)


if __name__ == "__main__":
    command()
