"""Does the table of a step count every moment once, for the right part, and beside the right limit?"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from scripts.bench import step_table
from scripts.bench.step_table import PARTS, Machine, Row, Stopwatch, Work, rows_of, table_of
from tests.conftest import Checkpoints
from tests.families import random_family


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Machinery:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def outer(self) -> str:
        self.clock.now += 1
        self.inner()
        self.clock.now += 2
        return "done"

    def inner(self) -> None:
        self.clock.now += 10
        if self.clock.now > 100:
            raise ValueError


def test_the_innermost_part_counts() -> None:
    clock = Clock()
    watch, thing = Stopwatch(clock, lambda: clock.now / 2), Machinery(clock)
    watch.watch(thing, "outer", "head")
    watch.watch(thing, "inner", "norms")
    clock.now += 5
    assert thing.outer() == "done"
    clock.now += 7
    assert watch.take() == {"rest": (12, 6), "head": (3, 1.5), "norms": (10, 5)}
    clock.now = 100
    watch.take()
    with pytest.raises(ValueError):
        thing.outer()
    clock.now += 4
    assert watch.take() == {"rest": (4, 2), "head": (1, 0.5), "norms": (10, 5)}


def test_limits() -> None:
    machine = Machine(bytes_per_s=1e9, operations_per_s=1e10)
    work = {"linears": Work(num_bytes=10**6, num_operations=10**6), "head": Work(num_bytes=10**6, num_operations=10**8)}
    rows = rows_of({"linears": (0.01, 0.02), "head": (0.03, 0.04), "step": (0.05, 0.06)}, work, machine)
    assert rows == {
        "linears": Row(wall_ms=10, thread_ms=20, limit_ms=1), "head": Row(wall_ms=30, thread_ms=40, limit_ms=10),
        "step": Row(wall_ms=50, thread_ms=60, limit_ms=11),
    }  # fmt: skip
    assert "| linears | 10.00 | 20.00 | 1.00 |" in table_of({1: rows})
    assert "| gates | - | - | - |" in table_of({1: rows})


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_tiny_model(family: str, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_table, "measure_machine", lambda dtype: Machine(bytes_per_s=1e9, operations_per_s=1e9))
    path = checkpoints.fx_r if family == "llama" else random_family(tmp_path / family, family)
    words = [str(path), "--dtype", "float32", "--threads", "1", "--batch", "1,3", "--context", "40", "--steps", "3"]
    done = CliRunner().invoke(step_table.command, [*words, "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out.json").read_text())
    batches = result["threads"]["1"]["batches"]
    for size in (1, 3):
        rows = batches[str(size)]
        assert set(rows) == {*PARTS, "step"}
        assert all(row["ms"] > 0 for row in rows.values())
        assert rows["attention"]["limit_ms"] > 0
    if family == "llama":
        of_layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160
        assert batches["3"]["linears"]["limit_ms"] == pytest.approx(max(5 * of_layer * 4, 2 * 3 * 5 * of_layer) / 1e6)
        assert batches["3"]["attention"]["limit_ms"] == pytest.approx(3 * 5 * 40 * 2 * 32 * 4 / 1e6)
        assert batches["1"]["head"]["limit_ms"] == pytest.approx(512 * 64 * 4 / 1e6)


def test_what_cannot_be_a_number_is_refused() -> None:
    done = CliRunner().invoke(step_table.command, ["model", "--batch", "1,x"])
    assert done.exit_code == 2
    assert "must be positive whole numbers" in done.output
