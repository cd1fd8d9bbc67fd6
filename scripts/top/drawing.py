"""What the screen of `brigade top` looks like. Needs rich, of the extra [ui]."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from scripts.terminal_text import printable
from scripts.top.model import WAITS, RequestLine, Stage, View

BAR_CELLS = 18
NARROW_BAR_CELLS = 12
WIDE = 118
"""Columns from which on everything is shown."""

PLAIN_WIDTH = 120
PICTURE_WIDTH = 118
MIN_REQUEST_ROWS = 3
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Fonts that a picture would fetch from elsewhere; without them it takes a font of the viewer's machine."""

NUM_OTHER_LINES = 14
"""Of a frame, beside stages and requests."""

STATE_STYLES = {"answer": "green", "prompt": "cyan", "preempted": "red"}
WAIT_STYLES = dict(zip(WAITS.values(), ("yellow", "blue", "magenta", "cyan", "red"), strict=True))


@dataclass(slots=True)
class Choices:
    """What of the screen is shown."""

    requests: bool = True
    pipeline: bool = True


def console_of(file: TextIO, *, is_plain: bool) -> Console:
    """Plain: no colour, and a width that does not depend on a terminal."""
    if is_plain:
        return Console(file=file, width=PLAIN_WIDTH, color_system=None, force_terminal=False, highlight=False)
    return Console(file=file, highlight=False)


def write_picture(file: Path, view: View) -> None:
    """The frame as an SVG. Raises OSError."""
    console = Console(
        record=True, file=io.StringIO(), width=PICTURE_WIDTH, force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(frame(view, None, Choices(), width=PICTURE_WIDTH, num_rows=18))
    svg = console.export_svg(title="brigade top", unique_id="brigade-top")
    file.write_text(_FONT_FACE.sub("", svg), encoding="utf-8")


def frame(
    view: View | None, problem: str | None, choices: Choices, *, width: int = PLAIN_WIDTH, num_rows: int | None = None,
    keys: bool = False,
) -> RenderableType:  # fmt: skip
    """One screen.

    Args:
        view: the newest there is; None before the first.
        problem: why there is none newer.
        width: of the screen; a narrow one has fewer columns.
        num_rows: lines that the requests may take; None for all of them.
        keys: whether keys do something.
    """
    parts: list[RenderableType] = []
    if problem is not None:
        parts.append(Text(f"no answer: {printable(problem)}", style="bold red"))
    if view is None:
        parts.append(Text("waiting for an engine"))
    else:
        is_narrow = width < WIDE
        parts += [_header(view), _figures(view, 2 if is_narrow else 4)]
        if choices.pipeline:
            parts += [Rule("pipeline, the last second", align="left", style="dim"), _stages(view.stages, is_narrow)]
        if choices.requests:
            parts += _requests(view, num_rows, is_narrow)
    if keys:
        parts += [Text(), Text("q quit   r requests   p pipeline", style="dim")]
    return Group(*parts)


def rows_for_requests(height: int, view: View | None, choices: Choices) -> int:
    """Lines that are left for requests on a screen of this height."""
    num_stages = 0 if view is None or not choices.pipeline else len(view.stages)
    return max(MIN_REQUEST_ROWS, height - NUM_OTHER_LINES - num_stages)


def _header(view: View) -> RenderableType:
    state = Text(view.state if not view.is_ready else "ready", style="bold green" if view.is_ready else "bold yellow")
    line = Text.assemble(
        ("brigade ", "bold"), printable(view.model), "  ", (view.address, "dim"), "  ", state,
        f"  {view.num_stages} stages  epoch {view.epoch}",
    )  # fmt: skip
    if view.restarts:
        line.append(f"  {view.restarts} restarts", style="red")
    return line


def _figures(view: View, num_columns: int) -> RenderableType:
    drafts = "none" if view.accepted_share is None else f"{view.accepted_share:.0%} of {view.draft_tokens}"
    now = "" if view.prefix_hit_share_now is None else f", now {view.prefix_hit_share_now:.0%}"
    kv = Text.assemble(("KV ", "dim"), _bar([(view.kv_share, "green" if view.kv_share < 0.9 else "red")], 12),
                       f" {view.kv_share:.0%} of {view.kv_blocks_total}")  # fmt: skip
    figures = [
        _figure("generated", f"{_rate(view.generation_tokens_per_s)} tokens/s"),
        _figure("requests", f"{view.running} running, {view.waiting} waiting"),
        _figure("prefix hits", f"{_share(view.prefix_hit_share)}{now}"),
        _figure("in flight", f"{view.steps_in_flight} steps, {view.num_cohorts} cohorts"),
        _figure("prompts", f"{_rate(view.prompt_tokens_per_s)} tokens/s"),
        kv,
        _figure("preemptions", f"{view.preemptions}, {_rate(view.preemptions_per_s)}/s"),
        _figure("drafts kept", drafts),
        _figure("core", f"{_share(view.core_share)} of a processor"),
    ]
    grid = Table.grid(padding=(0, 3))
    for _ in range(num_columns):
        grid.add_column(no_wrap=True)
    for start in range(0, len(figures), num_columns):
        grid.add_row(*figures[start : start + num_columns])
    return grid


def _figure(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), value)


