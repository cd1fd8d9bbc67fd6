"""Does the soak see an engine that stays flat as such, and one that grows or leaks too? Twenty seconds of it on a shared engine."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from scripts.bench import soak as bench
from scripts.bench.process_use import Use, read_use
from scripts.bench.soak_load import ABORTED, COMPLETED, REFUSED
from tests.conftest import Checkpoints
from tests.e2e.harness import Engine, EnginePool
from tests.e2e.test_http_cases import FLAGS, url_of

SECONDS = 12.0
"""Of the measured load; with warm-up and settling about twenty."""

FAR_TOO_STEEP = 500.0
"""MB in 10 minutes: in seconds, a page here and there makes a slope. What counts is the run of 30 minutes."""


def pids_of(engine: Engine) -> dict[str, int]:
    return {f"{process.pid} {' '.join(process.cmdline())[-20:]}": process.pid for process in engine.tree().all}


@pytest.mark.e2e
def test_twenty_seconds_of_every_way_in_leave_nothing_behind(engines: EnginePool, checkpoints: Checkpoints, tmp_path: Path) -> None:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    target = bench.Target(address=engine.address, url=url_of(engine), pids=pids_of(engine))
    findings = bench.soak(target, seconds=SECONDS, rate=20.0, seed=3, max_slope=FAR_TOO_STEEP)
    assert findings.problems == []
    expected = {f"{way} {end}" for way in ("asyncio", "blocking", "http") for end in (COMPLETED, ABORTED, REFUSED)}
    assert set(findings.counts) == expected
    assert len(findings.uses) >= 5 and all(len(uses) == len(findings.times_s) > 10 for uses in findings.uses.values())
    assert bench.table(findings).count("\n") == len(findings.uses) + 1
    if bench.Figure is not None:
        bench.draw(str(tmp_path / "soak.png"), findings)
        assert (tmp_path / "soak.png").read_bytes()[:4] == b"\x89PNG"
    engine.settle()


def test_slopes_are_in_mb_in_10_minutes_and_leave_the_warm_up_out() -> None:
    times = [10.0 * i for i in range(180)]
    growing = [int(5e8 + 3e6 * t / 600) for t in times]
    assert bench.slope(times, growing) == pytest.approx(3.0, abs=0.01)
    assert bench.slope(times, [int(1e7 * min(t, 400)) for t in times]) == pytest.approx(0.0, abs=0.01)
    assert bench.slope(times[:3], growing[:3]) == 0.0


def test_open_files_and_sockets_and_memory_are_counted() -> None:
    before = read_use(os.getpid())
    read_end, write_end = os.pipe()
    kept = bytearray(os.urandom(1 << 20)) * 32
    after = read_use(os.getpid())
    assert before is not None and after is not None and len(kept) == 32 << 20
    assert (after.num_files, after.num_sockets) == (before.num_files + 2, before.num_sockets)
    assert after.anonymous_bytes - before.anonymous_bytes > 30 << 20
    less = Use(anonymous_bytes=0, num_files=before.num_files + 1, num_sockets=before.num_sockets)
    assert bench.leaks({"me": os.getpid()}, {"me": less}, timeout_s=0) == [
        f"me has {after.num_files} files open, {less.num_files} before the load"
    ]
    os.close(read_end)
    os.close(write_end)
    assert bench.leaks({"me": os.getpid()}, {"me": less}, timeout_s=0) == []


def test_what_can_not_be_drawn_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "Figure", None)
    result = CliRunner().invoke(bench.command, ["nothing", "--png", "x.png"])
    assert result.exit_code == 2 and "matplotlib" in result.output
