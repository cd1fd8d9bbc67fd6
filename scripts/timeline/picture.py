"""How does a timeline look? One row for each stage and one for the core, coloured by what they did."""

from typing import Any

from ipc.errors import ConfigError
from ipc.spans import Kind, Spans
from scripts.timeline.lanes import KIND, Timeline, cut
from scripts.timeline.summary import name_of

try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError:
    Figure = Patch = None

MOST_SECONDS = 1.0
"""More would be a smear."""

COLOURS: dict[int, str] = {
    Kind.FORWARD: "#2a7f62",
    Kind.SAMPLE: "#6bbf59",
    Kind.PREPARE: "#9ecae1",
    Kind.ACCEPT: "#3182bd",
    Kind.SEND: "#756bb1",
    Kind.RETURN: "#bcbddc",
    Kind.OTHER: "#969696",
    Kind.WAIT_PLAN: "#fee391",
    Kind.WAIT_ACTIVATIONS: "#fb6a4a",
    Kind.WAIT_TOKENS: "#fe9929",
    Kind.WAIT_SEND: "#a50f15",
    Kind.WAIT_MASKS: "#dd1c77",
    Kind.CLIENTS: "#c7e9c0",
    Kind.RECEIVE: "#9ecae1",
    Kind.APPLY: "#3182bd",
    Kind.ANSWER: "#6baed6",
    Kind.SCHEDULE: "#31a354",
    Kind.SEND_PLAN: "#756bb1",
    Kind.MASKS: "#c994c7",
    Kind.IDLE: "#f0f0f0",
}
UNKNOWN = "#000000"


def check_can_draw() -> None:
    """Raises ConfigError without matplotlib."""
    if Figure is None:
        raise ConfigError("--png", "needs matplotlib: pip install -e '.[bench]' in the clone")


def draw(path: str, timeline: Timeline) -> None:
    """Write the last second as a PNG file. Raises ConfigError without matplotlib, OSError when it can't be written."""
    check_can_draw()
    begin_ns = max(timeline.begin_ns, timeline.end_ns - int(MOST_SECONDS * 1e9))
    lanes = [*timeline.stages, timeline.core]
    figure: Any = Figure(figsize=(16, 1.6 + 0.9 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    shown: set[int] = set()
    for row, lane in enumerate(lanes):
        shown |= _draw_lane(axes, row, cut(lane.spans, begin_ns, timeline.end_ns), begin_ns)
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
    axes.invert_yaxis()
    axes.set(xlim=(0, (timeline.end_ns - begin_ns) / 1e6 or 1), xlabel="time (ms)", title="; ".join(timeline.problems))
    patches = [Patch(color=colour, label=name_of(kind)) for kind, colour in COLOURS.items() if kind in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=9, frameon=False)
    figure.savefig(path, format="png", dpi=120)


def _draw_lane(axes: Any, row: int, spans: Spans, begin_ns: int) -> set[int]:
    kinds = {int(kind) for kind in spans[:, KIND]}
    for kind in kinds:
        bars = [((start - begin_ns) / 1e6, (end - start) / 1e6) for of, _, start, end in spans.tolist() if of == kind]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=COLOURS.get(kind, UNKNOWN), linewidth=0)
    return kinds
