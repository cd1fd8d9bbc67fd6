"""A stage's clock: what counts as work, and as waiting for what."""

from ipc.spans import Kind
from worker.clock import LINK, MASKS, PLAN, ROOM, TOKENS, StageClock


class Now:
    seconds = 100.0

    def __call__(self) -> int:
        return int(self.seconds * 1e9)


def test_every_moment_counts_for_exactly_one_cause():
    now = Now()
    clock = StageClock(now)
    with clock.waiting(PLAN):
        now.seconds += 5
        assert clock.busy_and_waits() == (0, {PLAN: 5, LINK: 0, TOKENS: 0, ROOM: 0, MASKS: 0})
    now.seconds += 2
    clock.doing(Kind.FORWARD, 4)
    with clock.waiting(LINK):
        now.seconds += 3
        with clock.waiting(TOKENS):
            now.seconds += 0.5
        now.seconds += 1
    now.seconds += 1
    assert clock.busy_and_waits() == (3, {PLAN: 5, LINK: 4, TOKENS: 0.5, ROOM: 0, MASKS: 0})
    assert clock.totals_ns()[Kind.FORWARD] == 10**9


def test_behind_a_wait_a_stage_does_what_it_did_before_also_when_the_wait_fails():
    clock = StageClock(Now())
    clock.doing(Kind.FORWARD, 4)
    try:
        with clock.waiting(LINK):
            raise TimeoutError
    except TimeoutError:
        assert clock.doing(Kind.SAMPLE, 5) == (Kind.FORWARD, 4)
    assert clock.doing(Kind.OTHER) == (Kind.SAMPLE, 5)
