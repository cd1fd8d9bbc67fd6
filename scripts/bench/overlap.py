"""Do stages work at the same time? Two stages against the same engine with one batch in flight (F1):
``python -m scripts.bench.overlap``
"""

import tempfile
from pathlib import Path

import click

from ipc.errors import EngineError
from scripts.bench.alternate import alternate, as_json
from scripts.bench.cases import Case, CaseType
from scripts.bench.comparison import cores_per_stage
from scripts.bench.random_model import write_random_model
from scripts.bench.results import Verdict, fail, finish, markdown, script_options

DECODE_BAR, PREFILL_BAR, BUSY_BAR = 1.15, 1.5, 0.7
"""Least ratios of tokens per second, and least share of its time that each rank is on its core."""

MANY, ONE = "batches in flight", "one batch"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("model", required=False)
@click.option("--dtype", default="bfloat16")
@click.option("--decode", type=CaseType(), default="16x32:96", help="Answer tokens while all decode count.")
@click.option("--prefill", type=CaseType(), default="16x512:1", help="Prompt tokens count.")
@click.option("--flag", "flags", multiple=True, help="One more word for `brigade serve`; repeatable.")
@script_options
def command(
    model: str | None, dtype: str, decode: Case, prefill: Case, flags: tuple[str, ...], rounds: int, json_path: str | None,
    check: bool,
) -> None:  # fmt: skip
    """Print both ratios and how busy each rank was, on MODEL, or on a random one of about 100 MB; one core per rank."""
    with tempfile.TemporaryDirectory(prefix="brigade-bench-") as folder:
        try:
            path = model or str(write_random_model(Path(folder) / "random"))
            words = [path, "--pp", "2", "--dtype", dtype, "--max-num-batched-tokens", "16384", *flags]
            settings = {MANY: words, ONE: [*words, "--single-batch"]}
            results = alternate(settings, [decode, prefill], rounds, cores=cores_per_stage(2))
        except EngineError as error:
            fail(str(error))
    rows, verdicts = [], []
    for name, case, figure, bar in (
        ("decode", decode, "steady_tok_s", DECODE_BAR), ("prefill", prefill, "total_tok_s", PREFILL_BAR),
    ):  # fmt: skip
        many, one = (results[setting][case].median(figure) for setting in settings)
        busy = [[results[setting][case].busy(rank) for rank in (0, 1)] for setting in settings]
        rows.append([
            f"{name} {case}", many, one, f"{many / one:.2f}", *(" / ".join(f"{s:.0%}" for s in shares) for shares in busy)
        ])  # fmt: skip
        verdicts.append(Verdict(name=f"{name} {case}", value=many / one, bar=bar))
        verdicts += [
            Verdict(name=f"{name} {case}, busy share of rank {rank}", value=share, bar=BUSY_BAR)
            for rank, share in enumerate(busy[0])
        ]
    columns = ["work", f"{MANY}, tokens/s", f"{ONE}, tokens/s", "ratio", f"ranks busy, {MANY}", f"ranks busy, {ONE}"]
    finish({"results": as_json(results)}, markdown(columns, rows), verdicts, json_path=json_path, check=check)


if __name__ == "__main__":
    command()
