"""`brigade timeline`: where did the last seconds of a running engine go?"""

import json
from pathlib import Path

import click

from ipc.client import TokenClient
from ipc.endpoints import DEFAULT_LISTEN
from scripts.exits import errors_told
from scripts.options import client_key_options
from scripts.timeline.lanes import Timeline, read_timeline
from scripts.timeline.picture import check_can_draw, draw
from scripts.timeline.summary import Summary, as_text, summarize
from scripts.timeline.trace_file import trace_of

_FILE = click.Path(dir_okay=False, writable=True)


@click.command(name="timeline")
@click.argument("address", required=False)
@click.option("--connect", metavar="ADDR", default=DEFAULT_LISTEN, show_default=True, help="The same as ADDRESS.")
@client_key_options
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True,
              help="How far back; ranks remember some 30,000 pieces of work each.")
@click.option("--trace", type=_FILE, help="Write a trace for ui.perfetto.dev or chrome://tracing to this file.")
@click.option("--png", type=_FILE, help="Draw the last second into this file.")
@click.option("--json", "json_file", type=_FILE, help="Write the figures and all spans to this file.")
def command(
    address: str | None, connect: str, server_key: str | None, client_key: str | None, seconds: float, trace: str | None,
    png: str | None, json_file: str | None,
) -> None:  # fmt: skip
    """Show where the last seconds of the engine at ADDRESS went.

    A table tells for each stage how long it worked and what it waited for; how much of that another split of the layers
    would remove, and what is left unexplained; the core's own work per step; and a sampled token's way back to the
    first stage. Recording is always on and costs a stage microseconds per step.

    \b
    Exit codes:
      0    done, also when a rank did not answer (it is named)
      2    an option can't be used
      3    no engine at the address, or it went away
    """
    with errors_told():
        if png is not None:
            check_can_draw()
        with TokenClient(
            address or connect, name="brigade-timeline", server_key=server_key, client_key=client_key
        ) as client:
            timeline = read_timeline(client.timeline(seconds))
        summary = summarize(timeline)
        click.echo(as_text(summary))
        _write_files(timeline, summary, trace, png, json_file)


def _write_files(
    timeline: Timeline, summary: Summary, trace: str | None, png: str | None, json_file: str | None
) -> None:
    if trace is not None:
        Path(trace).write_text(json.dumps(trace_of(timeline)), encoding="utf-8")
    if png is not None:
        draw(png, timeline)
    if json_file is not None:
        lanes = [
            {"name": lane.name, "rank": lane.rank, "clock_error_ns": lane.clock_error_ns, "spans": lane.spans.tolist()}
            for lane in timeline.lanes
        ]
        window = {"begin_ns": timeline.begin_ns, "end_ns": timeline.end_ns}
        content = {"summary": summary.as_dict(), **window, "fields": ["kind", "step", "start_ns", "end_ns"], "lanes": lanes}
        Path(json_file).write_text(json.dumps(content), encoding="utf-8")
