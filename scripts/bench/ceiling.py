"""The pipeline against its own ceiling: ``python -m scripts.bench.ceiling MODEL``

The ceiling runs the same steps on stages that have all inputs at hand, side by side, one process and one core each; the
slowest stage decides. Beside it, for the record: the whole model in one such process, with two threads and with one.
"""

import click

from ipc.errors import EngineError
from scripts.bench.cases import Case, CaseType
from scripts.bench.comparison import DECODE, PREFILL, Setup, Work, compare_with_ceiling, one_stage_alone
from scripts.bench.results import Verdict, fail, finish, markdown, script_options

BAR = 0.92
"""Of the ceiling, in steady decode and in prefill."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("model")
@click.option("--stages", type=click.IntRange(1), default=2)
@click.option("--dtype", default="bfloat16")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=2048)
@click.option("--decode", "decodes", type=CaseType(), multiple=True, default=("32x64:128",), help="Steady decode. Repeatable.")
@click.option("--prefill", "prefills", type=CaseType(), multiple=True, default=("16x512:1",), help="Prompts alone. Repeatable.")
@click.option("--flag", "flags", multiple=True, help="One more word for `brigade serve`; repeatable.")
@click.option("--pin", is_flag=True, help="Keep the real ranks to one core each, too.")
@click.option("--alone/--no-alone", default=True, help="Measure one stage with two threads and with one as well.")
@click.option("--bar", type=float, default=BAR, help="Least ratio of the real pipeline to its ceiling.")
@script_options
def command(
    model: str, stages: int, dtype: str, max_num_batched_tokens: int, decodes: tuple[Case, ...], prefills: tuple[Case, ...],
    flags: tuple[str, ...], pin: bool, alone: bool, bar: float, rounds: int, json_path: str | None, check: bool,
) -> None:  # fmt: skip
    """Print tokens per second of the real pipeline and of its ceiling, and their ratio."""
    setup = Setup(
        model=model, dtype=dtype, num_stages=stages, max_num_batched_tokens=max_num_batched_tokens, flags=flags, is_pinned=pin
    )
    works = [*(Work(DECODE, case) for case in decodes), *(Work(PREFILL, case) for case in prefills)]
    try:
        measured = compare_with_ceiling(setup, works, rounds)
        threads = (2, 1) if alone else ()
        lone = {count: one_stage_alone(setup, measured, works, count, rounds) for count in threads}
    except EngineError as error:
        fail(str(error))
    columns = ["work (requests x prompt:output)", "real tokens/s", "ceiling", "ratio", "stages alone, s"]
    rows = [
        [
            str(work), measured.median(work, "real"), measured.median(work, "ceiling"),
            f"{measured.median(work, 'ratio'):.3f}", " / ".join(f"{s:.2f}" for s in measured.rounds[work][-1].stage_s),
            *(lone[count][work] for count in threads),
        ]
        for work in works
    ]  # fmt: skip
    table = markdown([*columns, *(f"one stage, {count} thread{'s'[: count - 1]}" for count in threads)], rows)
    result = {
        **measured.as_json(), "stages": stages, "dtype": dtype,
        "one_stage": {str(count): {str(work): rate for work, rate in rates.items()} for count, rates in lone.items()},
    }  # fmt: skip
    verdicts = [Verdict(name=f"{work} to its ceiling", value=measured.median(work, "ratio"), bar=bar) for work in works]
    finish(result, f"{table}\n\nLayers per stage: {measured.partition}", verdicts, json_path=json_path, check=check)


if __name__ == "__main__":
    command()
