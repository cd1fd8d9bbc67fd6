"""Does the dashboard ask for metrics that the engine tells, and for all of them?"""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from engine.metrics import Metrics
from engine.metrics_text import GAUGES, render_metrics
from engine.timeline import stage_values
from ipc.messages import StageReport
from tests.prometheus import parse

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana.json"


def exported() -> bytes:
    """Every family that an engine may tell."""
    report = StageReport(
        core_id=1, epoch=1, rank=0, num_steps=1, busy_s=1.0, plan_wait_s=1.0, receive_wait_s=1.0, token_wait_s=1.0,
        queue_depth=0, resident_bytes=1,
    )  # fmt: skip
    reports = {0: (report, None)}
    return render_metrics({
        **dict.fromkeys(GAUGES, 1), **Metrics().values(None, reports, num_outside=0), **stage_values(reports),
        "requests_refused_total_bad_request": 0, "core_busy_s": 1.0, "core_cpu_s": 1.0,
    })


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def asked() -> set[str]:
    return {
        name for panel in panels() for target in panel["targets"] for name in re.findall(r"\bbrigade_\w+", target["expr"])
    }


def test_every_expression_names_a_metric_that_there_is() -> None:
    samples = {key if isinstance(key, str) else key[0] for key in parse(exported())}
    assert asked() - samples == set()


def test_every_metric_has_a_panel() -> None:
    asked_for = asked()
    families = list(text_string_to_metric_families(exported().decode()))
    missing = [
        family.name for family in families
        if not {family.name, f"{family.name}_total", f"{family.name}_bucket"} & asked_for
    ]  # fmt: skip
    assert len(families) > 30 and missing == []


def test_labels_in_expressions_and_legends_are_those_of_the_metrics() -> None:
    labels = {key[0]: {part.partition("=")[0] for part in key[1:]} for key in parse(exported()) if isinstance(key, tuple)}
    for panel in panels():
        for target in panel["targets"]:
            known = {"instance"}.union(*(labels.get(name, set()) for name in re.findall(r"\bbrigade_\w+", target["expr"])))
            grouped = {name for names in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for name in names.split(", ")}
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert (grouped | shown) - known == set(), panel["title"]


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    every = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken = [
        (x, y) for panel in every for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    ]  # fmt: skip
    assert len(set(taken)) == len(taken)