def _stages(stages: Sequence[Stage], is_narrow: bool) -> RenderableType:
    if not stages:
        return Text("no stage has reported yet", style="dim")
    further = ("ms/step", "tok/s") if is_narrow else ("ms/step", "work ms", "steps/s", "tokens/s", "graphs", "MiB")
    causes = ["activ." if cause == "activations" else cause for cause in WAITS.values()]
    table = _table("stage", ("time", "left"), "busy", *causes, *further)
    for stage in stages:
        parts = [(stage.busy, "green"), *((share, WAIT_STYLES[cause]) for cause, share in stage.waits.items())]
        waits = [
            Text(f"{share:.0%}", style=WAIT_STYLES[cause] if share >= 0.005 else "dim") for cause, share in stage.waits.items()
        ]
        figures = [
            _number(stage.step_ms, 1), _number(stage.busy_ms, 1), f"{stage.steps_per_s:.1f}", f"{stage.tokens_per_s:.0f}",
            f"{stage.graph:.0%}", f"{stage.resident_bytes / 2**20:.0f}",
        ]  # fmt: skip
        bar = _bar(parts, NARROW_BAR_CELLS if is_narrow else BAR_CELLS)
        table.add_row(
            str(stage.rank), bar, f"{stage.busy:.0%}", *waits, *([figures[0], figures[3]] if is_narrow else figures)
        )
    return table


def _requests(view: View, num_rows: int | None, is_narrow: bool) -> list[RenderableType]:
    if view.num_open is None:
        return [Rule("requests", align="left", style="dim"), Text("this engine does not tell of its requests", style="dim")]
    shown = view.requests if num_rows is None else view.requests[:num_rows]
    more = f", {view.num_open - len(shown)} not shown" if view.num_open > len(shown) else ""
    title = f"requests, oldest first: {view.num_open} open{more}"
    client: list[tuple[str, str]] = [] if is_narrow else [("client", "left")]
    table = _table(("request", "left"), *client, ("state", "left"), "age", "prompt", "cached", "output", "preempted")
    for request in shown:
        table.add_row(*_request_cells(request, is_narrow))
    return [Rule(title, align="left", style="dim"), table]


def _request_cells(request: RequestLine, is_narrow: bool) -> list[Text]:
    label = request.id if len(request.id) <= 16 else request.id[:15] + "…"
    choice = f" [{request.index}]" if request.index else ""
    return [
        Text(printable(label) + choice), *([] if is_narrow else [Text(printable(request.client)[-32:], style="dim")]),
        Text(request.state, style=STATE_STYLES.get(request.state, "yellow")), Text(_age(request.age_s)),
        Text(str(request.num_prompt_tokens)), Text(str(request.num_cached_tokens)), Text(str(request.num_output_tokens)),
        Text(str(request.num_preemptions or ""), style="red"),
    ]  # fmt: skip


def _table(*columns: str | tuple[str, str]) -> Table:
    """Numbers stand right unless a column says otherwise."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        name, justify = column if isinstance(column, tuple) else (column, "right")
        table.add_column(name, justify="left" if justify == "left" else "right", no_wrap=True)
    return table


def _bar(parts: Sequence[tuple[float, str]], num_cells: int) -> Text:
    """Shares of a whole in a row of cells; what is left of it is dotted. The first is drawn solid, the others lighter."""
    bar = Text()
    done = 0.0
    for number, (share, style) in enumerate(parts):
        cells = round((done + share) * num_cells) - round(done * num_cells)
        bar.append(("█" if number == 0 else "▒") * cells, style=style)
        done += share
    bar.append("·" * (num_cells - len(bar)), style="dim")
    bar.truncate(num_cells)
    return bar


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _age(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
