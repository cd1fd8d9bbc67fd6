"""What do the records of a load say: percentiles, tokens per second, steady decode; as JSON and as a table."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ipc.messages import ModelInfo
from scripts.bench.load import LoadResult, Record

SCHEMA = "brigade.bench/1"
PERCENTILES = (50, 90, 99)
MAX_ERRORS = 20
"""Different ones that a result lists."""

LATENCIES = (
    ("ttft_s", "time to first token (ms)"),
    ("inter_token_s", "time between tokens (ms)"),
    ("end_to_end_s", "whole request (ms)"),
)
"""Key of the JSON, and row of the table."""


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Mean, p50, p90, p99 and max; empty for no values. A percentile between two values is interpolated."""
    array = np.fromiter(values, np.float64)
    if not array.size:
        return {}
    points = np.percentile(array, PERCENTILES).tolist()
    named = {f"p{percent}": point for percent, point in zip(PERCENTILES, points, strict=True)}
    return {"mean": float(array.mean()), **named, "max": float(array.max())}


def summarize(result: LoadResult, model: ModelInfo, settings: dict[str, Any]) -> dict[str, Any]:
    """One flat result, ready for JSON. Failed requests count in ``requests`` only, but for the tokens they got."""
    records, wall_s = result.records, max(result.wall_s, 1e-9)
    done = [record for record in records if record.error is None and record.token_times]
    errors = Counter((record.error.code, str(record.error)) for record in records if record.error is not None)
    num_output = sum(len(record.token_times) for record in records)
    num_prompt = sum(record.num_prompt for record in records if record.token_times)
    return {
        "schema": SCHEMA,
        "engine": {
            "model": model.name, "version": model.version, "stages": model.num_stages,
            "max_model_len": model.max_model_len, "max_num_seqs": model.max_num_seqs,
        },
        "settings": settings,
        "requests": {
            "completed": len(done), "failed": sum(errors.values()), "num_errors": len(errors),
            "errors": [
                {"code": code, "message": text, "count": count} for (code, text), count in errors.most_common(MAX_ERRORS)
            ],
        },
        "duration_s": result.wall_s,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "output_tok_s": num_output / wall_s,
        "total_tok_s": (num_prompt + num_output) / wall_s,
        "requests_s": len(done) / wall_s,
        "ttft_s": percentiles(record.token_times[0] - record.due for record in done),
        "inter_token_s": percentiles(gap for record in done for gap in np.diff(record.token_times)),
        "end_to_end_s": percentiles(record.end - record.due for record in done),
        "late_s": max((record.sent - record.due for record in records), default=0.0),
        "client_cpu_share": result.client_cpu_s / wall_s,
    }  # fmt: skip


def steady_rate(records: Sequence[Record]) -> float:
    """Output tokens per second while every request was decoding: from the last first token to the first last one.

    0 when there was no such time.
    """
    if not records or not all(record.token_times for record in records):
        return 0.0
    begin = max(record.token_times[0] for record in records)
    end = min(record.token_times[-1] for record in records)
    times = np.concatenate([record.token_times for record in records])
    count = int(((times > begin) & (times <= end)).sum())
    return count / (end - begin) if end > begin else 0.0


def table(summary: dict[str, Any]) -> str:
    """For a terminal."""
    requests = summary["requests"]
    lines = [
        f"{requests['completed']} requests completed, {requests['failed']} failed, in {summary['duration_s']:.2f} s",
        *(f"  {error['count']} x {error['code']}: {error['message']}" for error in requests["errors"]),
        f"{'output tokens/s':28}{summary['output_tok_s']:10.1f}",
        f"{'prompt and output tokens/s':28}{summary['total_tok_s']:10.1f}",
        f"{'requests/s':28}{summary['requests_s']:10.2f}",
        "",
        f"{'':28}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max")),
    ]
    for key, name in LATENCIES:
        values = summary[key]
        cells = [f"{values[column] * 1e3:10.1f}" if values else f"{'-':>10}" for column in ("mean", "p50", "p90", "p99", "max")]
        lines.append(f"{name:28}" + "".join(cells))
    lines += ["", f"this client took {summary['client_cpu_share']:.1%} of a core and sent at most {summary['late_s'] * 1e3:.1f} ms late"]
    return "\n".join(lines)
