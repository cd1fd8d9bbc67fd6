"""Spans: no gap, no half span, no span that a reader was told of twice."""

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ipc.spans import MAX_SPANS, NO_STEP, Kind, Recorder, SpanRing, Spans

MOST_US_PER_SPAN = 100.0
"""Some fifty times of what it takes; only an accident such as a lock or an allocation per span reaches that."""


class Ticks:
    """A clock that moves by one nanosecond each time it is read."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        self.now += 1
        return self.now


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads change places after every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("num_spans", [0, 1, 6, 7, 8, 9, 50])
def test_a_ring_keeps_the_newest(num_spans: int) -> None:
    ring = SpanRing(capacity=8)
    for number in range(num_spans):
        ring.append(number, 10 * number, 100 * number, 100 * number + 100)
    kept = ring.read()
    assert kept[:, 0].tolist() == list(range(max(0, num_spans - 7), num_spans))
    assert (kept[:, 1] == 10 * kept[:, 0]).all() and (kept[:, 3] - kept[:, 2] == 100).all()


@pytest.mark.usefixtures("eager_threads")
def test_a_reader_sees_whole_spans_only_while_the_writer_goes_round() -> None:
    """Each span's four numbers belong together; a torn one, or one of two rounds, does not fit."""
    ring = SpanRing(capacity=64)
    is_over = threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            ring.append(number, -number, 3 * number, 5 * number)
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    newest = 0
    try:
        deadline = time.monotonic() + 60
        num_seen = 0
        while num_seen < 20_000 and time.monotonic() < deadline:
            spans = ring.read()
            assert (np.diff(spans[:, 0]) == 1).all()
            assert (spans[:, 1:] == spans[:, :1] * [[-1, 3, 5]]).all()
            num_seen += len(spans)
            newest = max(newest, int(spans[-1, 0]) if len(spans) else 0)
    finally:
        is_over.set()
        writer.join()
    assert num_seen >= 20_000 and newest > 10 * 64


def test_spans_cover_the_time_without_a_gap() -> None:
    clock = Ticks()
    recorder = Recorder(clock=clock)
    began = clock.now
    for step in range(20):
        recorder.doing(Kind.PREPARE, step)
        with recorder.during(Kind.WAIT_TOKENS):
            with recorder.during(Kind.ACCEPT, step - 1):
                clock.now += 7
            clock.now += 5
        recorder.doing(Kind.FORWARD)
        clock.now += 50
    totals = recorder.totals_ns()
    spans = recorder.snapshot(1.0)
    assert spans[0].tolist()[:3] == [Kind.OTHER, NO_STEP, began]
    assert (spans[1:, 2] == spans[:-1, 3]).all()
    assert (totals[Kind.ACCEPT], totals[Kind.FORWARD]) == (20 * 8, 20 * 51)
    # Between the two readings only the clock's own ticks have passed.
    assert 0 <= (spans[-1, 3] - began) - sum(totals) <= 3
    accepted = spans[spans[:, 0] == Kind.ACCEPT]
    assert accepted[:, 1].tolist() == list(range(-1, 19))
    forward = spans[spans[:, 0] == Kind.FORWARD]
    assert forward[:, 1].tolist() == list(range(20))


def test_what_is_going_on_is_the_last_span() -> None:
    clock = Ticks()
    recorder = Recorder(clock=clock)
    recorder.doing(Kind.WAIT_PLAN)
    began = clock.now
    clock.now += 10**9
    assert recorder.snapshot(0.5).tolist() == [[Kind.WAIT_PLAN, NO_STEP, began, clock.now]]
    assert recorder.totals_ns()[Kind.WAIT_PLAN] == clock.now - began


def test_a_window_holds_what_touches_it() -> None:
    clock = Ticks()
    recorder = Recorder(clock=clock)
    for step in range(10):
        recorder.doing(Kind.FORWARD, step)
        clock.now += 10**8
    assert recorder.snapshot(0.45)[:, 1].tolist() == [5, 6, 7, 8, 9]
    assert len(recorder.snapshot(100)) == 11


@pytest.mark.usefixtures("eager_threads")
def test_readers_agree_with_the_clock_while_the_writer_goes_on() -> None:
    """Totals never count a moment twice or not at all, and no snapshot has a gap."""
    recorder = Recorder(capacity=256)
    began = recorder.snapshot(1)[0, 2]
    is_over = threading.Event()

    def write() -> None:
        step = 0
        while not is_over.is_set():
            recorder.doing(Kind.FORWARD, step)
            with recorder.during(Kind.WAIT_TOKENS):
                recorder.doing(Kind.ACCEPT)
            step += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            before = time.monotonic_ns()
            total = sum(recorder.totals_ns())
            after = time.monotonic_ns()
            assert before - began <= total <= after - began
            spans = recorder.snapshot(60)
            assert (spans[1:, 2] == spans[:-1, 3]).all()
            assert spans[-1, 3] <= time.monotonic_ns()
    finally:
        is_over.set()
        writer.join()


def test_a_reader_that_is_overtaken_while_it_copies_keeps_only_what_was_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five more spans are complete, and a sixth is half written, when the copy is made."""
    ring = SpanRing(capacity=8)
    memory = ring._spans

    class Overtaken:
        def copy(self) -> Spans:
            for number in range(8, 13):
                ring.append(number, number, number, number)
            memory[13 % 8, :2] = 13
            return memory.copy()

    for number in range(8):
        ring.append(number, number, number, number)
    monkeypatch.setattr(ring, "_spans", Overtaken())
    assert ring.read().tolist() == [[number] * 4 for number in (6, 7)]


def test_a_snapshot_holds_nothing_that_began_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer goes on between the look at what is going on and the look at the ring."""
    clock = Ticks()
    recorder = Recorder(clock=clock)
    recorder.doing(Kind.FORWARD, 1)
    read = recorder._ring.read

    def read_late() -> Spans:
        recorder.doing(Kind.SAMPLE, 1)
        recorder.doing(Kind.PREPARE, 2)
        return read()

    monkeypatch.setattr(recorder._ring, "read", read_late)
    spans = recorder.snapshot(1.0)
    assert spans[:, 0].tolist() == [Kind.OTHER, Kind.FORWARD]
    assert spans[0, 3] == spans[1, 2]


def test_a_reader_waits_out_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a change the totals have the old span already: what is going on must not be counted with them."""
    clock = Ticks()
    recorder = Recorder(clock=clock)
    began = clock.now
    seen: list[int] = []
    reader = threading.Thread(target=lambda: seen.append(sum(recorder.totals_ns())))

    class Slow(list[int]):
        def __setitem__(self, index: Any, value: Any) -> None:
            super().__setitem__(index, value)
            reader.start()
            reader.join(0.05)

    clock.now += 1000
    monkeypatch.setattr(recorder, "_totals", Slow(recorder._totals))
    recorder.doing(Kind.FORWARD)
    reader.join(10)
    assert len(seen) == 1 and 1000 <= seen[0] <= clock.now - began


@pytest.mark.alone
def test_recording_is_cheap() -> None:
    recorder = Recorder()
    num_spans = 5000
    costs = []
    for _ in range(5):
        began = time.perf_counter()
        for step in range(num_spans):
            recorder.doing(Kind.FORWARD, step)
        costs.append((time.perf_counter() - began) / num_spans * 1e6)
    assert min(costs) < MOST_US_PER_SPAN
    assert len(recorder.snapshot(3600)) <= MAX_SPANS
