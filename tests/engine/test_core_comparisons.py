"""What benchmarks compare with: does the core keep to a fixed number of cohorts, and to one batch in flight?"""

import threading
import time
from pathlib import Path

import pytest

from engine.config import CoreConfig
from ipc.errors import ConfigError
from tests.engine.test_core import DEADLINE_S, add, running_core

NUM_REQUESTS = 4


@pytest.mark.parametrize(("num_cohorts", "most_together"), [(1, 4), (3, 2)])
def test_decodes_ride_in_as_many_cohorts_as_were_fixed(num_cohorts: int, most_together: int, tmp_path: Path) -> None:
    with running_core(tmp_path, num_cohorts=num_cohorts) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        for number in range(NUM_REQUESTS):
            client.ask(add(f"r{number}", [1, 2, 3], max_tokens=40))
        open_requests = NUM_REQUESTS
        while open_requests:
            open_requests -= getattr(client.hear(), "finish_reason", None) is not None
        decodes = [len(plan.rows) for plan in group.plans if set(plan.num_scheduled_tokens) == {1}]
        assert max(decodes) == most_together
        stats = client.stats()
        assert stats["cost_step_s"] >= 0 and stats["cost_head_s"] >= 0
        group.stop()


@pytest.mark.parametrize(("single_batch", "least", "most"), [(True, 1, 1), (False, 2, 3)])
def test_a_single_batch_is_alone_in_flight(single_batch: bool, least: int, most: int, tmp_path: Path) -> None:
    hold = threading.Event()
    with running_core(tmp_path, single_batch=single_batch) as engine:
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        for number in range(NUM_REQUESTS):
            client.ask(add(f"r{number}", [1, 2, 3]))
        deadline = time.monotonic() + DEADLINE_S
        counts: list[int] = []
        # No step returns meanwhile. Several more answers than it takes, so that one step too many would be seen.
        while len(counts) < 10 or max(counts) < least:
            assert time.monotonic() < deadline, f"steps in flight: {counts}"
            counts.append(int(client.stats()["steps_in_flight"]))
        assert max(counts) <= most
        hold.set()
        group.stop()


def test_more_cohorts_than_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--num-cohorts: 4 must be between 1 and 3"):
        CoreConfig(
            run_dir="", agent_pid=1, agent_start=0, key="", num_stages=2, model_name="m", vocab_size=9, model_max_len=9,
            num_cohorts=4,
        )  # fmt: skip
